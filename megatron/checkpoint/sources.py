"""Where weights are read from: whole tensors of a model, one pipeline layer at a time.

A source knows a file layout and nothing of this run's degrees; ``weights.load_weights``
knows the model and nothing of layouts. Pipeline indices and local names are ours (see
``megatron.model.pipe``) whatever the files call them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron.config import CheckpointConfig
from megatron.errors import RunError
from megatron.mpu.tags import ParamTag, unshard


class WeightSource(ABC):
    """Whole tensors by pipeline index and local name."""

    where: str
    """what a message calls it: a folder"""
    num_layers: int
    """blocks of the stored model"""
    averaged: Mapping[str, float] = {}
    """of the layers read so far: parameters whose copies differed and were averaged -> largest difference"""
    notes: Sequence[str] = ()
    """what is odd about the files, as sentences for the console"""

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

    def stored(self) -> dict:
        """What the checkpoint says about its run, {} where it says nothing.

        Raises RunError when that cannot be read.
        """
        return {}


def merge_shares(name: str, shares: list[torch.Tensor], tag: ParamTag, paths: list[Path], *,
                 averaged: dict[str, float] | None = None) -> torch.Tensor:
    """The whole tensor from its TP shares; copies of a replicated one must be equal.

    With ``averaged`` copies that differ are averaged, and name and difference noted in it. Raises
    RunError otherwise, with the largest absolute difference.
    """
    for share, path in zip(shares[1:], paths[1:]):
        if share.shape != shares[0].shape or share.dtype != shares[0].dtype:
            raise RunError(f"{name} is {_kind(share)} in {path.name} and {_kind(shares[0])} in {paths[0].name} "
                           f"({path.parent}): shares of one checkpoint are alike")
    if tag.dim is not None:
        return unshard(shares, tag)
    other = next((rank for rank, copy in enumerate(shares) if not torch.equal(copy, shares[0])), None)
    if other is None:
        return shares[0]
    copies = torch.stack([copy.double() for copy in shares])
    difference = float((copies.amax(0) - copies.amin(0)).max())
    if averaged is None or not difference < float("inf"):
        advice = ("; --average-duplicated-parameters takes the mean of the copies" if difference < float("inf")
                  else " and hold values that are no numbers")
        raise RunError(f"{name} should be the same on all TP ranks, but {paths[other].name} and {paths[0].name} "
                       f"in {paths[0].parent} differ by up to {difference:.3g}{advice}")
    averaged[name] = difference
    return copies.mean(0).to(shares[0].dtype)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def averaged_lines(averaged: Mapping[str, float]) -> Sequence[str]:
    """What was averaged, as lines for the console."""
    if not averaged:
        return []
    return ["copies that differed over TP ranks were averaged (--average-duplicated-parameters):",
            *(f"  {name}: by up to {difference:.3g}" for name, difference in averaged.items())]


def open_source(folder: str | Path, config: CheckpointConfig | None = None) -> WeightSource:
    """The source that reads ``folder``: a tag folder of any trainer, one with biases alone, or a Hugging Face folder.

    ``config`` says what the user allowed. Raises RunError for a folder of no known layout.
    """
    from megatron.checkpoint.delta import is_delta_tag, open_delta_tag
    from megatron.checkpoint.hugging_face import HuggingFaceFolder, is_hugging_face
    from megatron.checkpoint.iteration_folder import IterationFolder, is_iteration_folder
    from megatron.checkpoint.layouts import LayerFolder

    if is_delta_tag(Path(folder)):
        return open_delta_tag(Path(folder), config)
    if is_hugging_face(folder):
        return HuggingFaceFolder(folder)
    allowed = {"trust": bool(config and config.trust_checkpoint),
               "average": bool(config and config.average_duplicated_parameters)}
    return (IterationFolder if is_iteration_folder(folder) else LayerFolder)(Path(folder), **allowed)
