"""Jobs that train a subset of the biases, save it and load it elsewhere."""

from __future__ import annotations

import dataclasses

import torch
from bitfit_jobs import tensors_in
from counting import counted_collectives
from small_runs import Case, build_run, train_steps

from megatron.bitfit import is_anchor, trainable
from megatron.checkpoint import save
from megatron.checkpoint.progress import Progress
from megatron.metrics import params_norm


def terms_run(case: Case, base: str, folder: str) -> dict:
    """Train and save as step 1; what this rank saw, held and reduced."""
    case = dataclasses.replace(case, save=folder)
    settings, context, streams, engine, _ = build_run(case, base)
    losses, norms = train_steps(engine, case, context, 0, case.steps - 1)
    with counted_collectives() as moved:
        last = train_steps(engine, case, context, case.steps - 1, 1)
    save.save(engine, settings, context, Progress(iteration=1), streams)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    dp_ranks = tuple(torch.distributed.get_process_group_ranks(engine.mpu.get_data_parallel_group()))
    return {
        "losses": losses + last[0], "norms": norms + last[1],
        "trained": {name: param.numel() for name, param in trainable(engine.module)},
        "anchors": sum(is_anchor(param) for param in engine.module.parameters()),
        "moments": sum(tensor.numel() for state in inner.state.values() for tensor in tensors_in(state)
                       if tensor.numel() > 1),
        "dp_bytes": moved.get(("all_reduce", dp_ranks), 0),
        "params_norm": params_norm(engine.module, context),
    }


def loaded(case: Case, folder: str) -> dict:
    """A start from the weights of step 1: the vectors that train, and the layers as files would show them."""
    _, _, _, engine, _ = build_run(case, folder)
    layers = {}
    for local, layer in enumerate(engine.module.forward_funcs):
        if isinstance(layer, torch.nn.Module):
            layers[engine.module._local_start + local] = {
                name: value.clone() for name, value in layer.state_dict().items()}
    return {"layers": layers,
            "trained": {name: param.detach().clone() for name, param in trainable(engine.module)}}
