"""Tensor-parallel linear layers and embedding (Megatron-LM, arXiv 1909.08053, section 3).

All matrix products go through ``megatron.mpu.linear``: a frozen weight costs no weight
gradient and keeps no input, while the bias and the input still get their gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator

from megatron.config import ModelConfig
from megatron.mpu.collectives import reduce_from_tp
from megatron.mpu.context import ParallelContext
from megatron.mpu.linear import linear
from megatron.mpu.random import RandomStreams
from megatron.mpu.tags import REPLICATED, ParamTag, shard, tag_parameter

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(config: ModelConfig) -> torch.dtype:
    """The torch dtype of the parameters."""
    return TORCH_DTYPES[config.params_dtype]


def constant_parameter(shape: tuple[int, ...], value: float, *, tag: ParamTag,
                       config: ModelConfig) -> torch.nn.Parameter:
    """A tagged parameter of local ``shape`` filled with ``value``, on the current device."""
    data = torch.full(shape, value, dtype=torch_dtype(config), device=get_accelerator().current_device_name())
    return tag_parameter(torch.nn.Parameter(data), tag)


def normal_parameter(shape: tuple[int, ...], std: float, *, tag: ParamTag, config: ModelConfig,
                     context: ParallelContext, streams: RandomStreams,
                     drawn_rows: int | None = None) -> torch.nn.Parameter:
    """A tagged parameter, this rank's share of a N(0, std^2) tensor of full ``shape``.

    Each tensor is drawn in fp32 and cast at once, so that a 16-bit model never exists
    in fp32 as a whole. With ``use_cpu_initialization`` the full tensor is drawn on the
    CPU from the default generator: equal weights at any TP degree. Otherwise a sharded
    tensor is drawn on the device from the model-parallel stream. Full rows from
    ``drawn_rows`` on are zero and draw nothing on the CPU (padding of the vocabulary).
    """
    device = get_accelerator().current_device_name()
    rows = shape[0] if drawn_rows is None else drawn_rows
    if config.use_cpu_initialization:
        full = torch.zeros(shape)
        full[:rows].normal_(0.0, std)
        data = shard(full, tag, context.tp_rank, context.tp_size)
    else:
        local = list(shape)
        if tag.dim is not None:
            local[tag.dim] = split_evenly(shape[tag.dim], context, tag.blocks)
        data = torch.empty(local, device=device)
        if tag.dim is None:
            data.normal_(0.0, std)
        else:
            with streams.fork():
                data.normal_(0.0, std)
        if tag.dim == 0 and tag.blocks == 1:
            data[max(0, rows - context.tp_rank * local[0]):] = 0.0
    data = data.to(device=device, dtype=torch_dtype(config))
    return tag_parameter(torch.nn.Parameter(data), tag)


def split_evenly(size: int, context: ParallelContext, blocks: int = 1) -> int:
    """``size / tp_size``. Raises ValueError when each of the ``blocks`` does not divide."""
    if size % (context.tp_size * blocks):
        raise ValueError(f"width {size} does not split into {blocks} x {context.tp_size} equal shares; "
                         "--tensor-model-parallel-size must divide it")
    return size // context.tp_size


class ColumnParallelLinear(torch.nn.Module):
    """``x W^T + b`` with the outputs split over TP.

    Input [..., in_features], equal on all TP ranks; output [..., out_features / TP].
    ``blocks`` equal parts of the outputs are each split on their own (2 for a GLU).
    """

    slice_heads: int
    """heads on this rank where slices of the bias train alone (``megatron.partial_bias``); 0 elsewhere"""
    merged_bias: Callable[[ColumnParallelLinear], torch.Tensor] | None
    """what puts such a bias together; None where ``bias`` is the bias"""

    def __init__(self, in_features: int, out_features: int, *, config: ModelConfig, context: ParallelContext,
                 streams: RandomStreams, std: float, bias: bool = True, blocks: int = 1) -> None:
        super().__init__()
        self.context = context
        self.slice_heads, self.merged_bias = 0, None
        tag = ParamTag(dim=0, blocks=blocks)
        local = split_evenly(out_features, context, blocks)
        self.weight = normal_parameter((out_features, in_features), std, tag=tag, config=config,
                                       context=context, streams=streams)
        self.bias = constant_parameter((local,), 0.0, tag=tag, config=config) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.merged_bias is None else self.merged_bias(self)
        return linear(x, self.weight, bias, self.context, sum_input_gradients=True)


class RowParallelLinear(torch.nn.Module):
    """``x W^T + b`` with the inputs split over TP.

    Input [..., in_features / TP]; output [..., out_features], equal on all TP ranks.
    The replicated bias is added once, after the sum over ranks.
    """

    def __init__(self, in_features: int, out_features: int, *, config: ModelConfig, context: ParallelContext,
                 streams: RandomStreams, std: float, bias: bool = True) -> None:
        super().__init__()
        self.context = context
        split_evenly(in_features, context)
        self.weight = normal_parameter((out_features, in_features), std, tag=ParamTag(dim=1), config=config,
                                       context=context, streams=streams)
        self.bias = constant_parameter((out_features,), 0.0, tag=REPLICATED, config=config) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, self.context, sum_outputs=True)


class VocabParallelEmbedding(torch.nn.Module):
    """A lookup table whose rows are split over TP.

    Input int64 ids of any shape; output [..., hidden_size], equal on all TP ranks.
    The table has ``config.padded_vocab_size`` rows over all ranks (``vocab_size`` where
    no padding was chosen). ``draw=False`` leaves it zero, for a tied copy whose values
    come from the first stage. An id outside the table gives a zero row: the dataset
    refuses such ids when it is opened.
    """

    def __init__(self, *, config: ModelConfig, context: ParallelContext, streams: RandomStreams,
                 tied: str | None = None, draw: bool = True) -> None:
        super().__init__()
        self.context = context
        rows = config.padded_vocab_size or config.vocab_size
        if not rows:
            raise ValueError("vocab_size and padded_vocab_size are 0: read the tokenizer before "
                             "building the model")
        local = split_evenly(rows, context)
        self.first_id = context.tp_rank * local
        tag = ParamTag(dim=0, tied=tied)
        if draw:
            self.weight = normal_parameter((rows, config.hidden_size), config.init_method_std, tag=tag,
                                           config=config, context=context, streams=streams,
                                           drawn_rows=config.vocab_size or rows)
        else:
            self.weight = constant_parameter((local, config.hidden_size), 0.0, tag=tag, config=config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.context.tp_size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.first_id
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from_tp(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.context)


def parallel_logits(x: torch.Tensor, table: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """This rank's columns of ``x E^T``: [..., hidden] with [V / TP, hidden] to [..., V / TP]."""
    return linear(x, table, None, context, sum_input_gradients=True)
