"""Tensor-parallel collectives with an explicit group.

``reduce_from_tp`` is a sum forward and the identity backward (Megatron-LM, arXiv
1909.08053, section 3). Its counterpart, a sum of gradients in backward, is part of
``megatron.mpu.linear``. With a TP degree of one both are the identity.
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


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, context):
        return all_reduce(tensor.contiguous().clone(), context)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def reduce_from_tp(tensor: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """Sum partial results over TP; the gradient passes unchanged."""
    return tensor if context.tp_size == 1 else _ReduceFromTP.apply(tensor, context)
