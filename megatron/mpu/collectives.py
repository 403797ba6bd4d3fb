"""Tensor-parallel collectives, each an autograd function with an explicit group.

The pair of Megatron-LM (arXiv 1909.08053, section 3): ``copy_to_tp`` is the
identity forward and a sum of gradients backward, ``reduce_from_tp`` a sum
forward and the identity backward. With a TP degree of one all are the identity.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.mpu.context import ParallelContext


def all_reduce(tensor: torch.Tensor, context: ParallelContext, op=dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce ``tensor`` in place over the TP group and return it."""
    if context.tp_size > 1:
        dist.all_reduce(tensor, op=op, group=context.tp_group)
    return tensor


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, context):
        ctx.context = context
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad.contiguous().clone(), ctx.context), None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, context):
        return all_reduce(tensor.contiguous().clone(), context)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def copy_to_tp(tensor: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """Hand ``tensor`` (equal on all TP ranks) to sharded weights; gradients are summed."""
    return tensor if context.tp_size == 1 else _CopyToTP.apply(tensor, context)


def reduce_from_tp(tensor: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """Sum partial results over TP; the gradient passes unchanged."""
    return tensor if context.tp_size == 1 else _ReduceFromTP.apply(tensor, context)


def broadcast_object(value, context: ParallelContext):
    """A small Python object from TP rank 0 to the whole TP group."""
    if context.tp_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=context.tp_ranks[0], group=context.tp_group)
    return box[0]
