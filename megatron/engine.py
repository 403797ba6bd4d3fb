"""From settings to a DeepSpeed engine, in the one order that keeps frozen weights free:

build the pipeline -> load the weights -> freeze -> collect what trains -> optimizer ->
engine. Nothing after the freeze changes ``requires_grad``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron import bitfit
from megatron.checkpoint.load_plan import LoadPlan
from megatron.checkpoint.sources import open_source
from megatron.checkpoint.weights import load_weights, synchronize_tied
from megatron.config import Settings
from megatron.deepspeed_config import derive_deepspeed_config
from megatron.errors import RunError
from megatron.gradients import count_bad_copies
from megatron.initialize import agree, quiet
from megatron.model.loss import GlobalWeight, loss_function
from megatron.model.pipe import GPTPipeline
from megatron.mpu.context import ParallelContext
from megatron.mpu.layers import torch_dtype
from megatron.mpu.random import RandomStreams
from megatron.optimizer.build import build_optimizer
from megatron.optimizer.learning_rate import LearningRateSchedule, build_schedule
from megatron.replicas import fingerprint


def build_model(settings: Settings, context: ParallelContext, streams: RandomStreams, plan: LoadPlan,
                weight: GlobalWeight | None = None) -> GPTPipeline:
    """Collective: this rank's stage, filled from the plan's weights, frozen if asked.

    The loss is divided by ``weight``, where given, else by that of its micro-batch.
    Raises RunError on all ranks when the weights cannot be loaded on one of them.
    """
    with quiet():
        model = GPTPipeline(settings.model, context, streams,
                            partition_method=settings.parallel.pp_partition_method,
                            loss_fn=loss_function(settings.model, context, weight))
    if plan.folder:
        problem = None
        try:
            source = open_source(plan.path, settings.checkpoint)
            load_weights(model, source, context)
            for note in source.notes if context.rank == 0 else ():
                print(f"warning: {note}", flush=True)
        except RunError as error:
            problem = str(error)
        agree(context, problem)
        synchronize_tied(model)
    if settings.optimizer.bitfit:
        bitfit.freeze(model, settings.optimizer.bitfit_bias_terms)
    return model


@dataclass(frozen=True)
class OptimizerFacts:
    """What the data-parallel reduction and the optimizer of this rank cost."""

    gradient_bytes_per_step: int
    """bytes of gradients this rank hands to its one data-parallel all-reduce per step"""
    state_bytes: int
    """moments (or momentum) and the fp32 copy of its shard, held here once training has begun"""


def build_engine(model: GPTPipeline, settings: Settings, context: ParallelContext, train_iters: int,
                 global_batch_size: int) -> tuple[Any, LearningRateSchedule]:
    """Collective: optimizer, schedule and DeepSpeed engine over what trains.

    Returns (engine, schedule). Frozen parameters reach neither of them.
    """
    import deepspeed

    from megatron.checkpoint.files import checkpoint_engine

    device = next(model.parameters()).device if any(True for _ in model.parameters()) else torch.device("cpu")
    bitfit.add_anchor(model, context, torch_dtype(settings.model), device)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = build_optimizer(model, settings.optimizer)
    schedule = build_schedule(settings.optimizer, settings.train, optimizer, train_iters,
                              seq_length=settings.model.seq_length)
    config = derive_deepspeed_config(settings, global_batch_size=global_batch_size,
                                     trainable_per_rank=sum(param.numel() for param in params))
    with quiet(), _frozen_not_broadcast(model, context):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config,
                                          lr_scheduler=schedule, dist_init_required=False)
    engine.checkpoint_engine = checkpoint_engine()
    count_bad_copies(engine.optimizer, context)
    return engine, schedule


@contextlib.contextmanager
def _frozen_not_broadcast(model: GPTPipeline, context: ParallelContext) -> Iterator[None]:
    """Collective: DeepSpeed, built inside, does not broadcast frozen parameters over DP.

    It would send every parameter from DP rank 0, though all replicas drew the same
    numbers or read the same file. Sixteen bytes per frozen tensor prove that here; one that
    does differ is broadcast as before. What trains is always broadcast.
    """
    frozen = [param for param in model.parameters() if not param.requires_grad]
    if context.dp_size == 1 or not frozen:
        yield
        return
    prints = torch.stack([fingerprint(param.detach().view(-1)) for param in frozen])
    both = torch.cat([prints, ~prints])  # ~ turns the order round: the least of the replicas too
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=context.dp_group)
    equal = (both[:len(frozen)] == ~both[len(frozen):]).tolist()
    spared = [param for param, same in zip(frozen, equal) if same]
    for param in spared:
        param.ds_optim_param = True  # DeepSpeed's mark of parameters it leaves where they are
    try:
        yield
    finally:
        for param in spared:
            del param.ds_optim_param


def optimizer_facts(engine, settings: Settings) -> OptimizerFacts:
    """Count this rank's share from the tensors that exist, not from a formula."""
    trained = sum(param.numel() for _, param in bitfit.trainable(engine.module))
    width = 2 if settings.model.params_dtype == "fp16" else 4  # bf16 gradients travel in fp32
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    tensors = [value for state in inner.state.values() for value in state.values()
               if torch.is_tensor(value) and value.numel() > 1]
    # the shard it updates: the fp32 masters of 16-bit weights, and a copy of fp32 ones too
    tensors += [param for group in inner.param_groups for param in group["params"]]
    return OptimizerFacts(gradient_bytes_per_step=trained * width,
                          state_bytes=sum(t.numel() * t.element_size() for t in tensors))
