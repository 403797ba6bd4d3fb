"""Token files: ``<prefix>.bin`` holds the tokens, ``<prefix>.idx`` says where each sequence lies.

The ``.idx`` layout (little-endian, no padding) is::

    9 bytes  magic "MMIDIDX\\0\\0"     u64 version 1     u8 dtype code     u64 N     u64 D
    i32[N]   tokens per sequence      i64[N] byte offset of each sequence in .bin
    i64[D]   document k is sequences doc_idx[k] .. doc_idx[k + 1] - 1

Some writers append one signed byte per sequence (modes), which is ignored. The
older ``TNTIDX`` layout, called cached or lazy, can be read but not written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from array import array
from collections.abc import Sequence

import numpy as np

from megatron.data.caching import flush_to_disk, temporary_name

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
LEGACY_HEADER = struct.Struct("<8sQQQQQQ")
IMPLEMENTATIONS = ("infer", "mmap", "cached", "lazy")

#: dtype of each code. Code 7 is float64 in files of the BigScience trainers and float32 in
#: NVIDIA's; a reader tells them apart by the size of .bin. Text only ever uses 4 and 8.
DTYPES: dict[int, np.dtype] = {1: np.dtype("u1"), 2: np.dtype("i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"),
          6: np.dtype("<f8"), 7: np.dtype("<f8"), 8: np.dtype("<u2")}
WRITABLE = {dtype: code for code, dtype in DTYPES.items() if dtype.kind in "iu"}


def best_dtype(vocab_size: int | None) -> np.dtype:
    """Token dtype for ids below ``vocab_size`` = highest id + 1, added tokens included.

    uint16 below 65,500 (the limit other readers of these files expect), else
    int32; int32 when the size is unknown (None).
    """
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


def byte_offsets(sizes: np.ndarray, itemsize: int) -> np.ndarray:
    """int64[N] byte offset of each sequence: 64-bit, whatever the dtype of ``sizes``."""
    offsets = np.zeros(len(sizes), np.int64)
    np.cumsum(sizes[:-1], dtype=np.int64, out=offsets[1:])
    return offsets * itemsize


def dataset_exists(prefix: str) -> bool:
    """Whether both files of the dataset are there."""
    return os.path.isfile(prefix + ".idx") and os.path.isfile(prefix + ".bin")


class IndexedDataset:
    """Read-only, memory-mapped access to the sequences of ``<prefix>.bin``.

    ``impl`` is infer, mmap, cached or lazy and must agree with the file. With
    ``warmup`` both files are read once, so that the page cache holds them. The
    index is checked against itself and against the length of ``.bin`` here, so
    a read never passes the end: FileNotFoundError when a file is missing,
    ValueError with the path and what is wrong when one is damaged.

    Attributes: ``prefix``; ``dtype`` of a token; ``sizes`` int32[N] tokens per
    sequence; ``pointers`` int64[N] byte offsets; ``doc_idx`` int64[D].
    """

    def __init__(self, prefix: str, impl: str = "infer", warmup: bool = False) -> None:
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"--data-impl {impl!r} is not one of {', '.join(IMPLEMENTATIONS)}")
        self.prefix, self._impl = prefix, impl
        self._index_path, self._bin_path = prefix + ".idx", prefix + ".bin"
        for path in (self._index_path, self._bin_path):
            if not os.path.isfile(path):
                raise FileNotFoundError(f"dataset {prefix!r} needs the file {path}, which does not exist; "
                                        "give the path without .idx and .bin, or make both with tools/preprocess_data.py")
        if warmup:
            for path in (self._index_path, self._bin_path):
                _read_through(path)
        index = _map(self._index_path).data
        self._tokens = _map(self._bin_path).data
        legacy = bytes(index[:8]) == LEGACY_MAGIC
        if not legacy and bytes(index[:9]) != MAGIC:
            raise self._damaged(f"begins with {bytes(index[:9])!r}, which is not the magic of a token index")
        if impl != "infer" and legacy != (impl in ("cached", "lazy")):
            raise ValueError(f"--data-impl {impl}: {self._index_path} is of the "
                             f"{'cached' if legacy else 'mmap'} kind; use infer")
        (self._read_legacy if legacy else self._read_index)(index)
        self._check()

    def __len__(self) -> int:
        return len(self.sizes)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """``length`` tokens (default: all that follow) of sequence ``i`` from ``offset``; a read-only view.

        Raises IndexError when the sequence or the range does not exist.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {i} of {self.prefix}: there are {len(self)}")
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"tokens {offset}..{offset + length} of sequence {i} of {self.prefix}: "
                             f"it has {size} tokens")
        if not length:
            return np.empty(0, self.dtype)
        start = int(self.pointers[i]) + offset * self.dtype.itemsize
        return np.frombuffer(self._tokens, self.dtype, length, start)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.get(i)

    def __reduce__(self):
        # a loader worker started with spawn maps the files itself instead of receiving a copy
        return IndexedDataset, (self.prefix, self._impl)

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"{self._index_path} {what}; the dataset is damaged or of another kind, "
                          "make it again with tools/preprocess_data.py")

    def _read_index(self, index: memoryview) -> None:
        if len(index) < HEADER.size:
            raise self._damaged(f"has {len(index)} bytes, fewer than its header of {HEADER.size}")
        _, version, code, n, d = HEADER.unpack_from(index)
        self._check_header(version, code)
        length = HEADER.size + 12 * n + 8 * d
        if len(index) not in (length, length + n):
            raise self._damaged(f"has {len(index)} bytes where {n} sequences and {d} document marks "
                                f"take {length}")
        # the arrays are not aligned in the file; numpy reads them correctly all the same
        self.sizes = np.frombuffer(index, "<i4", n, HEADER.size)
        self.pointers = np.frombuffer(index, "<i8", n, HEADER.size + 4 * n)
        self.doc_idx = np.frombuffer(index, "<i8", d, HEADER.size + 12 * n)

    def _read_legacy(self, index: memoryview) -> None:
        if len(index) < LEGACY_HEADER.size:
            raise self._damaged(f"has {len(index)} bytes, fewer than its header of {LEGACY_HEADER.size}")
        _, version, code, itemsize, n, s, d = LEGACY_HEADER.unpack_from(index)
        self._check_header(version, code)
        length = LEGACY_HEADER.size + 8 * (2 * (n + 1) + s + d)
        if len(index) != length:
            raise self._damaged(f"has {len(index)} bytes where its header announces {length}")
        if itemsize != self.dtype.itemsize:
            raise self._damaged(f"announces {itemsize} bytes per token, but dtype code {code} "
                                f"has {self.dtype.itemsize}")
        body = np.frombuffer(index, "<i8", offset=LEGACY_HEADER.size)
        dims, offsets, sizes, self.doc_idx = np.split(body, np.cumsum([n + 1, n + 1, s]))
        if s != n or not np.array_equal(dims, np.arange(n + 1)):
            raise self._damaged("holds items of more than one dimension, which are not sequences of tokens")
        if s and not 0 <= sizes.min() <= sizes.max() < 2**31:
            raise self._damaged("has a sequence size outside 0 .. 2**31 - 1")
        self.sizes = sizes.astype(np.int32)
        self.pointers = offsets[:n] * itemsize

    def _check_header(self, version: int, code: int) -> None:
        if version != 1:
            raise self._damaged(f"has version {version}; only version 1 is known")
        if code not in DTYPES:
            raise self._damaged(f"has dtype code {code}, which is not one of 1 .. 8")
        self._code, self.dtype = code, DTYPES[code]

    def _check(self) -> None:
        n, tokens = len(self.sizes), int(self.sizes.sum(dtype=np.int64))
        if n and self.sizes.min() < 0:
            raise self._damaged("has a negative sequence size")
        if self._code == 7 and len(self._tokens) == 4 * tokens:
            self.dtype = np.dtype("<f4")
        if len(self._tokens) != tokens * self.dtype.itemsize:
            raise ValueError(f"{self._bin_path} has {len(self._tokens)} bytes, but {self._index_path} "
                             f"describes {tokens} tokens of {self.dtype.itemsize} bytes = "
                             f"{tokens * self.dtype.itemsize}; the two do not belong together or one is cut, "
                             "make both again with tools/preprocess_data.py")
        step = 1 << 22  # in pieces: an index may hold hundreds of millions of sequences
        if n and self.pointers[0] != 0:
            raise self._damaged(f"places its first sequence at byte {self.pointers[0]} instead of 0")
        for start in range(0, n - 1, step):
            ends = self.pointers[start:start + step + 1]
            sizes = self.sizes[start:start + len(ends) - 1].astype(np.int64)
            if not np.array_equal(np.diff(ends), sizes * self.dtype.itemsize):
                raise self._damaged("has byte offsets that do not follow from its sequence sizes")
        marks = self.doc_idx
        if not len(marks) or marks[0] != 0 or marks[-1] != n or any(
                (np.diff(marks[start:start + step + 1]) < 0).any() for start in range(0, len(marks), step)):
            raise self._damaged(f"has document marks that do not run from 0 to its {n} sequences")


