"""The one mark every parameter carries: replicated, sharded or tied.

Gradient norm, TP synchronisation, checkpoints, reshaping and conversion read
this mark; there is no list of parameter names anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ParamTag:
    """How a local parameter relates to the whole one.

    ``dim`` is the dimension sharded over TP, None for a replicated parameter.
    ``blocks`` is the number of equal pieces the full dimension falls into before
    each of them is sharded: 2 for a gated MLP, whose rank r holds the r-th share
    of both halves. ``tied`` names the parameters that share storage over stages.
    """

    dim: int | None = None
    blocks: int = 1
    tied: str | None = None


REPLICATED = ParamTag()


def tag_parameter(param: torch.nn.Parameter, tag: ParamTag) -> torch.nn.Parameter:
    """Attach ``tag`` and the attributes DeepSpeed's gradient norm looks at."""
    mark(param, tag=tag, tensor_model_parallel=tag.dim is not None)
    if tag.dim is not None:
        mark(param, partition_dim=tag.dim, partition_stride=tag.blocks)
    return param


def mark(param: torch.Tensor, **attributes: object) -> None:
    """Set attributes that torch's class does not declare: ours, and those DeepSpeed looks for."""
    for name, value in attributes.items():
        setattr(param, name, value)


def tag_of(param: torch.Tensor) -> ParamTag:
    """The tag of ``param``; a parameter without one is a programming error."""
    tag = getattr(param, "tag", None)
    if tag is None:
        raise ValueError(f"parameter of shape {tuple(param.shape)} carries no ParamTag")
    return tag


def full_shape(param: torch.Tensor, tag: ParamTag, tp_size: int) -> tuple[int, ...]:
    """Shape of the whole parameter of which ``param`` is one rank's share."""
    shape = list(param.shape)
    if tag.dim is not None:
        shape[tag.dim] *= tp_size
    return tuple(shape)


def shard(full: torch.Tensor, tag: ParamTag, tp_rank: int, tp_size: int) -> torch.Tensor:
    """The share of ``full`` that TP rank ``tp_rank`` holds (a contiguous copy if sharded)."""
    if tag.dim is None or tp_size == 1:
        return full
    if full.shape[tag.dim] % (tag.blocks * tp_size):
        raise ValueError(f"dimension {tag.dim} of shape {tuple(full.shape)} does not split into "
                         f"{tag.blocks} x {tp_size} equal pieces")
    mine = [block.chunk(tp_size, dim=tag.dim)[tp_rank]
            for block in full.chunk(tag.blocks, dim=tag.dim)]
    return torch.cat(mine, dim=tag.dim).contiguous()


def unshard(shares: list[torch.Tensor], tag: ParamTag) -> torch.Tensor:
    """The whole parameter from the shares of all TP ranks, in rank order."""
    if tag.dim is None or len(shares) == 1:
        return shares[0]
    blocks = zip(*(share.chunk(tag.blocks, dim=tag.dim) for share in shares))
    return torch.cat([piece for block in blocks for piece in block], dim=tag.dim)
