"""Weights into a model, whatever layout and degrees they were written at."""

from __future__ import annotations

import torch

from megatron.checkpoint.sources import WeightSource, averaged_lines
from megatron.errors import RunError
from megatron.mpu.context import ParallelContext
from megatron.mpu.tags import shard, tag_of
from megatron.partial_bias import is_slice, separate_again


def load_weights(model, source: WeightSource, context: ParallelContext) -> None:
    """Fill every parameter of this rank's layers from ``source``; nothing may be missing.

    ``model`` is a PipelineModule. Values are cast to the parameter's dtype. Raises RunError
    naming file and tensor when one is missing, unknown or of another shape. Says on rank 0 when
    values there do not fit the dtype here. Not collective: follow with ``synchronize_tied``.
    """
    rounded: list[str] = []
    for local, layer in enumerate(model.forward_funcs):
        if isinstance(layer, torch.nn.Module) and list(layer.parameters()):
            rounded += fill_layer(layer, local + model._local_start, source, context)
    if context.tp_rank == context.dp_rank == 0:
        for line in averaged_lines(source.averaged):
            print(line, flush=True)
    if rounded and context.rank == 0:  # what the first stage holds stands for the whole model
        print(f"  weights in {source.where} are rounded to the type of this run ({rounded[0]}); whole checkpoints and their "
              "exports hold them so, a bias delta leaves its base as it is", flush=True)


def synchronize_tied(model) -> None:
    """Collective: send the first stage's word embedding to the stage of the head."""
    model._synchronize_tied_weights()


@torch.no_grad()
def fill_layer(layer: torch.nn.Module, index: int, source: WeightSource, context: ParallelContext) -> list[str]:
    """Fill one layer with pipeline layer ``index`` of ``source``; see ``load_weights``.

    Returns what was rounded: name and the two dtypes of each parameter that cannot hold what is stored.
    """
    params = {name: param for name, param in layer.named_parameters() if not is_slice(param)}
    tensors = source.layer(index, {name: tag_of(param) for name, param in params.items()})
    where = source.described(index)
    if missing := sorted(params.keys() - tensors.keys()):
        raise RunError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(tensors.keys() - params.keys() - {name for name, _ in layer.named_buffers()}):
        raise RunError(f"{where} holds {', '.join(unknown)}, which this model does not have; "
                       "check the architecture flags")
    rounded = []
    for name, param in params.items():
        tag, whole = tag_of(param), tensors[name]
        if tag.tied:
            if whole.shape[0] < (needed := getattr(getattr(layer, "config", None), "vocab_size", 0)):
                raise RunError(f"{name} in {where} has {whole.shape[0]:,} rows, the tokenizer {needed:,} token ids")
        mine = cut(whole, param, context, f"{name} in {where}")
        param.copy_(mine)
        if mine.dtype != param.dtype and not torch.equal(param.to(device=mine.device, dtype=mine.dtype), mine):
            rounded.append(f"{name}: {_short(mine)} to {_short(param)}")
    separate_again(layer)
    return rounded


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def cut(whole: torch.Tensor, param: torch.Tensor, context: ParallelContext, what: str) -> torch.Tensor:
    """This rank's share, shaped like the tagged ``param``, of ``whole``: values, or optimizer state of them.

    Rows past the true vocabulary are padding: their number depends on the TP degree, so a word
    table is cut or filled with zeros. Raises RunError, which begins with ``what``, where nothing fits.
    """
    tag = tag_of(param)
    if tag.tied:
        whole = resize_rows(whole, param.shape[0] * context.tp_size)
    try:
        mine = shard(whole, tag, context.tp_rank, context.tp_size)
    except ValueError as error:
        raise RunError(f"{what}: {error}") from error
    if mine.shape != param.shape:
        raise RunError(f"{what} has shape {tuple(mine.shape)} on this rank, the model wants {tuple(param.shape)}; "
                       "check the architecture flags")
    return mine


def resize_rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    """A word table, or optimizer state of one, cut or filled with zeros to ``rows`` rows."""
    if table.shape[0] >= rows:
        return table[:rows]
    return torch.cat([table, table.new_zeros(rows - table.shape[0], table.shape[1])])
