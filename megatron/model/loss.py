"""The loss of a micro-batch, and what it is divided by.

    micro-batch      sum(loss * weight) / sum(weight) of the micro-batch; micro-batches and
                     data-parallel ranks are then averaged, each counting alike
    global-tokens    the same sums over the whole global batch
    global-targets   that, where the weights of each target's tokens add up to 1

The global forms give one gradient however rows fall into micro-batches, data-parallel
ranks or the pipeline's schedule; the first does not when targets differ in length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.config import ModelConfig
from megatron.mpu.context import ParallelContext
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy


class GlobalWeight:
    """The mean weight of a micro-batch over the global batch in hand, on ranks of the last stage."""

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self.per_micro_batch: torch.Tensor | None = None
        """fp32 scalar: weights of the global batch / its micro-batches over all replicas"""

    def set(self, masks: Sequence[torch.Tensor]) -> None:
        """Collective over DP, on the last stage: the masks [b, s] of this replica's micro-batches."""
        total = torch.stack([mask.sum(dtype=torch.float32) for mask in masks]).sum()
        if self._context.dp_size > 1:
            dist.all_reduce(total, group=self._context.dp_group)
        self.per_micro_batch = total / (len(masks) * self._context.dp_size)

    @property
    def of_micro_batch(self) -> torch.Tensor:
        """``per_micro_batch``; the loop sets it before the first micro-batch of each global batch."""
        assert self.per_micro_batch is not None, "a loss was asked for before its global batch was weighed"
        return self.per_micro_batch


def loss_function(config: ModelConfig, context: ParallelContext, weight: GlobalWeight | None = None
                  ) -> Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """The loss of one micro-batch, called with logits [b, s, V / TP] and (labels, loss mask), each [b, s].

    sum(loss * mask) / sum(mask), or over ``weight.per_micro_batch`` where a ``weight`` is given:
    the mean over micro-batches and replicas, which the engine takes, then is the sum over the
    global batch divided by its weights. The mask, float, may hold any weights >= 0. Without any
    weight the loss is 0, never NaN: there is nothing to learn from.
    """
    vocab_size = config.vocab_size or None

    def loss(logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        targets, mask = labels
        losses = vocab_parallel_cross_entropy(logits, targets, context=context, vocab_size=vocab_size)
        weights = mask.float()
        # a target outside the vocabulary has infinite loss; where masked out it must not count
        total = torch.where(weights != 0, losses * weights, 0.0).sum()
        divisor = weights.sum() if weight is None else weight.of_micro_batch
        return total / divisor.clamp(min=torch.finfo(torch.float32).tiny)

    return loss
