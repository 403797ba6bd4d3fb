"""Training some of query, key and value: slices of a bias that is one fused tensor.

DeepSpeed freezes, counts and updates whole parameters only. So each trained slice moves
out of the fused bias into a vector of its own, and the fused one is frozen, zero where
a slice has left it: every value lives in one place. What the layer computes with, and
what ``state_dict`` shows under the old name ``bias``, is the two put together. Files
therefore look as if the fused bias had been trained.
"""

from __future__ import annotations

import torch

from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.tags import ParamTag, mark, tag_parameter

#: order of the slices within each head of the fused projection
SLICES = ("query", "key", "value")


class BiasSlice(torch.nn.Module):
    """One slice of all local heads as a vector ``bias``, [heads / TP * width]; computes nothing."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        # sharded by heads, and a vector: the optimizer decays matrices only
        self.bias = tag_parameter(torch.nn.Parameter(values), ParamTag(dim=0))
        mark(self.bias, slice_of_bias=True)


def is_slice(param: torch.nn.Parameter) -> bool:
    """Whether ``param`` holds elements that belong to a fused bias in files and counts."""
    return getattr(param, "slice_of_bias", False)


def train_slices(linear: ColumnParallelLinear, heads: int, terms: tuple[str, ...]) -> None:
    """Let only the slices ``terms`` of the bias of ``linear`` train, ordered [head][q,k,v][dim].

    ``heads`` is the number of heads on this rank; ``terms`` come from ``SLICES``. Each
    becomes a parameter ``{term}.bias`` of ``linear``; values are taken from the bias as it is.
    """
    bias = _fused(linear)
    linear.slice_heads, linear.merged_bias = heads, merged_bias
    bias.requires_grad_(False)
    rest, slices = _separate(bias, heads, terms)
    for term, values in slices.items():
        linear.add_module(term, BiasSlice(values))
    with torch.no_grad():
        bias.copy_(rest)
    linear.register_state_dict_post_hook(_show_merged)
    linear.register_load_state_dict_pre_hook(_load_separated)


def trained_slices(linear: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The vectors of ``linear`` by term, in the order of ``SLICES``; {} where none was made."""
    return {name: child.bias for name in SLICES if isinstance(child := getattr(linear, name, None), BiasSlice)}


def _fused(linear: ColumnParallelLinear) -> torch.nn.Parameter:
    assert linear.bias is not None, "the fused projection of attention always has a bias"
    return linear.bias


def merged_bias(linear: ColumnParallelLinear) -> torch.Tensor:
    """The whole bias [3 * heads / TP * width]; its gradient reaches the trained slices only."""
    parts = list(_fused(linear).detach().view(linear.slice_heads, len(SLICES), -1).unbind(1))
    for term, values in trained_slices(linear).items():
        parts[SLICES.index(term)] = values.view(linear.slice_heads, -1)
    return torch.stack(parts, dim=1).flatten()


@torch.no_grad()
def separate_again(module: torch.nn.Module) -> None:
    """After whole biases were copied into ``module``: move the trained slices out of them."""
    for linear in module.modules():
        if isinstance(linear, ColumnParallelLinear) and (slices := trained_slices(linear)):
            rest, fresh = _separate(_fused(linear), linear.slice_heads, tuple(slices))
            _fused(linear).copy_(rest)
            for term, values in fresh.items():
                slices[term].copy_(values)


@torch.no_grad()
def _separate(whole: torch.Tensor, heads: int, terms: tuple[str, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A copy of ``whole`` with zeros in place of the slices ``terms``, and these slices as vectors."""
    rest, slices = whole.detach().clone(), {}
    for term in terms:
        place = rest.view(heads, len(SLICES), -1)[:, SLICES.index(term)]
        slices[term] = place.flatten().clone()
        place.zero_()
    return rest, slices


def _show_merged(linear, state_dict, prefix, local_metadata) -> None:
    state_dict[f"{prefix}bias"] = merged_bias(linear).detach()
    for term in trained_slices(linear):
        del state_dict[f"{prefix}{term}.bias"]


def _load_separated(linear, state_dict, prefix, *_) -> None:
    whole = state_dict.get(f"{prefix}bias")
    if whole is None or whole.shape != linear.bias.shape:
        return  # torch names what is missing or does not fit
    state_dict[f"{prefix}bias"], slices = _separate(whole, linear.slice_heads, tuple(trained_slices(linear)))
    state_dict.update({f"{prefix}{term}.bias": values for term, values in slices.items()})
