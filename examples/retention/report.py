"""results.json, figures and RESULTS.md from the files of finished jobs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import analysis
import plan as plans
from analysis import Comparison, Results, mean, spread

from megatron.checkpoint.files import write_text


def machine() -> str:
    """Processor, cores and versions, for the report."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        facts = {name.strip(): value.strip() for name, _, value in lines}
        name = facts.get("model name", name)
        if (facts.get("vendor_id"), facts.get("cpu family"), facts.get("model")) == ("AuthenticAMD", "25", "1"):
            name += " (Milan)"  # virtual machines leave it out of the name
    return f"{name}, {os.cpu_count()} cores, no GPU used; torch {version('torch')}, fp32"


def collect(folder: Path, plan: plans.Plan, facts: dict, costs: dict) -> dict:
    """Everything the report says, as it is kept in results.json: losses to four decimals, those of languages in the
    order of ``facts["training_tokens"]``."""
    found = [json.loads((folder / "results" / f"{job.name}.json").read_text()) for job in plans.jobs(plan)]
    for job in found:
        for point in job["points"]:
            point["languages"] = [point["languages"][name] for name in facts["training_tokens"]]
    early = folder / "interrupted.txt"  # jobs that were ended and done again, see jobs.work
    ended = sum(map(float, early.read_text().split())) if early.exists() else 0.0
    costs = costs | {"jobs_cpu_seconds": ended + sum(job["cpu_seconds"] for job in found)}
    sizes = {size.name: vars(size) | {"block_weights": size.block_weights} for size in plan.sizes}
    amounts = {name: value for name, value in vars(plan).items() if isinstance(value, int)}
    return _rounded({"machine": machine(), "costs": costs, "facts": facts, "plan": amounts, "sizes": sizes,
                     "methods": {each.name: each.title for each in plan.methods}, "jobs": found})


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.4g}") if abs(value) < 1 else round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def write(folder: Path, plan: plans.Plan, facts: dict, costs: dict, target: Path) -> str:
    """Write results.json, the figures and RESULTS.md into ``target``; returns what to print."""
    target.mkdir(parents=True, exist_ok=True)
    everything = collect(folder, plan, facts, costs)
    write_text(target / "results.json", json.dumps(everything, separators=(",", ":")) + "\n")
    return render(everything, target)


def render(everything: dict, target: Path) -> str:
    """Figures and RESULTS.md from the contents of results.json."""
    import figures

    results = results_of(everything)
    figures.draw(results, everything["methods"], target)
    write_text(target / "RESULTS.md", report_text(everything))
    return f"wrote {target / 'RESULTS.md'}, results.json and figures\n\n{_findings(everything, results)}"


def results_of(everything: dict) -> Results:
    """What results.json holds, ready to be reckoned with."""
    names = list(everything["facts"]["training_tokens"])
    jobs = [job | {"points": [point | {"languages": dict(zip(names, point["languages"]))} for point in job["points"]]}
            for job in everything["jobs"]]
    return Results(tuple(jobs), tuple(everything["sizes"]), tuple(everything["methods"]))


def report_text(everything: dict) -> str:
    """RESULTS.md; every figure in it comes from results.json."""
    results = results_of(everything)
    return "\n\n".join(section(everything, results) for section in (
        _head, _findings, _equal_task, _pareto, _languages, _scale, _biases, _bases, _table, _limits)) + "\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left, the others to the right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _pm(values: list[float], digits: int = 3) -> str:
    return f"{mean(values):.{digits}f} ± {spread(values):.{digits}f}"


