"""What a run costs: memory by kind, time by phase, operations; said at its start and at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron import bitfit, log_lines
from megatron.config import Settings
from megatron.engine import OptimizerFacts, optimizer_facts
from megatron.flops import operations_needed, tflops_reported
from megatron.gradients import accumulation_line
from megatron.memory import SavedBytes, expected_bytes, held_bytes
from megatron.metrics import peak_memory_bytes
from megatron.model.numbering import FIRST_BLOCK
from megatron.mpu.context import ParallelContext
from megatron.phases import PHASES, StepPhases, shares

#: ranks with a line of their own in the tables of memory
RANKS_SHOWN = 64
_MIB = 2**20


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one rank while a step is under way."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """kept for backward, weights aside. On a processor as autograd counts them in the first
    iteration, without the chunk that is being computed again; on an accelerator all of the
    peak that is nothing else: temporary results and buffers of communication too"""
    rest: int
    """the peak's remainder: on a processor the interpreter, its libraries, temporary results"""


@dataclass(frozen=True)
class _RankCosts:
    """What one rank tells the others at the end."""

    memory: MemoryUse
    peak: int
    optimizer: OptimizerFacts
    phases: dict[str, float]


class RunReport:
    """The accounts of one run; everything but ``step`` and ``shares`` is collective."""

    def __init__(self, engine, settings: Settings, context: ParallelContext) -> None:
        self._engine, self._settings, self._context = engine, settings, context
        self._phases = StepPhases(engine)
        self._gradients = self._activations = 0
        self._timed_samples = 0
        self.operations_per_sample = operations_needed(
            settings.model, 1, bitfit=settings.optimizer.bitfit, bias_terms=settings.optimizer.bitfit_bias_terms,
            blocks_per_stage=blocks_per_stage(engine.module, settings.model.num_layers)).total

    @contextlib.contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Around ``train_batch``. The first one also counts what is kept for backward."""
        first = self._phases.steps == 0
        if first:
            self._phases.before_reduction = self._see_gradients
        else:
            self._timed_samples += samples
        on_cpu = get_accelerator().device_name() == "cpu"
        self._phases.begin()
        with SavedBytes(exclude=self._engine.module.parameters()) if first and on_cpu else contextlib.nullcontext() as kept:
            yield
        self._phases.end()
        if kept is not None:
            self._activations = kept.peak

    def reading(self) -> contextlib.AbstractContextManager:
        """Around data read inside ``step`` before the engine asks for them."""
        return self._phases.under("data")

    def shares(self) -> dict[str, float]:
        """Share of this rank's step time by phase since the last call."""
        return self._phases.drain()

    def tflops_needed(self, samples: int, seconds: float) -> float:
        """TFLOP/s per rank of the operations really needed, for one iteration of ``samples``."""
        return self.operations_per_sample * samples / (seconds * self._context.world_size * 1e12)

    def _see_gradients(self) -> None:
        self._gradients = held_bytes(self._engine).gradients

    def _gathered(self, mine) -> list:
        everyone = [mine]
        if self._context.world_size > 1:
            everyone = [None] * self._context.world_size
            dist.all_gather_object(everyone, mine)
        return everyone

    # --- at the start -----------------------------------------------------------------------

    def at_start(self) -> str:
        """Weights as they are; gradients and optimizer state as the first step will bring them; the dtypes of sums."""
        optimizer = self._settings.optimizer
        expected = expected_bytes(self._engine, self._settings.model.params_dtype, optimizer.optimizer,
                                  optimizer.sgd_momentum)
        rows = self._gathered((*astuple(expected), held_bytes(self._engine).optimizer))
        table = _table("memory per rank in MiB, expected (activations: see the end of the run)",
                       ("weights", "gradients", "optimizer state", "held already"), rows)
        return f"{table}\n{accumulation_line(self._engine)}"

    # --- at the end -------------------------------------------------------------------------

    def _costs(self) -> _RankCosts:
        held, peak = held_bytes(self._engine), peak_memory_bytes()
        gradients = max(self._gradients, held.gradients)
        others = held.weights + gradients + held.optimizer
        activations, rest = self._activations, max(0, peak - others - self._activations)
        if get_accelerator().device_name() != "cpu":
            activations, rest = rest, 0
        return _RankCosts(memory=MemoryUse(held.weights, gradients, held.optimizer, activations, rest), peak=peak,
                          optimizer=optimizer_facts(self._engine, self._settings), phases=self._phases.seconds)

    def at_end(self, parameters: bitfit.ParameterReport) -> list[str]:
        """Two tables and the run facts, which compare_runs puts side by side."""
        everyone = self._gathered(self._costs())
        settings, ranks = self._settings, self._context.world_size
        facts: dict[str, float] = {
            "bitfit": int(settings.optimizer.bitfit),
            "ranks": ranks,
            # one sample, one second, one rank
            "FLOP per sample (formula of the log line)": round(tflops_reported(settings.model, 1, 1.0, 1) * 1e12),
            "FLOP per sample (operations needed)": self.operations_per_sample,
            "trainable parameters": parameters.trainable,
            "total parameters": parameters.total,
            "peak memory bytes (max over ranks)": max(costs.peak for costs in everyone),
            "optimizer state bytes (all ranks)": sum(costs.optimizer.state_bytes for costs in everyone),
            "gradient bytes per step, to be summed over DP (all ranks)": sum(
                costs.optimizer.gradient_bytes_per_step for costs in everyone),
        }
        lines = []
        if self._phases.steps:
            for kind in ("weights", "gradients", "optimizer", "activations", "rest"):
                facts[f"memory bytes: {kind} (max over ranks)"] = max(getattr(costs.memory, kind) for costs in everyone)
            lines.append(_table("memory per rank in MiB", ("weights", "gradients", "optimizer state", "activations",
                                                           "rest", "peak"),
                                [(*astuple(costs.memory), costs.peak) for costs in everyone]))
        total = {phase: sum(costs.phases[phase] for costs in everyone) / ranks for phase in PHASES}
        if (seconds := sum(total.values())) > 0:
            lines.append(f"step time by phase, mean over ranks, {self._phases.steps - 1} iterations (the first left "
                         "out): " + ", ".join(f"{phase} {100 * share:.1f} %" for phase, share in shares(total).items()))
            for phase, share in shares(total).items():
                facts[f"share of step time: {phase} (percent, mean over ranks)"] = round(100 * share, 3)
            facts["TFLOPs per rank (operations needed)"] = float(f"{self.tflops_needed(self._timed_samples, seconds):.4g}")
        return lines + [log_lines.format_run_fact(name, value) for name, value in facts.items()]


def blocks_per_stage(module, num_layers: int) -> list[int]:
    """Transformer blocks on each pipeline stage of a GPTPipeline."""
    bounds = [min(max(int(bound) - FIRST_BLOCK, 0), num_layers) for bound in module.parts]
    return [stop - start for start, stop in zip(bounds, bounds[1:])]


def _table(title: str, names: tuple[str, ...], rows: list[tuple[int, ...]]) -> str:
    """One line per rank, bytes shown as MiB; of very many ranks the first and the largest figures."""
    lines = [title, f"{'rank':>6}" + "".join(f"  {name:>15}" for name in names)]
    shown = [(f"{rank:>6}", row) for rank, row in enumerate(rows[:RANKS_SHOWN])]
    if len(rows) > 1:
        shown.append((f"{'most':>6}", tuple(map(max, zip(*rows)))))
    return "\n".join(lines + [head + "".join(f"  {value / _MIB:>15.3f}" for value in row) for head, row in shown])
