"""Jobs that look for anything a frozen parameter might cost, in all of DeepSpeed's objects."""

from __future__ import annotations

import torch
from counting import counted_collectives
from small_runs import Case, build_run, settings_of, train_steps

from megatron.memory import expected_bytes, held_bytes, storage_key, tensors_within
from megatron.phases import StepPhases


def bytes_of(params) -> int:
    return sum(param.numel() * param.element_size() for param in params)


def audit_run(case: Case, base: str, steps: int) -> dict:
    """Build and train ``case``; what start and one step move, and what the engine's objects hold."""
    with counted_collectives() as start:
        settings, context, _, engine, _ = build_run(case, base)
    expected = expected_bytes(engine, case.dtype, case.optimizer, settings.optimizer.sgd_momentum)
    phases, gradients = StepPhases(engine), []
    phases.before_reduction = lambda: gradients.append(held_bytes(engine).gradients)
    for step in range(steps):
        phases.begin()
        with counted_collectives() as moved:
            train_steps(engine, case, context, step, 1)
        phases.end()
    params = list(engine.module.parameters())
    frozen = [param for param in params if not param.requires_grad]
    own = {storage_key(param) for param in params}
    shapes = {tuple(param.shape) for param in frozen if param.dim() > 1}
    found = [*tensors_within(vars(engine), "engine"), *tensors_within(engine.optimizer, "optimizer")]
    strangers = [(path, tuple(tensor.shape)) for path, tensor in found
                 if not tensor.is_meta and tensor.numel() and storage_key(tensor) not in own]
    grid = engine.grid
    return {
        "place": (context.pp_rank, context.dp_rank, context.tp_rank),
        "dp_ranks": tuple(torch.distributed.get_process_group_ranks(grid.get_data_parallel_group())),
        "tied_ranks": next((tuple(tie["ranks"]) for tie in engine.module.tied_comms.values()), ()),
        "trained": sum(param.numel() for param in params if param.requires_grad),
        "trained_bytes": bytes_of(param for param in params if param.requires_grad),
        "frozen_bytes": bytes_of(frozen),
        "frozen_known": [list(param.shape) for param in frozen
                         if param.grad is not None or getattr(param, "_hp_mapping", None) is not None
                         or hasattr(param, "ds_optim_param")],
        "frozen_shaped": [stranger for stranger in strangers if stranger[1] in shapes],
        "start": start.sizes, "moved": moved.sizes,
        "expected": expected, "held": held_bytes(engine), "gradients_at_most": gradients,
        "seconds": phases.seconds, "steps": phases.steps, "shares": phases.drain(), "left": phases.drain(),
        "objects": len(found),
    }


def unequal_start(case: Case, base: str) -> dict:
    """A frozen weight that differs between replicas before the engine is built, and afterwards."""
    from megatron.checkpoint.load_plan import LoadPlan
    from megatron.engine import build_engine, build_model
    from megatron.mpu.context import build_context
    from megatron.mpu.random import seed_everything

    rank = torch.distributed.get_rank()
    settings = settings_of(case, rank)
    context = build_context(case.tp, case.pp, case.world, rank)
    model = build_model(settings, context, seed_everything(case.seed, context), LoadPlan(base, "global_step1"))
    weight = next(param for param in model.parameters() if not param.requires_grad and param.dim() > 1)
    with torch.no_grad():
        weight[0, 0] += context.dp_rank
    with counted_collectives() as start:
        build_engine(model, settings, context, 100, case.global_batch)
    return {"value": float(weight[0, 0]), "sizes": start.sizes, "bytes": bytes_of([weight]),
            "dp_ranks": tuple(torch.distributed.get_process_group_ranks(context.dp_group))}