def _head(everything: dict, results: Results) -> str:
    facts, costs, plan = everything["facts"], everything["costs"], everything["plan"]
    cpu = costs["jobs_cpu_seconds"] + costs.get("preparation_cpu_seconds", 0)
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return f"""# Does BitFit keep the base model's languages better than full fine-tuning?

Made by `examples/retention/run.py`; the figures are in `results.json`. Machine: {everything["machine"]}.
{costs["wall_seconds"] / 60:.0f} minutes on the clock and {cpu / 60:.0f} minutes of processor time, that is {cpu / 120:.0f} minutes \
where two cores are free. A ± is the standard deviation over {len(results.seeds)} seeds (order of the training prompts).

- **Text**: gettext catalogues of {packages}; {len(facts["training_tokens"])} languages, \
{sum(facts["training_tokens"].values()) / 1e6:.2f} million training tokens (vocabulary {plans.VOCABULARY}), \
{facts["messages"][0]:,} messages; {facts["messages"][1]:,} messages held out in all languages at once.
- **Base models**: BLOOM's layout (ALiBi, LayerNorm behind the embedding, tied head), \
{plan["pretraining_steps"] * plan["pretraining_rows"] * plans.LENGTH / 1e6:.2f} million tokens each, by `pretrain_gpt.py`.
- **Tasks**, English alone, {len(facts["chance"])} templates: {", ".join(facts["chance"])}; \
{sum(facts["training_prompts"].values()):,} training prompts, {sum(facts["held_out_prompts"].values())} held out, \
by `finetune_t0.py`: {plan["steps"]} steps of {plan["rows"]} packed rows of {plans.LENGTH} tokens, warm-up over a tenth, then constant; \
Adam, no weight decay, `--loss-normalization global-tokens`.
- **Lost** means: mean held-out loss of the {len(facts["training_tokens"]) - 1} languages other than English, \
nats per token, less that of the base. **Task loss**: nats per token of held-out answers, mean over templates."""


def _comparisons(results: Results) -> list[Comparison]:
    return [analysis.compare(results, size, method, task) for size in results.sizes for method in results.methods[1:]
            for task in results.targets(size)]


def _findings(everything: dict, results: Results) -> str:
    titles, lines = everything["methods"], ["## What was found", ""]
    verdicts: list[str] = []
    keeps = {"more": "keeps more", "less": "keeps less", "equal": "no clear difference"}
    for size in results.sizes:
        compared = [analysis.compare(results, size, method, results.common_task(size)) for method in results.methods[1:]]
        verdicts += [each.verdict for each in compared]
        said = [f"{titles[each.method]} {_pm(each.other)} ({keeps[each.verdict]})" for each in compared]
        lines.append(f"- Size {size}: where all reach task loss {results.common_task(size):.2f}, full fine-tuning has lost "
                     f"{_pm(compared[-1].full)}, {', '.join(said)}.")
    for size in results.sizes:
        reached = {method: [results.best_task(size, method, seed) for seed in results.seeds]
                   for method in results.methods}
        lines.append(f"- Size {size}, lowest task loss of any learning rate: "
                     f"{', '.join(f'{titles[method]} {_pm(values, 2)}' for method, values in reached.items())}.")
    for size in results.sizes:
        ends = {method: [curve.end.lost for curve in results.of(size, method, rate=results.best_rate(size, method))]
                for method in results.methods}
        lines.append(f"- Size {size}, at the end of the learning rate of lowest task loss, unequal in task: "
                     f"{', '.join(f'{titles[method]} has lost {_pm(values, 2)}' for method, values in ends.items())}.")
    if all(each == "more" for each in verdicts):
        answer = "**At equal task loss BitFit kept the other languages better in every comparison here.**"
    elif all(each == "less" for each in verdicts):
        answer = "**At equal task loss BitFit kept the other languages worse in every comparison here.**"
    else:
        counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in ("more", "less", "equal"))
        answer = (f"**At equal task loss the answer depends on size and bias terms: of {len(verdicts)} comparisons BitFit "
                  f"kept {counts}.**")
    def lowest(size: str, method: str) -> float:
        return mean(results.best_task(size, method, seed) for seed in results.seeds)

    better = [size for size in results.sizes
              if lowest(size, "full") < min(lowest(size, method) for method in results.methods[1:])]
    if better:
        answer += (f" Full fine-tuning reached lower task losses at size{'s' * (len(better) > 1)} {', '.join(better)} "
                   "than BitFit did at any learning rate tried.")
    return "\n".join([lines[0], "", answer, "", *lines[2:]])


