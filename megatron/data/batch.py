"""What a causal language model takes from rows of running text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.config import DataConfig


@dataclass(frozen=True, kw_only=True)
class GPTBatch:
    """All of shape [b, s]."""

    tokens: torch.Tensor
    """int64, what the model reads"""
    labels: torch.Tensor
    """int64, the token after each"""
    loss_mask: torch.Tensor
    """float32, 1 where the prediction counts"""
    position_ids: torch.Tensor
    """int64"""
    segment_ids: torch.Tensor | None
    """int64, number of the document within the row, from 0; a token sees only its own. None: one document"""


def gpt_batch(text: torch.Tensor, data: DataConfig, eod: int | None) -> GPTBatch:
    """Split rows ``text`` (int64 [b, s + 1]) into inputs, labels, mask and positions.

    A document ends with its ``eod`` token, which still belongs to it: the token
    after it has position 0 (``--reset-position-ids``) and the next segment
    (``--reset-attention-mask``). ``--eod-mask-loss`` leaves out what is predicted
    from an ``eod``. ValueError when one of these is set and ``eod`` is None.

    [BUG] The pipelines users come from drop the segments, so that
    ``--reset-attention-mask`` changes nothing there; here it works.
    """
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device=text.device).expand_as(tokens)
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=text.device)
    segments = None
    if data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask:
        if eod is None:
            raise ValueError("--eod-mask-loss, --reset-position-ids and --reset-attention-mask need a "
                             "tokenizer with an end-of-document token; this one has none")
        ends = tokens == eod
        # true where the token before is an eod, that is, where a document begins within the row
        begins = torch.zeros_like(ends)
        begins[:, 1:] = ends[:, :-1]
        if data.eod_mask_loss:
            loss_mask[ends] = 0.0
        if data.reset_position_ids:
            positions = positions - torch.where(begins, positions, 0).cummax(dim=1).values
        if data.reset_attention_mask:
            segments = begins.cumsum(dim=1)
    return GPTBatch(tokens=tokens, labels=labels, loss_mask=loss_mask,
                    position_ids=positions.contiguous(), segment_ids=segments)
