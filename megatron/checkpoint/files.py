"""Files of a checkpoint: names, atomic writes, reads that cannot run code.

Layout (DeepSpeed pipeline format): ``SAVE/latest`` holds a tag; the folder of that
name holds ``layer_II-model_TT-model_states.pt`` per pipeline layer and TP rank,
``mp_rank_MM_model_states.pt`` per model-parallel rank and optimizer shards.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.checkpoint import unpickling
from megatron.errors import RunError

LATEST = "latest"


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step."""
    replace(path, lambda part: part.write_text(text))


def write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step."""
    replace(path, lambda part: part.write_bytes(data))


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Replace ``path`` by what ``write`` puts into the file it is given, in one step.

    When this returns the new file and its name are on disk; when it raises, or the process
    is killed, ``path`` is what it was.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        with open(part, "rb") as done:
            os.fsync(done.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Put the names in ``folder`` on disk; without it a rename may be lost with the power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise  # some network file systems know no such thing: there a rename is on disk at once
    finally:
        os.close(handle)


def unfinished(target: Path, source: Path) -> Path:
    """Where the folder ``target`` is written until it is complete; what a killed job left there is removed.

    Raises RunError where ``source``, which it is made from, lies in that place.
    """
    part = target.with_name(target.name + ".part")
    if part.resolve() in (source.resolve(), *source.resolve().parents):
        raise RunError(f"{target} would be written as {part} first, which is what is read; give another name")
    shutil.rmtree(part, ignore_errors=True)
    return part


def publish(part: Path, target: Path) -> None:
    """Give the complete folder ``part`` its name, with all its files on disk."""
    for folder, _, names in os.walk(part):
        for name in names:
            with open(os.path.join(folder, name), "rb") as done:
                os.fsync(done.fileno())
        sync_folder(Path(folder))
    part.rename(target)
    sync_folder(target.absolute().parent)


def save(content, path: Path) -> None:
    """torch.save, with an OSError where the disk is full."""
    try:
        torch.save(content, path)
    except RuntimeError as error:
        raise OSError(f"{path.name}: {str(error).splitlines()[0]}") from error


def replace_folder(new: Path, old: Path) -> None:
    """Put the complete folder ``new`` in the place of ``old``, which need not exist.

    A job killed between the two renames leaves ``old`` whole under the name of `aside`.
    """
    trash = aside(old)
    if old.exists():
        shutil.rmtree(trash, ignore_errors=True)
        old.rename(trash)
    new.rename(old)
    sync_folder(old.parent)
    shutil.rmtree(trash, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` such that nothing half-removed ever bears its name."""
    trash = aside(folder)
    shutil.rmtree(trash, ignore_errors=True)
    folder.rename(trash)
    sync_folder(folder.parent)
    shutil.rmtree(trash)


def aside(folder: Path) -> Path:
    """Where a folder is put that is about to be removed."""
    return folder.with_name(f".{folder.name}.old")


def latest_tag(folder: str | Path) -> str | None:
    """The tag named in ``folder/latest``, or None without such a file."""
    try:
        return (Path(folder) / LATEST).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def layer_file(folder: Path, index: int, rank: int) -> Path:
    """The share of pipeline layer ``index`` that TP rank ``rank`` wrote."""
    return folder / f"layer_{index:02d}-model_{rank:02d}-model_states.pt"


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
        writer = None
        """a `writer.TagWriter` while a tag is saved: it takes the files and keeps the errors"""

        def __init__(self):  # the base class only wants to announce itself
            self.name = type(self).__name__

        def create(self, info):
            pass

        def makedirs(self, path, exist_ok=False):
            if self.writer:
                self.writer.attempt(os.makedirs, path, exist_ok=exist_ok)
            else:
                os.makedirs(path, exist_ok=exist_ok)

        def save(self, state_dict, path):
            if self.writer:
                self.writer.save(state_dict, path)
            else:
                replace(Path(path), lambda part: torch.save(state_dict, part))

        def load(self, path, map_location=None):
            return read(path)

        def commit(self, info):
            return True

    return SafeCheckpointEngine()