def _equal_task(everything: dict, results: Results) -> str:
    rows = []
    for each in _comparisons(results):
        chosen = results.at_equal_task(each.size, each.method, each.task)
        rates = sorted({rate for rate, _ in chosen})
        full = sorted({rate for rate, _ in results.at_equal_task(each.size, "full", each.task)})
        rows.append([each.size, everything["methods"][each.method], f"{each.task:.2f}", _pm(each.full), _pm(each.other),
                     _pm(each.differences), each.verdict, ", ".join(f"{rate:g}" for rate in full),
                     ", ".join(f"{rate:g}" for rate in rates)])
    return ("## At equal task loss\n\nEach seed's curves (one per learning rate) are interpolated between measurements; of those that "
            "reach the task loss the one that lost least counts. The last target of a size is the lowest task loss that every method "
            "reached with every seed. Difference: full less the other, above 0 where the other keeps more; *more* and *less* are said "
            "where all seeds agree and the mean is above two standard errors.\n\n"
            + table(["size", "against full", "task loss", "full lost", "it lost", "difference", "keeps", "rate of full",
                     "its rate"], rows))


def _pareto(everything: dict, results: Results) -> str:
    return ("![Task gained against languages lost](pareto.png)\n\nA line is a learning rate, from the base at zero through the "
            "measurements to the end (large mark, bars over seeds). Dashed: the common task loss.")


def _languages(everything: dict, results: Results) -> str:
    size = results.sizes[-1]
    text = []
    for method in results.methods:
        points = [point for _, point in results.at_equal_task(size, method, results.common_task(size))]
        each = {name: mean(point.per_language[name] for point in points) for name in points[0].per_language}
        worst = sorted(each, key=lambda name: -each[name])
        text.append(f"{everything['methods'][method]}: most in {', '.join(f'{n} {each[n]:.3f}' for n in worst[:3])}, "
                    f"least in {', '.join(f'{n} {each[n]:.3f}' for n in worst[-3:])}; English text "
                    f"{mean(point.english for point in points):.3f}")
    return f"## Per language\n\n![Per language](languages.png)\n\nSize {size}, lost at equal task loss. {'. '.join(text)}."


def _scale(everything: dict, results: Results) -> str:
    rows: list[list[str]] = []
    gaps: dict[str, list[tuple[float, float, float]]] = {method: [] for method in results.methods[1:]}
    for size in results.sizes:
        for method in results.methods[1:]:
            each = analysis.compare(results, size, method, results.common_task(size))
            task = mean(results.best_task(size, method, s) for s in results.seeds) - mean(
                results.best_task(size, "full", s) for s in results.seeds)
            times = mean(each.other) / mean(each.full) if mean(each.full) > 0 else float("nan")
            gaps[method].append((task, -mean(each.differences), times))
            rows.append([size, f"{results.bases[size]['weights']:,}", everything["methods"][method], f"{task:.3f}",
                         f"{-mean(each.differences):.3f}", f"{times:.1f}"])
    said = [f"{everything['methods'][method]}: {_trend([each[0] for each in values])} in lowest task loss, "
            f"{_trend([each[1] for each in values])} in nats lost at equal task loss, {_trend([each[2] for each in values])} in "
            "how many times as much is lost" for method, values in gaps.items()]
    return ("## Over sizes\n\n![Over sizes](scale.png)\n\nThe gap to full fine-tuning from the smallest size to the largest. "
            f"{'. '.join(said)}.\n\n"
            + table(["size", "weights", "method", "lowest task loss, more than full", "lost at equal task loss, more than full",
                     "times what full loses"], rows))


def _trend(values: list[float]) -> str:
    """Whether a gap closes with size, in words, with its first and last value."""
    steps = [b - a for a, b in zip(values, values[1:])]
    word = ("it falls at every step" if steps and all(step < 0 for step in steps) else
            "it grows at every step" if steps and all(step > 0 for step in steps) else "no steady trend")
    return f"{word} ({values[0]:.2f} to {values[-1]:.2f})"


def _biases(everything: dict, results: Results) -> str:
    size = results.sizes[-1]
    rate = results.best_rate(size, "bitfit") if "bitfit" in results.methods else None
    said = ""
    if rate is not None:
        runs = [curve.bias_changes for curve in results.of(size, "bitfit", rate=rate)]
        means = {term: mean(mean(run[term]) for run in runs) for term in runs[0]}
        order = sorted(means, key=lambda term: -means[term])
        said = (f" BitFit moved {', '.join(f'{term} {means[term]:.2g}' for term in order)} (mean over blocks). Key biases have no "
                "gradient without rotary positions, but for rounding, which Adam scales up.")
    return (f"## Which biases move\n\n![Mean change of biases](biases.png)\n\nSize {size}, mean |change| at the end, means over seeds, "
            f"each method at its learning rate of lowest task loss.{said}")


