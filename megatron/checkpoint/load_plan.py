"""What a start loads, and which parts of it.

Which folder a start reads is decided once, on rank 0, and told to all ranks:

====================================  =====================================================
found                                 done
====================================  =====================================================
``--save`` holds a checkpoint,         resume this run from there (weights, optimizer,
``--load`` is it too, is another       schedule, progress, random states); with another or
folder or is not given                 no ``--load``, ``--finetune``, ``--no-load-optim`` and
                                       ``--reset-progress`` were for the first start
``--load`` is another folder           start from it as a base: weights only, everything
                                       else fresh
``--load`` is the ``--save`` folder    resume, less what ``--finetune``, ``--no-load-optim``,
and one of the old flags is given      ``--no-load-rng`` and ``--reset-progress`` leave out
``--load`` holds no checkpoint         an error, unless ``--allow-fresh-start``
====================================  =====================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint import files
from megatron.config import CheckpointConfig
from megatron.errors import RunError
from megatron.initialize import agree
from megatron.mpu.context import ParallelContext


@dataclass(frozen=True)
class LoadPlan:
    """Where a start reads from, and which parts of it."""

    folder: str | None
    tag: str | None
    resume: bool = False
    """optimizer, schedule and counters of the engine too, not the weights alone"""
    progress: bool = False
    rng: bool = False
    reason: str = "starting from random weights"

    @property
    def weights_only(self) -> bool:
        return self.folder is not None and not (self.resume or self.progress or self.rng)

    @property
    def path(self) -> Path:
        return Path(self.folder) / self.tag


def plan_load(config: CheckpointConfig, *, eval_only: bool = False) -> LoadPlan:
    """Decide what this start loads; looks at ``latest`` files only.

    With ``eval_only`` nothing is written, so ``--load`` is read whatever ``--save`` holds,
    and the iteration it was saved at is kept for the evaluation's lines.

    Raises RunError when ``--load`` holds no checkpoint and a fresh start was not allowed.
    """
    own = config.save and files.latest_tag(config.save)
    same = bool(config.save and config.load
                and Path(config.save).resolve() == Path(config.load).resolve())
    if own and not same and not eval_only:
        base = f"; --load {config.load} was its base and is not read again" if config.load else ""
        spent = [flag for flag, given in (("--finetune", config.finetune), ("--no-load-optim", not config.load_optim),
                                          ("--reset-progress", config.reset_progress)) if given]
        spent = f"; {', '.join(spent)} concerned the first start alone" if spent else ""
        return LoadPlan(config.save, own, resume=True, progress=True, rng=config.load_rng,
                        reason=f"resuming: --save {config.save} holds this run's {own}{base}{spent}")
    if not config.load:
        return LoadPlan(None, None)
    tag = files.latest_tag(config.load)
    if tag is None:
        if config.allow_fresh_start:
            return LoadPlan(None, None, reason=f"--load {config.load} holds no checkpoint; "
                                               "--allow-fresh-start: starting from random weights")
        raise RunError(f"--load {config.load} holds no checkpoint (no file 'latest' in it); give the "
                       "folder that was used with --save, or --allow-fresh-start to train from "
                       "random weights")
    if not (Path(config.load) / tag).is_dir():
        raise RunError(f"--load {config.load}: its file 'latest' names {tag}, but there is no such "
                       "folder in it")
    if eval_only:
        return LoadPlan(config.load, tag, progress=True, reason=f"evaluating {config.load} ({tag})")
    if not same:
        return LoadPlan(config.load, tag,
                        reason=f"starting from the base {config.load} ({tag}): weights only; optimizer, "
                               "schedule, progress and random states start fresh")
    resume = config.load_optim
    progress = not (config.finetune or config.reset_progress)
    left_out = [name for name, out in (("optimizer and schedule", not resume), ("progress", not progress),
                                       ("random states", not config.load_rng or config.finetune)) if out]
    return LoadPlan(config.load, tag, resume=resume, progress=progress,
                    rng=config.load_rng and not config.finetune,
                    reason=f"resuming from {config.load} ({tag})"
                           + (f" without {', '.join(left_out)}" if left_out else ""))


def shared_plan(config: CheckpointConfig, context: ParallelContext, *, eval_only: bool = False) -> LoadPlan:
    """Collective: rank 0's plan, after every rank has seen the same tag on its disk."""
    plan, problem = None, None
    try:
        plan = plan_load(config, eval_only=eval_only)
    except RunError as error:
        problem = str(error)
    agree(context, problem)
    box = [plan]
    if context.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    theirs = box[0]
    agree(context, None if (plan.folder, plan.tag) == (theirs.folder, theirs.tag) else
          f"sees checkpoint {plan.tag} where rank 0 sees {theirs.tag} in {theirs.folder}; "
          "all ranks need the same file system")
    return theirs
