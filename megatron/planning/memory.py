"""Memory of one rank: what it holds all the time, and what a step adds at its peak.

The tables BLOCK, EMBEDDING_LAYER and HEAD are the model of what autograd keeps; correct them
there when a layer changes. Not counted: the accelerator's context, buffers of the
communication library, the data loader, and the allocator's fragmentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.config import ModelConfig, Settings
from megatron.planning.shape import WIDTH, Stage, held
from megatron.planning.traffic import micro_batches

#: elements after which DeepSpeed's all-reduce of bf16 runs starts a new buffer
_REDUCTION_BUFFER = 500_000_000
#: bytes of logits whose exponentials the loss forms at a time on an accelerator
_LOSS_ROWS = 2**28


@dataclass(frozen=True)
class Sizes:
    """What the tables count in; widths in elements of one TP rank."""

    t: int
    """tokens of a micro-batch, b x s"""
    s: int
    h: int
    heads: int
    """of one rank"""
    p: int
    """query width of one rank, heads x head width"""
    f: int
    """MLP width of one rank"""
    v: int
    """rows of the vocabulary on one rank"""
    w: int
    """bytes of a parameter and an activation"""
    r: int
    """bytes of an element of the residual stream"""
    full: bool
    """whether weights train"""
    model: ModelConfig


def sizes_of(settings: Settings) -> Sizes:
    model, tp = settings.model, settings.parallel.tensor_model_parallel_size
    width = WIDTH[model.params_dtype]
    return Sizes(t=settings.train.micro_batch_size * model.seq_length, s=model.seq_length, h=model.hidden_size,
                 heads=model.num_attention_heads // tp, p=model.projection_size // tp, f=model.ffn_hidden_size // tp,
                 v=(model.padded_vocab_size or model.vocab_size) // tp, w=width,
                 r=4 if model.fp32_residual_connection else width, full=not settings.optimizer.bitfit, model=model)


@dataclass(frozen=True)
class Term:
    """One tensor, or several alike, that a layer keeps or works with."""

    name: str
    formula: str
    """per rank, in the letters of ``Sizes``; widths per rank have /TP"""
    bytes: Callable[[Sizes], int]
    when: Callable[[Sizes], bool] = lambda z: True


#: kept by one block between forward and backward of one micro-batch
BLOCK: tuple[Term, ...] = (
    Term("inputs of both LayerNorms", "2 r t h", lambda z: 2 * z.r * z.t * z.h),
    Term("mean and scale of both LayerNorms, fp32", "2 * 8 t", lambda z: 16 * z.t),
    Term("outputs of both LayerNorms, for weight gradients", "2 w t h", lambda z: 2 * z.w * z.t * z.h,
         lambda z: z.full),
    Term("query, key, value", "3 w t p/TP", lambda z: 3 * z.w * z.t * z.p),
    Term("attention output", "w t p/TP", lambda z: z.w * z.t * z.p),
    Term("log-sum-exp of the fused attention, fp32", "4 t heads/TP", lambda z: 4 * z.t * z.heads,
         lambda z: z.model.masked_softmax_fusion),
    Term("attention weights of the explicit path, fp32 and as used", "(4 + w) t s heads/TP",
         lambda z: (4 + z.w) * z.t * z.s * z.heads, lambda z: not z.model.masked_softmax_fusion),
    Term("copies of query, key, value of the explicit path", "3 w t p/TP", lambda z: 3 * z.w * z.t * z.p,
         lambda z: not z.model.masked_softmax_fusion),
    Term("dropout mask of the explicit path", "t s heads/TP", lambda z: z.t * z.s * z.heads,
         lambda z: not z.model.masked_softmax_fusion and z.model.attention_dropout > 0),
    Term("input of the activation function, or its slope", "w t f/TP (2 w t f/TP if gated)",
         lambda z: (2 if z.model.gated else 1) * z.w * z.t * z.f),
    Term("activated gate", "w t f/TP", lambda z: z.w * z.t * z.f,
         lambda z: z.model.gated and z.model.activation != "liglu"),
    Term("input of the last linear layer, for its weight gradient", "w t f/TP", lambda z: z.w * z.t * z.f,
         lambda z: z.full),
    Term("two dropout masks", "2 t h", lambda z: 2 * z.t * z.h, lambda z: z.model.hidden_dropout > 0),
)
#: kept by the embedding of the first stage, for one micro-batch
EMBEDDING_LAYER: tuple[Term, ...] = (
    Term("token and position ids, int64, as read and as used", "4 * 8 t", lambda z: 32 * z.t),
    Term("input and statistics of the embedding LayerNorm", "w t h + 8 t", lambda z: z.w * z.t * z.h + 8 * z.t,
         lambda z: z.model.embed_layernorm),
    Term("dropout mask", "t h", lambda z: z.t * z.h, lambda z: z.model.hidden_dropout > 0),
)
#: kept by final LayerNorm, head and loss of the last stage, for one micro-batch
HEAD: tuple[Term, ...] = (
    Term("input and statistics of the final LayerNorm", "r t h + 8 t", lambda z: z.r * z.t * z.h + 8 * z.t),
    Term("its output, for the gradient of the word table", "w t h", lambda z: z.w * z.t * z.h, lambda z: z.full),
    Term("logits", "4 t V/TP (w t V/TP with --fp16-lm-cross-entropy)", lambda z: _logits(z)),
    Term("labels, loss mask, columns, one loss per token", "38 t", lambda z: 38 * z.t),
)


def _logits(z: Sizes) -> int:
    return (z.w if z.model.fp16_lm_cross_entropy else 4) * z.t * z.v


def kept(table: tuple[Term, ...], z: Sizes) -> dict[str, int]:
    """Name -> bytes of the terms of ``table`` that apply."""
    return {term.name: term.bytes(z) for term in table if term.when(z)}


def kept_bytes(table: tuple[Term, ...], z: Sizes) -> int:
    return sum(kept(table, z).values())


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank; ``total`` is its peak."""

    weights: int
    gradients: int
    """of what trains, with the fp32 sums of bf16 runs"""
    optimizer: int
    """fp32 copy and moments of this rank's share over DP"""
    activations: int
    """kept for the micro-batches in flight, stage inputs and outputs included"""
    working: int
    """attention bias, gradients on the way, logits of the loss: while a micro-batch runs"""
    update: int
    """buffers of the gradient reduction and the update, when activations are gone"""
    in_flight: int
    """micro-batches whose activations are kept at once"""

    @property
    def total(self) -> int:
        steady = self.weights + self.gradients + self.optimizer
        return steady + max(self.activations + self.working, self.update)


