"""Writing a checkpoint of layer files from any source of weights, one layer in memory at a time.

What is written is the layout of Megatron-DeepSpeed: layer files at the wanted TP degree,
fit for any PP, and a state file per TP rank that says what the model is. There is no
optimizer state in it: a start from it takes weights only.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from tqdm import tqdm

from megatron.checkpoint import files, manifest
from megatron.checkpoint.layer_tags import layer_kind, layer_order, layer_tags
from megatron.checkpoint.layouts import NUMBERS
from megatron.checkpoint.progress import Progress, architecture, position_type, stored_arguments
from megatron.checkpoint.sources import WeightSource
from megatron.checkpoint.weights import resize_rows
from megatron.config import ModelConfig
from megatron.errors import RunError
from megatron.mpu.layers import TORCH_DTYPES
from megatron.mpu.tags import ParamTag, shard


def write_layer_folder(target: str | Path, tag: str, source: WeightSource, shape: ModelConfig, *, tp: int = 1,
                       dtype: str | None = None, layout: str = "bigscience",
                       stored: Mapping | None = None, unknown: Collection[str] = ()) -> Path:
    """Write ``target/tag`` with all weights of ``source`` cut for ``tp`` ranks; make it the latest.

    ``shape`` describes the model; its ``padded_vocab_size`` is the number of rows to write (zeros
    are added, rows past it dropped) and must hold ``vocab_size``. ``dtype`` (fp32, bf16, fp16)
    None keeps that of each tensor. ``stored``: the source's own state, of which arguments and
    counters are kept. ``unknown``: settings that the source does not tell, which are then
    not recorded. Files appear under ``tag.part`` and get their name when they are complete.

    Returns the tag folder. Raises RunError, leaving nothing, for degrees the model cannot be cut
    into, a target in use, or a disk that fails.
    """
    target = Path(target)
    _check(target, tag, source, shape, tp)
    part, created = target / f"{tag}.part", not target.exists()
    shutil.rmtree(part, ignore_errors=True)
    tags = layer_tags(shape.gated, shape.position_embedding_type == "absolute", shape.embed_layernorm)
    try:
        part.mkdir(parents=True)
        for index in tqdm(layer_order(shape.num_layers), desc=f"writing {tag}", unit="layer", disable=None):
            of_layer = tags[layer_kind(index, shape.num_layers)]
            tensors = source.layer(index, of_layer)
            _check_layer(tensors, of_layer, source.described(index))
            for rank in range(tp):
                _write(files.layer_file(part, NUMBERS[layout].of(index, shape.num_layers), rank),
                       {name: _share(name, tensors, of_layer, shape, rank, tp, dtype) for name in tensors})
            del tensors
        for rank in range(tp):
            _write(files.mp_rank_file(part, rank), _state(shape, tp, dtype, layout, stored or {}, unknown))
        _write_manifest(part, shape, tp, dtype, stored or {})
        part.rename(target / tag)
        files.write_text(target / files.LATEST, tag)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if created and target.exists() and not any(target.iterdir()):
            target.rmdir()
        if isinstance(error, OSError):
            raise RunError(f"{target} cannot be written: {error}") from error
        raise
    return target / tag


def _check(target: Path, tag: str, source: WeightSource, shape: ModelConfig, tp: int) -> None:
    for used in (target / tag, target / files.LATEST):
        if used.exists():
            raise RunError(f"--save: {used} exists already; give a new folder")
    if source.num_layers != shape.num_layers:
        raise RunError(f"{source.where} holds {source.num_layers} blocks, its model should have {shape.num_layers}")
    if shape.padded_vocab_size < max(1, shape.vocab_size):
        raise RunError(f"{shape.padded_vocab_size} rows cannot hold the {shape.vocab_size} token ids of {source.where}")
    for what, size in (("attention heads", shape.num_attention_heads), ("rows of the word table", shape.padded_vocab_size),
                       ("inner units of the MLP", shape.ffn_hidden_size)):
        if size % tp:
            raise RunError(f"--target-tp {tp} does not divide the {size} {what} of {source.where}; give a degree that does")


def _check_layer(tensors: Mapping[str, torch.Tensor], tags: Mapping[str, ParamTag], where: str) -> None:
    if missing := sorted(tags.keys() - tensors.keys()):
        raise RunError(f"{where} lacks {', '.join(missing)}")
    # buffers of attention (the frequencies of rotary positions) are the only thing beside parameters
    if unknown := sorted(name for name in tensors.keys() - tags.keys() if not name.startswith("self_attention.")):
        raise RunError(f"{where} holds {', '.join(unknown)}, which no model here has")


def _share(name: str, tensors: Mapping[str, torch.Tensor], tags: Mapping[str, ParamTag], shape: ModelConfig,
           rank: int, tp: int, dtype: str | None) -> torch.Tensor:
    """What TP rank ``rank`` holds of one tensor, in memory of its own: torch.save writes whole storages."""
    tensor = tensors[name]
    if (tag := tags.get(name)) is not None:
        if tag.tied:
            tensor = resize_rows(tensor, shape.padded_vocab_size)
        try:
            tensor = shard(tensor, tag, rank, tp)
        except ValueError as error:
            raise RunError(f"{name}: {error}") from error
    wanted = TORCH_DTYPES[dtype] if dtype and tensor.is_floating_point() else tensor.dtype
    result = tensor.to(wanted, copy=True, memory_format=torch.contiguous_format)
    if result.dtype == torch.float16 and bool((result.isinf() & tensor.isfinite()).any()):
        raise RunError(f"{name} has values up to {tensor.abs().max():.4g}, which fp16 cannot hold; take bf16 or fp32")
    return result


def _state(shape: ModelConfig, tp: int, dtype: str | None, layout: str, stored: Mapping, unknown: Collection[str]) -> dict:
    """A state file: what DeepSpeed looks for, what the trainers look for, and what we record."""
    from deepspeed import __version__

    iteration, tokens = stored.get("iteration") or 0, stored.get("tokens") or 0
    arguments = stored_arguments(stored)
    progress = stored.get("progress") or vars(Progress(
        iteration=iteration, consumed_train_tokens=tokens,
        consumed_train_samples=arguments.get("consumed_train_samples") or 0,
        consumed_valid_samples=arguments.get("consumed_valid_samples") or 0,
        gigaflos_no_embeds=arguments.get("gigaflos_no_embeds") or 0.0))
    return {
        "module": None, "buffer_names": [], "optimizer": None, "param_shapes": None,
        "frozen_param_shapes": None, "shared_params": None, "frozen_param_fragments": None,
        "sparse_tensor_module_names": [], "data_sampler": None, "random_ltd": None,
        "skipped_steps": 0, "global_steps": iteration, "global_samples": progress["consumed_train_samples"],
        "dp_world_size": 1, "mp_world_size": tp, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": tp},
        "ds_config": {}, "ds_version": __version__,
        "args": _arguments(shape, tp, dtype, layout, arguments, unknown),
        "checkpoint_version": 3.0, "iteration": iteration, "tokens": tokens, "progress": dict(progress),
        "architecture": {name: value for name, value in architecture(shape).items() if name not in unknown},
        "checkpoint_info": {"padded_vocab_size": shape.padded_vocab_size, "original_vocab_size": shape.vocab_size or None},
    }


def _arguments(shape: ModelConfig, tp: int, dtype: str | None, layout: str, stored: Mapping,
               unknown: Collection[str]) -> argparse.Namespace:
    facts = {"num_layers": shape.num_layers, "hidden_size": shape.hidden_size, "kv_channels": shape.kv_channels,
             "num_attention_heads": shape.num_attention_heads, "ffn_hidden_size": shape.ffn_hidden_size,
             "max_position_embeddings": shape.max_position_embeddings, "seq_length": shape.seq_length,
             "position_embedding_type": (position_type(shape.position_embedding_type)
                                         if layout == "bigscience" else shape.position_embedding_type),
             "embed_layernorm": shape.embed_layernorm, "layernorm_epsilon": shape.layernorm_epsilon,
             "apply_residual_connection_post_layernorm": shape.apply_residual_connection_post_layernorm,
             "glu_activation": shape.activation if shape.gated else None, "openai_gelu": False, "onnx_safe": None,
             "bias_gelu_fusion": shape.activation == "gelu_tanh", "padded_vocab_size": shape.padded_vocab_size,
             "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1}
    left_out = {"activation": ("glu_activation", "openai_gelu", "onnx_safe", "bias_gelu_fusion")}
    hidden = {field for name in unknown for field in left_out.get(name, (name,))}
    kept = {"consumed_train_samples": 0, "consumed_valid_samples": 0, "gigaflos_no_embeds": 0.0, **stored}
    if dtype:
        kept.update(fp16=dtype == "fp16", bf16=dtype == "bf16", params_dtype=TORCH_DTYPES[dtype])
    return argparse.Namespace(**kept | {name: value for name, value in facts.items() if name not in hidden})


def _write_manifest(part: Path, shape: ModelConfig, tp: int, dtype: str | None, stored: Mapping) -> None:
    """Lengths and checksums of what was written, by which a later read knows a damaged copy."""
    entries = tuple(manifest.Entry(path.name, path.stat().st_size, manifest.crc32_of(path)) for path in sorted(part.iterdir()))
    manifest.write(part, manifest.Manifest(iteration=stored.get("iteration") or 0, run=secrets.token_hex(8), sequence=1,
                                           degrees={"tp": tp, "pp": 1, "dp": 1}, dtype=dtype or shape.params_dtype,
                                           files=entries))


def _write(path: Path, content: dict) -> None:
    """One file, on disk when this returns."""
    files.save(content, path)
    with open(path, "rb") as written:
        os.fsync(written.fileno())
