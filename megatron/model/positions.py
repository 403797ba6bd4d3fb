"""Positions inside attention: ALiBi slopes, rotary angles, and the additive bias."""

from __future__ import annotations

import math

import torch

from megatron.config import ModelConfig
from megatron.mpu.context import ParallelContext


def alibi_slopes(heads: int) -> torch.Tensor:
    """Slopes of ALiBi (arXiv 2108.12409) for all ``heads``, fp32 [heads].

    With P the largest power of two not above ``heads``: 2^(-8k/P) for k = 1..P, then
    2^(-4m/P) for m = 1, 3, 5, ...
    """
    power = 2 ** int(math.log2(heads))
    exponents = [8 * k / power for k in range(1, power + 1)]
    exponents += [4 * m / power for m in range(1, 2 * (heads - power), 2)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32)


def local_alibi_slopes(heads: int, context: ParallelContext) -> torch.Tensor:
    """This TP rank's contiguous share of the slopes, fp32 [heads / TP]."""
    return alibi_slopes(heads).chunk(context.tp_size)[context.tp_rank]


def rotary_frequencies(width: int, base: float = 10000.0) -> torch.Tensor:
    """RoPE (arXiv 2104.09864): base^(-2i/width) for i = 0 .. width/2 - 1, fp32."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)


def rotary_tables(length: int, width: int, device: torch.device,
                  dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [length, width], angles in fp32, halves repeated."""
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rotary_frequencies(width).to(device)).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn ``x`` [..., width] by its position; dimension i pairs with i + width/2.

    ``tables`` are the cosines and sines, of a shape that broadcasts to that of ``x``.
    """
    cosines, sines = tables
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


def hidden_keys(queries: torch.Tensor, keys: torch.Tensor, first_query: int, prefix_lm: bool) -> torch.Tensor:
    """True where a query must not see a key because of their segments or their order.

    ``queries`` int64 [..., n] and ``keys`` int64 [..., m] are the segment ids of positions
    ``first_query`` .. and 0 .. of one row; result bool [..., n, m]. A query sees the keys of its
    segment that are not later than it. With ``prefix_lm`` ids are marks, 2 * segment + is_input,
    and two inputs of a segment see each other whatever their order.
    """
    places = torch.arange(first_query, first_query + queries.shape[-1], device=queries.device)
    hidden = torch.arange(keys.shape[-1], device=keys.device) > places[:, None]
    queries, keys = queries[..., :, None], keys[..., None, :]
    if prefix_lm:
        hidden = hidden & (queries & keys & 1 == 0)
        queries, keys = queries >> 1, keys >> 1
    return hidden | (queries != keys)


class PositionCache:
    """What all blocks of a stage need once per forward: attention bias and rotary tables.

    One object is handed to every block of a stage. It keeps the last result and builds
    a new one when shape, dtype, device or segments change.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext) -> None:
        self._config = config
        self._slopes = None
        if config.position_embedding_type == "alibi":
            self._slopes = local_alibi_slopes(config.num_attention_heads, context)
        # what the last result was made for, and the result
        self._bias: tuple[tuple, torch.Tensor] | None = None
        self._segments: torch.Tensor | None = None
        self._tables: tuple[tuple, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def plain_causal(self) -> bool:
        """Whether, without segments, attention needs no bias beyond "no later key"."""
        return self._slopes is None

    def bias(self, length: int, segments: torch.Tensor | None, device: torch.device,
             dtype: torch.dtype) -> torch.Tensor:
        """What is added to attention scores: ALiBi where used, -inf at hidden keys.

        Shape [1 or b, 1 or heads / TP, length, length] in ``dtype``. Query i sees key j
        when j <= i and, with ``segments`` (int64 [b, length]), both lie in one segment
        (or, in a prefix language model, when ``hidden_keys`` says so).
        Padding is a segment like any other: its rows carry no loss and no other row sees
        them, and so no row is without a visible key. ALiBi counts row positions; within
        a segment the difference is a constant per query, to which softmax is blind.
        """
        key: tuple = (length, device, dtype)
        # the segments seen last are kept, so an equal address means the same memory
        if segments is not None:
            key += (tuple(segments.shape), segments.data_ptr(), segments._version)
        if self._bias is not None and self._bias[0] == key:
            return self._bias[1]
        if segments is None:
            hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
        else:
            hidden = hidden_keys(segments, segments, 0, self._config.prefix_lm)[:, None]
        per_key = self.key_bias(length, device, dtype)
        if per_key is None:
            bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
        else:
            bias = per_key.to(dtype)[None, :, None, :]
        bias = bias.masked_fill(hidden, -torch.inf)
        self._bias, self._segments = (key, bias), segments
        return bias

    def key_bias(self, length: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
        """ALiBi alone, fp32 [heads / TP, length], the same for every query; None where not used.

        The product slope * j is formed in fp32 and rounded to ``dtype``, as existing
        checkpoints were trained.
        """
        if self._slopes is None:
            return None
        positions = torch.arange(length, dtype=torch.float32, device=device)
        return (self._slopes.to(device)[:, None] * positions).to(dtype).float()

    def rotary(self, length: int, device: torch.device,
               dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary tables [length, kv_channels] for this forward."""
        key = (length, device, dtype)
        if self._tables is None or self._tables[0] != key:
            self._tables = key, rotary_tables(length, self._config.kv_channels, device, dtype)
        return self._tables[1]
