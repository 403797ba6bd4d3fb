"""Put two training logs side by side: what trains, losses, time, memory, reduced bytes.

    python tools/compare_runs.py full.log bitfit.log --names full bitfit

Reads what the trainer prints, a log of torchrun --tee included. A figure that a log does
not hold (logs of other trainers have no run facts) is shown as ``-``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.log_lines import parse_run_facts, parse_training_line


class LogError(ValueError):
    """A log that cannot be compared; the message says which and why."""


@dataclass(frozen=True)
class RunLog:
    """What one log says."""

    lines: list[dict]
    """values of each training line, in the order of the file"""
    facts: dict
    skip: int

    @property
    def timed(self) -> list[dict]:
        """Training lines without the first ``skip``, which pay for warming up."""
        return self.lines[self.skip:]


def read_log(path: Path, skip: int) -> RunLog:
    """Parse the log at ``path``; raises LogError when it cannot be used."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read().splitlines()
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from error
    lines = [values for values in map(parse_training_line, text) if values is not None]
    if not lines:
        raise LogError(f"{path} holds no training line (' iteration N/ M | ...'): was the run started, and is "
                       "this the standard output of its last rank?")
    if len(lines) <= skip:
        raise LogError(f"{path} holds {len(lines)} training lines, --skip {skip} leaves none to time: "
                       "lower --skip or train longer")
    return RunLog(lines=lines, facts=parse_run_facts(text), skip=skip)


# --- figures ----------------------------------------------------------------------------------


def _values(lines: list[dict], key: str) -> list[float]:
    return [line[key] for line in lines if isinstance(line.get(key), (int, float))]


def _at(index: int, key: str) -> Callable[[RunLog], float | None]:
    def figure(run: RunLog) -> float | None:
        value = run.lines[index].get(key)
        return value if isinstance(value, (int, float)) else None
    return figure


def _over(reduce: Callable, key: str, *, timed: bool = False) -> Callable[[RunLog], float | None]:
    def figure(run: RunLog) -> float | None:
        values = _values(run.timed if timed else run.lines, key)
        return reduce(values) if values else None
    return figure


def _fact(name: str) -> Callable[[RunLog], float | None]:
    def figure(run: RunLog) -> float | None:
        value = run.facts.get(name)
        return value if isinstance(value, (int, float)) else None
    return figure


def _seconds(reduce: Callable) -> Callable[[RunLog], float | None]:
    """Time per iteration, from the printed time or the printed rate: the one with more digits."""
    def figure(run: RunLog) -> float | None:
        times = []
        for line in run.timed:
            seconds, rate = line.get("seconds_per_iteration", 0.0), line.get("samples_per_second", 0.0)
            if rate > 0 and rate * 10 > seconds and "global_batch_size" in line:  # .3f against .2f
                seconds = line["global_batch_size"] / rate
            if seconds > 0:
                times.append(seconds)
        return reduce(times) if times else None
    return figure


def _tflops(run: RunLog) -> float | None:
    """By the formula of the log line, which prints two decimals only: too few for a small model."""
    flop, ranks = run.facts.get("FLOP per sample (formula of the log line)"), run.facts.get("ranks")
    size, seconds = _at(-1, "global_batch_size")(run), _seconds(statistics.median)(run)
    if None in (flop, ranks, size, seconds):
        return _over(statistics.median, "tflops", timed=True)(run)
    return flop * size / seconds / ranks / 1e12


def _share(run: RunLog) -> float | None:
    trainable, total = run.facts.get("trainable parameters"), run.facts.get("total parameters")
    return 100.0 * trainable / total if trainable is not None and total else None


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    raise AssertionError


#: (row, figure, text of a value, whether a ratio means something)
ROWS = (
    ("trainable parameters", _fact("trainable parameters"), "{:,}".format, True),
    ("share of all parameters", _share, "{:.4f} %".format, False),
    ("total parameters", _fact("total parameters"), "{:,}".format, True),
    ("training lines", lambda run: len(run.lines), "{:,}".format, False),
    ("last iteration", _at(-1, "iteration"), "{:,}".format, False),
    ("lm loss, first line", _at(0, "loss"), "{:.6f}".format, True),
    ("lm loss, last line", _at(-1, "loss"), "{:.6f}".format, True),
    ("gradient norm, first line", _at(0, "grad_norm"), "{:.3f}".format, True),
    ("gradient norm, median", _over(statistics.median, "grad_norm"), "{:.3f}".format, True),
    ("skipped iterations", _over(sum, "skipped_iterations"), "{:,}".format, False),
    ("nan iterations", _over(sum, "nan_iterations"), "{:,}".format, False),
    ("seconds per iteration, median", _seconds(statistics.median), "{:.4g}".format, True),
    ("seconds per iteration, least", _seconds(min), "{:.4g}".format, True),
    ("seconds per iteration, most", _seconds(max), "{:.4g}".format, True),
    ("samples per second, median", _over(statistics.median, "samples_per_second", timed=True),
     "{:.3f}".format, True),
    ("TFLOPs per rank (formula of the log line)", _tflops, "{:.3g}".format, True),
    ("peak memory (max over ranks)", _fact("peak memory bytes (max over ranks)"), _bytes, True),
    ("optimizer state (all ranks)", _fact("optimizer state bytes (all ranks)"), _bytes, True),
    ("gradients reduced per step (all ranks)", _fact("gradient bytes reduced per step (all ranks)"), _bytes, True),
)


def compare(first: RunLog, second: RunLog, names: tuple[str, str]) -> list[tuple[str, str, str, str]]:
    """Rows of (figure, first, second, second / first), the heading included."""
    table = [("", *names, f"{names[1]} / {names[0]}")]
    for title, figure, text, has_ratio in ROWS:
        values = [figure(run) for run in (first, second)]
        shown = ["-" if value is None else text(value) for value in values]
        ratio = "-"
        if has_ratio and None not in values and values[0] and all(map(math.isfinite, values)):
            ratio = f"{values[1] / values[0]:.3g}"
        table.append((title, *shown, ratio))
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


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("logs", nargs=2, type=Path, metavar="LOG", help="standard output of a run")
    parser.add_argument("--names", nargs=2, metavar="NAME", help="headings (default: the names of the files)")
    parser.add_argument("--skip", type=_not_negative, default=2, metavar="N",
                        help="training lines at the start that are left out of the times (default: 2)")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args = parser.parse_args(argv)
    try:
        runs = [read_log(path, args.skip) for path in args.logs]
    except LogError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    names = tuple(args.names) if args.names else (args.logs[0].stem, args.logs[1].stem)
    print(format_table(compare(runs[0], runs[1], names), markdown=args.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
