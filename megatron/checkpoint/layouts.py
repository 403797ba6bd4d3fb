"""Checkpoints of Megatron-DeepSpeed as they are found: layer files of any trainer, TP and PP degree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint import files, manifest
from megatron.checkpoint.progress import stored_architecture, stored_arguments
from megatron.checkpoint.sources import WeightSource, merge_shares
from megatron.errors import RunError
from megatron.model.numbering import EMBEDDING_INDEX, FIRST_BLOCK, canonical_name
from megatron.mpu.tags import ParamTag

#: as many digits as a trainer liked; ours are two, more from 100 on
_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")


@dataclass(frozen=True)
class FileNumbers:
    """Which numbers the files of a trainer carry; the embedding's is 1 in all of them."""

    first_block: int = FIRST_BLOCK
    gap: int = 1
    """numbers without a file between the last block and the final LayerNorm"""

    def of(self, index: int, num_layers: int) -> int:
        """File number of pipeline layer ``index`` (ours) of a model of ``num_layers`` blocks."""
        if index == EMBEDDING_INDEX:
            return EMBEDDING_INDEX
        if index < FIRST_BLOCK + num_layers:
            return self.first_block + index - FIRST_BLOCK
        return self.first_block + num_layers + self.gap

    def all(self, num_layers: int) -> set[int]:
        """The numbers of a complete model."""
        end = self.first_block + num_layers
        return {EMBEDDING_INDEX, *range(self.first_block, end), end + self.gap}


#: blocks from 03, with a transpose before and behind them (ours too), or blocks from 02
NUMBERS = {"bigscience": FileNumbers(), "deepspeedai": FileNumbers(2, 0)}


class ShareSource(WeightSource):
    """A checkpoint whose tensors lie in one file per TP rank, whatever the files are."""

    def __init__(self, folder: Path, *, trust: bool = False, average: bool = False) -> None:
        self.folder, self.where = folder, str(folder)
        self.averaged: dict[str, float] = {}
        self.degree = 1
        """TP degree it was written at"""
        self._trust, self._average = trust, average
        self._stored: dict | None = None

    def share(self, index: int, rank: int) -> dict[str, torch.Tensor]:
        """What TP rank ``rank`` holds of pipeline layer ``index`` (ours), by today's local names."""
        raise NotImplementedError

    def path(self, index: int, rank: int) -> Path:
        """The file that holds it."""
        raise NotImplementedError

    def state_file(self) -> Path:
        """The file that says what the run was."""
        raise NotImplementedError

    def layer(self, index: int, tags: Mapping[str, ParamTag]) -> dict[str, torch.Tensor]:
        paths = [self.path(index, rank) for rank in range(self.degree)]
        shares = [self.share(index, rank) for rank in range(self.degree)]
        for share, path in zip(shares, paths):
            if missing := sorted(tags.keys() - share.keys()):
                raise RunError(f"{path} lacks {', '.join(missing)}")
            if other := sorted(share.keys() ^ shares[0].keys()):
                raise RunError(f"{', '.join(other)} in one of {path.name} and {paths[0].name} only ({path.parent}): shares of one "
                               "checkpoint are alike")
        noted: dict[str, float] = {}
        merged = {name: merge_shares(name, [share[name] for share in shares], tags[name], paths,
                                     averaged=noted if self._average else None)
                  if name in tags else shares[0][name] for name in shares[0]}
        self.averaged.update({canonical_name(index, name, self.num_layers): by for name, by in noted.items()})
        return merged

    def described(self, index: int) -> str:
        return str(self.path(index, 0))

    def shapes(self, index: int) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of TP rank 0's share of each tensor of pipeline layer ``index``."""
        return {name: (value.shape, value.dtype) for name, value in self.share(index, 0).items()}

    def stored(self) -> dict:
        path = self.state_file()
        if self._stored is None:
            self._stored = files.read(path, trust=self._trust) if path.exists() else {}
            if not isinstance(self._stored, dict):
                raise RunError(f"{path} holds {type(self._stored).__name__}, but should hold entries by name")
        return self._stored


