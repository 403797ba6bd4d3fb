"""Jobs that save at some degrees and precision and go on at others."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import numpy
import torch
from resume_jobs import optimizer_digest, resumed
from small_runs import Case, build_run, micro_batches, settings_of, train_steps

from megatron.bitfit import trainable
from megatron.checkpoint import load_plan, save
from megatron.checkpoint.progress import Progress
from megatron.mpu.context import build_context
from megatron.mpu.random import seed_everything
from megatron.mpu.tags import tag_of

EVAL_STEP = 500


def save_and_go_on(case: Case, base: str, folder: str, steps: int, more: int) -> dict:
    """``steps`` steps, a checkpoint, and the unbroken run from there."""
    case = dataclasses.replace(case, save=folder)
    settings, context, streams, engine, schedule = build_run(case, base)
    train_steps(engine, case, context, 0, steps)
    progress = Progress(iteration=steps, consumed_train_samples=steps * case.global_batch)
    save.save(engine, settings, context, progress, streams)
    return _continued(case, context, engine, schedule, progress, more)


def go_on(case: Case, folder: str, more: int) -> dict:
    """Resume from ``folder`` as ``case`` and make ``more`` steps."""
    context, engine, schedule, progress, _ = resumed(case, folder)
    return _continued(case, context, engine, schedule, progress, more)


def pass_on(case: Case, folder: str, target: str) -> float:
    """Resume from ``folder`` as ``case`` and save that to ``target``; the evaluation loss."""
    context, engine, _, progress, streams = resumed(case, folder)
    save.save(engine, settings_of(dataclasses.replace(case, save=target), context.rank), context, progress, streams)
    return _evaluation(case, context, engine)


def weights_alone(case: Case, folder: str, target: str | None = None) -> tuple[str, float]:
    """Start a run from the weights in ``folder`` and save it to ``target``; what is odd about ``folder``, and the evaluation loss."""
    settings = settings_of(dataclasses.replace(case, load=folder, save=target), torch.distributed.get_rank())
    context = build_context(case.tp, case.pp, case.world, settings.parallel.rank)
    plan = load_plan.shared_plan(settings.checkpoint, context)
    _, context, streams, engine, _ = build_run(case, plan)
    if target:
        save.save(engine, settings, context, Progress(), streams)
    return plan.warning, _evaluation(case, context, engine)


def _evaluation(case: Case, context, engine) -> float:
    reads = context.is_first_stage or context.is_last_stage
    rows = list(micro_batches(case, EVAL_STEP, context.dp_rank))
    return float(engine.eval_batch(iter(rows) if reads else None, num_micro_batches=len(rows)))


def _continued(case: Case, context, engine, schedule, progress: Progress, more: int) -> dict:
    seen = {"place": (context.pp_rank, context.dp_rank, context.tp_rank), "progress": dict(vars(progress)),
            "schedule": schedule.state_dict(), "state": _state(engine), "digest": optimizer_digest(engine),
            "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
            "scale": getattr(engine.optimizer, "cur_scale", None)}
    seen["eval"] = _evaluation(case, context, engine)
    seen["losses"], seen["norms"] = train_steps(engine, case, context, progress.iteration, more)
    return seen


def _state(engine) -> dict:
    """Model weight, fp32 master and moments of what trains here, whole over DP, as DeepSpeed's own accessors see them."""
    engine.optimizer._hp_optimizer_states_linked = False  # ZeRO links after the step of its first group
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    inner = engine.optimizer.optimizer
    moments = [key for key in ("exp_avg", "exp_avg_sq", "momentum_buffer") if any(key in kept for kept in inner.state.values())]
    state = {}
    for name, param in trainable(engine.module):
        values = {"weight": param.detach().float().clone(), "master": param.get_full_hp_param()}
        values.update({key: param.get_full_hp_param(key) for key in moments})
        state[name] = (values, tag_of(param), bool(getattr(param, "ds_pipe_replicated", False)))
    return state


def streams_after(case: Case, folder: str) -> dict:
    """Hashes of all random streams after a resume."""
    context, _, _, _, streams = resumed(case, folder)
    return _streams(context, streams)


def streams_of_a_start(case: Case, iteration: int) -> dict:
    """The same for a start; with an iteration, one whose seed is that of ``streams_after`` mixed with it."""
    context = build_context(case.tp, case.pp, case.world, torch.distributed.get_rank())
    seed = case.seed + 1
    if iteration:
        seed = int(hashlib.sha256(f"{seed} {iteration}".encode()).hexdigest()[:8], 16) // 2
    return _streams(context, seed_everything(seed, context))


def _streams(context, streams) -> dict:
    _, keys, *_ = numpy.random.get_state()
    parts = {"python": repr(random.getstate()).encode(), "numpy": keys.tobytes(),
             "default": torch.get_rng_state().numpy().tobytes(), "private": streams.get_state().numpy().tobytes()}
    return {"place": (context.pp_rank, context.dp_rank, context.tp_rank),
            **{name: digest(part) for name, part in parts.items()}}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
