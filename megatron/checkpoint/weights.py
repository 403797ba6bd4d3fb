"""Weights from layer files into a model, whatever TP and PP degree they were written at."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.checkpoint import files
from megatron.errors import RunError
from megatron.mpu.context import ParallelContext
from megatron.mpu.tags import shard, tag_of, unshard


def load_weights(model, folder: Path, context: ParallelContext) -> None:
    """Fill every parameter of this rank's layers from ``folder``; nothing may be missing.

    ``model`` is a PipelineModule whose pipeline indices are those of the files. Values
    are cast to the parameter's dtype. Raises RunError naming file and tensor when one
    is missing, unknown or of another shape. Not collective but for the tied weights.
    """
    for local, layer in enumerate(model.forward_funcs):
        if not isinstance(layer, torch.nn.Module) or not list(layer.parameters()):
            continue
        index = local + model._local_start
        paths = files.layer_files(folder, index)
        if not paths:
            raise RunError(f"checkpoint {folder} has no file for pipeline layer {index} "
                           f"(layer_{index:02d}-model_00-model_states.pt)")
        _fill(layer, [files.read(path) for path in paths], paths[0], context)


def synchronize_tied(model) -> None:
    """Collective: send the first stage's word embedding to the stage of the head."""
    model._synchronize_tied_weights()


@torch.no_grad()
def _fill(layer: torch.nn.Module, shares: list[dict], path: Path, context: ParallelContext) -> None:
    params = dict(layer.named_parameters())
    if missing := sorted(params.keys() - shares[0].keys()):
        raise RunError(f"{path} lacks {', '.join(missing)}")
    buffers = {name for name, _ in layer.named_buffers()}
    if unknown := sorted(shares[0].keys() - params.keys() - buffers):
        raise RunError(f"{path} holds {', '.join(unknown)}, which this model does not have; "
                       "check the architecture flags")
    for name, param in params.items():
        tag = tag_of(param)
        whole = unshard([share[name] for share in shares], tag)
        # rows past the true vocabulary are padding: their number depends on the TP degree
        if name.rpartition(".")[0] == "word_embeddings":
            whole = _resize_rows(whole, param.shape[0] * context.tp_size)
        mine = shard(whole, tag, context.tp_rank, context.tp_size)
        if mine.shape != param.shape:
            raise RunError(f"{name} in {path} has shape {tuple(mine.shape)} on this rank, the model "
                           f"wants {tuple(param.shape)}; check the architecture flags")
        param.copy_(mine)


def _resize_rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    if table.shape[0] >= rows:
        return table[:rows]
    return torch.cat([table, table.new_zeros(rows - table.shape[0], table.shape[1])])