class LayerFolder(ShareSource):
    """A tag folder with ``layer_II-model_TT-model_states.pt`` files.

    Which trainer numbered them, how many blocks there are and the TP degree are read off the
    names. Files that its manifest does not list are left out, with a note; where it has none, those of further
    layers or TP ranks than the state file tells.
    Optimizer files are not looked at. Raises RunError for an incomplete set, naming what is missing.
    """

    def __init__(self, folder: Path, *, trust: bool = False, average: bool = False) -> None:
        super().__init__(folder, trust=trust, average=average)
        found = _layer_files(folder)
        told = self._told()
        self.layout, self.num_layers = _numbering(folder, set(found), told.get("num_layers"))
        wanted = NUMBERS[self.layout].all(self.num_layers)
        highest = 1 + max((rank for number in wanted for rank in found[number]), default=0)
        missing = [(number, rank) for number in sorted(wanted) for rank in range(highest) if rank not in found[number]]
        told_degree = told.get("tensor_parallel", highest)
        self.degree = known = told_degree if missing or told_degree > highest else highest
        _refuse(folder, [(number, rank) for number in sorted(wanted) for rank in range(known) if rank not in found[number]])
        self.notes = manifest.notes(folder)
        if strays := [path.name for number in sorted(found) for rank, path in sorted(found[number].items())
                      if number not in wanted or rank >= known]:
            self.notes = (*self.notes, f"{folder}: {manifest.named(strays)} ignored: the state file tells of {self.num_layers} "
                                       f"blocks at TP {known}, to which it does not belong")
        self._paths = {number: [found[number][rank] for rank in range(known)] for number in wanted}

    def share(self, index: int, rank: int) -> dict[str, torch.Tensor]:
        path = self.path(index, rank)
        content = files.read(path, trust=self._trust)
        if not isinstance(content, dict) or not all(torch.is_tensor(value) for value in content.values()):
            raise RunError(f"{path} is no layer file: it should hold tensors by name")
        return {current_name(name): value for name, value in content.items()}

    def path(self, index: int, rank: int) -> Path:
        return self._paths[NUMBERS[self.layout].of(index, self.num_layers)][rank]

    def state_file(self) -> Path:
        return files.mp_rank_file(self.folder, 0)

    def _told(self) -> dict[str, int]:
        """Depth and TP degree that the state file tells, where there is a readable one."""
        try:
            stored = self.stored()
        except RunError:  # files of weights need no state beside them; whoever needs it will hear
            self._stored = None
            return {}
        arguments = stored_arguments(stored)
        dims = stored.get("checkpoint_parallel_dimensions") or {}
        told = {"num_layers": stored_architecture(stored).get("num_layers"),
                "tensor_parallel": dims.get("tp_degree") or arguments.get("tensor_model_parallel_size")}
        return {name: value for name, value in told.items() if isinstance(value, int)}


def current_name(name: str) -> str:
    """A parameter's name today; attention was called otherwise in the first trainers."""
    return f"self_{name}" if name.startswith("attention.") else name


def tensor_parallel_degree(folder: Path) -> int:
    """TP degree of a checkpoint: how many ranks wrote layer files into ``folder``.

    Raises RunError when there is none, or when a rank in between wrote nothing.
    """
    ranks = {rank for shares in _layer_files(folder).values() for rank in shares}
    if ranks != set(range(len(ranks))):
        raise RunError(f"{folder} holds layer files of TP ranks {sorted(ranks)}, which is no complete checkpoint")
    return len(ranks)


def has_layer_files(folder: Path) -> bool:
    """Whether any file of the tag in ``folder`` is a layer file; a delta has none."""
    return any(_LAYER_FILE.fullmatch(path.name) for path in manifest.files_of(folder))


def _layer_files(folder: Path) -> dict[int, dict[int, Path]]:
    """File number -> TP rank -> path."""
    found: dict[int, dict[int, Path]] = {}
    for path in manifest.files_of(folder):
        if match := _LAYER_FILE.fullmatch(path.name):
            shares = found.setdefault(int(match[1]), {})
            if (other := shares.setdefault(int(match[2]), path)) != path:
                raise RunError(f"{folder} holds {other.name} and {path.name}, which mean the same; remove one of them")
    if not found:
        raise RunError(f"{folder} holds no layer files (layer_01-model_00-model_states.pt and so on)")
    return found


def _numbering(folder: Path, numbers: set[int], told: int | None) -> tuple[str, int]:
    """Which trainer's numbers these are, and the number of blocks."""
    for layout, of in NUMBERS.items():
        depth = _depth(max(numbers), layout)
        if depth > 0 and numbers == of.all(depth):
            return layout, depth
    fitting = [layout for layout, of in NUMBERS.items() if told and of.all(told) <= numbers]
    if told and len(fitting) == 1:
        return fitting[0], told
    layout = "deepspeedai" if 2 in numbers else "bigscience"
    expected = NUMBERS[layout].all(told or _depth(max(numbers), layout))
    if expected - numbers and (told or numbers < expected):
        _refuse(folder, [(number, 0) for number in sorted(expected - numbers)])
    raise RunError(f"{folder} holds layer files with the numbers {_ranges(numbers)}, which is no complete model: L blocks "
                   "have 1, 3 to L+2 and L+4, or 1, 2 to L+1 and L+2; copy the checkpoint again")


def _depth(last: int, layout: str) -> int:
    """How many blocks lie before a final LayerNorm of file number ``last``."""
    return last - NUMBERS[layout].first_block - NUMBERS[layout].gap


def _refuse(folder: Path, missing: list[tuple[int, int]]) -> None:
    """Raise RunError naming the first of the (file number, TP rank) that have no file; nothing for []."""
    if missing:
        number, rank = missing[0]
        more = f", and {len(missing) - 1} more files are missing" if len(missing) > 1 else ""
        raise RunError(f"{folder} is incomplete: it has no file for pipeline layer {number} "
                       f"({files.layer_file(folder, number, rank).name}){more}; copy the checkpoint again")


def _ranges(numbers: set[int]) -> str:
    """{1, 3, 4, 5} -> "1, 3-5"."""
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends))
