"""GELU and dropout, as a processor does them best; accelerators take torch's kernels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

#: rows of about this many bytes are worked on at a time, so that all passes over them stay in cache
_CHUNK_BYTES = 1 << 19


class _GeluTanh(torch.autograd.Function):
    """x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3), which is x (1 + tanh u) / 2.

    Keeps the derivative instead of ``x``: as many bytes, and backward is one product.
    """

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        slope = torch.empty_like(y) if ctx.needs_input_grad[0] else None
        flat, out = x.reshape(-1), y.view(-1)
        step = max(1, _CHUNK_BYTES // 4)
        for start in range(0, flat.numel(), step):
            part = slice(start, start + step)
            _gelu_and_slope(flat[part], out[part], None if slope is None else slope.view(-1)[part])
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        slope, = ctx.saved_tensors
        return grad * slope


def _gelu_and_slope(x: torch.Tensor, out: torch.Tensor, slope: torch.Tensor | None) -> None:
    """Fill ``out`` and ``slope`` (dtype of ``x``, all 1-d) through fp32, in as few passes as that takes."""
    first, third = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
    direct = x.dtype == torch.float32
    x = x.float()
    square = x * x
    gate = square.mul(third).add_(first).mul_(x).sigmoid_()
    product = torch.mul(x, gate, out=out if direct else None)
    if not direct:
        out.copy_(product)
    if slope is not None:
        # gate + x gate (1 - gate) (2u)'
        square.mul_(3 * third).add_(first).mul_(product)
        value = torch.addcmul(gate, square, 1 - gate, out=slope if direct else None)
        if not direct:
            slope.copy_(value)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form (arXiv 1606.08415), same shape and dtype as ``x``.

    Accelerators take torch's one kernel. On a processor its tanh is the slowest
    elementwise step of a block; the sigmoid form below takes half its time.
    """
    return _GeluTanh.apply(x) if x.device.type == "cpu" else F.gelu(x, approximate="tanh")


class _Dropout(torch.autograd.Function):
    """Keeps one byte an element; torch's own on a processor keeps the whole mask in the dtype of ``x``."""

    @staticmethod
    def forward(ctx, x, rate):
        dropped = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(rate)
        ctx.rate = rate
        ctx.save_for_backward(dropped)
        return x.masked_fill(dropped, 0.0).mul_(1 / (1 - rate))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dropped, = ctx.saved_tensors
        return grad.masked_fill(dropped, 0.0).mul_(1 / (1 - ctx.rate)), None


def dropout(x: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
    """Zero a share ``rate`` of the elements of ``x`` while training and scale the others by 1 / (1 - rate)."""
    if not training or rate == 0:
        return x
    if x.device.type == "cpu" and rate < 1:
        return _Dropout.apply(x, rate)
    return F.dropout(x, rate)
