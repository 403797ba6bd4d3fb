"""One transformer block, as a stage of the pipeline."""

from __future__ import annotations

import torch

from megatron.config import ModelConfig
from megatron.model.activations import dropout
from megatron.model.attention import SelfAttention
from megatron.model.mlp import MLP
from megatron.model.norm import LayerNorm
from megatron.model.positions import PositionCache
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams


class ParallelTransformerLayerPipe(torch.nn.Module):
    """Pre-LayerNorm block: attention, then MLP, each with dropout and a residual.

    Input and output: hidden states [b, s, h], or the pair of them and segment ids
    (int64 [b, s]). The class name is what ``--pp-partition-method type:transformer``
    counts, so nothing else in the pipeline may carry that word.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext, streams: RandomStreams,
                 positions: PositionCache, layer_number: int) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = LayerNorm(config)
        self.self_attention = SelfAttention(config, context, streams, positions, layer_number)
        self.post_attention_layernorm = LayerNorm(config)
        self.mlp = MLP(config, context, streams)

    def forward(self, inputs):
        x, segments = inputs if isinstance(inputs, tuple) else (inputs, None)
        normed = self.input_layernorm(x)
        x = self._add(x, normed, self.self_attention(normed, segments))
        normed = self.post_attention_layernorm(x)
        x = self._add(x, normed, self.mlp(normed))
        return x if segments is None else (x, segments)

    def _add(self, x: torch.Tensor, normed: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Residual sum; with --fp32-residual-connection the stream stays fp32."""
        residual = normed if self.config.apply_residual_connection_post_layernorm else x
        if self.config.fp32_residual_connection:
            residual = residual.float()
        return residual + dropout(update, self.config.hidden_dropout, self.training)
