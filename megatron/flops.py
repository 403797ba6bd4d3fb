"""Floating-point operations of a training step: as logged, and as really needed.

Needs neither torch nor a model: everything follows from the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config import BIAS_TERMS, ModelConfig


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
    """the second forward of the blocks under activation checkpointing, as far as it goes"""
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


def operations_needed(model: ModelConfig, batch: int, *, bitfit: bool,
                      bias_terms: tuple[str, ...] = BIAS_TERMS,
                      blocks_per_stage: Sequence[int] | None = None) -> Operations:
    """What an iteration over ``batch`` samples has to compute, frozen weights considered.

    With N weights in the blocks' linear layers, T = batch * s tokens and p = heads x width:

    - forward: 2 N T, attention 4 T s p per block (scores and context; the causal half not
      subtracted), tied output head 2 T h V;
    - activation gradients: as much, the attention twice; only down to the lowest bias of
      ``bias_terms``, so in block 0 less may do, and nothing in the embedding;
    - weight gradients: 2 N T + 2 T h V, nothing under BitFit;
    - recompute: the blocks' forward once more, up to the last thing kept for backward.
      With frozen weights the last linear layer of each chunk of ``checkpoint_num_layers``
      blocks comes after that, unless dropout follows it. Chunks end with a stage:
      ``blocks_per_stage``, by default one stage.

    Not counted, for it is the kernels' choice: fused attention forms the scores again in
    backward (2 T s p per block), and some skips keys that no query of a block sees. A
    compute-bound BitFit step without attention and head takes 4 N T of 6 N T, or 6 N T of
    8 N T with checkpointing, less 2 T h f per chunk (f the MLP's width) without dropout.
    """
    stages = [model.num_layers] if blocks_per_stage is None else list(blocks_per_stage)
    if sum(stages) != model.num_layers:
        raise ValueError(f"blocks_per_stage {stages} do not add up to num_layers {model.num_layers}")
    trains = set(bias_terms) if bitfit else {"weights", *BIAS_TERMS}
    tokens = batch * model.seq_length
    head = 2 * tokens * model.hidden_size * model.padded_vocab_size
    # does the input of the next block need a gradient?
    needed = not bitfit or (model.embed_layernorm and "layernorm" in trains)
    forward = recompute = activation_gradient = weight_gradient = 0
    for stage, blocks in enumerate(stages):
        needed = needed or stage > 0  # DeepSpeed asks for the gradient of all that a stage receives
        chunk = max(1, model.checkpoint_num_layers)
        for first in range(0, blocks, chunk):
            walks = []
            for _ in range(min(chunk, blocks - first)):
                walks.append(_walk_block(model, tokens, trains, needed))
                needed = walks[-1].output_needs_gradient
            forward += sum(walk.forward for walk in walks)
            activation_gradient += sum(walk.activation_gradient for walk in walks)
            weight_gradient += sum(walk.forward - walk.attention for walk in walks) if "weights" in trains else 0
            # later blocks of a chunk keep something whenever the first does
            recompute += sum(walk.forward for walk in walks[:-1]) * bool(walks[-1].kept) + walks[-1].kept
    return Operations(
        forward=forward + head,
        recompute=recompute if model.checkpoint_activations else 0,
        activation_gradient=activation_gradient + (head if needed or "layernorm" in trains else 0),
        weight_gradient=weight_gradient + (head if "weights" in trains else 0))


@dataclass(frozen=True)
class _BlockWalk:
    """One block followed from its input to its output, as autograd follows it."""

    forward: int
    attention: int
    """the part of ``forward`` that multiplies activations only"""
    activation_gradient: int
    kept: int
    """forward operations before the last tensor that is kept for backward"""
    output_needs_gradient: bool


def _walk_block(model: ModelConfig, tokens: int, trains: set[str], needed: bool) -> _BlockWalk:
    """``needed``: whether the block's input needs a gradient."""
    hidden, ffn, projection = model.hidden_size, model.ffn_hidden_size, model.projection_size
    attention = 4 * tokens * model.seq_length * projection
    weights, norm = "weights" in trains, "layernorm" in trains
    forward = backward = kept = 0

    def keep(condition: bool) -> None:
        nonlocal kept
        kept = forward if condition else kept

    def linear(inputs: int, outputs: int, needed: bool, *terms: str) -> bool:
        """Count one product; returns whether its result needs a gradient."""
        nonlocal forward, backward
        forward += 2 * tokens * inputs * outputs
        keep(weights)  # the input; torch asks for it when the product is done
        backward += 2 * tokens * inputs * outputs * needed
        return needed or weights or not trains.isdisjoint(terms)

    keep(needed or norm)
    mixed = linear(hidden, 3 * projection, needed or norm, "query", "key", "value")
    forward += attention
    keep(mixed)
    backward += 2 * attention * mixed
    update = linear(projection, hidden, mixed, "attention_output")
    keep(model.hidden_dropout > 0 and update)
    needed = needed or update
    keep(needed or norm)
    inner = linear(hidden, (2 if model.gated else 1) * ffn, needed or norm, "mlp_intermediate")
    keep(inner)
    update = linear(ffn, hidden, inner, "mlp_output")
    keep(model.hidden_dropout > 0 and update)
    return _BlockWalk(forward, attention, backward, kept, needed or update)


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
