"""Tensors in the files of a Hugging Face folder, one at a time: reading any of their layouts, writing shards.

Files are mapped and not read: a tensor takes memory when it is used, and gives it back when the
caller lets go of all that came with it.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from megatron.errors import RunError

INDEX = "model.safetensors.index.json"
#: where weights are looked for, the first one found wins, as in from_pretrained; (file, does it list others)
_PLACES = (("model.safetensors", False), (INDEX, True), ("pytorch_model.bin", False),
           ("pytorch_model.bin.index.json", True))
#: rows of a table that are compared at a time
_ROWS = 4096


def read_json(path: Path) -> dict:
    """The object in a JSON file; RunError names the file when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} holds no JSON object")
    return value


class TensorFiles:
    """Names and values of all tensors in ``model.safetensors``, ``pytorch_model.bin`` or their shards."""

    def __init__(self, folder: Path) -> None:
        """Find out which file holds what. Raises RunError naming a file that is missing or damaged."""
        self.folder = folder
        self._kept: tuple[Path, dict[str, torch.Tensor]] | None = None
        place = next(((folder / name, listed) for name, listed in _PLACES if (folder / name).is_file()), None)
        if place is None:
            raise RunError(f"{folder} holds a config.json but no weights; looked for "
                           f"{', '.join(name for name, _ in _PLACES)}")
        path, listed = place
        self.file_of = self._listed(path) if listed else dict.fromkeys(self._names(path), path)

    def _listed(self, index: Path) -> dict[str, Path]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise RunError(f"{index} has no weight_map")
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise RunError(f"{index} has a weight_map that does not name a file for each tensor")
        for file in sorted(set(weight_map.values())):
            if Path(file).name != file:
                raise RunError(f"{index} names {file}, which is no file beside it")
            if not (self.folder / file).is_file():
                first = next(name for name, its in weight_map.items() if its == file)
                raise RunError(f"{index} says that {first} is in {file}, but there is no such file in {self.folder}")
        return {name: self.folder / file for name, file in weight_map.items()}

    def _names(self, path: Path) -> list[str]:
        if path.suffix == ".bin":
            return list(self._load_bin(path))
        with _opened(path) as file:
            return list(file.keys())

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors ``names`` as stored, mapped from their files. RunError for a damaged file or a wrong index."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.file_of[name], []).append(name)
        found = {}
        for path, wanted in by_file.items():
            if path.suffix == ".bin":
                stored = self._load_bin(path)
                for name in wanted:
                    found[name] = _stored(stored, name, path)
            else:
                with _opened(path) as file:
                    for name in wanted:
                        found[name] = _guarded(path, lambda file=file, name=name: file.get_tensor(name))
        return found

    def rows(self, name: str) -> Iterator[torch.Tensor]:
        """Pieces of a table [rows, h], some thousand rows each, in order."""
        path = self.file_of[name]
        if path.suffix == ".bin":
            yield from _stored(self._load_bin(path), name, path).split(_ROWS)
            return
        with _opened(path) as file:
            table = _guarded(path, lambda: file.get_slice(name))
            for start in range(0, table.get_shape()[0] if table.get_shape() else 0, _ROWS):
                yield _guarded(path, lambda start=start: table[start:start + _ROWS])

    def _load_bin(self, path: Path) -> dict[str, torch.Tensor]:
        if self._kept and self._kept[0] == path:
            return self._kept[1]
        # zip files are mapped, not read: opening one again for each layer costs little
        mapped = zipfile.is_zipfile(path)
        stored = _guarded(path, lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))
        if not mapped:  # written by torch before 1.6: kept until another file is wanted
            self._kept = (path, stored)
        if not isinstance(stored, dict) or not all(isinstance(name, str) for name in stored):
            raise RunError(f"{path} holds no tensors by name")
        return stored


def _stored(stored: dict, name: str, path: Path) -> torch.Tensor:
    if not torch.is_tensor(stored.get(name)):
        raise RunError(f"{path} lacks {name}, which the index says is in it")
    return stored[name]


def _opened(path: Path):
    return _guarded(path, lambda: safe_open(path, "pt", device="cpu"))


def _guarded(path: Path, read):
    try:
        return read()
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(f"{path} is damaged or no file of weights: {first}") from error


# --- writing ----------------------------------------------------------------------------------

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass
class _Shard:
    """The file in hand."""

    file: BinaryIO
    header: dict[str, dict] = field(default_factory=dict)
    size: int = 0
    """bytes of tensors so far"""


class ShardWriter:
    """``safetensors`` files of at most ``max_bytes`` of tensors each, written as tensors come.

    A file starts with a JSON header that lists its tensors. Its room is reserved and it is
    written last (trailing blanks are allowed in it), so no more than one tensor is ever held.
    """

    def __init__(self, folder: Path, names: Iterable[str], max_bytes: int) -> None:
        """``names`` are all that may be added: they bound the size of a header."""
        self.folder, self.max_bytes = folder, max_bytes
        self._room = 64 + sum(len(json.dumps(name)) + 160 for name in names)
        self._room += -self._room % 8
        self._shard: _Shard | None = None
        self._shards: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append one tensor of floating point numbers, in its dtype."""
        size = tensor.numel() * tensor.element_size()
        shard = self._shard
        if shard and shard.size + size > self.max_bytes:
            self._finish(shard)
            shard = None
        if shard is None:
            shard = self._shard = _Shard(open(self._part(len(self._shards)), "wb"))  # noqa: SIM115 (closed in _finish)
            shard.file.seek(8 + self._room)
        data = tensor.detach().cpu().contiguous()
        shard.file.write(data.view(-1).view(torch.uint8).numpy().data)
        shard.header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape),
                              "data_offsets": [shard.size, shard.size + size]}
        shard.size += size
        self.total_bytes += size

    def close(self) -> list[Path]:
        """Finish the last shard, give all of them their names and write the index of several."""
        if self._shard:
            self._finish(self._shard)
        count = len(self._shards)
        names = ["model.safetensors"] if count == 1 else [f"model-{number + 1:05d}-of-{count:05d}.safetensors"
                                                          for number in range(count)]
        for number, name in enumerate(names):
            os.replace(self._part(number), self.folder / name)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes},
                     "weight_map": {name: file for file, held in zip(names, self._shards) for name in held}}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return [self.folder / name for name in names]

    def abandon(self) -> None:
        """Close the file in hand; the folder is left to the caller."""
        if self._shard:
            self._shard.file.close()

    def _part(self, number: int) -> Path:
        return self.folder / f"shard-{number}.part"

    def _finish(self, shard: _Shard) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}, **shard.header}, separators=(",", ":")).encode()
        shard.file.seek(0)
        shard.file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        shard.file.flush()
        os.fsync(shard.file.fileno())
        shard.file.close()
        self._shards.append(list(shard.header))
        self._shard = None