def _map(path: str) -> np.ndarray:
    # an empty file cannot be mapped
    return np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)


def _read_through(path: str) -> None:
    buffer = bytearray(1 << 24)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


class IndexedDatasetWriter:
    """Writes ``<prefix>.bin`` and ``.idx``; both appear when the ``with`` block ends without exception.

    After an exception nothing is left behind, and an older dataset of that name
    is untouched. ``dtype`` is an integer type (see ``best_dtype``). Datasets that
    belong together are published together: see ``publish_together``.
    """

    def __init__(self, prefix: str, dtype: np.dtype | type | str) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype).newbyteorder("<")
        if self.dtype not in WRITABLE:
            raise ValueError(f"{prefix}: tokens cannot be written as {self.dtype}; allowed are "
                             f"{', '.join(str(each) for each in WRITABLE)}")
        self._sizes, self._marks = array("i"), array("q", [0])
        self._complete = False

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return len(self._marks) - 1

    def __enter__(self):
        self._bin_name = temporary_name(self.prefix + ".bin")
        self._index_name = temporary_name(self.prefix + ".idx")
        self._bin = open(self._bin_name, "xb")
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self.complete()
                self.withdraw_older()
                os.replace(self._bin_name, self.prefix + ".bin")
                os.replace(self._index_name, self.prefix + ".idx")
        finally:
            self._bin.close()
            for name in (self._bin_name, self._index_name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)

    def complete(self) -> None:
        """Bring both files to the disk under temporary names; all that is left to do is to rename them."""
        if self._complete:
            return
        with open(self._index_name, "xb") as index:
            self._write_index(index)
            flush_to_disk(index)
        flush_to_disk(self._bin)
        self._bin.close()
        self._complete = True

    def withdraw_older(self) -> None:
        """Take away the index of an older dataset, which must never stand beside the new tokens."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.prefix + ".idx")

    def add_document(self, tokens: Sequence[int] | np.ndarray | Sequence[Sequence[int]]) -> None:
        """Append one document: a flat list of token ids, or a list of such lists, one per sequence.

        Raises ValueError for a document without tokens and for an id that the
        dtype cannot hold; nothing of the document is written then.
        """
        nested = len(tokens) > 0 and np.ndim(tokens[0]) == 1
        sequences = [self._encode(sequence) for sequence in (tokens if nested else [tokens])]
        if not any(len(sequence) for sequence in sequences):
            raise ValueError(f"{self.prefix}: document {len(self._marks) - 1} holds no tokens")
        for sequence in sequences:
            self._bin.write(sequence.tobytes())
            self._sizes.append(len(sequence))
        self._marks.append(len(self._sizes))

    def add_dataset(self, other: IndexedDataset) -> None:
        """Append all documents of ``other``, whose dtype must be the same (ValueError)."""
        if other.dtype != self.dtype:
            raise ValueError(f"{other.prefix} holds {other.dtype} tokens and cannot be appended to "
                             f"{self.dtype} tokens; encode both with the same dtype")
        shift = len(self._sizes)
        with open(other.prefix + ".bin", "rb") as source:
            shutil.copyfileobj(source, self._bin, 1 << 24)
        self._sizes.frombytes(other.sizes.astype(np.int32).tobytes())
        self._marks.frombytes((other.doc_idx[1:] + shift).astype(np.int64).tobytes())

    def _encode(self, sequence) -> np.ndarray:
        ids = np.asarray(sequence)
        if not len(ids):
            return np.empty(0, self.dtype)
        limits = np.iinfo(self.dtype)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{self.prefix}: a sequence must be a flat list of whole numbers, "
                             f"got {ids.ndim} dimensions of {ids.dtype}")
        for extreme in (int(ids.min()), int(ids.max())):
            if not max(limits.min, 0) <= extreme <= limits.max:
                raise ValueError(f"{self.prefix}: token id {extreme} does not fit {self.dtype} "
                                 f"(0 .. {limits.max})")
        return ids.astype(self.dtype)

    def _write_index(self, index) -> None:
        sizes = np.frombuffer(self._sizes, np.int32)
        index.write(HEADER.pack(MAGIC, 1, WRITABLE[self.dtype], len(sizes), len(self._marks)))
        index.write(sizes.astype("<i4").tobytes())
        index.write(byte_offsets(sizes, self.dtype.itemsize).astype("<i8").tobytes())
        index.write(np.frombuffer(self._marks, np.int64).astype("<i8").tobytes())


def publish_together(writers: Sequence[IndexedDatasetWriter]) -> None:
    """Prepare writers of datasets with equal numbers of documents; call it last in their ``with`` block.

    Raises ValueError when the numbers differ. Nothing of the writing can fail
    afterwards, and at no moment do new and older datasets stand side by side as if
    they belonged together: a job killed meanwhile leaves one without an index.
    """
    if len({writer.documents for writer in writers}) > 1:
        raise ValueError("datasets that belong together differ in documents: "
                         + ", ".join(f"{writer.prefix} has {writer.documents}" for writer in writers))
    for writer in writers:
        writer.complete()
    for writer in writers:
        writer.withdraw_older()
