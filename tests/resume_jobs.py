"""Jobs that save, start again and go on."""

from __future__ import annotations

import dataclasses
import hashlib
from unittest import mock

from bitfit_jobs import tensors_in
from small_runs import Case, build_run, local_tensors, settings_of, train_steps

from megatron.checkpoint import load_plan, resume, save
from megatron.checkpoint.progress import Progress
from megatron.mpu.context import build_context


def optimizer_digest(engine) -> str:
    """Hash of every optimizer tensor, master copies included."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    digest = hashlib.sha256()
    for tensor in tensors_in(inner.state_dict()["state"]) + [p for g in inner.param_groups for p in g["params"]]:
        digest.update(tensor.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def outcome(engine, schedule, losses, progress) -> dict:
    """All that must agree between an unbroken and a resumed run."""
    return {"losses": losses, "optimizer": optimizer_digest(engine), "schedule": schedule.state_dict(),
            "lr": schedule.get_lr(), "progress": vars(progress),
            "tensors": {name: value[0] for name, value in local_tensors(engine).items()}}


def straight(case: Case, base: str, steps: int) -> dict:
    """``steps`` steps in one go."""
    _, context, _, engine, schedule = build_run(case, base)
    losses, _ = train_steps(engine, case, context, 0, steps)
    progress = Progress(iteration=steps, consumed_train_samples=steps * case.global_batch)
    return outcome(engine, schedule, losses, progress)


def first_half(case: Case, base: str, steps: int, folder: str) -> list[float]:
    """``steps`` steps and a checkpoint."""
    case = dataclasses.replace(case, save=folder)
    settings, context, streams, engine, _ = build_run(case, base)
    losses, _ = train_steps(engine, case, context, 0, steps)
    progress = Progress(iteration=steps, consumed_train_samples=steps * case.global_batch)
    save.save(engine, settings, context, progress, streams)
    return losses


def resumed(case: Case, folder: str):
    """Collective: context, engine, schedule, progress and streams of a resume from ``folder`` in a new process.

    The seed is another, so that all that is not loaded differs.
    """
    import torch.distributed as dist

    fresh = dataclasses.replace(case, seed=case.seed + 1, save=folder, load=folder)
    settings = settings_of(fresh, dist.get_rank())
    context = build_context(case.tp, case.pp, dist.get_world_size(), dist.get_rank())
    plan = load_plan.shared_plan(settings.checkpoint, context)
    stored = resume.check_stored(plan, settings, context)
    settings, context, streams, engine, schedule = build_run(fresh, plan)
    resume.check_trained(plan, stored, settings, context, engine.module)
    progress = resume.resume(engine, plan, stored, streams, settings, context)
    return context, engine, schedule, progress, streams


def second_half(case: Case, folder: str, steps: int) -> dict:
    """Start from another seed, resume, go on for ``steps`` steps."""
    context, engine, schedule, progress, _ = resumed(case, folder)
    losses, _ = train_steps(engine, case, context, progress.iteration, steps)
    progress.iteration += steps
    progress.consumed_train_samples += steps * case.global_batch
    return outcome(engine, schedule, losses, progress)


def rates_after_resume(case: Case, folder: str) -> tuple[float, float] | str:
    """Rates of the schedule and of the optimizer right after a resume, or the refusal."""
    try:
        _, engine, schedule, _, _ = resumed(case, folder)
    except ValueError as error:
        return str(error)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return schedule.get_lr(), inner.param_groups[0]["lr"]


def refusals(case: Case, changes: list[dict], folder: str) -> list[str | None]:
    """What ``case`` with each of ``changes`` says to the checkpoint in ``folder``; see ``refusal``."""
    return [refusal(dataclasses.replace(case, **{name: value for name, value in change.items() if name != "frozen"}), folder,
                    change.get("frozen")) for change in changes]


def refusal(case: Case, folder: str, frozen: str | None = None) -> str | None:
    """The sentence with which ``case``, without its parameter ``frozen``, refuses the checkpoint in ``folder``, if it does."""
    from megatron.errors import RunError

    case = dataclasses.replace(case, save=folder, load=folder)
    settings, context, _, engine, _ = build_run(case, None)
    for name, param in engine.module.named_parameters():
        param.requires_grad_(param.requires_grad and name != frozen)
    try:
        plan = load_plan.shared_plan(settings.checkpoint, context)
        stored = resume.check_stored(plan, settings, context)
        resume.check_trained(plan, stored, settings, context, engine.module)
    except RunError as error:
        return str(error)
    return None


def end_of_run(flags: list[str]) -> str:
    """The sentence with which a whole run of these flags ends on this rank of a group; "" when it comes to its end."""
    import torch.distributed as dist

    import pretrain_gpt
    from megatron import training
    from megatron.arguments import parse_arguments
    from megatron.errors import SharedRunError

    task = training.Task(datasets=pretrain_gpt.datasets, batch=pretrain_gpt.batch)
    with mock.patch.object(training, "shutdown", dist.barrier):  # the group lives on
        try:
            training.pretrain(parse_arguments(flags), task)
        except SharedRunError as error:
            return str(error)
    return ""


def ends_of_runs(*lines: list[str]) -> list[str]:
    """``end_of_run`` of one after the other."""
    return [end_of_run(flags) for flags in lines]


def plan_of(case: Case) -> str:
    """The reason of the plan all ranks agree on, or the refusal."""
    import torch.distributed as dist

    from megatron.errors import RunError
    from megatron.mpu.context import build_context

    settings = settings_of(case, dist.get_rank())
    context = build_context(case.tp, case.pp, dist.get_world_size(), dist.get_rank())
    try:
        return load_plan.shared_plan(settings.checkpoint, context).reason
    except RunError as error:
        return f"refused: {error}"
