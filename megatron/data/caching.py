"""Files that appear whole or not at all, and index arrays cached beside the data."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO

import numpy as np

from megatron.errors import RunError

logger = logging.getLogger(__name__)


def temporary_name(path: str) -> str:
    """A hidden name in the folder of ``path`` that no other process or host will choose."""
    folder, name = os.path.split(path)
    tag = f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    return os.path.join(folder, f".{name}.{tag}.tmp")


def flush_to_disk(file: BinaryIO) -> None:
    """Return only when the bytes written to ``file`` are on the disk."""
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[BinaryIO]:
    """Open ``path`` for binary writing; it is replaced on success and untouched on an exception."""
    temporary = temporary_name(path)
    try:
        # open(), not mkstemp(): the file shall have the permissions of the user's umask
        with open(temporary, "xb") as file:
            yield file
            flush_to_disk(file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


#: dtype and shape; None stands for any length along that dimension
Expected = tuple[np.dtype, tuple[int | None, ...]]


def _fits(array: np.ndarray, dtype: np.dtype, shape: tuple[int | None, ...]) -> bool:
    return (array.dtype == dtype and array.ndim == len(shape)
            and all(due in (None, length) for due, length in zip(shape, array.shape)))


def _load(path: str, dtype: np.dtype, shape: tuple[int | None, ...]) -> np.ndarray | None:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        logger.warning("index cache %s cannot be read (%s); it is built again", path, error)
        return None
    if not _fits(array, dtype, shape):
        logger.warning("index cache %s holds %s %s where %s %s is due; it is built again",
                       path, array.dtype, array.shape, dtype, shape)
        return None
    return array


@contextlib.contextmanager
def _one_builder(folder: str) -> Iterator[None]:
    """Let the processes of one host build one after the other, where the file system can lock.

    Only saves work and memory: where locks do not exist, all build at once. The
    lock is on the folder itself, so no lock file stays behind, and it ends with
    its process.
    """
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def cached_arrays(stem: str, expected: Mapping[str, Expected],
                  build: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays ``<stem>_<key>.npy`` for each key of ``expected``, memory-mapped; built when absent.

    ``expected`` gives dtype and shape; a file that is unreadable or different is
    built again. ``build`` must be deterministic and ``stem`` name everything it
    depends on: then any number of processes on any hosts may build and write at
    once, since each file is replaced whole by the same bytes.
    Raises RunError where they cannot be written: each process and start would build them anew.
    """
    paths = {key: f"{stem}_{key}.npy" for key in expected}

    def load() -> dict[str, np.ndarray] | None:
        found = {key: _load(paths[key], *expected[key]) for key in expected}
        usable = {key: array for key, array in found.items() if array is not None}
        return usable if len(usable) == len(found) else None

    found = load()
    if found is not None:
        return found
    with _one_builder(os.path.dirname(stem) or "."):
        found = load()
        if found is not None:
            return found
        built = build()
        for key, (dtype, shape) in expected.items():
            if not _fits(built[key], dtype, shape):
                raise AssertionError(f"{key}: built {built[key].dtype} {built[key].shape}, "
                                     f"expected {dtype} {shape}")
        try:
            for key in expected:
                with atomic_file(paths[key]) as file:
                    np.save(file, built[key], allow_pickle=False)
        except OSError as error:
            raise RunError(f"the index cache {stem}_*.npy cannot be written ({error.strerror or error}); make its folder "
                           "writable, or link the .bin and .idx into a folder that is, and name that one") from error
    return load() or built
