"""What a causal or prefix language model takes from packed rows of pairs (``packed_dataset``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.config import DataConfig
from megatron.data.packed_dataset import split_entries
from megatron.tokenizer.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class MTFBatch:
    """All of shape [b, s]."""

    tokens: torch.Tensor
    """int64, what the model reads"""
    labels: torch.Tensor
    """int64, the token after each"""
    loss_mask: torch.Tensor
    """float32, weight of each prediction; above 0 only where a token of a target is predicted"""
    position_ids: torch.Tensor
    """int64, from 0 in every pair and in the padding"""
    segment_ids: torch.Tensor
    """int64, number of the pair in its row, from 1; 0 on padding. A token sees none but its own pair.
    With --prefixlm 2 * that number + 1 on inputs, 2 * that number on targets and padding."""


def mtf_batch(rows: torch.Tensor, data: DataConfig, *, pad: int | None = None, eod: int | None = None) -> MTFBatch:
    """Take rows of entries (int64 [b, s + 1]) apart into inputs, labels, weights and positions.

    The loss counts the prediction of targets, their end tokens included, the first one
    from the last input token; not that of inputs, padding or anything across the border
    of two pairs. ``--norm-target-loss`` divides each weight by the number of the target's
    tokens that count in this row, so that every target weighs 1. ``--eod-mask-loss``
    leaves out what is predicted from an ``eod`` (ValueError when that is None).

    ``--prefixlm`` makes the model treat inputs as a prefix. Query i then sees key j when
    both lie in one pair and j <= i or both are inputs; with c = ``segment_ids``::

        (c_i >> 1 == c_j >> 1) & ((j <= i) | (c_i & c_j & 1 == 1))

    Padding reads as ``pad``, as 0 where that is None; no loss depends on it.

    [BUG] In the trainers users come from the loss of end tokens is lost when padding and
    end share an id, and ``--norm-target-loss`` takes a target at the end of a row and one
    at the start of the next for a single one; here segments decide.
    """
    ids, marks = split_entries(rows)
    segments, is_input = marks >> 1, marks & 1
    if pad is not None:
        ids = torch.where(segments == 0, pad, ids)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    own, following = segments[:, :-1], segments[:, 1:]
    counts = (following > 0) & (following == own) & (is_input[:, 1:] == 0)
    if data.eod_mask_loss:
        if eod is None:
            raise ValueError("--eod-mask-loss needs a tokenizer with an end-of-document token; this one has none")
        counts &= tokens != eod
    loss_mask = counts.float()
    if data.norm_target_loss:
        per_segment = torch.zeros(rows.shape[0], rows.shape[1] + 1, device=rows.device)
        per_segment.scatter_add_(1, own, loss_mask)
        loss_mask = loss_mask / per_segment.gather(1, own).clamp(min=1.0)
    places = torch.arange(tokens.shape[1], device=rows.device).expand_as(tokens)
    begins = torch.zeros_like(counts)
    begins[:, 1:] = own[:, 1:] != own[:, :-1]
    positions = places - torch.where(begins, places, 0).cummax(dim=1).values
    visible = marks[:, :-1] if data.prefixlm else own
    return MTFBatch(tokens=tokens, labels=labels, loss_mask=loss_mask, position_ids=positions.contiguous(),
                    segment_ids=visible.contiguous())


def batch_function(data: DataConfig, tokenizer: Tokenizer) -> Callable[[torch.Tensor], tuple[tuple, tuple]]:
    """Function from rows [b, s + 1] to ((tokens, position ids, segment ids), (labels, loss mask)).

    Three inputs mean that segment ids travel along the pipeline: the model must have
    been told so (``ModelConfig.reset_attention_mask``).
    """
    pad, eod = (tokenizer.special(role) if tokenizer.has(role) else None for role in ("pad", "eod"))

    def split(rows: torch.Tensor) -> tuple[tuple, tuple]:
        parts = mtf_batch(rows, data, pad=pad, eod=eod)
        return (parts.tokens, parts.position_ids, parts.segment_ids), (parts.labels, parts.loss_mask)

    return split
