"""Jobs that save biases alone and go on from them."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from resume_jobs import resumed
from small_runs import Case, build_run, settings_of, train_steps

from megatron.checkpoint import load_plan, save
from megatron.checkpoint.delta_run import DeltaSaves
from megatron.checkpoint.progress import Progress
from megatron.errors import RunError
from megatron.mpu.context import build_context


def train_and_save(case: Case, base: str, steps: int, delta_folder: str, whole_folder: str | None = None,
                   background: bool = False, tag: str | None = "global_step1") -> list[float]:
    """``steps`` steps from ``tag`` of ``base`` (None: a Hugging Face folder), then the same state saved as biases alone and, if asked, whole."""
    case = dataclasses.replace(case, save=delta_folder, load=base)
    plan = load_plan.LoadPlan(base, tag)
    settings, context, streams, engine, _ = build_run(case, plan)
    losses, _ = train_steps(engine, case, context, 0, steps)
    progress = Progress(iteration=steps, consumed_train_samples=steps * case.global_batch)
    settings = dataclasses.replace(settings, checkpoint=dataclasses.replace(settings.checkpoint, async_save=background))
    saver = save.Saver(settings, context, plan, DeltaSaves(engine.module, settings, context, plan))
    saver.save(engine, progress, streams)
    saver.finish()
    if whole_folder:
        whole = dataclasses.replace(settings, checkpoint=dataclasses.replace(settings.checkpoint, save=whole_folder, async_save=False))
        save.Saver(whole, context, plan).save(engine, progress, streams)
    return losses


def go_on(case: Case, folder: str, steps: int) -> tuple[list[float], dict]:
    """Losses of ``steps`` more steps after a resume, and the trained tensors of this rank."""
    context, engine, _, progress, _ = resumed(case, folder)
    losses, _ = train_steps(engine, case, context, progress.iteration, steps)
    return losses, {name: param.detach().clone() for name, param in engine.module.named_parameters() if param.requires_grad}


def switch_to_deltas(case: Case, folder: str, base: str | None) -> str | None:
    """Resume from ``folder`` and save biases alone one step later; the refusal, where there is one."""
    if base is None:
        case = dataclasses.replace(case, load=folder)
    try:
        context, engine, _, progress, _ = resumed(case, folder)
        settings = settings_of(dataclasses.replace(case, save=folder, load=base or folder), dist.get_rank())
        plan = load_plan.shared_plan(settings.checkpoint, context)
        deltas = DeltaSaves(engine.module, settings, context, plan)
        deltas.file(progress.iteration)
    except RunError as error:
        return str(error)
    return None


def refusal_of(case: Case) -> str | None:
    """What a start of ``case`` with a delta of another base says."""
    settings = settings_of(case, dist.get_rank())
    context = build_context(case.tp, case.pp, dist.get_world_size(), dist.get_rank())
    try:
        build_run(case, load_plan.shared_plan(settings.checkpoint, context))
    except RunError as error:
        return str(error)
    return None


def without_base(case: Case) -> str | None:
    """What a run from random weights says that should save biases alone."""
    settings, context, _, engine, _ = build_run(case, None)
    try:
        DeltaSaves(engine.module, settings, context, load_plan.LoadPlan(None, None))
    except RunError as error:
        return str(error)
    return None
