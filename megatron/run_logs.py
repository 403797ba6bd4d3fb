"""What a run said while it trained, read back from its log or its TensorBoard folder.

Logs are ours or those of Megatron-DeepSpeed, with whatever a launcher puts in front of a line
(``[default3]:``, a time stamp, colours). They are read in pieces, so memory grows with the
number of training lines only, not with the size of the file.

One file may hold several *starts* of the program: a log that jobs append to, a folder with an
event file per job. They are read as one run that was resumed: where a later start begins at
iteration N, everything earlier starts said of N and beyond was given up and is dropped. So
a second run appended from iteration 1 on replaces the first. ``FILE#2`` reads the second
start alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron.errors import RunError
from megatron.log_lines import parse_run_facts, parse_training_line

#: longer lines (a progress bar without line breaks) are cut into pieces of this many characters
LONGEST_LINE = 1 << 16
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_NEXT_LINE = re.compile(r"(?=(?<!\w)iteration +\d+/ *\d+ \|)")
#: printed once by each start, before its first iteration
_NEW_START = "using world size: "


class Point(NamedTuple):
    """One iteration as it was reported; None is what was not said. NaN and infinity are kept."""

    iteration: int
    age: int
    """training lines of the same start before this one"""
    loss: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    """per iteration"""
    tflops: float | None = None
    samples_per_second: float | None = None
    skipped: float | None = None
    """iterations since the line before"""
    nan: float | None = None
    """iterations since the line before"""
    batch: float | None = None
    """global batch size in samples"""


@dataclass
class Start:
    """What one start of the program reported, iterations ascending."""

    points: list[Point] = field(default_factory=list)
    facts: dict = field(default_factory=dict)
    """run facts by name"""

    def says_more(self, point: Point) -> bool:
        """Append ``point``; False, and nothing done, if its iteration is not beyond the last one."""
        if self.points and point.iteration <= self.points[-1].iteration:
            return False
        self.points.append(point)
        return True


@dataclass(frozen=True)
class RunLog:
    """A run: what is left of all its starts."""

    path: str
    points: list[Point]
    """iterations ascending"""
    facts: dict
    starts: list[tuple[int, int]]
    """first and last iteration of each start that was read"""


# --- one log file -----------------------------------------------------------------------------


def parse_line(text: str) -> list[dict]:
    """Values of the training lines in ``text``: none, one, or several that lost their line break."""
    if "iteration" not in text or "|" not in text:
        return []
    text = _ESCAPE.sub("", text)
    return [values for part in _NEXT_LINE.split(text) if (values := parse_training_line(part)) is not None]


def _number(values: dict, name: str) -> float | None:
    value = values.get(name)
    return value if isinstance(value, (int, float)) else None


def point(values: dict, age: int) -> Point | None:
    """The Point of a parsed training line; None if the line was cut before its first figure.

    Seconds come from the printed time (two decimals) or from batch and printed rate (three):
    from whichever has more digits.
    """
    seconds, rate = _number(values, "seconds_per_iteration"), _number(values, "samples_per_second")
    batch = _number(values, "global_batch_size")
    if batch and rate and math.isfinite(rate) and rate > 0 and (seconds is None or rate * 10 > seconds):
        seconds = batch / rate
    figures = {"loss": _number(values, "loss"), "grad_norm": _number(values, "grad_norm"), "seconds": seconds,
               "tflops": _number(values, "tflops"), "samples_per_second": rate,
               "skipped": _number(values, "skipped_iterations"), "nan": _number(values, "nan_iterations")}
    if all(value is None for value in figures.values()):
        return None
    return Point(values["iteration"], age, batch=batch, **figures)


def _pieces(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(LONGEST_LINE):
            yield line


def _log_starts(path: Path) -> list[Start]:
    starts = [Start()]
    for text in _pieces(path):
        for values in parse_line(text):
            new = point(values, len(starts[-1].points))
            if new is None or starts[-1].says_more(new):
                continue
            last = starts[-1].points[-1]
            if repr(last[2:]) != repr(new[2:]) or last.iteration != new.iteration:  # else one line logged twice
                starts.append(Start([new._replace(age=0)]))
        if _NEW_START in text and starts[-1].points:
            starts.append(Start())
        elif "run fact" in text:
            starts[-1].facts.update(parse_run_facts([_ESCAPE.sub("", text)]))
    return [start for start in starts if start.points]


# --- one TensorBoard folder -------------------------------------------------------------------

#: curve over iterations -> field of Point
TAGS = {"lm-loss-training/lm loss": "loss", "grad-norm/grad-norm": "grad_norm",
        "iteration-time/iteration-time": "seconds", "iteration-time/TFLOPs per gpu (estimated)": "tflops",
        "iteration-time/samples per second": "samples_per_second", "batch-size/batch-size": "batch"}


def _folder_starts(folder: Path) -> list[Start]:
    """One start per event file: a process opens one and never goes back in it."""
    files = sorted(path for path in folder.iterdir() if "tfevents" in path.name and path.is_file())
    if not files:
        raise RunError(f"{folder} is a folder without TensorBoard event files (*tfevents*): name the folder that "
                       "--tensorboard-dir named, or a log file")
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise RunError(f"{folder}: reading a TensorBoard folder needs the package tensorboard: "
                       "pip install tensorboard") from error
    starts = []
    for file in files:
        with file.open("rb"):  # an unreadable file is an OSError here; the accumulator only logs it
            pass
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
        present = events.Tags()["scalars"]
        steps: dict[int, dict[str, float]] = {}
        for tag, name in TAGS.items():
            for event in events.Scalars(tag) if tag in present else ():
                steps.setdefault(event.step, {})[name] = event.value
        if steps:
            starts.append(Start([Point(step, age, **steps[step]) for age, step in enumerate(sorted(steps))]))
    return starts


# --- any of them ------------------------------------------------------------------------------


def resumed(starts: list[Start]) -> tuple[list[Point], dict]:
    """Points and facts of the run that ``starts`` make together.

    A start drops what was said before of its first iteration and later ones; one of which
    nothing is left gives no facts either.
    """
    points: list[tuple[int, Point]] = []
    for number, start in enumerate(starts):
        first = start.points[0].iteration
        while points and points[-1][1].iteration >= first:
            points.pop()
        points += [(number, point) for point in start.points]
    left = sorted({number for number, _ in points})
    return [point for _, point in points], {k: v for number in left for k, v in starts[number].facts.items()}


def read_run(name: str) -> RunLog:
    """Read the log file or TensorBoard folder ``name``, or with ``name#N`` its start N (from 1).

    Raises RunError, naming the file, when it cannot be read or holds no training line.
    """
    path, number = Path(name), None
    if (found := re.fullmatch(r"(.+)#(\d+)", name)) and not path.exists():
        path, number = Path(found[1]), int(found[2])
    try:
        starts = _folder_starts(path) if path.is_dir() else _log_starts(path)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from error
    if not starts:
        what = ("no scalar of a training iteration" if path.is_dir() else
                "no training line (' iteration N/ M | ...'): was the run started, and is this the standard output "
                "of its last rank?")
        raise RunError(f"{path} holds {what}")
    if number is not None:
        if not 1 <= number <= len(starts):
            raise RunError(f"{name}: {path} holds {len(starts)} start(s); #N takes 1 to {len(starts)}")
        starts = [starts[number - 1]]
    points, facts = resumed(starts)
    return RunLog(name, points, facts, [(start.points[0].iteration, start.points[-1].iteration) for start in starts])
