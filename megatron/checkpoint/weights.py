"""Weights from layer files into a model, whatever TP and PP degree they were written at."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.checkpoint import files
from megatron.errors import RunError
from megatron.mpu.context import ParallelContext
from megatron.mpu.tags import ParamTag, shard, tag_of, unshard
from megatron.partial_bias import is_slice, separate_again


def load_weights(model, folder: Path, context: ParallelContext) -> None:
    """Fill every parameter of this rank's layers from ``folder``; nothing may be missing.

    ``model`` is a PipelineModule whose pipeline indices are those of the files. Values
    are cast to the parameter's dtype. Raises RunError naming file and tensor when one
    is missing, unknown, of another shape, or differs between TP ranks that should hold
    copies. Not collective: follow with ``synchronize_tied``.
    """
    degree = files.tensor_parallel_degree(folder)
    for local, layer in enumerate(model.forward_funcs):
        if not isinstance(layer, torch.nn.Module) or not list(layer.parameters()):
            continue
        index = local + model._local_start
        paths = [files.layer_file(folder, index, rank) for rank in range(degree)]
        for path in paths:
            if not path.exists():
                raise RunError(f"checkpoint {folder} has no file for pipeline layer {index} ({path.name})")
        _fill(layer, [files.read(path) for path in paths], paths, context)


def synchronize_tied(model) -> None:
    """Collective: send the first stage's word embedding to the stage of the head."""
    model._synchronize_tied_weights()


@torch.no_grad()
def _fill(layer: torch.nn.Module, shares: list[dict], paths: list[Path], context: ParallelContext) -> None:
    params = {name: param for name, param in layer.named_parameters() if not is_slice(param)}
    buffers = {name for name, _ in layer.named_buffers()}
    for share, path in zip(shares, paths):
        if missing := sorted(params.keys() - share.keys()):
            raise RunError(f"{path} lacks {', '.join(missing)}")
        if unknown := sorted(share.keys() - params.keys() - buffers):
            raise RunError(f"{path} holds {', '.join(unknown)}, which this model does not have; "
                           "check the architecture flags")
    for name, param in params.items():
        tag = tag_of(param)
        whole = merge_shares(name, [share[name] for share in shares], tag, paths)
        # rows past the true vocabulary are padding: their number depends on the TP degree
        if tag.tied:
            whole = _resize_rows(whole, param.shape[0] * context.tp_size)
        mine = shard(whole, tag, context.tp_rank, context.tp_size)
        if mine.shape != param.shape:
            raise RunError(f"{name} in {paths[0]} has shape {tuple(mine.shape)} on this rank, the model "
                           f"wants {tuple(param.shape)}; check the architecture flags")
        param.copy_(mine)
    separate_again(layer)


def merge_shares(name: str, shares: list[torch.Tensor], tag: ParamTag, paths: list[Path]) -> torch.Tensor:
    """The whole tensor; copies of a replicated one must be equal. Raises RunError otherwise."""
    if tag.dim is None:
        for copy, path in zip(shares[1:], paths[1:]):
            if copy.shape != shares[0].shape or not torch.equal(copy, shares[0]):
                raise RunError(f"{name} should be the same on all TP ranks, but {path.name} and "
                               f"{paths[0].name} in {path.parent} differ")
    return unshard(shares, tag)


def _resize_rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    if table.shape[0] >= rows:
        return table[:rows]
    return torch.cat([table, table.new_zeros(rows - table.shape[0], table.shape[1])])
