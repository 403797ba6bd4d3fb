"""Writing this rank's files of one tag: checksums on the way, errors kept for all ranks to agree on."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from megatron.checkpoint import files
from megatron.checkpoint.manifest import Entry


class CheckedFile:
    """A file opened for writing that counts and checks what passes through.

    It never raises from ``write``: torch's archive writer is C++, and an exception in its
    callback would end the process. What went wrong is in ``problem``, and later writes do nothing.
    """

    def __init__(self, file) -> None:
        self._file = file
        self.bytes, self.crc32 = 0, 0
        self.problem: OSError | None = None

    def write(self, data) -> int:
        if self.problem is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.problem = error
            self.crc32 = zlib.crc32(data, self.crc32)
            self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        if self.problem is None:
            try:
                self._file.flush()
            except OSError as error:
                self.problem = error


class Memory:
    """The bytes of a file that a thread will write later."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def write(self, data) -> int:
        self._chunks.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def pour(self, sink) -> None:
        """Write everything to ``sink``, giving memory back on the way."""
        self._chunks.reverse()
        while self._chunks:
            sink.write(self._chunks.pop())


class TagWriter:
    """The files of one tag that this rank writes.

    Nothing here raises for a disk that fails: other ranks would wait for this one in
    DeepSpeed's barriers. The first error is kept, later files are left out, and
    `finish` tells. With ``background`` a file's bytes are made at once, in memory, and written by
    one thread, so what is saved is the state at the call.
    """

    def __init__(self, *, background: bool = False) -> None:
        self._pool = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._futures: list[Future] = []
        self._entries: list[Entry] = []
        self._problem: str | None = None

    def save(self, state: object, path: str | Path) -> None:
        """Write ``state`` as torch does. What is saved must be safe to load with ``weights_only=True``."""
        self._add(Path(path), lambda sink: torch.save(state, sink))

    def write_bytes(self, data: bytes, path: str | Path) -> None:
        """Write ``data`` as it is."""
        self._add(Path(path), lambda sink: sink.write(data))

    def attempt(self, function: Callable, *args, **kwargs) -> None:
        """Call ``function``; its error is this writer's first problem unless there is one."""
        if self._problem is not None:
            return
        try:
            function(*args, **kwargs)
        except Exception as error:
            self._problem = (str(error) or type(error).__name__).splitlines()[0]

    @property
    def done(self) -> bool:
        """Whether `finish` would return at once."""
        return all(future.done() for future in self._futures)

    def finish(self) -> tuple[list[Entry], str | None]:
        """Wait for the thread; returns what was written, and what went wrong first."""
        if self._pool:
            self._pool.shutdown()
        return self._entries, self._problem

    def _add(self, path: Path, fill: Callable) -> None:
        if self._pool is None:
            self.attempt(self._write, path, fill)
            return
        memory = Memory()
        self.attempt(fill, memory)
        self._futures.append(self._pool.submit(self.attempt, self._write, path, memory.pour))

    def _write(self, path: Path, fill: Callable) -> None:
        written: list[Entry] = []

        def into(part: Path) -> None:
            with open(part, "wb") as file:
                sink = CheckedFile(file)
                fill(sink)
                sink.flush()
                if sink.problem is not None:
                    raise sink.problem
            written.append(Entry(path.name, sink.bytes, f"{sink.crc32:08x}"))

        files.replace(path, into)
        self._entries += written
