"""Which tensors a model has, where the pipeline cuts it, and what trains; from settings alone.

Needs no torch. Names and layer numbers are those of the layer files; a test compares them,
their shapes and their shares with the network itself.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

from megatron.config import ModelConfig, OptimizerConfig

#: bytes of one element
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
#: shape of each BLOOM model: blocks, hidden size, heads (arXiv 2211.05100, table 3)
PRESETS = {"bloom-560m": (24, 1024, 16), "bloom-1b1": (24, 1536, 16), "bloom-1b7": (24, 2048, 16),
           "bloom-3b": (30, 2560, 32), "bloom-7b1": (30, 4096, 32), "bloom-176b": (70, 14336, 112)}
PRESET_VOCAB, PRESET_PADDED_VOCAB, PRESET_LENGTH = 250_680, 250_880, 2048
EMBEDDING, FIRST_BLOCK = 1, 3

_TERM_OF = {"self_attention.dense.bias": "attention_output", "mlp.dense_h_to_4h.bias": "mlp_intermediate",
            "mlp.dense_4h_to_h.bias": "mlp_output"}
_QKV_BIAS = "self_attention.query_key_value.bias"


@dataclass(frozen=True)
class Tensor:
    """One parameter of the whole model."""

    layer: int
    """pipeline index, as in the names of layer files"""
    name: str
    """inside its layer"""
    shape: tuple[int, ...]
    sharded: bool = False
    """whether TP ranks hold equal shares of it, else each holds all"""
    copy: bool = False
    """the head's copy of the word table, which exists where the last stage is not the first"""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def local(self, tp: int) -> int:
        """Elements on one TP rank."""
        return self.elements // tp if self.sharded else self.elements

    def trained(self, tp: int, optimizer: OptimizerConfig) -> int:
        """Elements of one TP rank's share that train."""
        if not optimizer.bitfit:
            return self.local(tp)
        if self.name.rpartition(".")[2] != "bias":
            return 0
        terms = set(optimizer.bitfit_bias_terms)
        if self.name == _QKV_BIAS:
            return self.local(tp) // 3 * len(terms & {"query", "key", "value"})
        return self.local(tp) if _TERM_OF.get(self.name, "layernorm") in terms else 0


@cache
def tensors(model: ModelConfig) -> tuple[Tensor, ...]:
    """All parameters in pipeline order, the head's copy of the word table last."""
    hidden, ffn, projection, last = model.hidden_size, model.ffn_hidden_size, model.projection_size, model.num_layers + 4
    first = (2 if model.gated else 1) * ffn
    table = (model.padded_vocab_size or model.vocab_size, hidden)
    found = [Tensor(EMBEDDING, "word_embeddings.weight", table, sharded=True)]
    if model.embed_layernorm:
        found += _norm(EMBEDDING, "word_embeddings.norm.", hidden)
    if model.position_embedding_type == "absolute":
        rows = model.max_position_embeddings or model.seq_length
        found.append(Tensor(EMBEDDING, "position_embeddings.weight", (rows, hidden)))
    for layer in range(FIRST_BLOCK, FIRST_BLOCK + model.num_layers):
        found += _norm(layer, "input_layernorm.", hidden)
        found += _linear(layer, "self_attention.query_key_value.", 3 * projection, hidden, bias_sharded=True)
        found += _linear(layer, "self_attention.dense.", hidden, projection)
        found += _norm(layer, "post_attention_layernorm.", hidden)
        found += _linear(layer, "mlp.dense_h_to_4h.", first, hidden, bias_sharded=True)
        found += _linear(layer, "mlp.dense_4h_to_h.", hidden, ffn)
    found += _norm(last, "", hidden)
    found.append(Tensor(last + 1, "word_embeddings.weight", table, sharded=True, copy=True))
    return tuple(found)


def _norm(layer: int, prefix: str, width: int) -> list[Tensor]:
    return [Tensor(layer, f"{prefix}weight", (width,)), Tensor(layer, f"{prefix}bias", (width,))]


def _linear(layer: int, prefix: str, rows: int, columns: int, *, bias_sharded: bool = False) -> list[Tensor]:
    return [Tensor(layer, f"{prefix}weight", (rows, columns), sharded=True),
            Tensor(layer, f"{prefix}bias", (rows,), sharded=bias_sharded)]


def total_parameters(model: ModelConfig) -> int:
    """Elements of the whole model, the tied table once."""
    return sum(tensor.elements for tensor in tensors(model) if not tensor.copy)


def trainable_parameters(model: ModelConfig, optimizer: OptimizerConfig) -> int:
    """Elements that train, the tied table once."""
    return sum(tensor.trained(1, optimizer) for tensor in tensors(model) if not tensor.copy)


