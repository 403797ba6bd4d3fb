"""What a checkpoint says about its run, beside the tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.bitfit import trainable
from megatron.config import ModelConfig


@dataclass
class Progress:
    """Counters of a run; what a resume must continue exactly."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_train_tokens: int = 0
    consumed_valid_samples: int = 0
    gigaflos_no_embeds: float = 0.0
    skipped_iterations: int = 0


def trained_names(model) -> list[str]:
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
