"""Causal attention on a processor: blocks of queries, each against the keys it may see.

No tensor of length x length exists: a block's scores are made, used and dropped, and made
again in backward (as in FlashAttention, arXiv 2205.14135, with a block of queries against
all its keys at once). Keys after the block are never touched, which halves the arithmetic.
Scores and sums are fp32 whatever the dtype. torch's own kernel for processors computes the
whole square when a bias is given, and its 16-bit backward is many times slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from megatron.model.positions import hidden_keys

#: scores are kept in units of log2(e): torch's exp2 takes half the time of its exp, and a tenth
#: where the result underflows, as it does for the far keys of ALiBi
_LOG2_E = math.log2(math.e)
#: queries per block: large enough for fast products, small enough to waste little above the diagonal
BLOCK = 128


@dataclass(frozen=True)
class Visibility:
    """What is added to a query's scores, and which earlier keys it does not see."""

    key_bias: torch.Tensor | None = None
    """fp32 [heads, s]: added to every score of that key (ALiBi up to a constant per query)"""
    segments: torch.Tensor | None = None
    """int64 [b, s]: a key of another segment is not seen"""
    prefix_lm: bool = False
    """the segments are marks as in ``positions.hidden_keys``: inputs see later inputs of their segment"""

    def last_key(self, stop: int, length: int) -> int:
        """How many keys a block of queries that ends before ``stop`` may see, of ``length``."""
        return length if self.prefix_lm and self.segments is not None else stop

    def scores(self, query: torch.Tensor, key: torch.Tensor, row: int, start: int) -> torch.Tensor:
        """Scores x log2(e) of a block of queries from position ``start`` on, -inf where hidden.

        ``query`` [heads, n, width] of sample ``row``, ``key`` [heads, last_key, width]; fp32.
        """
        keys = key.shape[1]
        scale = _LOG2_E / math.sqrt(query.shape[-1])
        if self.key_bias is None:
            scores = torch.bmm(query * scale, key.transpose(1, 2))
        else:
            # relative to the block's last key, so that near keys are added small, exact numbers
            bias = (self.key_bias[:, :keys] - self.key_bias[:, keys - 1:keys])[:, None]
            scores = torch.baddbmm(bias, query, key.transpose(1, 2), beta=_LOG2_E, alpha=scale)
        if self.segments is None:
            # adding -inf above the diagonal is several times faster than filling by a mask
            block = keys - start
            scores[:, :, start:] += torch.full((block, block), -torch.inf, device=query.device).triu_(1)
        else:
            segments = self.segments[row]
            hidden = hidden_keys(segments[start:start + query.shape[1]], segments[:keys], start, self.prefix_lm)
            scores.masked_fill_(hidden, -torch.inf)
        return scores


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fused, visibility, dropout):
        batch, length, heads, _, width = fused.shape
        out = fused.new_empty(batch, length, heads, width)
        log_totals = torch.empty(batch, heads, length, dtype=torch.float32, device=fused.device)
        dropped = []
        for row in range(batch):
            query, key, value = _per_head(fused[row])
            for start in range(0, length, BLOCK):
                stop = min(start + BLOCK, length)
                last = visibility.last_key(stop, length)
                scores = visibility.scores(query[:, start:stop], key[:, :last], row, start)
                peak = scores.amax(-1, keepdim=True)
                weights = scores.sub_(peak).exp2_()
                total = weights.sum(-1, keepdim=True)
                log_totals[row, :, start:stop] = peak.add_(total.log2()).squeeze(-1)
                if dropout > 0:
                    # one byte a score is kept: drawing the same numbers again needs the generator's state
                    dropped.append(torch.empty_like(weights, dtype=torch.bool).bernoulli_(dropout))
                    weights.masked_fill_(dropped[-1], 0.0)
                    total *= 1 - dropout
                mixed = torch.bmm(weights, value[:, :last]).div_(total)
                out[row, start:stop] = mixed.transpose(0, 1)
        ctx.visibility, ctx.dropout = visibility, dropout
        ctx.save_for_backward(fused, out, log_totals, *dropped)
        return out.view(batch, length, heads * width)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        fused, out, log_totals, *dropped = ctx.saved_tensors
        batch, length, heads, _, width = fused.shape
        scale = 1 / math.sqrt(width)
        grad_fused = torch.empty_like(fused)
        dropped = iter(dropped)
        for row in range(batch):
            query, key, value = _per_head(fused[row])
            grad_out = grad[row].view(length, heads, width).transpose(0, 1).float().contiguous()
            # the part of a softmax gradient that is common to all keys of a query
            common = (grad_out * out[row].transpose(0, 1)).sum(-1, keepdim=True)
            # fp32 gradients are summed where they belong, others beside and rounded at the end
            grads = grad_fused[row].permute(2, 1, 0, 3).zero_()
            if fused.dtype != torch.float32:
                grads = torch.zeros(3, heads, length, width, dtype=torch.float32, device=fused.device)
            grad_query, grad_key, grad_value = grads
            for start in range(0, length, BLOCK):
                stop = min(start + BLOCK, length)
                last = ctx.visibility.last_key(stop, length)
                mine = slice(start, stop)
                weights = ctx.visibility.scores(query[:, mine], key[:, :last], row, start)
                used = weights.sub_(log_totals[row, :, mine, None]).exp2_()
                grad_weights = torch.bmm(grad_out[:, mine], value[:, :last].transpose(1, 2))
                if ctx.dropout > 0:
                    mask, kept = next(dropped), 1 / (1 - ctx.dropout)
                    grad_weights.masked_fill_(mask, 0.0).mul_(kept)
                    used = weights.masked_fill(mask, 0.0).mul_(kept)
                grad_value[:, :last].baddbmm_(used.transpose(1, 2), grad_out[:, mine])
                grad_scores = grad_weights.sub_(common[:, mine]).mul_(weights)
                grad_query[:, mine].baddbmm_(grad_scores, key[:, :last], beta=0, alpha=scale)
                grad_key[:, :last].baddbmm_(grad_scores.transpose(1, 2), query[:, mine], alpha=scale)
            if fused.dtype != torch.float32:
                grad_fused[row] = grads.permute(2, 1, 0, 3)
        return grad_fused, None, None


def _per_head(fused: torch.Tensor) -> torch.Tensor:
    """[s, heads, 3, width] as fp32 [3, heads, s, width]."""
    return fused.permute(2, 1, 0, 3).float()


def blocked_attention(fused: torch.Tensor, visibility: Visibility, dropout: float = 0.0) -> torch.Tensor:
    """softmax(q k^T / sqrt(width) + bias) v over visible keys, with dropout on the weights.

    ``fused`` [b, s, heads, 3, width] holds query, key and value; the result is
    [b, s, heads * width] in its dtype. Kept for backward: ``fused``, the result, one fp32 per
    head and position, and with dropout one byte per visible pair of positions and head.
    """
    return _Attention.apply(fused, visibility, dropout)
