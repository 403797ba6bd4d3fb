"""Reasons to end a run before its length, agreed on by all ranks, and what is known of updates that were skipped."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.bitfit import trainable
from megatron.config import TrainConfig
from megatron.mpu.context import ParallelContext
from megatron.replicas import checkpoint_name

#: exit code of a run that a signal stopped and that saved: EX_TEMPFAIL of sysexits.h, "try again later"
REQUEUE = 75
#: the signals of --exit-signal-handler
STOPPING = (signal.SIGTERM, signal.SIGUSR1)
#: seconds in which more signals are the first one again: a scheduler signals a launcher and its ranks,
#: and the launcher hands it on
REPEAT = 1.0


# --- signals ----------------------------------------------------------------------------------


class Signals:
    """From now on SIGTERM and SIGUSR1 are a wish to stop; one that comes later than REPEAT ends this process.

    Must be made in the main thread. A thread of its own reads what arrives: a handler in
    Python has to wait until the main thread returns from the collective it is in, which
    it never does when another rank is stuck.
    """

    def __init__(self) -> None:
        self.first = 0
        """number of the first signal; 0 before"""
        self._at = 0.0
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._fd_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _leave_to_thread) for number in STOPPING}
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()
        _active.append(self)

    def close(self) -> None:
        """Let signals do again what they did before."""
        _active.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._writer)

    def _listen(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in STOPPING:
                    self._note(number)
        os.close(reader)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if not self.first:
            self.first, self._at = number, now
        elif now - self._at >= REPEAT:
            os.write(2, f"second signal, {signal.Signals(number).name}: quitting at once\n".encode())
            os._exit(128 + number)


#: the Signals of this process; its children must not write into its pipe
_active: list[Signals] = []


def _leave_to_thread(number: int, frame: object) -> None:
    """Nothing: the byte that Python writes to the wake-up descriptor is what counts."""


def _in_child() -> None:
    if _active:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_child)


def outlive_signals(worker: int) -> None:
    """Called at the start of a data loader's process: only its rank may end it, which needs it until it has stopped.

    Schedulers signal every process of a job. A worker whose rank is gone notices that by itself.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_rank, args=(multiprocessing.parent_process().pid,), daemon=True).start()


def _end_with_rank(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)


# --- reasons ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stop:
    """An early end: the reason in words, and the exit code of all ranks."""

    reason: str
    exit_code: int = 0


class Stopping:
    """All that may end one run early; the same answer on every rank at the same iteration."""

    def __init__(self, config: TrainConfig, context: ParallelContext, started: float) -> None:
        """``started``: time.monotonic() at the start, for --exit-duration-in-mins."""
        self._config, self._context, self._started = config, context, started
        self._signals = Signals() if config.exit_signal_handler and not config.eval_only else None
        self.skipped_in_a_row = 0

    def after(self, iteration: int, device: torch.device) -> Stop | None:
        """Collective, and then one number per reason, where a flag asks for what ranks may see at different times."""
        config = self._config
        if self._signals or config.exit_duration_in_mins is not None or config.kill_switch_path is not None:
            number, late, switch = self._votes(device)
            if number:
                return Stop(f"{signal.Signals(number).name} (--exit-signal-handler); exit code {REQUEUE}", REQUEUE)
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
                int(switch is not None and Path(switch).exists())]
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

    def close(self) -> None:
        """The run has saved: from here on signals have their usual effect."""
        if self._signals:
            self._signals.close()
            self._signals = None


# --- skipped updates --------------------------------------------------------------------------


class GradientWatch:
    """Which gradients were not finite when DeepSpeed skipped an update; costs nothing in other iterations.

    DeepSpeed frees the gradients of a skipped update before it returns, so they are looked at when it has decided
    and tells its loss scaler. They are summed over DP by then: every rank has a share of the sums, and none
    knows any more which replica spoilt them.
    """

    def __init__(self, engine, context: ParallelContext) -> None:
        self._engine, self._context = engine, context
        self._found: list[tuple[tuple[int, float, int], str]] | None = None
        """(place in the forward pass, name) of bad gradients; None when they were not seen"""
        update = getattr(engine.optimizer, "_update_scale", None)
        if update is None:  # another DeepSpeed
            return

        def decided(overflow: bool = False) -> None:
            self._found = list(self._bad()) if overflow else None
            update(overflow)

        engine.optimizer._update_scale = decided

    def _bad(self):
        optimizer = self._engine.optimizer
        known = {id(param): (place, name) for place, (name, param) in enumerate(trainable(self._engine.module))}
        for group, params in enumerate(optimizer.params_in_partition):
            gradients = [each for each in optimizer.averaged_gradients[group] or ()
                         if not getattr(each, "_zero_padding", False)]
            for param, gradient in zip(params, gradients):
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
            everyones = [None] * self._context.world_size
            dist.all_gather_object(everyones, self._found)
        start = f"iteration {iteration}: update skipped, "
        if any(found is None for found in everyones):
            return start + "gradients are not finite; this version of DeepSpeed does not show which"
        places = dict(sorted((place_and_name for found in everyones for place_and_name in found), reverse=True))
        names = list(dict.fromkeys(places.values()))
        if not names:
            return start + "every gradient is finite but their norm is not"
        more = f", and {len(names) - 1} after it in the backward pass" if len(names) > 1 else ""
        where = "" if math.isfinite(loss) else f"; the loss is {loss} already"
        return f"{start}the gradient of {names[0]} is not finite{more}{where}"