def _bases(everything: dict, results: Results) -> str:
    rows, facts = [], everything["facts"]
    for size in results.sizes:
        base = results.bases[size]
        loss = base["points"][-1]["languages"]
        gaps = {name: facts["unigram"][name] - value for name, value in loss.items()}
        worst = min(gaps, key=gaps.__getitem__)
        rows.append([size, f"{everything['sizes'][size]['block_weights']:,}", f"{base['weights']:,}", f"{base['biases']:,}",
                     f"{mean(facts['unigram'].values()):.2f}", f"{mean(loss.values()):.2f}",
                     f"{worst} {gaps[worst]:.2f}", f"{mean(base['points'][-1]['tasks'].values()):.2f}",
                     f"{mean(base['accuracy'].values()):.2f}"])
    return ("## The base models\n\nHeld-out loss against that of word counts: a model that knows how often each token occurs in a "
            "language, and nothing of context.\n\n"
            + table(["size", "weights in blocks", "all weights", "biases", "counts alone, mean", "base, mean",
                     "least gained", "task loss", "task accuracy"], rows))


def _table(everything: dict, results: Results) -> str:
    rows = []
    for size in results.sizes:
        for method in results.methods:
            for rate in results.rates(size, method):
                curves = results.of(size, method, rate=rate)
                rows.append([size, everything["methods"][method], f"{rate:g}", _pm([each.end.task for each in curves]),
                             _pm([mean(each.accuracy.values()) for each in curves], 2),
                             _pm([each.end.lost for each in curves]), _pm([each.end.english for each in curves])])
    chance = mean(everything["facts"]["chance"].values())
    said = _accuracy_said(results, chance, sum(everything["facts"]["held_out_prompts"].values()))
    return (f"## All runs, at their end\n\nAccuracy: share of held-out prompts whose right answer is the likeliest of four or five "
            f"(chance {chance:.2f}), mean over templates. {said}\n\n"
            + table(["size", "method", "learning rate", "task loss", "accuracy", "other languages lost", "English text lost"], rows))


def _accuracy_said(results: Results, chance: float, prompts: int) -> str:
    groups: dict[tuple, list[float]] = {(curve.size, curve.method, curve.rate): [] for curve in results.curves}
    for curve in results.curves:
        groups[curve.size, curve.method, curve.rate].append(mean(curve.accuracy.values()))
    best = max(groups, key=lambda key: mean(groups[key]))
    error = (chance * (1 - chance) / prompts) ** 0.5
    found = f"The highest mean is {mean(groups[best]):.2f} (size {best[0]}, {best[1]}, {best[2]:g})"
    if mean(groups[best]) < chance + 2 * error:
        return (f"{found}, within two standard errors ({2 * error:.2f}) of chance: task loss fell because the form of answers and "
                "their frequent words were learnt, not the choice between them.")
    return f"{found}; two standard errors of guessing are {2 * error:.2f}."


def _limits(everything: dict, results: Results) -> str:
    tokens = mean(everything["facts"]["held_out_tokens"].values())
    weights = [job["weights"] / 1e6 for job in results.bases.values()]
    chosen = {size: {rate for rate, _ in results.at_equal_task(size, "full", results.common_task(size))}
              for size in results.sizes}
    lowest = all(rates == {results.rates(size, "full")[0]} for size, rates in chosen.items())
    edge = (" Where all methods are equal, full fine-tuning did best at the lowest rate it was given: a lower one might keep yet "
            "more." if lowest else "")
    return f"""## What these figures cannot say

- The models have {min(weights):.1f} to {max(weights):.1f} million weights and saw {everything["plan"]["steps"]} steps of fine-tuning. \
What is claimed for BitFit is about pretrained models of 100 million weights and more.
- {tokens:.0f} held-out tokens a language: differences between methods are paired (same tokens), levels are not precise.
- Seeds vary the order of the prompts, not the base: there is one base per size.
- The learning rate is chosen afterwards, per seed and for every method alike.{edge}"""
