"""TensorBoard curves under the names that Megatron-DeepSpeed dashboards know."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from megatron.config import LoggingConfig
from megatron.errors import RunError
from megatron.log_lines import TrainingFacts

SAMPLES, TOKENS, GIGAFLOS = " vs samples", " vs tokens", " vs gigaflos (without embeddings)"


class TensorBoardWriter:
    """Writes scalars on one rank; everything is a no-op without a folder or on other ranks.

    The x axis of a scalar is the iteration unless its name says otherwise. The scalars per
    replica and per token need ``data_parallel_size`` and ``seq_length`` (tokens per sample).

    Raises RunError, on every rank that lacks it, when the package tensorboard is missing.
    """

    def __init__(self, logging: LoggingConfig, enabled: bool, *, data_parallel_size: int | None = None,
                 seq_length: int | None = None):
        self.logging = logging
        self.data_parallel_size, self.seq_length = data_parallel_size, seq_length
        self._writer = None
        if logging.tensorboard_dir is None:
            return
        if importlib.util.find_spec("tensorboard") is None:
            raise RunError(f"--tensorboard-dir {logging.tensorboard_dir} needs the package tensorboard, which is "
                           "not installed: pip install tensorboard, or leave the flag out")
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter
        try:
            os.makedirs(logging.tensorboard_dir, exist_ok=True)
            self._writer = SummaryWriter(logging.tensorboard_dir, max_queue=logging.tensorboard_queue_size)
        except OSError as error:
            raise RunError(f"--tensorboard-dir {logging.tensorboard_dir} cannot be written: {error}") from error

    def _scalar(self, name: str, value: float, axes: Mapping[str, float]) -> None:
        """One curve per axis; the key of ``axes`` is appended to the name."""
        assert self._writer is not None, "every method returns at once where nothing is written"
        for suffix, x in axes.items():
            self._writer.add_scalar(name + suffix, value, int(x))

    def log_arguments(self, flags: Mapping[str, Any], iteration: int = 0) -> None:
        """Every flag as a text entry."""
        if self._writer is not None:
            for name, value in flags.items():
                self._writer.add_text(name, str(value), global_step=iteration)

    def log_restart(self, iteration: int, world_size: int) -> None:
        """The number of ranks from ``iteration`` on."""
        if self._writer is not None and self.logging.log_timers_to_tensorboard:
            self._scalar("iteration-time/world_size", world_size, {"": iteration})

    def log_training(self, facts: TrainingFacts, *, gigaflos: float,
                     timers: Mapping[str, float] | None = None, tflops_needed: float | None = None) -> None:
        """The curves of one iteration, if ``--tensorboard-log-interval`` selects it.

        ``gigaflos`` is the counter so far, ``timers`` seconds by name, ``tflops_needed`` TFLOP/s
        per rank of the operations really needed (``flops.operations_needed``). What is None
        has no curve.
        """
        if self._writer is None or facts.iteration % self.logging.tensorboard_log_interval:
            return
        logging = self.logging
        steps = {"": facts.iteration}
        samples = {**steps, SAMPLES: facts.consumed_samples}
        both = {**samples, TOKENS: facts.consumed_tokens}
        self._scalar("steps-vs-samples/y=steps,x=samples", facts.iteration, {"": facts.consumed_samples})
        self._scalar("steps-vs-samples/y=samples,x=steps", facts.consumed_samples, steps)
        self._scalar("steps-vs-tokens/y=steps,x=tokens", facts.iteration, {"": facts.consumed_tokens})
        self._scalar("steps-vs-tokens/y=tokens,x=steps", facts.consumed_tokens, steps)
        if logging.log_learning_rate_to_tensorboard:
            self._scalar("learning-rate/learning-rate", facts.learning_rate, both)
        if logging.log_batch_size_to_tensorboard:
            self._scalar("batch-size/batch-size", facts.global_batch_size, samples)
        optional: dict[str, tuple[float | None, Mapping[str, float]]] = {
            "lm-loss-training/lm loss": (facts.loss, {**both, GIGAFLOS: gigaflos}),
            "grad-norm/grad-norm": (facts.grad_norm, both), "num-zeros/num-zeros": (facts.num_zeros, both),
            "params-norm/params-norm": (facts.params_norm, both)}
        if logging.log_loss_scale_to_tensorboard:
            optional["loss-scale/loss-scale"] = (facts.loss_scale, both)
        for name, (value, axes) in optional.items():
            if value is not None:
                self._scalar(name, value, axes)
        if logging.log_timers_to_tensorboard:
            self._log_times(facts, timers or {}, both)
        if tflops_needed is not None:
            self._scalar("iteration-time/TFLOPs per gpu (operations needed)", tflops_needed, steps)

    def _log_times(self, facts: TrainingFacts, timers: Mapping[str, float], axes: Mapping[str, float]) -> None:
        steps = {"": facts.iteration}
        rate, replicas, length = facts.samples_per_second, self.data_parallel_size, self.seq_length
        self._scalar("iteration-time/iteration-time", facts.seconds_per_iteration, axes)
        self._scalar("iteration-time/samples per second", rate, steps)
        if replicas is not None:
            self._scalar("iteration-time/samples per second per replica", rate / replicas, steps)
        if length is not None:
            self._scalar("iteration-time/tokens per second", rate * length, steps)
        if replicas is not None and length is not None:
            self._scalar("iteration-time/tokens per second per replica", rate * length / replicas, steps)
        self._scalar("iteration-time/TFLOPs per gpu (estimated)", facts.tflops, steps)
        for name, seconds in timers.items():
            self._scalar(f"time/{name}-time", seconds, steps)

    def log_validation(self, group: str, loss: float, ppl: float, *, iteration: int, samples: int,
                       tokens: int, gigaflos: float) -> None:
        """One evaluation of the validation group ``group``; perplexity only if asked for."""
        if self._writer is None:
            return
        axes = {"": iteration, SAMPLES: samples, TOKENS: tokens, GIGAFLOS: gigaflos}
        self._scalar(f"lm-loss-validation/{group}/lm loss validation", loss, axes)
        if self.logging.log_validation_ppl_to_tensorboard:
            self._scalar(f"lm-loss-validation/{group}/lm loss validation ppl", ppl, axes)
        self._writer.flush()

    def log_shares(self, shares: Mapping[str, float], iteration: int) -> None:
        """Share of this rank's step time by phase (``megatron.phases``) since the last training line."""
        if self._writer is not None:
            for phase, share in shares.items():
                self._scalar(f"time-share/{phase}", share, {"": iteration})

    def log_differing_copies(self, count: int, iteration: int) -> None:
        """How many tensors were not the same on all TP ranks at one check."""
        if self._writer is not None:
            self._scalar("replicas/tensors that differ over TP", count, {"": iteration})

    def close(self) -> None:
        """Write out what is queued."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
