"""Jobs that count what a training run holds and moves."""

from __future__ import annotations

import torch
from counting import counted_collectives
from small_runs import Case, build_run, train_steps

from megatron.bitfit import trainable
from megatron.engine import optimizer_facts


def tensors_in(value) -> list[torch.Tensor]:
    """All tensors inside nested containers."""
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def cost_run(case: Case, base: str, steps: int) -> dict:
    """Train, then count: what moved, what has gradients, state and traffic of one step."""
    settings, context, _, engine, _ = build_run(case, base)
    before = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    train_steps(engine, case, context, 0, steps - 1)
    with counted_collectives() as moved:
        train_steps(engine, case, context, steps - 1, 1)
    params = dict(engine.module.named_parameters())
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    moments = [tensor for state in inner.state.values() for tensor in tensors_in(state) if tensor.numel() > 1]
    width = torch.tensor([], dtype=next(iter(params.values())).dtype).element_size()
    return {
        "place": (context.pp_rank, context.dp_rank, context.tp_rank),
        "dp_ranks": tuple(torch.distributed.get_process_group_ranks(engine.mpu.get_data_parallel_group())),
        "tied_ranks": next((tuple(tie["ranks"]) for tie in engine.module.tied_comms.values()), ()),
        "trainable": sum(param.numel() for _, param in trainable(engine.module)),
        "trainable_names": [name for name, _ in trainable(engine.module)],
        "frozen_moved": [name for name, param in params.items()
                         if not param.requires_grad and not torch.equal(param, before[name])],
        "frozen_with_grad": [name for name, param in params.items()
                             if not param.requires_grad and param.grad is not None],
        "unmoved": [name for name, param in params.items()
                    if param.requires_grad and torch.equal(param, before[name])],
        "moment_elements": sum(tensor.numel() for tensor in moments),
        "facts": optimizer_facts(engine, settings), "width": width,
        "moved": dict(moved),
        "query_key_value": {name: (param.detach() - before[name]).abs().cpu() for name, param in params.items()
                            if name.endswith("query_key_value.bias")},
        "heads": case.heads // case.tp,
    }
