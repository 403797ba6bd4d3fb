"""Floating-point operations of a training step: as logged, and as really needed.

Needs neither torch nor a model: everything follows from the shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import ModelConfig


def tflops_reported(model: ModelConfig, batch: int, seconds: float, world_size: int) -> float:
    """TFLOP/s per GPU as Megatron-DeepSpeed logs print it, for comparison with old logs.

    F = k c B s L h^2 (1 + s / (6 h) + V / (16 L h)) operations per iteration, from
    arXiv 2104.04473 (equation 3) with k = 24 (32 for a gated MLP) and c = 4 passes with
    activation checkpointing, else 3. ``batch`` is the global batch in samples, ``seconds``
    the time of one iteration. The figure counts a full training step whatever is frozen;
    ``operations_needed`` does not.
    """
    layers, hidden, length = model.num_layers, model.hidden_size, model.seq_length
    factor = 32 if model.gated else 24
    passes = 4 if model.checkpoint_activations else 3
    correction = 1 + length / (6 * hidden) + model.padded_vocab_size / (16 * layers * hidden)
    operations = factor * passes * batch * length * layers * hidden**2 * correction
    return operations / (seconds * world_size * 1e12)


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of matrix products in one iteration, all ranks together."""

    forward: int
    recompute: int
    """the second forward of the blocks under activation checkpointing"""
    activation_gradient: int
    weight_gradient: int

    @property
    def total(self) -> int:
        return self.forward + self.recompute + self.activation_gradient + self.weight_gradient


def linear_weights(model: ModelConfig) -> int:
    """Elements of the four weight matrices of all blocks (12 L h^2 in the usual shape)."""
    hidden, ffn, projection = model.hidden_size, model.ffn_hidden_size, model.projection_size
    first = (2 if model.gated else 1) * ffn
    return model.num_layers * hidden * (4 * projection + first + ffn)


def operations_needed(model: ModelConfig, batch: int, *, bitfit: bool) -> Operations:
    """What an iteration over ``batch`` samples has to compute, frozen weights considered.

    With N weights in the blocks' linear layers and T = batch * s tokens:

    - forward: 2 N T, attention 4 T s p per block (scores and context, p = heads x width,
      the causal half not subtracted), tied output head 2 T h V;
    - recompute: the blocks' forward once more;
    - activation gradients: 2 N T, twice the attention's forward, 2 T h V; needed down to
      the lowest bias, so BitFit pays them all;
    - weight gradients: 2 N T + 2 T h V, nothing under BitFit.

    A compute-bound BitFit step without attention and head thus takes 4 N T of 6 N T, or
    6 N T of 8 N T with checkpointing.
    """
    tokens = batch * model.seq_length
    linear = 2 * linear_weights(model) * tokens
    attention = 4 * tokens * model.seq_length * model.projection_size * model.num_layers
    head = 2 * tokens * model.hidden_size * model.padded_vocab_size
    return Operations(
        forward=linear + attention + head,
        recompute=linear + attention if model.checkpoint_activations else 0,
        activation_gradient=linear + 2 * attention + head,
        weight_gradient=0 if bitfit else linear + head)


def parameters_without_embeddings(model: ModelConfig) -> int:
    """Parameters of the blocks and the final LayerNorm; no embedding table, no embedding LayerNorm."""
    hidden, ffn, projection = model.hidden_size, model.ffn_hidden_size, model.projection_size
    first = (2 if model.gated else 1) * ffn
    biases = 3 * projection + hidden + first + hidden
    layernorms = 4 * hidden
    return linear_weights(model) + model.num_layers * (biases + layernorms) + 2 * hidden


def parameters_without_embeddings_in_billions(model: ModelConfig) -> float:
    """``parameters_without_embeddings`` / 1e9."""
    return parameters_without_embeddings(model) / 1e9


def gigaflos(model: ModelConfig, samples: int) -> float:
    """What ``samples`` add to the gigaflos counter: 6 x tokens x parameters without embeddings / 1e9.

    The x axis of some TensorBoard curves; like them it takes every parameter as trained.
    """
    return 6 * samples * model.seq_length * parameters_without_embeddings_in_billions(model)
