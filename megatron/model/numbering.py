"""Numbers of pipeline layers, and names that know no pipeline. Imports nothing heavy."""

from __future__ import annotations

from megatron.config import ModelConfig

#: pipeline index of the embedding, of block 0, and how far behind the blocks the final LayerNorm is
EMBEDDING_INDEX, FIRST_BLOCK, FINAL_NORM = 1, 3, 4


def final_norm_index(config: ModelConfig) -> int:
    """Pipeline index, and layer file number, of the final LayerNorm."""
    return config.num_layers + FINAL_NORM


def canonical_name(index: int, name: str, num_layers: int) -> str:
    """``embedding.<name>``, ``layers.<block>.<name>`` or ``final_layernorm.<name>`` of pipeline layer ``index``."""
    if index == EMBEDDING_INDEX:
        return f"embedding.{name}"
    return f"final_layernorm.{name}" if index == num_layers + FINAL_NORM else f"layers.{index - FIRST_BLOCK}.{name}"
