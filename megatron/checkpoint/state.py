"""Saving a run, choosing what a start loads, and resuming.

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

import argparse
import dataclasses
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron import log_lines
from megatron.bitfit import is_anchor, trainable
from megatron.checkpoint import files
from megatron.config import BIAS_TERMS, CheckpointConfig, ModelConfig, Settings
from megatron.errors import RunError
from megatron.initialize import agree
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import capture_rng_state, restore_rng_state


@dataclass
class Progress:
    """Counters of a run; what a resume must continue exactly."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_train_tokens: int = 0
    consumed_valid_samples: int = 0
    gigaflos_no_embeds: float = 0.0
    skipped_iterations: int = 0


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


def trained_names(model) -> list[str]:
    """Names of what trains on this rank, in the optimizer's order of mention."""
    return [name for name, _ in trainable(model)]


def save(engine, settings: Settings, context: ParallelContext, progress: Progress, streams) -> None:
    """Collective: write one tag, then make it the latest.

    ``latest`` changes only after every rank's files are complete on disk, so a job
    killed in between leaves the previous tag as the one a resume finds.
    """
    folder, tag = settings.checkpoint.save, f"global_step{progress.iteration}"
    part = f"{tag}.part"
    if context.rank == 0:
        print(log_lines.saving_line(progress.iteration, folder), flush=True)
        shutil.rmtree(Path(folder) / part, ignore_errors=True)  # of a save that was killed
    start = time.monotonic()
    arguments = dict(settings.flags)
    arguments.update(consumed_train_samples=progress.consumed_train_samples,
                     consumed_valid_samples=progress.consumed_valid_samples,
                     gigaflos_no_embeds=progress.gigaflos_no_embeds,
                     padded_vocab_size=settings.model.padded_vocab_size)
    client = {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": progress.iteration,
        "tokens": progress.consumed_train_tokens,
        "architecture": architecture(settings.model),
        "checkpoint_info": {"padded_vocab_size": settings.model.padded_vocab_size,
                            "original_vocab_size": settings.model.vocab_size},
        "progress": dict(vars(progress)),
        "bitfit": settings.optimizer.bitfit,
        "bitfit_bias_terms": list(settings.optimizer.bitfit_bias_terms),
        "trainable_parameters": trained_names(engine.module),
        "dp_world_size": context.dp_size,
    }
    if settings.checkpoint.save_rng:
        client.update(capture_rng_state(streams))
    try:
        engine.save_checkpoint(folder, tag=part, client_state=client, save_latest=False)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        free = shutil.disk_usage(folder).free if Path(folder).is_dir() else 0
        raise RunError(f"--save {folder}: {tag} could not be written, {free / 2**20:,.0f} MiB are free there; "
                       f"the previous checkpoint is untouched ({str(error).splitlines()[0]})") from error
    # save_checkpoint ends with a barrier: all files of all ranks are in place
    if context.rank == 0:
        files.replace_folder(Path(folder) / part, Path(folder) / tag)
        files.write_text(Path(folder) / files.LATEST, tag)
        print(log_lines.saved_line(progress.iteration, folder), flush=True)
        print(f"  saving took {time.monotonic() - start:.2f} s", flush=True)
    if context.world_size > 1:
        dist.barrier()


def check_save_folder(config: CheckpointConfig, context: ParallelContext) -> None:
    """Collective: make ``--save`` and write to it now, not after hours of training."""
    problem = None
    if config.save and context.rank == 0:
        probe = Path(config.save) / ".probe"
        try:
            Path(config.save).mkdir(parents=True, exist_ok=True)
            files.write_text(probe, "writable")
            probe.unlink()
        except OSError as error:
            problem = f"--save {config.save} cannot be written: {error}"
    agree(context, problem)


#: what a stored model must share with the one it is loaded into, and the flag that sets each
_ARCHITECTURE = {
    "num_layers": "--num-layers", "hidden_size": "--hidden-size", "num_attention_heads": "--num-attention-heads",
    "kv_channels": "--kv-channels", "ffn_hidden_size": "--ffn-hidden-size",
    "position_embedding_type": "--position-embedding-type", "embed_layernorm": "--embed-layernorm",
    "activation": "--glu-activation, --no-bias-gelu-fusion", "layernorm_epsilon": "--layernorm-epsilon",
    "apply_residual_connection_post_layernorm": "--apply-residual-connection-post-layernorm",
    "vocab_size": "the tokenizer's vocabulary",
}


