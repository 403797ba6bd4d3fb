"""Learning rate as a function of the samples trained on, with linear warmup."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from megatron.config import OptimizerConfig, TrainConfig
from megatron.optimizer.batch_size import ScheduleError

DECAY_STYLES = ("constant", "linear", "cosine")

#: stored constant -> the flags that determine it, for messages
CONSTANTS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "warmup_steps": "--lr-warmup-samples, --lr-warmup-iters or --lr-warmup-fraction",
    "decay_steps": "--lr-decay-samples or --lr-decay-iters, by default the length of the run",
    "decay_style": "--lr-decay-style",
}


#: published BitFit runs used 1e-3 and more; below this a rate was most likely taken over from full fine-tuning
LOW_BITFIT_RATE = 1e-4


def low_rate_notice(config: OptimizerConfig) -> str | None:
    """What is said at the start of a --bitfit run that has kept the learning rate of full fine-tuning."""
    if not config.bitfit or config.lr is None or config.lr >= LOW_BITFIT_RATE:
        return None
    return (f"--lr {config.lr:g} is a rate of full fine-tuning; biases want far more, around 1e-3 "
            "(docs/bitfit.md)")


class HasGroups(Protocol):
    """An optimizer, as far as a schedule is concerned."""

    param_groups: list[dict[str, Any]]


class LearningRateSchedule:
    """Writes the learning rate of the next update into every group of an optimizer.

    ``owner`` is any object with ``param_groups``. Steps are samples. With n samples done:
    n <= warmup_steps gives max_lr * n / warmup_steps (so the first update uses 0), later
    the decay style decides, from max_lr at warmup_steps to min_lr at decay_steps and
    beyond. ``decay_tokens`` lets the decay follow the tokens trained on instead, counted
    from where the warmup ended; a step is then worth ``tokens_per_step`` tokens.

    DeepSpeed takes an instance as its ``lr_scheduler`` and calls ``step(batch size)``
    after each update that was not skipped.

    Raises ScheduleError (a ValueError) for constants that contradict each other.
    """

    def __init__(self, owner: HasGroups, *, max_lr: float, min_lr: float = 0.0, warmup_steps: float = 0,
                 decay_steps: int, decay_style: str = "linear", decay_tokens: int | None = None,
                 tokens_per_step: int | None = None, override: bool = False, use_checkpoint: bool = False):
        self.owner = owner
        self.max_lr, self.min_lr = max_lr, min_lr
        self.warmup_steps, self.decay_steps, self.decay_style = warmup_steps, decay_steps, decay_style
        self.decay_tokens, self.tokens_per_step = decay_tokens, tokens_per_step
        self.override, self.use_checkpoint = override, use_checkpoint
        self.num_steps = self.num_tokens = 0
        self.warmup_tokens = 0
        self._check()
        self.apply()

    def _check(self) -> None:
        if not 0.0 <= self.min_lr <= self.max_lr:
            raise ScheduleError(f"--min-lr {self.min_lr} and --lr {self.max_lr}: 0 <= min-lr <= lr is required")
        if self.decay_style not in DECAY_STYLES:
            raise ScheduleError(f"--lr-decay-style {self.decay_style} is not one of {', '.join(DECAY_STYLES)}")
        if not 0 <= self.warmup_steps < self.decay_steps:
            raise ScheduleError(
                f"warmup of {self.warmup_steps} samples ({CONSTANTS['warmup_steps']}) must be shorter than "
                f"the decay of {self.decay_steps} samples ({CONSTANTS['decay_steps']})")
        if self.override and self.use_checkpoint:
            raise ScheduleError("--override-lr-scheduler and --use-checkpoint-lr-scheduler exclude each other")

    # --- the formula ------------------------------------------------------------------------

    def get_lr(self) -> float:
        """The rate that the next update uses."""
        if self.warmup_steps > 0 and self.num_steps <= self.warmup_steps:
            return self.max_lr * self.num_steps / self.warmup_steps
        if self.decay_style == "constant":
            return self.max_lr
        done, begin, end = self.num_steps, self.warmup_steps, self.decay_steps
        if self.decay_tokens is not None:
            done, begin, end = self.num_tokens, self.warmup_tokens, self.decay_tokens
        if done > end or end <= begin:
            return self.min_lr
        ratio = (done - begin) / (end - begin)
        share = 1.0 - ratio if self.decay_style == "linear" else (1.0 + math.cos(math.pi * ratio)) / 2
        return self.min_lr + share * (self.max_lr - self.min_lr)

    def apply(self) -> None:
        """Write the current rate into the groups.

        To be called once more after a checkpoint is loaded: DeepSpeed restores ZeRO's
        groups, and the rate stored in them, after it has restored the schedule.
        """
        rate = self.get_lr()
        for group in self.owner.param_groups:  # looked up each time: loading replaces the list
            group["lr"] = rate

    def step(self, increment: int, tokens: int | None = None) -> None:
        """Count ``increment`` samples and, if given, set the tokens consumed in the whole run.

        ``increment`` has no default: DeepSpeed first calls ``step()`` and takes the
        TypeError as the sign to pass the batch size.
        """
        self.num_steps += increment
        if tokens is not None:
            self.num_tokens = tokens
        elif self.tokens_per_step is not None:
            self.num_tokens += increment * self.tokens_per_step
        elif self.decay_tokens is not None:
            raise ScheduleError("--lr-decay-tokens needs the number of tokens that were trained on")
        if self.num_steps == self.warmup_steps:
            # only an exact hit counts, as in the runs whose curves must be continued
            self.warmup_tokens = self.num_tokens
        self.apply()

    # --- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and one string, under the keys of Megatron-DeepSpeed checkpoints."""
        keys = ("max_lr", "min_lr", "warmup_steps", "num_steps", "warmup_tokens", "num_tokens",
                "decay_style", "decay_steps")
        return {key: getattr(self, key) for key in keys}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the progress from ``state``; its constants must equal the flags'.

        With ``override`` the flags' constants are kept, with ``use_checkpoint`` the stored
        ones are taken. Raises ScheduleError (a ValueError) on a difference that neither
        settles, and on a state with missing keys; nothing is changed then.
        """
        missing = [key for key in (*CONSTANTS, "num_steps") if key not in state]
        if missing:
            raise ScheduleError(f"the checkpoint's learning-rate schedule lacks {', '.join(missing)}: "
                                "load it with --no-load-optim to start a new schedule")
        differences = [f"{key} is {state[key]} in the checkpoint and {getattr(self, key)} by the flags ({flags})"
                       for key, flags in CONSTANTS.items() if state[key] != getattr(self, key)]
        if differences and not (self.override or self.use_checkpoint):
            raise ScheduleError(f"learning-rate schedule: {'; '.join(differences)}; make them equal, or give "
                                "--override-lr-scheduler to follow the flags or "
                                "--use-checkpoint-lr-scheduler to follow the checkpoint")
        if self.use_checkpoint:
            for key in CONSTANTS:
                setattr(self, key, state[key])
        self.num_steps = state["num_steps"]
        self.num_tokens = state.get("num_tokens", 0)
        self.warmup_tokens = state.get("warmup_tokens", 0)
        self.apply()


def build_schedule(config: OptimizerConfig, train: TrainConfig, optimizer: HasGroups, train_iters: int,
                   seq_length: int | None = None) -> LearningRateSchedule:
    """The schedule of a run, all lengths turned into samples.

    ``optimizer`` is the object whose ``param_groups`` are written to. ``seq_length`` (tokens
    per sample) is needed for ``--lr-decay-tokens`` alone. A run counted in iterations uses
    iterations x global batch size; the decay lasts as long as the run unless a flag says
    otherwise. Raises ScheduleError (a ValueError) for flags that contradict each other.
    """
    size = train.global_batch_size
    if config.lr is None and not train.eval_only:
        raise ScheduleError("--lr is missing: training needs a learning rate")
    if config.lr_decay_tokens is not None and seq_length is None:
        raise ScheduleError("--lr-decay-tokens needs the sequence length (--seq-length)")
    warmup: float
    if train.train_samples is not None:
        decay = config.lr_decay_samples if config.lr_decay_samples is not None else train.train_samples
        warmup = config.lr_warmup_samples
    else:
        decay = (config.lr_decay_iters if config.lr_decay_iters is not None else train_iters) * size
        warmup = config.lr_warmup_iters * size
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * decay
    if train.eval_only:
        decay, warmup = max(decay, 1), 0  # --eval-only may come with a run of no length
    use_checkpoint = config.use_checkpoint_lr_scheduler
    if train.eval_only and not config.override_lr_scheduler:
        use_checkpoint = True  # no update will use the rate: no reason to refuse the checkpoint
    return LearningRateSchedule(
        optimizer, max_lr=config.lr or 0.0, min_lr=config.min_lr if config.lr else 0.0,
        warmup_steps=warmup, decay_steps=decay, decay_style=config.lr_decay_style,
        decay_tokens=config.lr_decay_tokens, tokens_per_step=seq_length,
        override=config.override_lr_scheduler, use_checkpoint=use_checkpoint)
