"""Where each parameter lives in Hugging Face's BLOOM and GPT-2, and how it is laid out there.

Tensors here are whole (all TP shares merged) and named by pipeline index and local
name. ``to_hugging_face`` and ``from_hugging_face`` are each other's inverse, but for
padding rows of the vocabulary that a caller chose to drop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.config import ModelConfig
from megatron.model.numbering import EMBEDDING_INDEX, FIRST_BLOCK, final_norm_index

#: ways a tensor may differ: not at all; transposed; fused QKV regrouped from
#: [head][q,k,v][dim] to [q,k,v][head][dim] (and transposed if a matrix); padded rows
SAME, TRANSPOSED, GROUPED, VOCABULARY = "same", "transposed", "grouped", "vocabulary"


@dataclass(frozen=True, kw_only=True)
class NamePair:
    """One parameter: pipeline index and local name here, full name there."""

    index: int
    name: str
    hf_name: str
    layout: str = SAME


def bloom_names(config: ModelConfig) -> list[NamePair]:
    """All parameters of a BLOOM-layout model as ``BloomForCausalLM`` calls them.

    ``lm_head.weight`` is tied to the word embedding there and is not listed. Raises
    ValueError when BLOOM cannot express the model.
    """
    _require(config, "BLOOM", position_embedding_type="alibi", embed_layernorm=True, activation="gelu_tanh")
    pairs = [_pair(EMBEDDING_INDEX, "word_embeddings.weight", "transformer.word_embeddings.weight", VOCABULARY)]
    pairs += [_pair(EMBEDDING_INDEX, f"word_embeddings.norm.{kind}",
                    f"transformer.word_embeddings_layernorm.{kind}") for kind in ("weight", "bias")]
    for block in range(config.num_layers):
        pairs += [_pair(FIRST_BLOCK + block, f"{module}.{kind}", f"transformer.h.{block}.{module}.{kind}")
                  for module in _BLOCK_MODULES for kind in ("weight", "bias")]
    return pairs + _final_norm(config)


def gpt2_names(config: ModelConfig) -> list[NamePair]:
    """All parameters as ``GPT2LMHeadModel`` calls them (``Conv1D`` weights are transposed there)."""
    _require(config, "GPT-2", position_embedding_type="absolute", embed_layernorm=False,
             activation="gelu_tanh", apply_residual_connection_post_layernorm=False)
    pairs = [_pair(EMBEDDING_INDEX, "word_embeddings.weight", "transformer.wte.weight", VOCABULARY),
             _pair(EMBEDDING_INDEX, "position_embeddings.weight", "transformer.wpe.weight")]
    for block in range(config.num_layers):
        for module, theirs in _BLOCK_MODULES.items():
            there = f"transformer.h.{block}.{theirs}"
            fused, norm = module.endswith("query_key_value"), module.endswith("layernorm")
            weight_layout = SAME if norm else GROUPED if fused else TRANSPOSED
            pairs.append(_pair(FIRST_BLOCK + block, f"{module}.weight", f"{there}.weight", weight_layout))
            pairs.append(_pair(FIRST_BLOCK + block, f"{module}.bias", f"{there}.bias",
                               GROUPED if fused else SAME))
    return pairs + _final_norm(config)


#: module in a block -> its name in GPT-2; BLOOM uses ours
_BLOCK_MODULES = {
    "input_layernorm": "ln_1",
    "self_attention.query_key_value": "attn.c_attn",
    "self_attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}


def to_hugging_face(pair: NamePair, tensor: torch.Tensor, config: ModelConfig, *,
                    keep_padding: bool = False) -> torch.Tensor:
    """The whole ``tensor`` in Hugging Face's layout.

    Padding rows of the vocabulary are dropped unless ``keep_padding`` (BLOOM's public
    checkpoints keep them).
    """
    if pair.layout == VOCABULARY and not keep_padding and config.vocab_size:
        return tensor[:config.vocab_size]
    if pair.layout == GROUPED:
        tensor = _regroup(tensor, (config.num_attention_heads, 3, config.kv_channels))
    if pair.layout in (TRANSPOSED, GROUPED) and tensor.dim() == 2:
        tensor = tensor.t().contiguous()
    return tensor


def from_hugging_face(pair: NamePair, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The whole ``tensor`` in our layout; zero rows are added up to the padded vocabulary."""
    if pair.layout == VOCABULARY:
        rows = config.padded_vocab_size or tensor.shape[0]
        if tensor.shape[0] > rows:
            raise ValueError(f"{pair.hf_name} has {tensor.shape[0]} rows, the padded vocabulary {rows}")
        return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])
    if pair.layout in (TRANSPOSED, GROUPED) and tensor.dim() == 2:
        tensor = tensor.t().contiguous()
    if pair.layout == GROUPED:
        tensor = _regroup(tensor, (3, config.num_attention_heads, config.kv_channels))
    return tensor


def _regroup(tensor: torch.Tensor, grouping: tuple[int, int, int]) -> torch.Tensor:
    """Swap the outer two of three groups that the first dimension consists of."""
    return tensor.unflatten(0, grouping).transpose(0, 1).flatten(0, 2).contiguous()


def _final_norm(config: ModelConfig) -> list[NamePair]:
    return [_pair(final_norm_index(config), kind, f"transformer.ln_f.{kind}") for kind in ("weight", "bias")]


def _pair(index: int, name: str, hf_name: str, layout: str = SAME) -> NamePair:
    return NamePair(index=index, name=name, hf_name=hf_name, layout=layout)


def _require(config: ModelConfig, architecture: str, **wanted) -> None:
    wanted.update(kv_channels=config.hidden_size // config.num_attention_heads)
    if architecture == "BLOOM":
        wanted.update(ffn_hidden_size=4 * config.hidden_size)
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise ValueError(f"Hugging Face's {architecture} needs {field} = {value}, the model has "
                             f"{getattr(config, field)}")
