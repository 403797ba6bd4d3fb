"""Where weights are read from: whole tensors of a model, one pipeline layer at a time.

A source knows a file layout and nothing of this run's degrees; ``weights.load_weights``
knows the model and nothing of layouts. Pipeline indices and local names are ours (see
``megatron.model.pipe``) whatever the files call them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron.checkpoint import files
from megatron.config import CheckpointConfig
from megatron.errors import RunError
from megatron.mpu.tags import ParamTag, unshard


class WeightSource(ABC):
    """Whole tensors by pipeline index and local name."""

    where: str
    """what a message calls it: a folder"""
    num_layers: int
    """blocks of the stored model"""

    @abstractmethod
    def layer(self, index: int, tags: Mapping[str, ParamTag]) -> dict[str, torch.Tensor]:
        """All tensors of pipeline layer ``index`` on the CPU, TP shares merged by ``tags``.

        The word table has as many rows as are stored; the caller fits it to its padded
        vocabulary. Tensors that no tag names (buffers) may be among them. Raises RunError naming
        the file, and the tensor where it is one, for what is missing, damaged or differs
        between copies.
        """

    @abstractmethod
    def described(self, index: int) -> str:
        """The file or files that layer ``index`` comes from, for messages."""


class LayerFolder(WeightSource):
    """A tag folder with ``layer_II-model_TT-model_states.pt`` files, any TP and PP degree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = str(folder)
        self.degree = files.tensor_parallel_degree(folder)
        indices = {int(match[1]) for path in folder.iterdir()
                   if (match := re.fullmatch(r"layer_(\d+)-model_\d+-model_states\.pt", path.name))}
        self.num_layers = len(indices) - 2

    def layer(self, index: int, tags: Mapping[str, ParamTag]) -> dict[str, torch.Tensor]:
        paths = [files.layer_file(self.folder, index, rank) for rank in range(self.degree)]
        for path in paths:
            if not path.exists():
                raise RunError(f"checkpoint {self.folder} has no file for pipeline layer {index} ({path.name})")
        shares = [files.read(path) for path in paths]
        for share, path in zip(shares, paths):
            if missing := sorted(tags.keys() - share.keys()):
                raise RunError(f"{path} lacks {', '.join(missing)}")
        return {name: merge_shares(name, [share[name] for share in shares], tags[name], paths)
                if name in tags else shares[0][name] for name in shares[0]}

    def described(self, index: int) -> str:
        return str(files.layer_file(self.folder, index, 0))


def merge_shares(name: str, shares: list[torch.Tensor], tag: ParamTag, paths: list[Path]) -> torch.Tensor:
    """The whole tensor; copies of a replicated one must be equal. Raises RunError otherwise."""
    if tag.dim is None:
        for copy, path in zip(shares[1:], paths[1:]):
            if copy.shape != shares[0].shape or not torch.equal(copy, shares[0]):
                raise RunError(f"{name} should be the same on all TP ranks, but {path.name} and "
                               f"{paths[0].name} in {path.parent} differ")
    return unshard(shares, tag)


def open_source(folder: str | Path, config: CheckpointConfig | None = None) -> WeightSource:
    """The source that reads ``folder``: a tag folder with layer files, or a Hugging Face folder.

    ``config`` says what the user allowed. Raises RunError for a folder of no known layout.
    """
    from megatron.checkpoint.hugging_face import HuggingFaceFolder, is_hugging_face

    if is_hugging_face(folder):
        return HuggingFaceFolder(folder)
    return LayerFolder(Path(folder))
