"""Cross entropy over logits whose vocabulary is split over TP."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import ParallelContext


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, *, context: ParallelContext,
                                 vocab_size: int | None = None) -> torch.Tensor:
    """Loss [b, s] in fp32 from ``logits`` [b, s, V / TP] and int64 ``labels`` [b, s].

    Columns with a global id of ``vocab_size`` or more are padding: they never enter the
    denominator and get no gradient. The original trainer lets them in, so that its loss
    depends on how far the vocabulary was padded, hence on the TP degree; what its users
    meant is the loss over the real vocabulary. None means that every column is real.
    A label outside the vocabulary gives an infinite loss, never a silent one.
    """
    return _CrossEntropy.apply(logits, labels, context, vocab_size)


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits and one number per position; exponentials are computed again in backward.

    Both passes go over a few rows at a time and so need no second tensor of the size of
    the logits for intermediate results. Exponentials are powers of two: torch's exp2 is
    the faster function.
    """

    @staticmethod
    def forward(ctx, logits, labels, context, vocab_size):
        width = logits.shape[-1]
        first_id = context.tp_rank * width
        real = width if vocab_size is None else min(max(vocab_size - first_id, 0), width)
        column = labels - first_id
        mine = (column >= 0) & (column < real)
        column = column.masked_fill(~mine, 0)

        target = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).float()
        target = target.masked_fill(~mine, -torch.inf)
        peak = logits[..., :real].amax(-1).float() if real else torch.full_like(target, -torch.inf)
        # one exchange finds the peak and, from its only owner, the target's logit
        peak, target = all_reduce(torch.stack((peak, target)), context, dist.ReduceOp.MAX)
        total = torch.zeros_like(peak)
        for rows, some in _few_rows(logits, real):
            total.view(-1)[rows] = _exp(some, peak.view(-1)[rows]).sum(-1)
        log_total = peak + torch.log(all_reduce(total, context))

        ctx.real = real
        ctx.save_for_backward(logits, log_total, column, mine)
        return log_total - target

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        logits, log_total, column, mine = ctx.saved_tensors
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        grad[..., ctx.real:] = 0.0
        flat = grad.view(-1, grad.shape[-1])
        scale = grad_loss.reshape(-1)
        for rows, some in _few_rows(logits, ctx.real):
            probability = _exp(some, log_total.view(-1)[rows])
            torch.mul(probability, scale[rows, None], out=probability)
            flat[rows, :ctx.real] = probability
        own = torch.where(mine, -grad_loss, 0.0).to(grad.dtype)
        grad.scatter_add_(-1, column.unsqueeze(-1), own.unsqueeze(-1))
        return grad, None, None, None


def _few_rows(logits: torch.Tensor, real: int):
    """Slices of positions, and the real columns of these rows [n, real] of ``logits`` [..., V / TP]."""
    flat = logits.reshape(-1, logits.shape[-1])
    # what stays in a processor's cache; enough to keep an accelerator busy
    limit = 1 << (20 if logits.device.type == "cpu" else 28)
    count = max(1, limit // (4 * max(real, 1)))
    for start in range(0, flat.shape[0], count):
        rows = slice(start, start + count)
        yield rows, flat[rows, :real]


def _exp(some: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """exp(some - shift) in fp32, [n, m] with [n]."""
    # the difference first: scaled logits of a thousand would lose the digits that matter
    return torch.sub(some.float(), shift[:, None]).mul_(math.log2(math.e)).exp2_()
