"""What the benchmarks share: interleaved timing, summaries, tables, the machine's description.

Every comparison runs its variants in turn within one process (or one subprocess each),
so that a machine that slows down slows all of them; ratios are taken per repetition,
between times measured side by side, and summarised only then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@dataclass(frozen=True)
class Spread:
    """A median and what lies around it."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """``median [low-high]`` with thousands separators."""
        return f"{self.median:,.{digits}f} [{self.low:,.{digits}f}-{self.high:,.{digits}f}]"


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest of ``values``."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Quotients repetition by repetition; ValueError when the lists differ in length."""
    return [above / below for above, below in zip(numerator, denominator, strict=True)]


def interleave(variants: Mapping[str, Callable[[], object]], repetitions: int, *, warmup: int = 1,
               timer: Callable[[], float] = time.perf_counter,
               note: Callable[[str], None] = lambda text: None) -> dict[str, list[float]]:
    """Seconds of ``repetitions`` calls of each variant: name -> list.

    Each repetition calls every variant once, forwards and backwards in turn (ABC, CBA,
    ABC ...), so that no variant always follows the same one or always goes first.
    ``warmup`` calls of each come before and are not timed. The variants must return
    only when their work is done (``synchronized``).
    """
    names = list(variants)
    for _ in range(warmup):
        for name in names:
            variants[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        for name in names if repetition % 2 == 0 else reversed(names):
            start = timer()
            variants[name]()
            seconds[name].append(timer() - start)
        note(f"repetition {repetition + 1} of {repetitions}")
    return seconds


def synchronized(work: Callable[[], object]) -> Callable[[], object]:
    """``work``, returning only when the accelerator has finished it."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()

    def call():
        result = work()
        accelerator.synchronize()
        return result

    return call


# --- shapes ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of one model and its micro-batch."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    """samples of the one micro-batch of a step, per replica"""
    dtype: str = "fp32"
    checkpointing: bool = False
    dropout: float = 0.0
    positions: str = "alibi"

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def text(self) -> str:
        return (f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads, vocabulary {self.vocabulary}, "
                f"sequence {self.length}, micro-batch {self.batch}, {self.dtype}")


SHAPE_FLAGS = {"layers": "transformer blocks", "hidden": "hidden size", "heads": "attention heads",
               "vocabulary": "token ids", "length": "tokens of a sequence", "batch": "sequences of a micro-batch"}


def shape_options(made: argparse.ArgumentParser, defaults: Shape, quick: Shape) -> None:
    """Flags for the size of the model and for its dtype; --quick has sizes of its own."""
    for flag, meaning in SHAPE_FLAGS.items():
        made.add_argument(f"--{flag}", type=positive, metavar="N",
                          help=f"{meaning} (default {getattr(defaults, flag)}, with --quick {getattr(quick, flag)})")
    made.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32",
                      help="of the parameters (default %(default)s)")
    made.set_defaults(full_shape=defaults, quick_shape=quick)


def shape_of(options: argparse.Namespace) -> Shape:
    """The shape that the flags ask for; they lose their None."""
    chosen = options.quick_shape if options.quick else options.full_shape
    del options.quick_shape, options.full_shape
    for flag in SHAPE_FLAGS:
        if getattr(options, flag) is None:
            setattr(options, flag, getattr(chosen, flag))
    return dataclasses.replace(chosen, dtype=options.dtype, **{flag: getattr(options, flag) for flag in SHAPE_FLAGS})


#: how what --quick prints ends
QUICK = "These figures are of --quick: they show only that the script works."

# --- command line and output ------------------------------------------------------------------


def parser(description: str, *, repetitions: int, quick_repetitions: int = 3,
           threads: int = 2) -> argparse.ArgumentParser:
    """Options every benchmark has: --quick, --repetitions, --threads, --json."""
    made = argparse.ArgumentParser(description=description,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true",
                      help="small shapes, few repetitions: shows in up to two minutes that it works, says nothing of speed")
    made.add_argument("--repetitions", type=positive, metavar="N",
                      help=f"timed rounds over all variants (default {repetitions}, with --quick {quick_repetitions})")
    made.add_argument("--threads", type=positive, default=_threads_given() or threads, metavar="N",
                      help=f"CPU threads of torch (default: OMP_NUM_THREADS of the environment, else {threads})")
    made.add_argument("--json", metavar="FILE", help="write machine, options and all single figures there too")
    made.set_defaults(full_repetitions=repetitions, quick_repetitions=quick_repetitions)
    return made


def _threads_given() -> int | None:
    """OMP_NUM_THREADS of the environment; None where it is unset or no number of threads."""
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def positive(text: str) -> int:
    """An integer above zero, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above zero")
    return value


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse, settle the number of repetitions, and set the threads before torch is loaded."""
    options = made.parse_args(arguments)
    if options.json and not Path(options.json).resolve().parent.is_dir():
        made.error(f"--json {options.json}: the folder does not exist")
    if options.repetitions is None:
        options.repetitions = options.quick_repetitions if options.quick else options.full_repetitions
    del options.quick_repetitions, options.full_repetitions
    use_threads(options.threads)
    return options


def use_threads(threads: int) -> None:
    """Bound torch's threads; nothing is fetched from any hub."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[variable] = "1"
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "WARNING")
    import torch

    torch.set_num_threads(threads)


def progress(text: str) -> None:
    """A line for the person waiting, on stderr."""
    print(text, file=sys.stderr, flush=True)


def processor() -> str:
    """Model of the CPU as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models and models[0] else platform.machine()


def machine() -> dict:
    """What figures depend on: processor, cores, threads, accelerator, versions. No host name."""
    import torch
    from deepspeed import __version__ as deepspeed_version
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": processor(), "cores": usable, "threads": torch.get_num_threads(),
            "accelerator": "none" if on_cpu else torch.get_device_module(accelerator.device_name()).get_device_name(),
            "torch": torch.__version__, "deepspeed": deepspeed_version, "python": platform.python_version()}


def machine_line(facts: Mapping | None = None) -> str:
    """``machine()`` as one line of text."""
    facts = facts or machine()
    return (f"Machine: {facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads, "
            f"accelerator {facts['accelerator']}; torch {facts['torch']}, DeepSpeed {facts['deepspeed']}, "
            f"Python {facts['python']}")


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, text_columns: int = 1) -> str:
    """A Markdown table; the first ``text_columns`` are left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    lines = []
    for number, row in enumerate(cells):
        lines.append("| " + " | ".join(cell.ljust(width) if column < text_columns else cell.rjust(width)
                                       for column, (cell, width) in enumerate(zip(row, widths, strict=True))) + " |")
        if number == 0:
            lines.append("|" + "|".join("-" * (width + 2) if column < text_columns else "-" * (width + 1) + ":"
                                        for column, width in enumerate(widths)) + "|")
    return "\n".join(lines)


def report(options: argparse.Namespace, title: str, body: str, figures: object) -> None:
    """Print title, machine and table on stdout; the same as JSON where --json asks."""
    facts = machine()
    print(f"{title}\n\n{body}\n\n{machine_line(facts)}")
    if options.quick:
        print(f"\n{QUICK}")
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        content = json.dumps({"title": title, "machine": facts, "options": settings, "figures": figures}, indent=1)
        write_whole(Path(options.json), content + "\n")


def write_whole(path: Path, text: str) -> None:
    """The file appears complete or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
