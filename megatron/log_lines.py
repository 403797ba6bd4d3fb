"""The lines a run prints, and the way back from a line to its values.

Pure functions of text: no torch, no clock but in ``datetime_line``. Users grep these lines,
so their wording and their widths are those of Megatron-DeepSpeed logs.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """What one training line says; a field that is None is left out of the line."""

    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    seconds_per_iteration: float
    learning_rate: float
    """of the next update"""
    global_batch_size: int
    loss: float | None
    """mean over the updates since the last line"""
    loss_scale: float | None = None
    """fp16 only"""
    grad_norm: float | None = None
    num_zeros: float | None = None
    params_norm: float | None = None
    skipped_iterations: int = 0
    nan_iterations: int = 0
    samples_per_second: float = 0.0
    tflops: float = 0.0


#: (label, field of TrainingFacts, format), in the order of the line after the iteration
FIELDS = (
    ("consumed samples", "consumed_samples", "12d"),
    ("consumed tokens", "consumed_tokens", "12d"),
    ("elapsed time per iteration (s)", "seconds_per_iteration", ".2f"),
    ("learning rate", "learning_rate", ".3E"),
    ("global batch size", "global_batch_size", "5d"),
    ("lm loss", "loss", ".6E"),
    ("loss scale", "loss_scale", ".1f"),
    ("grad norm", "grad_norm", ".3f"),
    ("num zeros", "num_zeros", ".1f"),
    ("params norm", "params_norm", ".3f"),
    ("number of skipped iterations", "skipped_iterations", "3d"),
    ("number of nan iterations", "nan_iterations", "3d"),
    ("samples per second", "samples_per_second", ".3f"),
    ("TFLOPs", "tflops", ".2f"),
)
_BY_LABEL = {label: (field, spec) for label, field, spec in FIELDS}
_START = re.compile(r"(?:^|\s|:)iteration\s+(\d{1,20})/\s*(\d{1,20}) \|(.*)")


def training_line(facts: TrainingFacts) -> str:
    """One line of ``name: value |`` fields.

    A loss that is not above zero (so also NaN) is left out, as old logs do; the count of
    nan iterations tells why.
    """
    parts = [f" iteration {facts.iteration:8d}/{facts.train_iters:8d} |"]
    for label, field, spec in FIELDS:
        value = getattr(facts, field)
        if value is None or (field == "loss" and not value > 0.0):
            continue
        parts.append(f" {label}: {value:{spec}} |")
    return "".join(parts)


def parse_training_line(text: str) -> dict[str, float | int | str] | None:
    """Values of a training line under the names of TrainingFacts; None for any other line.

    Whatever precedes the iteration (``[default3]:`` of torchrun, a time stamp) is skipped.
    A field unknown here is kept under its label, as a number where it is one.
    """
    found = _START.search(text)
    if found is None:
        return None
    values: dict[str, float | int | str] = {"iteration": int(found[1]), "train_iters": int(found[2])}
    for part in found[3].split("|")[:-1]:  # what no bar ends is cut off, its value perhaps too
        label, separator, value = part.partition(": ")
        if not separator:
            continue
        field, spec = _BY_LABEL.get(label.strip(), (label.strip(), ""))
        values[field] = _number(value.strip(), whole=spec.endswith("d"))
    return values


def _number(text: str, *, whole: bool = False) -> float | int | str:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        return text


def perplexity(loss: float) -> float:
    """exp(loss), cut off at exp(20) as in old logs; NaN stays NaN."""
    return math.exp(min(loss, 20.0))  # in this order min() hands a NaN on


def evaluation_lines(group: str, prefix: str, loss: float) -> list[str]:
    """The evaluation line of one validation group between two lines of dashes.

    ``prefix`` is ``iteration N`` or ``the end of training for val data`` and the like;
    ``loss`` is the mean over the evaluation's batches. See ``perplexity``.
    """
    line = (f"{group} loss at {prefix} | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {perplexity(loss):.6E} | ")
    dashes = "-" * (len(line) + 1)
    return [dashes, line, dashes]


def saving_line(iteration: int, folder: object) -> str:
    """Printed before a checkpoint is written."""
    return f"saving checkpoint at iteration {iteration:7d} to {folder}"


def saved_line(iteration: int, folder: object) -> str:
    """Printed once a checkpoint is complete."""
    return f"  successfully saved checkpoint at iteration {iteration:7d} to {folder}"


def loaded_line(folder: object, iteration: int) -> str:
    """Printed once a checkpoint is loaded."""
    return f"  successfully loaded checkpoint from {folder} at iteration {iteration}"


def datetime_line(event: str, now: time.struct_time | None = None) -> str:
    """``[event] datetime: ...`` in local time, ending in a space as old logs do."""
    return f"[{event}] datetime: {time.strftime('%Y-%m-%d %H:%M:%S', now or time.localtime())} "


def padded_vocab_line(size: int, padded: int) -> str:
    """How the vocabulary of ``size`` tokens was padded."""
    return f" > padded vocab (size: {size}) with {padded - size} dummy tokens (new size: {padded})"


def world_size_line(parallel: ParallelConfig) -> str:
    """The grid of ranks."""
    return (f"using world size: {parallel.world_size}, data-parallel-size: {parallel.data_parallel_size}, "
            f"tensor-model-parallel size: {parallel.tensor_model_parallel_size}, "
            f"pipeline-model-parallel size: {parallel.pipeline_model_parallel_size} ")


def training_iterations_line(iterations: int) -> str:
    """The length of the run in iterations."""
    return f"setting training iterations to {iterations}"


def timers_line(milliseconds: Mapping[str, float]) -> str:
    """``time (ms) | name: value | ...``."""
    return "time (ms)" + "".join(f" | {name}: {value:.2f}" for name, value in milliseconds.items())


# --- run facts: figures that compare_runs reads ----------------------------------------------

_FACT = "run fact | "


def format_run_fact(name: str, value: float | str, unit: str = "") -> str:
    """``run fact | name | value`` and, if there is one, ``| unit``.

    Raises ValueError when a part holds a line break or the separator.
    """
    parts = [name, str(value)] + ([unit] if unit else [])
    for part in parts:
        if "|" in part or part != part.strip() or len(part.splitlines()) != 1:
            raise ValueError(f"run fact {name!r}: {part!r} is empty or holds '|', a line break or outer spaces")
    return _FACT + " | ".join(parts)


def parse_run_facts(lines: Iterable[str]) -> dict[str, int | float | str]:
    """Name -> value of all run facts among ``lines``; a later one wins, units are dropped."""
    facts: dict[str, int | float | str] = {}
    for line in lines:
        _, found, rest = line.partition(_FACT)
        parts = [part.strip() for part in rest.split("|")]
        if not found or len(parts) not in (2, 3):
            continue
        number = _number(parts[1], whole=True)
        facts[parts[0]] = _number(number) if isinstance(number, str) else number
    return facts
