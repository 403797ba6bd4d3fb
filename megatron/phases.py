"""Where the time of a step goes: data, forward, backward, reduction, optimizer, pipeline.

DeepSpeed runs a step as a list of instructions; each is timed under a phase. On a
processor by the host's clock. On an accelerator by events in its stream, read when the
step is over, so that no instruction waits: what the host does while the accelerator
is busy costs nothing and counts nothing.

- data: the next micro-batch read, sent to the other TP ranks, put on the device;
- forward, backward: with the TP sums inside them (the larger ones travel while other
  products are computed) and, backward, with recomputation;
- reduction: gradients summed over DP, and of tied weights over stages;
- optimizer: gradient norm, clipping, the update, and the weights gathered over DP;
- send: activations and gradients handed to the neighbouring stages;
- pipeline wait: receiving them, which is mostly waiting until they are computed;
- rest: what is left of the step: losses averaged, the host between instructions.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule

PHASES = ("data", "forward", "backward", "reduction", "optimizer", "send", "pipeline wait", "rest")
_OF_INSTRUCTION = {
    schedule.LoadMicroBatch: "data", schedule.ForwardPass: "forward", schedule.BackwardPass: "backward",
    schedule.ReduceGrads: "reduction", schedule.ReduceTiedGrads: "reduction",
    schedule.OptimizerStep: "optimizer", schedule.SendActivation: "send", schedule.SendGrad: "send",
    schedule.RecvActivation: "pipeline wait", schedule.RecvGrad: "pipeline wait",
}


class StepPhases:
    """Times the instructions of ``engine.train_batch`` between ``begin`` and ``end``.

    Evaluation runs through the same instructions and is not timed.
    """

    def __init__(self, engine) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        """per phase, over all steps but the first, which pays for warming up"""
        self.steps = 0
        """begun and ended so far, the first one included"""
        self.before_reduction: Callable[[], None] | None = None
        """called once, when the next step has all its gradients and none is reduced yet"""
        self._interval = dict.fromkeys(PHASES, 0.0)
        self._started: float | None = None
        self._marks: list[tuple[str, Any, Any]] = []  # phase, start, stop: seconds, or events of the accelerator
        self._spare: list[Any] = []
        self._events = get_accelerator().device_name() != "cpu"
        engine._INSTRUCTION_MAP = {instruction: self._timed(function, _OF_INSTRUCTION.get(instruction, "rest"))
                                   for instruction, function in engine._INSTRUCTION_MAP.items()}

    def begin(self) -> None:
        """Before ``train_batch``."""
        get_accelerator().synchronize()
        self._started = time.perf_counter()

    def end(self) -> None:
        """After ``train_batch``; waits for the accelerator."""
        get_accelerator().synchronize()
        assert self._started is not None, "end without begin"
        total = time.perf_counter() - self._started
        self._started = None
        step = dict.fromkeys(PHASES, 0.0)
        for phase, start, stop in self._marks:
            step[phase] += start.elapsed_time(stop) / 1000 if self._events else stop - start
            if self._events:
                self._spare += (start, stop)
        self._marks.clear()
        step["rest"] += max(0.0, total - sum(step.values()))
        for phase, seconds in step.items():
            self._interval[phase] += seconds
            self.seconds[phase] += seconds if self.steps else 0.0
        self.steps += 1

    def drain(self) -> dict[str, float]:
        """Share of each phase (0 to 1) of the steps since the last drain; {} if there were none."""
        interval, self._interval = self._interval, dict.fromkeys(PHASES, 0.0)
        return shares(interval)

    @contextlib.contextmanager
    def under(self, phase: str) -> Iterator[None]:
        """Time what is done inside, between ``begin`` and ``end``, as ``phase``; elsewhere it is not timed."""
        if self._started is None:
            yield
            return
        start = self._now()
        yield
        self._marks.append((phase, start, self._now()))

    def _now(self):
        if not self._events:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def _timed(self, function: Callable, phase: str) -> Callable:
        def timed(engine, *args, **kwargs):
            if self._started is None:
                return function(engine, *args, **kwargs)
            if phase == "reduction" and self.before_reduction is not None:
                call, self.before_reduction = self.before_reduction, None
                call()
            with self.under(phase):
                return function(engine, *args, **kwargs)
        return timed


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """``seconds`` per phase divided by their sum; {} when that is zero."""
    total = sum(seconds.values())
    return {phase: each / total for phase, each in seconds.items()} if total else {}
