"""The biases of a bias-only run as one file, and back onto a copy of the base.

A delta is a ``safetensors`` file. Names are canonical and know no parallelism:
``embedding.<name>``, ``layers.<i>.<name>``, ``final_layernorm.bias``; tensors are whole
(TP shares merged) in the dtype of the checkpoint. Its metadata hold the tag it was
taken from, the number of layers and the number of parameters.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch

from megatron.bitfit import is_bias
from megatron.checkpoint import files
from megatron.checkpoint.sources import merge_shares
from megatron.config import ModelConfig
from megatron.errors import RunError
from megatron.model.pipe import EMBEDDING_INDEX, FIRST_BLOCK, GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams
from megatron.mpu.tags import ParamTag, shard, tag_of


def newest_folder(checkpoint: str | Path) -> Path:
    """The tag folder of ``checkpoint``: itself, or the one its ``latest`` names."""
    folder = Path(checkpoint)
    tag = files.latest_tag(folder)
    folder = folder / tag if tag else folder
    if not folder.is_dir() or not layer_indices(folder):
        raise RunError(f"{checkpoint} holds no checkpoint: neither a file 'latest' nor layer files")
    return folder


def layer_indices(folder: Path) -> list[int]:
    """Pipeline indices that have layer files in a tag folder, ascending."""
    found = {int(match[1]) for path in folder.iterdir()
             if (match := re.fullmatch(r"layer_(\d+)-model_\d+-model_states\.pt", path.name))}
    return sorted(found)


def bias_tags(first_projection_rows: int, second_projection_columns: int) -> dict[str, ParamTag]:
    """Tag of each bias by its name in a layer file, taken from a model of one tiny layer.

    A gated MLP shows in the shapes: its first projection has twice the rows that its
    second has columns.
    """
    gated = first_projection_rows == 2 * second_projection_columns
    config = ModelConfig(num_layers=1, hidden_size=2, num_attention_heads=1, seq_length=1, vocab_size=1,
                         padded_vocab_size=1, position_embedding_type="alibi", max_position_embeddings=1,
                         embed_layernorm=True, activation="geglu" if gated else "gelu_tanh",
                         use_cpu_initialization=True)
    with torch.random.fork_rng(devices=[]):
        model = GPTModel(config, ParallelContext(), RandomStreams(1))
    return {name.split(".", 2)[2]: tag_of(param) for name, param in model.named_parameters() if is_bias(name)}


def _layer(index: int, last: int) -> str:
    if index == EMBEDDING_INDEX:
        return "embedding"
    return "final_layernorm" if index == last else f"layers.{index - FIRST_BLOCK}"


def _tags_of_folder(folder: Path) -> dict[str, ParamTag]:
    paths = files.layer_files(folder, FIRST_BLOCK)
    if not paths:
        raise RunError(f"{folder} has no file for the first block (layer_{FIRST_BLOCK:02d}-model_00-...)")
    block = files.read(paths[0])
    return bias_tags(block["mlp.dense_h_to_4h.weight"].shape[0], block["mlp.dense_4h_to_h.weight"].shape[1])


def extract(checkpoint: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Whole biases by canonical name, and the metadata, of the newest tag in ``checkpoint``."""
    folder = newest_folder(checkpoint)
    tags = _tags_of_folder(folder)
    indices = layer_indices(folder)
    tensors: dict[str, torch.Tensor] = {}
    parameters = 0
    for index in indices:
        paths = files.layer_files(folder, index)
        shares = [files.read(path) for path in paths]
        for name in filter(is_bias, shares[0]):
            tensors[f"{_layer(index, indices[-1])}.{name}"] = merge_shares(
                name, [share[name] for share in shares], tags[name], paths).contiguous()
        parameters += sum(value.numel() for share in shares for value in share.values())
    return tensors, {"format": "bitfit-delta", "tag": folder.name, "layers": str(len(indices) - 2),
                     "checkpoint_parameters": str(parameters)}


def terms_trained(checkpoint: str | Path) -> tuple[str, ...] | None:
    """Kinds of bias that the run of the newest tag trained; None where its state file does not tell."""
    try:
        state = files.read(files.mp_rank_file(newest_folder(checkpoint), 0))
    except RunError:  # biases are in the layer files: a missing or foreign state file is no obstacle
        return None
    terms = state.get("bitfit_bias_terms") if isinstance(state, dict) and state.get("bitfit") else None
    return tuple(terms) if terms else None


def apply(base: str | Path, tensors: dict[str, torch.Tensor], target: str | Path) -> int:
    """Write a copy of ``base``'s newest tag to ``target`` with the biases of a delta in it.

    The copy holds layer files only: a start from it takes weights, never optimizer state.
    Returns how many tensors were set. Raises RunError, leaving no ``target``, when the
    delta and the base do not have the same biases.
    """
    folder, target = newest_folder(base), Path(target)
    if target.exists():
        raise RunError(f"{target} exists already; give a new folder")
    tags, indices = _tags_of_folder(folder), layer_indices(folder)
    part = target.with_name(target.name + ".part")
    tag = part / folder.name
    used: set[str] = set()
    try:
        tag.mkdir(parents=True)
        for index in indices:
            paths = files.layer_files(folder, index)
            for rank, path in enumerate(paths):
                values = files.read(path)
                for name in filter(is_bias, list(values)):
                    whole = f"{_layer(index, indices[-1])}.{name}"
                    values[name] = _share(tensors, whole, values[name], tags[name], rank, len(paths))
                    used.add(whole)
                torch.save(values, tag / path.name)
        if unknown := sorted(tensors.keys() - used):
            raise RunError(f"the base has no bias {unknown[0]} (and {len(unknown) - 1} more of the delta)")
        files.write_text(part / files.LATEST, folder.name)
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return len(used)


def _share(tensors: dict[str, torch.Tensor], name: str, old: torch.Tensor, tag: ParamTag, rank: int,
           ranks: int) -> torch.Tensor:
    if name not in tensors:
        raise RunError(f"the delta lacks {name}, which the base has")
    mine = shard(tensors[name], tag, rank, ranks)
    if mine.shape != old.shape:
        raise RunError(f"{name} has shape {tuple(tensors[name].shape)} in the delta, which does not fit the base")
    return mine.to(old.dtype).clone()
