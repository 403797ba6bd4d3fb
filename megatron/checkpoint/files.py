"""Files of a checkpoint: names, atomic writes, reads that cannot run code.

Layout (DeepSpeed pipeline format): ``SAVE/latest`` holds a tag; the folder of that
name holds ``layer_II-model_TT-model_states.pt`` per pipeline layer and TP rank,
``mp_rank_MM_model_states.pt`` per model-parallel rank and optimizer shards.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import torch

from megatron.checkpoint import unpickling
from megatron.errors import RunError

LATEST = "latest"


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step."""
    _replace(path, lambda part: part.write_text(text))


def write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step."""
    _replace(path, lambda part: part.write_bytes(data))


def _replace(path: Path, write) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        with open(part, "rb") as done:
            os.fsync(done.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def replace_folder(new: Path, old: Path) -> None:
    """Put the complete folder ``new`` in the place of ``old``, which need not exist."""
    trash = old.with_name(f"{old.name}.old")
    shutil.rmtree(trash, ignore_errors=True)
    if old.exists():
        old.rename(trash)
    new.rename(old)
    shutil.rmtree(trash, ignore_errors=True)


def latest_tag(folder: str | Path) -> str | None:
    """The tag named in ``folder/latest``, or None without such a file."""
    try:
        return (Path(folder) / LATEST).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def layer_files(folder: Path, index: int) -> list[Path]:
    """The shares of pipeline layer ``index`` in TP order; [] where there are none."""
    pattern = re.compile(rf"layer_0*{index}-model_(\d+)-model_states\.pt")
    found = [(int(match[1]), path) for path in folder.iterdir()
             if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def layer_file(folder: Path, index: int, rank: int) -> Path:
    """The share of pipeline layer ``index`` that TP rank ``rank`` wrote."""
    return folder / f"layer_{index:02d}-model_{rank:02d}-model_states.pt"


def tensor_parallel_degree(folder: Path) -> int:
    """TP degree of a checkpoint: how many ranks wrote layer files into ``folder``.

    Raises RunError when there is none, or when a rank in between wrote nothing.
    """
    pattern = re.compile(r"layer_\d+-model_(\d+)-model_states\.pt")
    ranks = {int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
    if ranks != set(range(len(ranks))) or not ranks:
        raise RunError(f"{folder} holds layer files of TP ranks {sorted(ranks) or 'none'}, "
                       "which is no complete checkpoint")
    return len(ranks)


def mp_rank_file(folder: Path, mp_rank: int) -> Path:
    """Counters, random states and arguments of one model-parallel rank (pp * TP + tp)."""
    return folder / f"mp_rank_{mp_rank:02d}_model_states.pt"


def read(path: str | Path, *, trust: bool = False):
    """Load a checkpoint file to the CPU without running code it may contain, unless ``trust``.

    Raises RunError for a missing or damaged file, and for one that needs more than
    the allowed classes.
    """
    return unpickling.load(path, trust=trust)


def checkpoint_engine():
    """What DeepSpeed writes and reads its files through: atomic, and safe to read."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class SafeCheckpointEngine(TorchCheckpointEngine):
        def __init__(self):  # the base class only wants to announce itself
            self.name = type(self).__name__

        def create(self, info):
            pass

        def save(self, state_dict, path):
            _replace(Path(path), lambda part: torch.save(state_dict, part))

        def load(self, path, map_location=None):
            return read(path)

        def commit(self, info):
            return True

    return SafeCheckpointEngine()
