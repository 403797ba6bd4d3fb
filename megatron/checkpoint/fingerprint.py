"""Fingerprints of whole tensors that shards compute by themselves.

The fingerprint of a matrix is ``sum(row[i] * column[j] * mix(bits[i, j]))`` modulo 2**64,
with odd weights per row and per column that follow from their positions in the whole
tensor (multilinear hashing, Carter and Wegman 1979). It is a sum over elements, so the
fingerprints of TP shares add up to that of the whole, whichever dimension was cut, and padding
rows of the vocabulary are left out by giving them no weight. One changed element always
shows; other accidents escape with a chance near 2**-60. It is not made against somebody who
wants to deceive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from megatron.mpu.tags import ParamTag, full_shape, shard

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
#: elements hashed at once. On a processor their 64-bit products stay in its cache, and torch leaves so few to
#: one thread: several that wait for each other some thousand times are slow where others want the cores too
_CHUNK_CPU, _CHUNK = 2**15, 2**24


def _signed(number: int) -> int:
    """``number`` modulo 2**64 as torch's int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits without the sign."""
    return (x >> bits) & (2**(64 - bits) - 1)


def position_weights(count: int, seed: int) -> torch.Tensor:
    """Odd int64 numbers [count]: the finaliser of splitmix64 (Steele, Lea, Flood 2014) of each position."""
    x = (torch.arange(1, count + 1, dtype=torch.int64) + _signed(seed << 32)) * _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return (x ^ _shifted(x, 31)) | 1


@torch.no_grad()
def tensor_print(values: torch.Tensor, tag: ParamTag, tp_rank: int = 0, tp_size: int = 1,
                 true_rows: int | None = None) -> torch.Tensor:
    """This share's part of the fingerprint of a whole tensor: an int64 scalar on its device.

    ``values`` is the share [r, c] or [r] of TP rank ``tp_rank`` of ``tp_size``, of any dtype of 1, 2 or
    4 bytes per element; by default the whole tensor. Parts of the shares of a tensor with ``tag.dim`` add up; of
    a replicated one each share has the same, whole fingerprint. Rows from ``true_rows`` on do not count.
    """
    rows, columns = (*full_shape(values, tag, tp_size), 1)[:2]
    row, column = position_weights(rows, 1), position_weights(columns, 2)
    if true_rows:
        row[true_rows:] = 0
    along = ParamTag(dim=0, blocks=tag.blocks)
    if tag.dim == 0:
        row = shard(row, along, tp_rank, tp_size)
    elif tag.dim == 1:
        column = shard(column, along, tp_rank, tp_size)
    matrix = values.detach().reshape(len(row), len(column)).view(_INTEGERS[values.element_size()])
    row, column = row.to(values.device), column.to(values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    step = max(1, (_CHUNK_CPU if values.device.type == "cpu" else _CHUNK) // len(column))
    for start in range(0, len(row), step):
        # bits are mixed first: a sum of raw 16- or 32-bit numbers would miss more pairs of changed signs
        mixed = matrix[start:start + step].to(torch.int64).mul_(_signed(_FIRST))
        mixed.bitwise_xor_(mixed >> 32).mul_(column)
        total += (mixed.sum(1) * row[start:start + step]).sum()
    return total


def as_text(part: torch.Tensor | int) -> str:
    """A fingerprint as 16 hexadecimal digits."""
    return f"{int(part) % 2**64:016x}"


def digest(prints: Mapping[str, str]) -> str:
    """One SHA-256 over the fingerprints of many tensors, by name, in hexadecimal digits."""
    return hashlib.sha256("".join(f"{name} {prints[name]}\n" for name in sorted(prints)).encode()).hexdigest()
