"""Causal self-attention with the heads split over TP."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F

from megatron.config import ModelConfig
from megatron.model.blocked_attention import Visibility, blocked_attention
from megatron.model.mlp import output_std
from megatron.model.positions import PositionCache, rotary_frequencies, rotate
from megatron.mpu.context import ParallelContext
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, split_evenly
from megatron.mpu.random import RandomStreams


class _RotaryBuffer(torch.nn.Module):
    """Holds ``inv_freq`` only because layer files of rotary models carry it.

    Angles are not computed from it: an engine casts buffers to 16 bits, and positions
    of a few thousand times a rounded frequency would be far off.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rotary_frequencies(width))


class SelfAttention(torch.nn.Module):
    """[b, s, h] to [b, s, h]. Features of the fused projection are ordered [head][q,k,v][dim].

    ``layer_number`` counts blocks from 0 and matters to query-key scaling only.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext, streams: RandomStreams,
                 positions: PositionCache, layer_number: int) -> None:
        super().__init__()
        self.config = config
        self.streams = streams
        self.positions = positions
        self.heads = split_evenly(config.num_attention_heads, context)
        self.layer_scale = max(1, layer_number) if config.query_key_layer_scaling else 1
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size, 3 * config.projection_size, std=config.init_method_std,
            config=config, context=context, streams=streams)
        self.dense = RowParallelLinear(config.projection_size, config.hidden_size, std=output_std(config),
                                       config=config, context=context, streams=streams)
        if config.position_embedding_type == "rotary":
            self.rotary_emb = _RotaryBuffer(config.kv_channels)

    def forward(self, x: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
        """``segments``: int64 [b, s]; positions of different segments do not see each other."""
        batch, length, _ = x.shape
        width = self.config.kv_channels
        fused = self.query_key_value(x).view(batch, length, self.heads, 3, width)
        if self.config.position_embedding_type == "rotary":
            cosines, sines = self.positions.rotary(length, x.device, x.dtype)
            query, key, value = fused.unbind(3)
            tables = cosines[:, None], sines[:, None]  # one for all heads of a position
            fused = torch.stack((rotate(query, tables), rotate(key, tables), value), dim=3)

        dropout = self.config.attention_dropout if self.training else 0.0
        # heads differ between TP ranks, so their dropout must come from the private stream
        with self.streams.fork() if dropout > 0 else contextlib.nullcontext():
            if self.config.masked_softmax_fusion and x.device.type == "cpu":
                visibility = Visibility(self.positions.key_bias(length, x.device, x.dtype), segments,
                                        self.config.prefix_lm)
                return self.dense(blocked_attention(fused, visibility, dropout))
            attend = self._fused if self.config.masked_softmax_fusion else self._explicit
            query, key, value = fused.permute(3, 0, 2, 1, 4)  # each [b, heads, s, width]
            mixed = attend(query, key, value, segments, dropout)
        return self.dense(mixed.transpose(1, 2).reshape(batch, length, self.heads * width))

    def _bias(self, query: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
        return self.positions.bias(query.shape[2], segments, query.device, query.dtype)

    def _fused(self, query, key, value, segments, dropout: float) -> torch.Tensor:
        """torch's attention. Query-key scaling cancels out and is not needed for its range:
        the kernels accumulate scores and softmax in fp32."""
        if segments is None and self.positions.plain_causal:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self._bias(query, segments),
                                              dropout_p=dropout)

    def _explicit(self, query, key, value, segments, dropout: float) -> torch.Tensor:
        """The same, step by step. Scores and bias are divided by ``layer_scale`` to stay in
        the range of 16 bits and multiplied back in fp32, before softmax."""
        scale = self.layer_scale
        scores = (query / (math.sqrt(query.shape[-1]) * scale)) @ key.transpose(-1, -2)
        scores = scores + self._bias(query, segments) / scale
        if self.config.query_key_layer_scaling or self.config.attention_softmax_in_fp32:
            scores = scores.float()
        weights = torch.softmax(scores * scale, dim=-1).to(query.dtype)
        return F.dropout(weights, dropout, training=True) @ value if dropout > 0 else weights @ value
