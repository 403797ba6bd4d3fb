"""Figures of several runs side by side, with ratios to the first one, the baseline.

Medians are taken over iterations after warm-up that all runs report, of finite values only;
how many values are not finite stands in rows of its own. If the runs share no such iteration,
medians are each run's own, and those of loss and gradient norm, which depend on
how far a run is, get no ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from megatron.errors import RunError
from megatron.run_logs import Point, RunLog

Figure = float | int | str | None
_FLOP = "FLOP per sample (formula of the log line)"


@dataclass(frozen=True)
class Row:
    """One figure of all runs."""

    title: str
    values: Sequence[Figure]
    """one per run; None is unknown"""
    text: Callable[[float], str]
    """of a value in the table"""
    has_ratio: bool = True
    iteration: int | None = None
    """of which iteration; None for a figure of the run as a whole"""

    @property
    def ratios(self) -> list[float | None]:
        """Each further run's value over the baseline's; None where that says nothing."""
        return [ratio(value, self.values[0]) if self.has_ratio else None for value in self.values[1:]]


@dataclass(frozen=True)
class Comparison:
    """All rows, and the iterations that the medians are of (none: of each run's own)."""

    names: list[str]
    warmup: int
    shared: list[int]
    rows: list[Row]


def ratio(value: Figure, base: Figure) -> float | None:
    """value / base for finite numbers and a base other than zero, else None."""
    return value / base if _is_finite(value) and _is_finite(base) and base else None


def _is_finite(value: Figure) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


# --- single values ----------------------------------------------------------------------------


def tflops(run: RunLog, point: Point) -> float | None:
    """TFLOP/s per rank by the formula of the log line.

    From the run facts if there are any: the log line's two decimals are too few for a small
    model.
    """
    flop, ranks = run.facts.get(_FLOP), run.facts.get("ranks")
    if not isinstance(flop, (int, float)) or not isinstance(ranks, (int, float)) or point.batch is None:
        return point.tflops
    if not ranks or not point.seconds:
        return point.tflops
    return flop * point.batch / point.seconds / ranks / 1e12


def _field(name: str) -> Callable[[RunLog, Point], float | None]:
    return lambda run, point: getattr(point, name)


#: (title, value of one point, text)
CURVES = (
    ("lm loss", _field("loss"), "{:.6f}".format),
    ("gradient norm", _field("grad_norm"), "{:.3f}".format),
    ("seconds per iteration", _field("seconds"), "{:.4g}".format),
    ("TFLOPs per rank (formula of the log line)", tflops, "{:.3g}".format),
    ("samples per second", _field("samples_per_second"), "{:.3f}".format),
    ("skipped iterations", _field("skipped"), "{:,}".format),
    ("nan iterations", _field("nan"), "{:,}".format),
)
_LOSS, _NORM, _SECONDS, _TFLOPS, _RATE, _SKIPPED, _NAN = CURVES


def _finite(values) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _text_of_bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    raise AssertionError


def _plain(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


# --- rows -------------------------------------------------------------------------------------

_PEAK, _STATE, _REDUCED = ("peak memory bytes (max over ranks)", "optimizer state bytes (all ranks)",
                           "gradient bytes per step, to be summed over DP (all ranks)")
#: name in a log -> name it had in older ones
_FORMER = {_REDUCED: "gradient bytes reduced per step (all ranks)"}
#: facts with a place of their own, or that only help to compute others
_PLACED = {"trainable parameters", "total parameters", "bitfit", "ranks", _FLOP, _PEAK, _STATE, *_FORMER, *_FORMER.values()}


def _fact_row(runs: list[RunLog], name: str, title: str | None = None, text: Callable = _plain) -> Row:
    former = _FORMER.get(name, name)
    return Row(title or name, [run.facts.get(name, run.facts.get(former)) for run in runs], text)


def _other_fact_row(runs: list[RunLog], name: str) -> Row:
    """Memory by kind is shown like the peak, every other fact as it stands."""
    kind = name.removeprefix("memory bytes: ")
    return _fact_row(runs, name) if kind == name else _fact_row(runs, name, f"memory: {kind}", _text_of_bytes)


def _share(run: RunLog) -> float | None:
    share = ratio(run.facts.get("trainable parameters"), run.facts.get("total parameters"))
    return None if share is None else 100.0 * share


def _end_row(runs: list[RunLog], curve: tuple, index: int) -> Row:
    title, value, text = curve
    ends = [run.points[index] for run in runs]
    return Row(f"{title}, {'last' if index else 'first'} line",
               [value(run, end) for run, end in zip(runs, ends, strict=True)], text,
               has_ratio=len({end.iteration for end in ends}) == 1)


def _overall(runs: list[RunLog], timed: list[list[Point]], aligned: bool) -> list[Row]:
    def over(reduce, curve, word, has_ratio=True) -> Row:
        title, value, text = curve
        values = [_finite(value(run, point) for point in points) for run, points in zip(runs, timed, strict=True)]
        return Row(f"{title}{word and ', '}{word}", [reduce(v) if v else None for v in values], text, has_ratio)

    def total(curve) -> Row:
        counts = [_finite(curve[1](run, point) for point in run.points) for run in runs]
        return Row(curve[0], [sum(count) if count else None for count in counts], curve[2], False)

    def unsound(name: str) -> list[int]:
        return [len(run.points) - len(_finite(getattr(point, name) for point in run.points)) for run in runs]

    count = "{:,}".format
    return [
        _fact_row(runs, "trainable parameters"),
        Row("share of all parameters", [_share(run) for run in runs], "{:.4f} %".format, False),
        _fact_row(runs, "total parameters"),
        Row("training lines", [len(run.points) for run in runs], count, False),
        Row("last iteration", [run.points[-1].iteration for run in runs], count, False),
        _end_row(runs, _LOSS, 0), _end_row(runs, _LOSS, -1), over(statistics.median, _LOSS, "median", aligned),
        _end_row(runs, _NORM, 0), _end_row(runs, _NORM, -1), over(statistics.median, _NORM, "median", aligned),
        total(_SKIPPED), total(_NAN),
        Row("lines without a finite loss", unsound("loss"), count, False),
        Row("lines without a finite gradient norm", unsound("grad_norm"), count, False),
        over(statistics.median, _SECONDS, "median"), over(min, _SECONDS, "least"), over(max, _SECONDS, "most"),
        over(statistics.median, _RATE, "median"), over(statistics.median, _TFLOPS, ""),
        _fact_row(runs, _PEAK, "peak memory (max over ranks)", _text_of_bytes),
        _fact_row(runs, _STATE, "optimizer state (all ranks)", _text_of_bytes),
        _fact_row(runs, _REDUCED, "gradients per step, to be summed over DP (all ranks)", _text_of_bytes),
        *(_other_fact_row(runs, name) for name in dict.fromkeys(name for run in runs for name in run.facts)
          if name not in _PLACED),
    ]


def _by_iteration(runs: list[RunLog], iterations: list[int]) -> list[Row]:
    wanted, rows = set(iterations), []
    found = [{point.iteration: point for point in run.points if point.iteration in wanted} for run in runs]
    for title, value, text in CURVES:
        counts = (title, value, text) in (_SKIPPED, _NAN)
        some = [Row(f"{title}, iteration {at}",
                    [value(run, points[at]) if at in points else None for run, points in zip(runs, found, strict=True)],
                    text, has_ratio=not counts, iteration=at) for at in iterations]
        if any(any(row.values) if counts else row.values != [None] * len(runs) for row in some):
            rows += some
    return rows


def compare(runs: list[RunLog], names: list[str], *, warmup: int, at: list[int] | None = None,
            rows: int = 5) -> Comparison:
    """Figures of the runs as a whole, then by iteration.

    ``warmup`` training lines of each start of a run stay out of medians and times. By iteration,
    ``at`` chooses; by default ``rows`` of those that all runs report, first and last among them,
    evenly spread. Raises RunError when warm-up leaves nothing or ``at`` names an unknown iteration.
    """
    timed = [[point for point in run.points if point.age >= warmup] for run in runs]
    for run, points in zip(runs, timed, strict=True):
        if not points:
            raise RunError(f"{run.path} holds {len(run.points)} training lines, --warmup {warmup} leaves none: "
                           "lower --warmup or train longer")
    shared = set.intersection(*({point.iteration for point in points} for points in timed))
    if shared:
        timed = [[point for point in points if point.iteration in shared] for points in timed]
    reported = [{point.iteration for point in run.points} for run in runs]
    if at is None:
        both = sorted(set.intersection(*reported))
        rows = min(rows, len(both))
        at = [both[round(i * (len(both) - 1) / max(rows - 1, 1))] for i in range(rows)]
    elif unknown := sorted(set(at) - set[int]().union(*reported)):
        raise RunError(f"--at {unknown[0]} is an iteration that no run reports")
    return Comparison(names, warmup, sorted(shared), _overall(runs, timed, bool(shared)) + _by_iteration(runs, at))


# --- how it is said ---------------------------------------------------------------------------


def _ratio_text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _text(row: Row, value: Figure) -> str:
    if value is None:
        return "-"
    return row.text(value) if _is_finite(value) else str(value)


def cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """The table as text, its heading first: title, a column per run, a column per ratio."""
    first, *others = comparison.names
    table = [("", *comparison.names, *(f"{name} / {first}" for name in others))]
    for row in comparison.rows:
        table.append((row.title, *(_text(row, value) for value in row.values), *map(_ratio_text, row.ratios)))
    return table


def format_table(table: list[tuple[str, ...]], *, markdown: bool = False) -> str:
    """Aligned text, or a Markdown table; the first column to the left, figures to the right."""
    if markdown:
        table = [tuple(cell.replace("|", "\\|") for cell in row) for row in table]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    edge, gap = ("| ", " | ") if markdown else ("", "  ")
    lines = [(edge + gap.join([row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width
                                                            in zip(row[1:], widths[1:], strict=True)])
              + edge[::-1]).rstrip() for row in table]
    rule = "-" * len(lines[0])
    if markdown:
        rule = "|" + "|".join([":" + "-" * (widths[0] + 1)] + ["-" * (width + 1) + ":" for width in widths[1:]]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def as_json(comparison: Comparison, runs: list[RunLog]) -> dict:
    """The same figures for machines; JSON has no NaN or infinity, they become "nan", "inf", "-inf"."""
    def number(value: Figure) -> Figure:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value
    shared = comparison.shared
    return {
        "warmup": comparison.warmup,
        "medians_over": {"iterations": len(shared), "first": shared[0], "last": shared[-1]} if shared else None,
        "runs": [{"name": name, "path": run.path, "training_lines": len(run.points), "starts": run.starts,
                  "facts": {fact: number(value) for fact, value in run.facts.items()}} for name, run in zip(comparison.names, runs, strict=True)],
        "figures": [{"figure": row.title, "iteration": row.iteration, "values": list(map(number, row.values)),
                     "ratios": row.ratios} for row in comparison.rows],
    }