def rank_memory(settings: Settings, stage: Stage, *, fused_update: bool = True) -> RankMemory:
    """Memory of TP rank 0 of ``stage``, in bytes, at the peak of a step.

    ``fused_update``: whether the optimizer works in place, as its kernels on GPUs do.
    """
    z, model = sizes_of(settings), settings.model
    parallel, optimizer = settings.parallel, settings.optimizer
    tp, dp = parallel.tensor_model_parallel_size, parallel.data_parallel_size
    passes = micro_batches(settings)
    mine = held(stage, tp, optimizer)
    share = sum(size // dp for size in mine.padded(dp))
    moments = 2 if optimizer.optimizer == "adam" else int(optimizer.sgd_momentum > 0)
    # bf16: the gradient autograd writes into, and the fp32 sum it is added to
    gradients = mine.trained * (z.w + 4 if model.params_dtype == "bf16" else z.w)
    in_flight = min(stage.count - stage.index, passes)
    shared = _shared_by_blocks(settings, z) if stage.blocks else 0
    boundary = _boundary(settings, stage, z)
    once, working = _one_micro_batch(settings, stage, z)
    if z.full and passes > 1:
        working += mine.largest * z.w  # a weight's gradient before it is added to the sum
    leftover = _logits(z) if stage.last and passes > 1 else 0  # of the pipeline's other buffer
    return RankMemory(
        weights=mine.weights * z.w, gradients=gradients, optimizer=(1 + moments) * 4 * share,
        activations=in_flight * (once + boundary), in_flight=in_flight,
        working=working + shared + leftover + boundary + _bucket(settings, mine.trained),
        update=_update(settings, mine.padded(dp), mine.trained, gradients, fused_update) + shared + boundary
        + leftover + (_logits(z) if stage.last else 0))


def _one_micro_batch(settings: Settings, stage: Stage, z: Sizes) -> tuple[int, int]:
    """(bytes kept for backward, most bytes worked with beside them) for one micro-batch of ``stage``."""
    model = settings.model
    block = kept_bytes(BLOCK, z)
    moving = z.w * z.t * (2 * z.f * (2 if model.gated else 1) + 3 * z.h)  # gradients inside a block
    if not stage.blocks:
        once = moving = 0
    elif model.checkpoint_activations:
        chunk = min(model.checkpoint_num_layers, stage.blocks)
        once = -(-stage.blocks // chunk) * z.r * z.t * z.h
        moving += chunk * block
    else:
        once = stage.blocks * block
    if stage.first:
        once += kept_bytes(EMBEDDING_LAYER, z)
    if stage.last:
        once += kept_bytes(HEAD, z)
        # the gradient of the logits, the same in 16 bits, and the rows the loss works on at a time
        narrow = z.w * z.t * z.v if _logits(z) > z.w * z.t * z.v else 0
        moving = max(moving, _logits(z) + narrow + min(4 * z.t * z.v, _LOSS_ROWS))
    return once, moving


def _shared_by_blocks(settings: Settings, z: Sizes) -> int:
    """What the blocks of a stage make once and share: the bias added to scores, or rotary tables."""
    model, samples = settings.model, settings.train.micro_batch_size
    tables = 2 * z.s * model.kv_channels * z.w if model.position_embedding_type == "rotary" else 0
    alibi = model.position_embedding_type == "alibi"
    if not alibi and not model.reset_attention_mask and model.masked_softmax_fusion:
        return tables
    rows = (samples if model.reset_attention_mask else 1) * (z.heads if alibi else 1)
    return tables + rows * z.s * z.s * z.w


def _boundary(settings: Settings, stage: Stage, z: Sizes) -> int:
    """What one micro-batch keeps of the hidden states that came in and go out."""
    tp = settings.parallel.tensor_model_parallel_size
    split = tp if tp > 1 and settings.parallel.scatter_gather_tensors_in_pipeline else 1
    hidden = z.r * z.t * z.h
    received = 0 if stage.first or split > 1 else hidden  # pieces: the gathered whole is the block's own input
    return received + (0 if stage.last else hidden // split)


def _bucket(settings: Settings, trained: int) -> int:
    """One buffer of DeepSpeed's ZeRO for the reduction; bf16 runs have none."""
    dtype = settings.model.params_dtype
    return 0 if dtype == "bf16" else WIDTH[dtype] * max(trained, 1024)


def _update(settings: Settings, groups: tuple[int, ...], trained: int, gradients: int, fused: bool) -> int:
    """What reduction and update need beside the gradients; the optimizer runs when the reduction is over."""
    share = sum(groups) // settings.parallel.data_parallel_size
    spare = 0 if fused or settings.optimizer.optimizer != "adam" else 8 * max(groups) // (
        settings.parallel.data_parallel_size)
    if settings.model.params_dtype == "bf16":
        return max(4 * (sum(groups) if groups[0] <= _REDUCTION_BUFFER else max(groups)), spare)
    width = WIDTH[settings.model.params_dtype]
    # two buckets and this rank's share of what they hold; then that share in fp32, as the gradients go
    return max(2 * _bucket(settings, trained) + width * share, (4 + width) * share, 4 * share + spare - gradients)
