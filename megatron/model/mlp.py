"""The two-layer perceptron of a block, plain or gated."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron.config import ModelConfig
from megatron.model.activations import gelu_tanh
from megatron.mpu.context import ParallelContext
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.random import RandomStreams

PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu_tanh": gelu_tanh, "gelu_erf": F.gelu}
#: what the gate goes through in the variants of arXiv 2002.05202
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "liglu": lambda gate: gate, "geglu": F.gelu, "reglu": F.relu, "swiglu": F.silu}


def output_std(config: ModelConfig) -> float:
    """Standard deviation for projections that add to the residual: std / sqrt(2 L)."""
    return config.init_method_std / math.sqrt(2 * config.num_layers)


class MLP(torch.nn.Module):
    """[b, s, h] to [b, s, h]; ``x1 * act(x2)`` of the two halves where gated."""

    def __init__(self, config: ModelConfig, context: ParallelContext, streams: RandomStreams) -> None:
        super().__init__()
        if config.activation not in (*PLAIN, *GATES):
            raise ValueError(f"activation {config.activation!r} is not one of {', '.join((*PLAIN, *GATES))}")
        self.activation = config.activation
        halves = 2 if config.gated else 1
        self.dense_h_to_4h = ColumnParallelLinear(
            config.hidden_size, halves * config.ffn_hidden_size, std=config.init_method_std, blocks=halves,
            config=config, context=context, streams=streams)
        self.dense_4h_to_h = RowParallelLinear(config.ffn_hidden_size, config.hidden_size, std=output_std(config),
                                               config=config, context=context, streams=streams)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dense_h_to_4h(x)
        if self.activation in GATES:
            value, gate = y.chunk(2, dim=-1)
            y = value * GATES[self.activation](gate)
        else:
            y = PLAIN[self.activation](y)
        return self.dense_4h_to_h(y)
