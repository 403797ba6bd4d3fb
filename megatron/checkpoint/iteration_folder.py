"""Checkpoints of Megatron-LM without DeepSpeed's pipeline: one file per rank with its whole stage.

``iter_0001000/mp_rank_TT/model_optim_rng.pt``, or ``mp_rank_TT_PPP`` with several stages, or
``release/mp_rank_...``. Files are mapped, not read: a layer's bytes come from the disk when it
is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron.checkpoint import unpickling
from megatron.checkpoint.layouts import ShareSource, current_name
from megatron.checkpoint.progress import stored_arguments
from megatron.errors import RunError
from megatron.model.numbering import EMBEDDING_INDEX, FINAL_NORM, FIRST_BLOCK

LATEST = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
#: the stack of blocks in the files, by age
_STACKS = ("encoder", "transformer")
_LAST_NORM = "final_layernorm."


def newest_iteration(folder: str | Path) -> str | None:
    """The folder in ``folder`` that its ``latest_checkpointed_iteration.txt`` means, None without that file.

    Raises RunError for one that holds neither a number nor ``release``.
    """
    path = Path(folder) / LATEST
    try:
        text = path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not re.fullmatch(r"\d{1,12}|release", text):
        raise RunError(f"{path} holds {text[:80]!r}, but should hold a number or 'release'")
    return text if text == "release" else f"iter_{int(text):07d}"


def is_iteration_folder(folder: str | Path) -> bool:
    """Whether ``folder`` has files of this layout."""
    return Path(folder).is_dir() and bool(_rank_files(Path(folder)))


class IterationFolder(ShareSource):
    """Weights of one iteration, at the TP and PP degree found."""

    def __init__(self, folder: Path, *, trust: bool = False, average: bool = False) -> None:
        super().__init__(folder, trust=trust, average=average)
        self._files = _rank_files(folder)
        if not self._files:
            raise RunError(f"{folder} holds no files mp_rank_00/{FILE}")
        self.degree = 1 + max(rank for rank, _ in self._files)
        stages = 1 + max(stage for _, stage in self._files)
        for missing in ((rank, stage) for rank in range(self.degree) for stage in range(stages)):
            if missing not in self._files:
                raise RunError(f"{folder} is incomplete: it has no file of TP rank {missing[0]} at pipeline stage "
                               f"{missing[1]}, though files of {self.degree} x {stages} ranks are there")
        self._contents: dict[tuple[int, int], dict] = {}
        self._places, self.num_layers = self._find_layers(stages)

    def share(self, index: int, rank: int) -> dict[str, torch.Tensor]:
        stage, part = self._places[index]
        tensors = self._parts(rank, stage)[part]
        return {name: self._ordered(value) if ".query_key_value." in name else value for name, value in tensors.items()}

    def path(self, index: int, rank: int) -> Path:
        return self._files[rank, self._places[index][0]]

    def state_file(self) -> Path:
        return self._files[0, 0]

    def stored(self) -> dict:
        return self._content(0, 0)

    def _find_layers(self, stages: int) -> tuple[dict[int, tuple[int, str | int]], int]:
        """Where each pipeline layer (our index) lies: stage, and part of its file; and the number of blocks."""
        places: dict[int, tuple[int, str | int]] = {}
        blocks, final = 0, None
        for stage in range(stages):
            parts = self._parts(0, stage)
            local = sorted(part for part in parts if isinstance(part, int))
            if local != list(range(len(local))):
                raise RunError(f"{self._files[0, stage]} holds blocks {local}, which should count from 0")
            places |= {FIRST_BLOCK + blocks + block: (stage, block) for block in local}
            blocks += len(local)
            if "embedding" in parts:
                places.setdefault(EMBEDDING_INDEX, (stage, "embedding"))
            if "final" in parts:
                final = (stage, "final")
        if EMBEDDING_INDEX not in places or final is None or not blocks:
            raise RunError(f"{self.folder} is incomplete: its files hold {blocks} blocks, "
                           f"{'an' if EMBEDDING_INDEX in places else 'no'} embedding and {'a' if final else 'no'} final LayerNorm")
        places[blocks + FINAL_NORM] = final
        return places, blocks

    def _parts(self, rank: int, stage: int) -> dict[str | int, dict[str, torch.Tensor]]:
        """Tensors of one file: those of "embedding" and "final" and of each block by its number there."""
        path, content = self._files[rank, stage], self._content(rank, stage)
        try:
            model = content["model"]["language_model"]
        except (KeyError, TypeError):
            raise RunError(f"{path} holds no entry model.language_model, which weights lie in") from None
        parts: dict[str | int, dict[str, torch.Tensor]] = {}
        if embedding := dict(_flat(model.get("embedding", {}))):
            parts["embedding"] = embedding
        for name, value in _flat(next((model[stack] for stack in _STACKS if stack in model), {})):
            if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
                parts.setdefault(int(match[1]), {})[current_name(match[2])] = value
            elif name.startswith(_LAST_NORM):
                parts.setdefault("final", {})[name.removeprefix(_LAST_NORM)] = value
            else:
                raise RunError(f"{path} holds {name}, which no model here has")
        return parts

    def _content(self, rank: int, stage: int) -> dict:
        if (rank, stage) not in self._contents:
            path = self._files[rank, stage]
            content = unpickling.load(path, trust=self._trust, mmap=True)
            if not isinstance(content, dict):
                raise RunError(f"{path} holds {type(content).__name__}, but should hold entries by name")
            self._contents[rank, stage] = content
        return self._contents[rank, stage]

    def _ordered(self, fused: torch.Tensor) -> torch.Tensor:
        """Rows of one rank's query-key-value projection as [head][q, k, v][dim], which they are since version 2.0."""
        version = float(self.stored().get("checkpoint_version") or 0)
        if version >= 2:
            return fused
        heads = stored_arguments(self.stored()).get("num_attention_heads")
        if not heads:
            raise RunError(f"{self.where} is of version {version:g} and does not tell the number of attention heads, without "
                           "which the rows of its projections cannot be put in order")
        heads //= self.degree
        if version == 0:  # [q, k, v][head][dim]
            return fused.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
        return fused.unflatten(0, (heads, -1, 3)).transpose(1, 2).flatten(0, 2)  # [head][dim][q, k, v]


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """(TP rank, stage) -> file."""
    return {(int(match[1]), int(match[2] or 0)): path / FILE for path in sorted(folder.iterdir())
            if (match := _RANK_FOLDER.fullmatch(path.name)) and (path / FILE).is_file()}


def _flat(nested: Mapping, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of nested dicts by dotted name; what is neither is left out."""
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif torch.is_tensor(value):
            yield f"{prefix}{name}", value
