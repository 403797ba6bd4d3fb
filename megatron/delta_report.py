"""How far each kind of bias moved in each layer: as a table, and as a heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import torch

from megatron.checkpoint.delta_file import Delta, slot, target_of
from megatron.config import BIAS_TERMS
from megatron.errors import RunError

#: rows beside the blocks
EMBEDDING, FINAL = "embedding", "final"
#: term by the module that a bias belongs to
_TERM = {"self_attention.dense": "attention_output", "mlp.dense_h_to_4h": "mlp_intermediate",
         "mlp.dense_4h_to_h": "mlp_output"}
_FUSED = "self_attention.query_key_value"


@dataclass(frozen=True)
class Movement:
    """Mean |change| by (row, term); rows are blocks, "embedding" and "final"."""

    rows: tuple[str, ...]
    terms: tuple[str, ...]
    cells: Mapping[tuple[str, str], float]


def movement(delta: Delta, base: Delta) -> Movement:
    """Mean absolute difference of ``delta`` and the biases of its base, per term and layer.

    Both LayerNorms of a block count as one. Raises RunError when a bias is missing in ``base``.
    """
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    heads = delta.facts.num_attention_heads or base.facts.num_attention_heads
    for name, values in delta.tensors.items():
        target, which = target_of(name)
        if target not in base.tensors:
            raise RunError(f"the base has no {target}, which is in the delta")
        if heads and target.endswith(f"{_FUSED}.bias") and base.tensors[target].numel() % (3 * heads):
            raise RunError(f"{target} of {base.tensors[target].numel()} elements cannot be of {heads} heads, which the delta tells")
        before = slot(base.tensors[target], which, heads).reshape(-1)
        if before.shape != values.reshape(-1).shape:
            raise RunError(f"{name} has shape {tuple(values.shape)}, which does not fit the base's {tuple(base.tensors[target].shape)}")
        change = (values.reshape(-1).double() - before.double()).abs()
        row, parts = _place(name, change, heads)
        for term, part in parts:
            total, count = sums.get((row, term), (0.0, 0))
            sums[row, term] = (total + float(part.sum()), count + part.numel())
    cells = {key: total / count for key, (total, count) in sums.items()}
    rows = [EMBEDDING, *map(str, range(delta.facts.num_layers)), FINAL]
    return Movement(tuple(row for row in rows if any(key[0] == row for key in cells)),
                    tuple(term for term in ("query_key_value", *BIAS_TERMS) if any(key[1] == term for key in cells)), cells)


def _place(name: str, change: torch.Tensor, heads: int) -> tuple[str, list[tuple[str, torch.Tensor]]]:
    """The row of a bias, and its parts by term."""
    first, _, rest = name.partition(".")
    if first != "layers":
        return (EMBEDDING if first == "embedding" else FINAL), [("layernorm", change)]
    block, _, rest = rest.partition(".")
    module = rest.rpartition(".")[0]
    if module == _FUSED:
        if not heads:  # a checkpoint that does not tell how many there are
            return block, [("query_key_value", change)]
        return block, [(term, slot(change, term, heads).reshape(-1)) for term in BIAS_TERMS[:3]]
    if module.startswith(_FUSED):
        return block, [(module.rpartition(".")[2], change)]
    return block, [(_TERM.get(module, "layernorm"), change)]


def table(moved: Movement) -> str:
    """One line per layer, one column per term; a dash where nothing trained."""
    width = max(10, *map(len, moved.terms))
    lines = ["mean |change|  " + "  ".join(f"{term:>{width}}" for term in moved.terms)]
    for row in moved.rows:
        found = (moved.cells.get((row, term)) for term in moved.terms)
        lines.append(f"{row:<13}  " + "  ".join(f"{'-' if value is None else f'{value:.3e}':>{width}}" for value in found))
    return "\n".join(lines)


# --- a picture ----------------------------------------------------------------------------------

_CELL, _LEFT, _TOP = (108, 20), 90, 44


def heat_map(moved: Movement, title: str) -> str:
    """An SVG of the table: light where little moved, dark where much did, on a logarithmic scale."""
    wide, high = _CELL
    width, height = _LEFT + wide * len(moved.terms) + 10, _TOP + high * len(moved.rows) + 34
    above = [value for value in moved.cells.values() if value > 0 and math.isfinite(value)]
    low, top = (min(above), max(above)) if above else (1.0, 1.0)
    low = max(low, top / 1e4)
    title = "".join(letter if letter.isprintable() else "?" for letter in title)  # XML knows no control characters
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
             f'<title>{escape(title)}</title>', f'<rect width="{width}" height="{height}" fill="white"/>',
             f'<text x="6" y="15" font-size="12">{escape(title)}</text>']
    parts += [_text(_LEFT + wide * (column + 0.5), _TOP - 6, term, "middle") for column, term in enumerate(moved.terms)]
    for line, row in enumerate(moved.rows):
        y = _TOP + high * line
        parts.append(_text(_LEFT - 6, y + 14, row if not row.isdigit() else f"layer {row}", "end"))
        for column, term in enumerate(moved.terms):
            value = moved.cells.get((row, term))
            if value is None:
                continue
            depth = _depth(value, low, top)
            x = _LEFT + wide * column
            parts.append(f'<rect x="{x}" y="{y}" width="{wide - 1}" height="{high - 1}" fill="{_colour(depth)}">'
                         f"<title>{escape(f'{row} {term}: {value:.3e}')}</title></rect>")
            parts.append(_text(x + wide / 2, y + 14, f"{value:.1e}", "middle", "white" if depth > 0.55 else "black"))
    parts.append(_text(6, height - 12, f"mean |change| of a bias; white {low:.1e} and less, dark {top:.1e}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _depth(value: float, low: float, top: float) -> float:
    if not value > low:
        return 0.0
    return 1.0 if value >= top else math.log(value / low) / math.log(top / low)


def _colour(depth: float) -> str:
    """From near white to dark blue."""
    light: Sequence[int] = (247, 251, 255)
    return "#" + "".join(f"{round(a + (b - a) * depth):02x}" for a, b in zip(light, (8, 48, 107)))


def _text(x: float, y: float, words: str, anchor: str = "start", fill: str = "black") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
