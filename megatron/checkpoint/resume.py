"""Checking a stored run against this one, and bringing it back."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.bitfit import is_anchor
from megatron.checkpoint import files
from megatron.checkpoint.load_plan import LoadPlan
from megatron.checkpoint.progress import ARCHITECTURE_FLAGS, Progress, architecture, trained_names
from megatron.config import BIAS_TERMS, Settings
from megatron.errors import RunError
from megatron.initialize import agree
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import restore_rng_state


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
                    f"({ARCHITECTURE_FLAGS[name]}); make them equal, or load another checkpoint")
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