# --- the cut into stages ----------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline."""

    index: int
    count: int
    start: int
    """its first pipeline layer"""
    stop: int
    blocks: int
    block: tuple[Tensor, ...]
    """the parameters of one block; all blocks are alike"""
    ends: tuple[Tensor, ...]
    """those of embedding, final LayerNorm and head, as far as they are here"""

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    @property
    def tensors(self) -> tuple[tuple[Tensor, int], ...]:
        """Each kind of parameter with the number of its kind."""
        return tuple((tensor, self.blocks) for tensor in self.block if self.blocks) + tuple(
            (tensor, 1) for tensor in self.ends)


@cache
def stages(model: ModelConfig, pp: int, method: str = "type:transformer") -> tuple[Stage, ...]:
    """The stages that ``--pp-partition-method`` gives. Raises ValueError for fewer layers than stages."""
    bounds = _bounds(_weights(model.num_layers, method), pp)
    behind = FIRST_BLOCK + model.num_layers
    everything, found = tensors(model), []
    block = tuple(tensor for tensor in everything if tensor.layer == FIRST_BLOCK)
    ends = [tensor for tensor in everything if not FIRST_BLOCK <= tensor.layer < behind]
    for index, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        mine = tuple(tensor for tensor in ends if start <= tensor.layer < stop
                     and not (tensor.copy and start <= EMBEDDING))
        blocks = max(0, min(stop, behind) - max(start, FIRST_BLOCK))
        found.append(Stage(index, pp, start, stop, blocks, block, mine))
    return tuple(found)


def _weights(layers: int, method: str) -> tuple[int, ...]:
    """1 for each pipeline layer whose class name the pattern matches, else 0."""
    kinds = ["", "EmbeddingPipe", "enter_blocks", *["ParallelTransformerLayerPipe"] * layers, "leave_blocks",
             "LayerNorm", "EmbeddingHead", "widen_logits"]
    # DeepSpeed matches in lower case and takes what stands between the first two colons
    pattern = method.lower().split(":")[1]
    return tuple(int(bool(re.search(pattern, kind.lower()))) for kind in kinds)


@cache
def _cuts(weights: tuple[int, ...], most: int) -> list[list[int]]:
    """For each number of parts up to ``most`` and each end, where the last part starts; see ``_bounds``."""
    count = len(weights)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # of the best cut of the first n layers into p parts: largest and smallest part
    best: list[tuple[float, float] | None] = [(0, math.inf)] + [None] * count
    cuts = []
    for _ in range(most):
        row: list[tuple[float, float] | None] = [None] * (count + 1)
        cut = [0] * (count + 1)
        for end in range(1, count + 1):
            spread, total = math.inf, sums[end]
            for start in range(end):
                if (before := best[start]) is None:
                    continue
                part = total - sums[start]
                high, low = max(before[0], part), min(before[1], part)
                if high - low <= spread:
                    spread, row[end], cut[end] = high - low, (high, low), start
        best = row
        cuts.append(cut)
    return cuts


def _bounds(weights: tuple[int, ...], parts: int) -> list[int]:
    """First layer of each part, and the end: parts whose weights differ least, of equal cuts the latest.

    The linear partition problem, solved as DeepSpeed 0.19 solves it, so that a plan is
    about the stages a run will have.
    """
    if parts > sum(weights):
        raise ValueError(f"--pipeline-model-parallel-size {parts} is more than the {sum(weights)} layers that "
                         "--pp-partition-method shares out")
    # rows for all parts take long with hundreds of layers; doubling them loses little when all are needed
    cuts, bounds = _cuts(weights, min(sum(weights), 1 << (parts - 1).bit_length())), [len(weights)]
    for part in reversed(range(parts)):
        bounds.append(cuts[part][bounds[-1]])
    return bounds[::-1]


# --- what trains on a rank --------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """Elements on one rank."""

    weights: int
    matrices: int
    """trained ones that decay"""
    vectors: int
    """trained ones that do not: biases, LayerNorms, an anchor"""
    largest: int
    """elements of the largest trained tensor"""

    @property
    def trained(self) -> int:
        return self.matrices + self.vectors

    def padded(self, dp: int) -> tuple[int, ...]:
        """Elements of the optimizer's flat groups, each padded to a multiple of 2 * DP."""
        unit = 2 * dp
        return tuple(-(-size // unit) * unit for size in (self.matrices, self.vectors) if size)


def held(stage: Stage, tp: int, optimizer: OptimizerConfig, tp_rank: int = 0) -> Held:
    """What TP rank ``tp_rank`` of ``stage`` holds, with the anchor that a rank with nothing to train gets."""
    sizes = [(tensor, number, tensor.trained(tp, optimizer)) for tensor, number in stage.tensors]
    sizes = [entry for entry in sizes if entry[2]]
    counted = any((tp_rank == 0 or tensor.sharded) and not tensor.copy for tensor, _, _ in sizes)
    anchor = 0 if counted else 1
    return Held(weights=sum(number * tensor.local(tp) for tensor, number in stage.tensors) + anchor,
                matrices=sum(number * size for tensor, number, size in sizes if len(tensor.shape) > 1),
                vectors=sum(number * size for tensor, number, size in sizes if len(tensor.shape) == 1) + anchor,
                largest=max((size for _, _, size in sizes), default=1))
