"""Reasons to end a run before its length, agreed on by all ranks, and what is known of updates that were skipped."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.bitfit import trainable
from megatron.config import TrainConfig
from megatron.gradients import held_gradients, watch_decisions
from megatron.mpu.context import ParallelContext
from megatron.replicas import checkpoint_name
from megatron.signals import Signals

#: exit code of a run that a signal stopped and that saved: EX_TEMPFAIL of sysexits.h, "try again later"
REQUEUE = 75


# --- reasons ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stop:
    """An early end: the reason in words, and the exit code of all ranks."""

    reason: str
    exit_code: int = 0


class Stopping:
    """All that may end one run early; the same answer on every rank at the same iteration."""

    def __init__(self, config: TrainConfig, context: ParallelContext, started: float, signals: Signals | None) -> None:
        """``started``: time.monotonic() at the start, for --exit-duration-in-mins; ``signals``: with --exit-signal-handler."""
        self._config, self._context, self._started = config, context, started
        self._signals = signals
        self.skipped_in_a_row = 0

    def signalled(self, device: torch.device) -> Stop | None:
        """Collective: whether a signal came, during the start, which then was for nothing, or the last save."""
        number = self._votes(device)[0] if self._signals else 0
        return _signalled(number) if number else None

    def after(self, iteration: int, device: torch.device) -> Stop | None:
        """Collective, and then one number per reason, where a flag asks for what ranks may see at different times."""
        config = self._config
        if self._signals or config.exit_duration_in_mins is not None or config.kill_switch_path is not None:
            number, late, switch = self._votes(device)
            if number:
                return _signalled(number)
            if late:
                return Stop(f"--exit-duration-in-mins {config.exit_duration_in_mins}")
            if switch:
                return Stop(f"--kill-switch-path {config.kill_switch_path}")
        if config.exit_interval and iteration % config.exit_interval == 0:
            return Stop(f"--exit-interval {config.exit_interval}")
        return None

    def _votes(self, device: torch.device) -> list[int]:
        """Highest of all ranks: number of a signal, whether time is up, whether the kill switch exists."""
        config = self._config
        limit, switch = config.exit_duration_in_mins, config.kill_switch_path
        mine = [self._signals.first if self._signals else 0,
                int(limit is not None and (time.monotonic() - self._started) / 60 > limit),
                int(switch is not None and os.path.exists(switch))]  # False if a disk is sick
        if self._context.world_size == 1:
            return mine
        votes = torch.tensor(mine, dtype=torch.int32, device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return votes.tolist()

    def count(self, iteration: int, *, skipped: bool) -> str | None:
        """Count one update; the sentence to give up with once --max-skipped-iterations were skipped in a row."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        limit = self._config.max_skipped_iterations
        if limit is None or self.skipped_in_a_row < limit:
            return None
        return (f"iteration {iteration}: {self.skipped_in_a_row} updates in a row were skipped for gradients that are "
                f"not finite (--max-skipped-iterations {limit}); nothing was saved since the last update that was made")

    @property
    def holds_saves_back(self) -> bool:
        """Whether a save must wait for an update that succeeds: this may be the beginning of such an end."""
        return self._config.max_skipped_iterations is not None and self.skipped_in_a_row > 0

    def close(self, stop: Stop | None) -> None:
        """The run has saved: from here on signals have their usual effect, or none if one of them was why it stopped.

        Whoever hands signals on may do so when this rank has heard of it from another one and saved.
        """
        if self._signals:
            self._signals.close(ignore=stop is not None and stop.exit_code == REQUEUE)
            self._signals = None


def _signalled(number: int) -> Stop:
    return Stop(f"{signal.Signals(number).name} (--exit-signal-handler); exit code {REQUEUE}", REQUEUE)


# --- skipped updates --------------------------------------------------------------------------


class GradientWatch:
    """Which gradients were not finite when DeepSpeed skipped an update; costs nothing in other iterations.

    DeepSpeed frees the gradients of a skipped update before it returns, so they are looked at when it has decided.
    They are summed over DP by then: every rank has a share of the sums, and none
    knows any more which replica spoilt them.
    """

    def __init__(self, engine, context: ParallelContext) -> None:
        self._engine, self._context = engine, context
        self._found: list[tuple[tuple[int, float, int], str]] | None = None
        """(place in the forward pass, name) of bad gradients; None when they were not seen"""
        watch_decisions(engine.optimizer, self._decided)

    def _decided(self, skipped: bool) -> None:
        self._found = list(self._bad()) if skipped else None

    def _bad(self) -> Iterator[tuple[tuple[int, float, int], str]]:
        known = {id(param): (place, name) for place, (name, param) in enumerate(trainable(self._engine.module))}
        for param, gradient in held_gradients(self._engine.optimizer):
            if id(param) in known and not torch.isfinite(gradient).all():
                place, name = known[id(param)]
                first, _, _ = name.partition(".")
                ends = math.inf if getattr(param, "ds_pipe_replicated", False) else -1
                layer = int(first) if first.isdigit() else ends  # the tied table: the embedding, or the head's copy
                yield (self._context.pp_rank, layer, place), checkpoint_name(name)

    def told(self, iteration: int, loss: float) -> str:
        """Collective, after a skipped update: one sentence that names the gradient the trouble began with.

        Of several it is the first of the backward pass, which spoils those of the layers
        before it. ``loss`` is that of the iteration.
        """
        everyones = [self._found]
        if self._context.world_size > 1:
            everyones *= self._context.world_size
            dist.all_gather_object(everyones, self._found)
        start = f"iteration {iteration}: update skipped, "
        seen = [found for found in everyones if found is not None]
        if len(seen) < len(everyones):
            return start + "gradients are not finite; this version of DeepSpeed does not show which"
        places = dict(sorted((place_and_name for found in seen for place_and_name in found), reverse=True))
        names = list(dict.fromkeys(places.values()))
        if not names:
            return start + "every gradient is finite but their norm is not"
        more = f", and {len(names) - 1} after it in the backward pass" if len(names) > 1 else ""
        where = "" if math.isfinite(loss) else f"; the loss is {loss} already"
        return f"{start}the gradient of {names[0]} is not finite{more}{where}"