def architecture(model: ModelConfig) -> dict:
    """The settings of the network that weights depend on; plain values."""
    everything = dataclasses.asdict(model)
    return {name: everything[name] for name in _ARCHITECTURE}


def check_stored(plan: LoadPlan, settings: Settings, context: ParallelContext) -> dict:
    """Collective: read the state file and refuse a model or a grid that does not fit this run.

    Returns this rank's file, or {} where there is none and nothing but weights is wanted (layer
    files alone are a base, and so are files of other degrees). Every rank raises when one of
    them refuses.
    """
    problem, stored = None, {}
    rank = 0 if not plan.resume else context.pp_rank * context.tp_size + context.tp_rank
    path = files.mp_rank_file(plan.path, rank)
    try:
        stored = files.read(path)
        problem = _other_architecture(stored, plan, settings)
        if plan.resume and not problem:
            problem = _not_resumable(stored, plan, context)
    except RunError as error:
        # foreign state files hold objects that are not read; their layer files are plain tensors
        problem = None if plan.weights_only else str(error)
    agree(context, problem)
    return stored


def _other_architecture(stored: dict, plan: LoadPlan, settings: Settings) -> str | None:
    now = architecture(settings.model)
    # without our own record, what the arguments of older trainers say of it
    older = {name: value for name, value in vars(stored.get("args", argparse.Namespace())).items()
             if name not in ("activation", "vocab_size") and value is not None}
    for name, value in stored.get("architecture", older).items():
        if name in now and value != now[name]:
            return (f"{plan.path} holds a model with {name} {value}, this run has {now[name]} "
                    f"({_ARCHITECTURE[name]}); make them equal, or load another checkpoint")
    return None


def _not_resumable(stored: dict, plan: LoadPlan, context: ParallelContext) -> str | None:
    dims = stored.get("checkpoint_parallel_dimensions") or {}
    saved = (dims.get("tp_degree"), dims.get("pp_degree"), stored.get("dp_world_size"))
    now = (context.tp_size, context.pp_size, context.dp_size)
    if "trainable_parameters" not in stored:
        return (f"{plan.path} does not say what its optimizer state belongs to; start from its weights: "
                "--load it with another --save folder")
    if saved != now:
        return (f"{plan.path} was saved with TP, PP, DP = {saved}, this run has {now}; resume with the "
                "saved degrees, or start from its weights with --load of it and another --save folder")
    return None


def check_trained(plan: LoadPlan, stored: dict, settings: Settings, context: ParallelContext, model) -> None:
    """Collective: refuse a resume whose optimizer state belongs to other parameters than train now."""
    problem = None
    if plan.resume and stored["trainable_parameters"] != trained_names(model):
        kind = _kind(stored.get("bitfit"), stored.get("bitfit_bias_terms"))
        asked = _kind(settings.optimizer.bitfit, settings.optimizer.bitfit_bias_terms)
        problem = (f"{plan.path} holds optimizer state of {kind}, but this run is {asked} and trains another "
                   f"set of parameters; to resume, train what it trained ({kind}); to start from its weights "
                   f"alone, --load {plan.folder} and save to another --save folder, or make it both --load and "
                   "--save and add --finetune --no-load-optim")
    agree(context, problem)


def _kind(bitfit: bool | None, terms: Sequence[str] | None) -> str:
    """What trains, in the words of the command line."""
    if not bitfit:
        return "full training"
    return f"--bitfit --bitfit-bias-terms {'all' if set(terms or BIAS_TERMS) == set(BIAS_TERMS) else ' '.join(terms)}"


def resume(engine, plan: LoadPlan, stored: dict, streams) -> Progress:
    """Collective: bring engine, schedule, counters and random states back.

    With ``plan.resume`` False the weights are already in the model and only progress
    and random states are taken.
    """
    if plan.resume:
        engine.load_checkpoint(plan.folder, tag=plan.tag)
        # the optimizer's groups are loaded after the schedule, with the rate they were saved with
        engine.lr_scheduler.apply()
        for _, param in engine.module.named_parameters():
            if is_anchor(param):
                param.data.zero_()
    progress = Progress()
    if plan.progress and "progress" in stored:
        progress = Progress(**stored["progress"])
    if plan.rng and "torch_rng_state" in stored:
        restore_rng_state(stored, streams)
    return progress
