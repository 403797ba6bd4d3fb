"""Put training runs side by side: what trains, loss, gradient norm, time, memory, bytes of gradients.

    python tools/compare_runs.py full.log bitfit.log --names full bitfit --html curves.html

Reads what the trainer prints, a log of torchrun --tee included, logs of Megatron-DeepSpeed, or
TensorBoard folders. A figure that a run does not tell (logs of other trainers have no run facts)
is shown as ``-``. Ratios are to the first run. A file that holds several starts of a run
counts as one that was resumed: a later start replaces what came before of its iterations.
FILE#2 takes its second start alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.curves import page, write_page
from megatron.errors import RunError, print_answer
from megatron.run_comparison import CURVES, as_json, cells, compare, format_table
from megatron.run_logs import RunLog, read_run

#: curves of the page, by the beginning of their title
DRAWN = ("lm loss", "gradient norm", "seconds", "TFLOPs")


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; exits with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("baseline", metavar="BASELINE", help="log file or TensorBoard folder of the run to divide by")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="those of further runs")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="headings, one per run (default: file names)")
    parser.add_argument("--warmup", type=_not_negative, default=2, metavar="N",
                        help="training lines at the beginning of each start of a run that are left out of "
                             "medians and times (default: 2)")
    parser.add_argument("--at", type=_not_negative, nargs="+", metavar="N",
                        help="iterations to show one by one (default: five of those that all runs report)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    form.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with table and curves")
    args = parser.parse_args(argv)
    args.runs.insert(0, args.baseline)
    if args.names and len(args.names) != len(args.runs):
        parser.error(f"--names gives {len(args.names)} names for {len(args.runs)} runs")
    files = [Path(path).resolve() for run in args.runs for path in (run, re.sub(r"#\d+$", "", run))]
    if args.html and args.html.resolve() in files:
        parser.error(f"--html {args.html} is one of the runs: it would be overwritten")
    return args


def default_names(runs: list[str]) -> list[str]:
    """File names without ending, or the paths as given where those would be the same."""
    paths = [Path(run) for run in runs]
    short = [path.name if path.is_dir() or "#" in path.name else path.stem for path in paths]
    return short if len(set(short)) == len(short) and all(short) else runs


def say_starts(run: RunLog) -> None:
    """A file of several starts is read in one of several ways: say in which."""
    if len(run.starts) > 1:
        ranges = ", ".join(f"{first} to {last}" for first, last in run.starts)
        print(f"note: {run.path} holds {len(run.starts)} starts (iterations {ranges}), read as one resumed run; "
              f"{run.path}#N reads start N alone", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status: 2 when a run cannot be read."""
    args = parse_arguments(argv)
    names = [name.encode("utf-8", "replace").decode() for name in args.names or default_names(args.runs)]
    try:
        runs = [read_run(run) for run in args.runs]
        comparison = compare(runs, names, warmup=args.warmup, at=args.at)
        if args.html:
            charts = [(title, [[(point.iteration, value(run, point)) for point in run.points] for run in runs])
                      for title, value, _ in CURVES if title.startswith(DRAWN)]
            write_page(args.html, page(names, charts, cells(comparison)))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for run in runs:
        say_starts(run)
    if not comparison.shared:
        print(f"note: no iteration after warm-up is reported by all of {', '.join(names)}: medians and times are "
              "each run's own", file=sys.stderr)
    if args.json:
        print_answer(json.dumps(as_json(comparison, runs), indent=1, allow_nan=False))
    else:
        print_answer(format_table(cells(comparison), markdown=args.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
