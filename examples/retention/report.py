"""results.json, figures and RESULTS.md from the files of finished jobs."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import analysis
import plan as plans
from analysis import Comparison, Results, mean, spread

from megatron.checkpoint.files import write_text


def machine() -> str:
    """Processor, cores and versions, for the report."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    import torch

    return f"{name}, {os.cpu_count()} cores, no GPU used; torch {torch.__version__}, fp32"


def collect(folder: Path, plan: plans.Plan, facts: dict, costs: dict) -> dict:
    """Everything the report says, as it is kept in results.json; losses to five decimals."""
    found = [json.loads((folder / "results" / f"{job.name}.json").read_text()) for job in plans.jobs(plan)]
    costs = costs | {"jobs_cpu_seconds": sum(job["cpu_seconds"] for job in found)}
    sizes = {size.name: vars(size) | {"block_weights": size.block_weights} for size in plan.sizes}
    amounts = {name: value for name, value in vars(plan).items() if isinstance(value, int)}
    return _rounded({"machine": machine(), "costs": costs, "facts": facts, "plan": amounts, "sizes": sizes,
                     "methods": {each.name: each.title for each in plan.methods}, "jobs": found})


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) < 1 else round(value, 5)
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
    return Results(tuple(everything["jobs"]), tuple(everything["sizes"]), tuple(everything["methods"]))


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
    verdicts = []
    for size in results.sizes:
        said = []
        for method in results.methods[1:]:
            each = analysis.compare(results, size, method, results.common_task(size))
            verdicts.append(each.verdict)
            keeps = {"more": "keeps more", "less": "keeps less", "equal": "no clear difference"}[each.verdict]
            said.append(f"{titles[method]} {_pm(each.other)} ({keeps})")
        lines.append(f"- Size {size}: where all reach task loss {results.common_task(size):.2f}, full fine-tuning has lost "
                     f"{_pm(each.full)}, {', '.join(said)}.")
    for size in results.sizes:
        reached = {method: [results.best_task(size, method, seed) for seed in results.seeds]
                   for method in results.methods}
        lines.append(f"- Size {size}, lowest task loss of any learning rate: "
                     f"{', '.join(f'{titles[method]} {_pm(values, 2)}' for method, values in reached.items())}.")
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
        answer += (f" Full fine-tuning learnt the tasks better (lowest task loss) at size{'s' * (len(better) > 1)} "
                   f"{', '.join(better)}; what lies below the common task loss BitFit cannot have at any price here.")
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
    rows = []
    for size in results.sizes:
        for method in results.methods[1:]:
            each = analysis.compare(results, size, method, results.common_task(size))
            gap = mean(results.best_task(size, method, s) for s in results.seeds) - mean(
                results.best_task(size, "full", s) for s in results.seeds)
            rows.append([size, f"{results.bases[size]['weights']:,}", everything["methods"][method], f"{gap:.3f}",
                         f"{-mean(each.differences):.3f}"])
    return ("## Over sizes\n\n![Over sizes](scale.png)\n\nGaps to full fine-tuning; both close with scale if they fall from size to "
            "size.\n\n" + table(["size", "weights", "method", "lowest task loss, more than full",
                                 "lost at equal task loss, more than full"], rows))


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
    return (f"## All runs, at their end\n\nAccuracy: share of held-out prompts whose right answer is the likeliest of four or five "
            f"(chance {chance:.2f}), mean over templates.\n\n"
            + table(["size", "method", "learning rate", "task loss", "accuracy", "other languages lost", "English text lost"], rows))


def _limits(everything: dict, results: Results) -> str:
    tokens = mean(everything["facts"]["held_out_tokens"].values())
    return f"""## What these figures cannot say

- Models of {min(job["weights"] for job in results.bases.values()) / 1e6:.1f} to \
{max(job["weights"] for job in results.bases.values()) / 1e6:.1f} million weights after seconds of fine-tuning; the claims about BitFit are \
about models a thousand times larger, whose tasks need fewer new features.
- {tokens:.0f} held-out tokens a language: differences between methods are paired (same tokens), levels are not precise.
- Seeds vary the order of the prompts, not the base: one base per size.
- The learning rate is chosen afterwards, per seed and method alike."""
