"""A delta put onto a copy of its base, as files: a Megatron-DeepSpeed tag or a Hugging Face folder.

Frozen tensors are compared with the fingerprints in the delta on the way. In a Hugging
Face folder files are copied as they are and the bytes of biases are overwritten in the copy.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.checkpoint import files, manifest
from megatron.checkpoint.delta import DeltaSource, Stored, checkpoint_folder, is_delta_tag, open_stored
from megatron.checkpoint.delta_file import Delta, read_delta, targets, write_delta
from megatron.checkpoint.hugging_face import PREFIX, HuggingFaceFolder
from megatron.checkpoint.hugging_face_export import CARRIED
from megatron.checkpoint.hugging_face_files import INDEX
from megatron.checkpoint.layouts import LayerFolder, current_name
from megatron.errors import RunError
from megatron.model.hf_names import to_hugging_face
from megatron.model.numbering import canonical_name
from megatron.mpu.tags import ParamTag, shard

UNDO = "bitfit_undo.safetensors"
"""in a folder that ``apply`` wrote: the base's own values of what it replaced, as a delta"""
_STATE = re.compile(r"mp_rank_.*_model_states\.pt")
#: weights in any format; those that are not read are not copied either
_WEIGHTS = re.compile(r"(pytorch_model|model|tf_model|flax_model)\b.*\.(bin|safetensors|h5|msgpack)(\.index\.json)?")


@dataclass(frozen=True)
class _Change:
    """One tensor of the base that is set."""

    index: int
    name: str
    tag: ParamTag
    value: torch.Tensor
    """whole, in the dtype of what it replaces"""


def apply(base: str | Path, delta: Delta, target: str | Path, name: str = "the delta", *, undo: bool = True) -> int:
    """Write a copy of ``base``'s newest tag, or of a Hugging Face folder, with ``delta`` in it to ``target``.

    Values take the dtype of what they replace. The copy of a tag holds layer and state files and no
    optimizer: a start from it takes weights only. With ``undo`` the values that were replaced are
    kept in ``target/bitfit_undo.safetensors``, which `apply` puts back. Returns how many tensors
    of the base were set. Raises RunError, leaving no ``target``, for a base with other frozen
    tensors than the delta's.
    """
    folder, target = checkpoint_folder(base, "--base" if undo else "--checkpoint"), Path(target)
    if target.exists():
        raise RunError(f"--output {target} exists already; give a new folder")
    if is_delta_tag(folder):
        raise RunError(f"{folder} holds biases only; give the base itself")
    stored = open_stored(folder)
    source = DeltaSource(stored.source, delta, name)
    changed = replace(stored, source=source)
    part = files.unfinished(target, folder)
    try:
        part.mkdir(parents=True)
        if isinstance(stored.source, HuggingFaceFolder):
            _copy_hugging_face(changed, source, stored.source, part)
        elif isinstance(stored.source, LayerFolder):
            _copy_tag(changed, source, stored.source, part)
        else:
            raise RunError(f"{folder} is in a format that is not written; convert it with tools/convert_checkpoint.py first")
        if unknown := sorted(targets(delta).keys() - source.replaced.keys()):
            raise RunError(f"the base {base} has no {unknown[0]} ({len(unknown)} of the delta's tensors are not in it)")
        if undo:
            write_delta(part / UNDO, Delta(source.replaced, replace(delta.facts, base=str(folder.resolve()))))
        files.publish(part, target)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"{target} cannot be written: {error}") from error
        raise
    return len(source.replaced)


def undo_of(folder: str | Path) -> Delta:
    """What ``apply`` replaced when it wrote ``folder``. RunError where it is not there."""
    path = Path(folder) / UNDO
    if not path.exists():
        raise RunError(f"{folder} holds no {UNDO}, so the values that a delta replaced must come from the base: give --base")
    return read_delta(path)


def _changes(changed: Stored, source: DeltaSource) -> Iterator[tuple[int, list[_Change]]]:
    """What is set, by index of the layer; ``source`` is that of ``changed``."""
    for index, _, tags, tensors in changed.layers():
        before = {name: source.replaced.get(canonical_name(index, name, source.num_layers)) for name in tags}
        yield index, [_Change(index, name, tags[name], tensors[name].to(value.dtype))
                      for name, value in before.items() if value is not None]


# --- Megatron-DeepSpeed -------------------------------------------------------------------------


def _copy_tag(changed: Stored, source: DeltaSource, layers: LayerFolder, part: Path) -> None:
    tag = part / changed.folder.name
    tag.mkdir()
    for state in manifest.files_of(changed.folder):
        if _STATE.fullmatch(state.name):
            shutil.copyfile(state, tag / state.name)
    for index, changes in _changes(changed, source):
        paths = [layers.path(index, rank) for rank in range(layers.degree)]
        for rank, path in enumerate(paths):
            content = files.read(path)
            keys = {current_name(key): key for key in content}
            for change in changes:
                mine = shard(change.value, change.tag, rank, len(paths))
                content[keys[change.name]] = mine.clone(memory_format=torch.contiguous_format)
            files.save(content, tag / path.name)
    if (carried := changed.folder.parent / CARRIED).is_dir():  # what from-hf left for to-hf
        shutil.copytree(carried, part / CARRIED)
    files.write_text(part / files.LATEST, changed.folder.name)


# --- Hugging Face -------------------------------------------------------------------------------


def _copy_hugging_face(changed: Stored, source: DeltaSource, base: HuggingFaceFolder, part: Path) -> None:
    file_of, model = base.files.file_of, base.config.model
    used = {path.name for path in file_of.values()}
    if not used & {"model.safetensors", "pytorch_model.bin"}:  # an index beside these is of other weights
        used.add(INDEX if any(name.endswith(".safetensors") for name in used) else "pytorch_model.bin.index.json")
    for path in changed.folder.iterdir():
        if path.is_file() and path.name != UNDO and (path.name in used or not _WEIGHTS.fullmatch(path.name)):
            shutil.copyfile(path, part / path.name)
    pairs = {(pair.index, pair.name): pair for pair in base.config.pairs()}
    pickled: dict[Path, dict[str, torch.Tensor]] = {}
    for _, changes in _changes(changed, source):
        for change in changes:
            pair = pairs[change.index, change.name]
            name = pair.hf_name if pair.hf_name in file_of else pair.hf_name.removeprefix(PREFIX)
            value, path = to_hugging_face(pair, change.value, model), part / file_of[name].name
            if path.suffix == ".safetensors":
                _overwrite(path, name, value)
            else:
                pickled.setdefault(path, {})[name] = value
    for path, values in pickled.items():
        files.save({**files.read(path), **values}, path)


def _overwrite(path: Path, name: str, value: torch.Tensor) -> None:
    """Replace one tensor in a ``safetensors`` file: a header of JSON behind its length, then bytes at offsets."""
    with open(path, "r+b") as file:
        length, = struct.unpack("<Q", file.read(8))
        start, stop = json.loads(file.read(length))[name]["data_offsets"]
        data = value.contiguous().view(torch.uint8).numpy().tobytes()
        if len(data) != stop - start:
            raise RunError(f"{name} takes {stop - start} bytes in {path.name}, its new value {len(data)}")
        file.seek(8 + length + start)
        file.write(data)
