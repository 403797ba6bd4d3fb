"""Parameter tags by name, for tools that read files and build no model."""

from __future__ import annotations

import torch

from megatron.bitfit import freeze, trainable
from megatron.config import ModelConfig
from megatron.model.numbering import EMBEDDING_INDEX, FIRST_BLOCK, final_norm_index
from megatron.model.pipe import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams
from megatron.mpu.tags import ParamTag, tag_of


def layer_tags(gated: bool, learned_positions: bool, embed_layernorm: bool) -> dict[str, dict[str, ParamTag]]:
    """Tag of every parameter by the kind of its layer and its name in a layer file.

    Kinds are "embedding", "block" and "final" (the LayerNorm behind the blocks). Taken from a model
    of one tiny layer, so that tags are said once: where the model is built. ``gated`` means an MLP
    whose first projection has two halves.
    """
    return {kind: {name: tag_of(param) for name, param in layer.named_parameters()}
            for kind, layer in _tiny_layers(gated, learned_positions, embed_layernorm).items()}


def trained_names(gated: bool, learned_positions: bool, embed_layernorm: bool,
                  terms: tuple[str, ...]) -> dict[str, list[str]]:
    """Names of what ``--bitfit`` with these bias terms trains in each kind of layer, as `layer_tags` calls them.

    Slices of a fused bias are vectors of their own: ``self_attention.query_key_value.query.bias``.
    """
    layers = _tiny_layers(gated, learned_positions, embed_layernorm)
    freeze(torch.nn.ModuleDict(layers), terms)
    return {kind: [name for name, _ in trainable(layer)] for kind, layer in layers.items()}


def _tiny_layers(gated: bool, learned_positions: bool, embed_layernorm: bool) -> dict[str, torch.nn.Module]:
    config = ModelConfig(num_layers=1, hidden_size=2, num_attention_heads=1, seq_length=1, vocab_size=1,
                         padded_vocab_size=1, max_position_embeddings=1, embed_layernorm=embed_layernorm,
                         position_embedding_type="absolute" if learned_positions else "alibi",
                         activation="geglu" if gated else "gelu_tanh", use_cpu_initialization=True)
    with torch.random.fork_rng(devices=[]):
        model = GPTModel(config, ParallelContext(), RandomStreams(1))
    indices = {"embedding": EMBEDDING_INDEX, "block": FIRST_BLOCK, "final": final_norm_index(config)}
    return {kind: model.layers[str(index)] for kind, index in indices.items()}


def layer_kind(index: int, num_layers: int) -> str:
    """The kind of pipeline layer ``index`` in a model of ``num_layers`` blocks."""
    if index == EMBEDDING_INDEX:
        return "embedding"
    return "block" if index < FIRST_BLOCK + num_layers else "final"


def layer_order(num_layers: int) -> list[int]:
    """Pipeline indices of all layers with parameters: embedding, blocks, final LayerNorm."""
    return [EMBEDDING_INDEX, *range(FIRST_BLOCK, FIRST_BLOCK + num_layers), num_layers + 4]
