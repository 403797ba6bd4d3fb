"""From token ids to hidden states, and the tied table the last stage needs for logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.config import ModelConfig
from megatron.model.activations import dropout
from megatron.model.norm import LayerNorm
from megatron.mpu.context import ParallelContext
from megatron.mpu.layers import VocabParallelEmbedding, normal_parameter
from megatron.mpu.random import RandomStreams
from megatron.mpu.tags import REPLICATED

#: key under which DeepSpeed ties the table of the first stage to that of the last
TIE = "embed"
#: fixed in the layout, whatever --layernorm-epsilon says
EMBED_NORM_EPSILON = 1e-5


class _WordEmbeddings(VocabParallelEmbedding):
    """The table and, inside it as in existing layer files, the embedding LayerNorm."""

    def __init__(self, config: ModelConfig, context: ParallelContext, streams: RandomStreams) -> None:
        super().__init__(config=config, context=context, streams=streams, tied=TIE)
        self.norm = LayerNorm(config, EMBED_NORM_EPSILON) if config.embed_layernorm else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids)
        return x if self.norm is None else self.norm(x)


class _PositionTable(torch.nn.Module):
    """Learned absolute positions, [max_position_embeddings, h]."""

    def __init__(self, config: ModelConfig, context: ParallelContext, streams: RandomStreams) -> None:
        super().__init__()
        rows = config.max_position_embeddings
        if rows is None or rows < config.seq_length:
            raise ValueError(f"--max-position-embeddings {rows} must be at least --seq-length "
                             f"{config.seq_length} with absolute positions")
        self.weight = normal_parameter((rows, config.hidden_size), config.init_method_std, tag=REPLICATED,
                                       config=config, context=context, streams=streams)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions, self.weight)


class EmbeddingPipe(torch.nn.Module):
    """Words, [embedding LayerNorm], [+ learned positions], dropout.

    Input: (tokens, position ids) or (tokens, position ids, segment ids), each int64
    [b, s]. Output: hidden states [b, s, h], or the pair of them and the segment ids.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext, streams: RandomStreams) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = _WordEmbeddings(config, context, streams)
        self.position_embeddings = None
        if config.position_embedding_type == "absolute":
            self.position_embeddings = _PositionTable(config, context, streams)

    def forward(self, inputs):
        tokens, positions, *segments = inputs
        x = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        if self.config.fp32_residual_connection:
            x = x.float()
        x = dropout(x, self.config.hidden_dropout, self.training)
        return (x, *segments) if segments else x


class EmbeddingHead(torch.nn.Module):
    """The last stage's copy of the word table, and of nothing else of the embedding.

    A copy of the embedding LayerNorm would be trained state without a gradient. Values
    come from the first stage when the pipeline is built or loaded.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext, streams: RandomStreams) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(config=config, context=context, streams=streams,
                                                      tied=TIE, draw=False)
