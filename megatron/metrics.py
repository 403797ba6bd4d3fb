"""Figures taken while a run goes on: losses since the last line, times, memory, norms."""

from __future__ import annotations

import math
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.mpu.context import ParallelContext
from megatron.mpu.tags import tag_of


class LossWindow:
    """Losses since the last training line."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0
        self.skipped = 0
        """iterations whose update was left out (fp16 overflow)"""
        self.nan = 0
        """iterations whose loss was NaN or infinite"""

    def add(self, loss: float, *, skipped: bool = False) -> None:
        """Count one iteration."""
        self.nan += not math.isfinite(loss)
        if skipped:
            self.skipped += 1
        else:
            self._sum += loss
            self._count += 1

    @property
    def mean(self) -> float | None:
        """Mean over the iterations that were not skipped; None when there was none."""
        return self._sum / self._count if self._count else None


class Timers:
    """Named stop watches that add up, in seconds.

    Each start and stop waits for the accelerator, so that queued work is charged to the
    timer under which it was asked for.
    """

    def __init__(self) -> None:
        self._elapsed: dict[str, float] = {}
        self._started: dict[str, float] = {}

    @staticmethod
    def _now() -> float:
        get_accelerator().synchronize()
        return time.perf_counter()

    def start(self, name: str) -> None:
        """Raises RuntimeError when ``name`` already runs."""
        if name in self._started:
            raise RuntimeError(f"timer {name!r} is already running")
        self._started[name] = self._now()

    def stop(self, name: str) -> None:
        """Raises RuntimeError when ``name`` was not started."""
        if name not in self._started:
            raise RuntimeError(f"timer {name!r} was stopped without a start")
        self._elapsed[name] = self._elapsed.get(name, 0.0) + self._now() - self._started.pop(name)

    def elapsed(self, name: str) -> float:
        """Seconds between all starts and stops of ``name`` so far; 0 if there were none."""
        return self._elapsed.get(name, 0.0)

    def drain(self) -> dict[str, float]:
        """Seconds of every stopped timer since the last drain; they start again from zero."""
        drained, self._elapsed = self._elapsed, {}
        return drained


def peak_memory_bytes() -> int:
    """Most memory held at once: by tensors on an accelerator, by this process on a CPU.

    On a CPU this is the resident set, so it includes the interpreter and its libraries.
    """
    if get_accelerator().device_name() != "cpu":
        return int(get_accelerator().max_memory_allocated())
    try:
        # the kernel's high-water mark of this program alone; getrusage's also covers the
        # program that started this one, if that was larger
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:") and int(line.split()[1]) > 0:
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def params_norm(module: torch.nn.Module, context: ParallelContext) -> float:
    """Collective: L2 norm of all parameters of the model, frozen ones included.

    Each is counted once: TP copies of a replicated parameter on TP rank 0 only, a parameter
    tied over stages on its first stage only, and one replica of the data-parallel ones.
    """
    total = torch.zeros(1, dtype=torch.float64, device=get_accelerator().current_device_name())
    for param in module.parameters():
        copy = tag_of(param).dim is None and context.tp_rank > 0
        if context.dp_rank or copy or getattr(param, "ds_pipe_replicated", False):
            continue
        total += torch.linalg.vector_norm(param.detach(), dtype=torch.float32).double() ** 2
    if context.world_size > 1:
        dist.all_reduce(total)
    return math.sqrt(total.item())
