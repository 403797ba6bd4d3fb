"""The matrix product of the parallel layers, as one autograd function.

It saves the layer's input only for a weight that trains, computes no gradient nobody
asked for, and folds the tensor-parallel sum (Megatron-LM, arXiv 1909.08053, section 3)
into the buffers it owns, so that no copy is made for it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron.mpu.context import ParallelContext


@functools.cache
def _has_units_for(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies ``dtype`` faster than fp32."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    try:
        return bool(getattr(torch.ops.mkldnn, name)())
    except (AttributeError, RuntimeError):  # a build without that library
        return False


def computes_in_fp32(tensor: torch.Tensor) -> bool:
    """Whether products of ``tensor`` are better done in fp32: 16 bits on a plain processor.

    A processor without 16-bit matrix units is several times slower in them than in fp32.
    The product of two 16-bit numbers is exact in fp32 and sums are kept in fp32 either
    way, so the result, rounded once at the end, is the same or closer.
    """
    return (tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16)
            and not _has_units_for(tensor.dtype))


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x weight^T + bias`` in the dtype of ``x``: [..., n] with [m, n] and [m] to [..., m]."""
    if not computes_in_fp32(x):
        return F.linear(x, weight, bias)
    wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(x.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, context, sum_outputs, sum_input_gradients):
        ctx.context = context
        ctx.sum_input_gradients = sum_input_gradients and context.tp_size > 1
        ctx.bias_dtype = None if bias is None else bias.dtype
        # the input serves one purpose in backward, the weight's gradient. A frozen weight is kept aside:
        # as a saved tensor it would have recomputation run this product, often the last one, to find it
        ctx.frozen = None if ctx.needs_input_grad[1] else weight
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        if not (sum_outputs and context.tp_size > 1):
            return multiply(x, weight, bias)
        y = multiply(x, weight)
        dist.all_reduce(y, group=context.tp_group)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        kept: tuple[Any, torch.Tensor] = ctx.saved_tensors if ctx.frozen is None else (None, ctx.frozen)
        x, weight = kept
        grad_x = grad_weight = grad_bias = waiting = None
        if ctx.needs_input_grad[0]:
            grad_x = multiply(grad, weight.t())
            if ctx.sum_input_gradients:  # travels while the other gradients are computed
                waiting = dist.all_reduce(grad_x, group=ctx.context.tp_group, async_op=True)
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = multiply(rows.t(), x.reshape(-1, x.shape[-1]).t())
        if ctx.needs_input_grad[2]:
            # over thousands of tokens: summed in fp32, rounded once
            grad_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if waiting is not None:
            waiting.wait()
        return grad_x, grad_weight, grad_bias, None, None, None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, context: ParallelContext, *,
           sum_outputs: bool = False, sum_input_gradients: bool = False) -> torch.Tensor:
    """``x weight^T + bias`` of this rank's share of a weight split over TP.

    ``sum_outputs``: the columns (inputs) are split, so results are summed over TP before
    the bias is added once. ``sum_input_gradients``: the rows (outputs) are split, so each
    rank knows a part of the input's gradient, and these are summed in backward.
    With a frozen ``weight`` nothing of ``x`` is kept and no weight gradient is computed.
    """
    return _Linear.apply(x, weight, bias, context, sum_outputs, sum_input_gradients)
