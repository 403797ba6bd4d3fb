"""What a checkpoint says about its run, beside the tensors."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.bitfit import trainable
from megatron.config import ModelConfig
from megatron.enums import PositionEmbeddingType


@dataclass
class Progress:
    """Counters of a run; what a resume must continue exactly."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_train_tokens: int = 0
    consumed_valid_samples: int = 0
    gigaflos_no_embeds: float = 0.0
    skipped_iterations: int = 0


def trained_names(model: torch.nn.Module) -> list[str]:
    """Names of what trains on this rank, in the optimizer's order of mention."""
    return [name for name, _ in trainable(model)]


#: what a stored model must share with the one it is loaded into, and the flag that sets each
ARCHITECTURE_FLAGS = {
    "num_layers": "--num-layers", "hidden_size": "--hidden-size", "num_attention_heads": "--num-attention-heads",
    "kv_channels": "--kv-channels", "ffn_hidden_size": "--ffn-hidden-size",
    "position_embedding_type": "--position-embedding-type", "embed_layernorm": "--embed-layernorm",
    "activation": "--glu-activation, --no-bias-gelu-fusion", "layernorm_epsilon": "--layernorm-epsilon",
    "apply_residual_connection_post_layernorm": "--apply-residual-connection-post-layernorm",
    "vocab_size": "the tokenizer's vocabulary",
}


def architecture(model: ModelConfig) -> dict:
    """The settings of the network that weights depend on; plain values."""
    everything = dataclasses.asdict(model)
    return {name: everything[name] for name in ARCHITECTURE_FLAGS}


def stored_architecture(stored: Mapping) -> dict:
    """The same as a state file tells it: our own record, or the arguments of an older trainer; plain values.

    Settings that it does not tell are left out, and so is the vocabulary's size in a foreign file:
    trainers count differently (see `stored_vocabulary`).
    """
    if "architecture" in stored:
        return dict(stored["architecture"])
    said = stored_arguments(stored)
    told = {name: said[name] for name in ARCHITECTURE_FLAGS
            if name not in ("activation", "vocab_size") and said.get(name) is not None}
    if "position_embedding_type" in told:  # an enum member, or a name
        name = getattr(said["position_embedding_type"], "name", said["position_embedding_type"])
        told["position_embedding_type"] = _POSITION_NAMES.get(name, name)
    if said.get("use_bnb_optimizer"):  # brings the embedding LayerNorm with it
        told["embed_layernorm"] = True
    if said.get("glu_activation"):
        told["activation"] = said["glu_activation"]
    elif "bias_gelu_fusion" in said:
        told["activation"] = "gelu_tanh" if said["bias_gelu_fusion"] or said.get("openai_gelu") else "gelu_erf"
    return told


def position_type(name: str) -> PositionEmbeddingType:
    """``--position-embedding-type`` as BigScience's trainer keeps it: on a load it compares what it reads."""
    return PositionEmbeddingType[name]


def stored_vocabulary(stored: Mapping) -> int | None:
    """True number of token ids, None where the state file does not tell."""
    return (stored.get("architecture", {}).get("vocab_size")
            or (stored.get("checkpoint_info") or {}).get("original_vocab_size"))


def stored_arguments(stored: Mapping) -> dict:
    """The arguments of the run that wrote a state file, by name; {} without any."""
    return vars(stored.get("args") or argparse.Namespace())


#: what later trainers call the kinds of positions
_POSITION_NAMES = {"learned_absolute": "absolute", "rope": "rotary"}
