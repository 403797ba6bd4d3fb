"""Rows of whole pairs, inputs and targets behind one another, for multitask prompted fine-tuning.

A row has T = seq_length + 1 entries, int64, one per token, each with its mark beside
the token id, so that a row travels like a row of running text::

    entry = token + 2**32 * mark        mark = 2 * segment + is_input

``segment`` is the number of the pair in the row, 1, 2, 3, ..; 0 is padding, whose
entries are 0. ``is_input`` is 1 on the tokens of inputs, 0 on targets and padding.
No token is added: end tokens are those of the data. ``split_entries`` takes rows
apart; ``mtf_batch`` makes of them what the model reads.
"""

from __future__ import annotations

import hashlib
import logging
import re
from functools import cache as remember

import numpy as np

from megatron.config import DataConfig
from megatron.data.caching import cached_arrays
from megatron.data.gpt_dataset import Datasets, assemble, check_ids
from megatron.data.mtf_dataset import PairedDataset
from megatron.data.packing import pack

logger = logging.getLogger(__name__)

OVERLONG = ("drop", "truncate-inputs", "error")
MARK = 32
"""bits of an entry below its mark"""


def split_entries(rows):
    """Tokens and marks of entries, each int64 in the shape of ``rows`` (NumPy array or torch tensor)."""
    return rows & ((1 << MARK) - 1), rows >> MARK


class PackedDataset:
    """At least ``num_samples`` + 1 rows ``{"text": int64[seq_length + 1]}`` of the pairs ``pairs``.

    ``documents`` (int) are the numbers of the pairs of the split. They are shuffled
    once per epoch and packed greedily (see ``packing.pack``); ``seed`` decides the
    order; rows are numbered in the order they were packed. Pairs are never split over
    rows. ``overlong`` says what becomes of a pair of more than T tokens: ``drop``
    leaves it out; ``truncate-inputs`` cuts the front of its inputs so that it fills a
    row, and drops it when the targets leave no room for an input token; ``error``
    raises ValueError. How many were cut or dropped is logged as a warning.

    ``name`` appears in the names of the index files, which with ``cache`` are kept
    beside the data under a name that covers all they depend on. ``vocab_size``, if
    given, is what every id read must be below. Raises ValueError when no pair can be used.

    [BUG] The trainers users come from number the pairs of a split from 0, so that
    ``0.95:1`` reads the first twentieth instead of the last; their cache knows neither
    row length nor range. Both are right here.
    """

    def __init__(self, name: str, pairs: PairedDataset, documents: np.ndarray, num_samples: int, seq_length: int,
                 seed: int, *, overlong: str = "drop", cache: bool = True, vocab_size: int | None = None) -> None:
        if overlong not in OVERLONG:
            raise ValueError(f"--mtf-overlong {overlong!r} is not one of {', '.join(OVERLONG)}")
        self.name, self.pairs, self.row_length, self.vocab_size = name, pairs, seq_length + 1, vocab_size
        documents = np.asarray(documents, np.int64)
        inputs, targets = pairs.sizes(documents)
        sizes = self._fitted(inputs, targets, overlong)
        what = f"{name}: {pairs.prefix}"

        def build() -> dict[str, np.ndarray]:
            try:
                order, rows = pack(sizes, self.row_length, num_samples, seed)
            except ValueError as error:
                raise ValueError(f"{what}: {error} (--seq-length {seq_length} and one more)") from None
            return {"batch_idx": rows, "shuffle_idx": documents[order]}

        digest = hashlib.sha256(repr((1, seq_length, seed, num_samples, overlong)).encode())
        for array in (documents, inputs, targets):
            digest.update(np.ascontiguousarray(array, "<i8").data)
        #: hex digest of all that the rows depend on; equal on ranks that read the same samples
        self.index_hash = digest.hexdigest()[:12]
        if cache:
            readable = re.sub(r"[^\w.-]", "_", name)
            stem = (f"{pairs.prefix}_{readable}_indexmap_{num_samples}ns_{seq_length}sl_{seed}s_"
                    f"{self.index_hash}_decoder_packed")
            expected = {"batch_idx": (np.dtype(np.int64), (None, 2)), "shuffle_idx": (np.dtype(np.int64), (None,))}
            arrays = cached_arrays(stem, expected, build)
            if len(arrays["batch_idx"]) <= num_samples or arrays["batch_idx"][-1, 1] >= len(arrays["shuffle_idx"]):
                raise ValueError(f"{what}: its index files do not belong together; delete {stem}_*.npy")
        else:
            arrays = build()
        #: int64[rows, 2]: row k holds the pairs shuffle_idx[start:end]
        self.rows = arrays["batch_idx"]
        #: int64: numbers of pairs, epoch behind epoch
        self.shuffle_idx = arrays["shuffle_idx"]

    def _fitted(self, inputs: np.ndarray, targets: np.ndarray, overlong: str) -> np.ndarray:
        """Tokens of each pair as it will lie in a row; still too many for one that is left out."""
        sizes = inputs + targets
        too_long = sizes > self.row_length
        if not too_long.any():
            return sizes
        found = (f"{self.name}: {int(too_long.sum())} of {len(sizes)} pairs of {self.pairs.prefix} have more than the "
                 f"{self.row_length} tokens of a row, up to {int(sizes.max())}")
        if overlong == "error":
            raise ValueError(f"{found} (--mtf-overlong error; drop and truncate-inputs are the other choices)")
        cut = too_long & (targets < self.row_length) if overlong == "truncate-inputs" else np.zeros_like(too_long)
        logger.warning("%s; cut: %d, dropped: %d (--mtf-overlong %s)", found, cut.sum(), (too_long & ~cut).sum(),
                       overlong)
        return np.where(cut, self.row_length, sizes)

    def __len__(self) -> int:
        return len(self.rows)

    def numbers(self, k: int) -> np.ndarray:
        """Numbers of the pairs in row ``k``, in order."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {self.name}: there are {len(self)}")
        start, end = self.rows[k]
        return self.shuffle_idx[start:end]

    def __getitem__(self, k: int) -> dict[str, np.ndarray]:
        sides, marks = [], []
        for segment, number in enumerate(self.numbers(k).tolist(), 1):
            inputs, targets = self.pairs[number]
            sides += [inputs[max(0, len(inputs) + len(targets) - self.row_length):], targets]
            marks += [2 * segment + 1, 2 * segment]
        tokens = np.concatenate(sides).astype(np.int64)
        # a negative id would spoil the mark, so ids are checked without a vocabulary too
        check_ids(tokens, self.vocab_size or 1 << MARK, self.pairs.prefix)
        entries = np.zeros(self.row_length, np.int64)
        entries[:len(tokens)] = tokens + (np.repeat(np.array(marks), [len(side) for side in sides]) << MARK)
        return {"text": entries}

    def parts(self, k: int) -> dict[str, np.ndarray]:
        """Row ``k`` under the names of older readers, each of length T.

        decoder_token_ids and decoder_segment_ids int64, decoder_is_inputs bool; 0 and False on padding.
        """
        tokens, marks = split_entries(self[k]["text"])
        return {"decoder_token_ids": tokens, "decoder_segment_ids": marks >> 1,
                "decoder_is_inputs": (marks & 1).astype(bool)}


def build_mtf_datasets(data: DataConfig, *, seq_length: int, seed: int, train_samples: int, valid_samples: int,
                       test_samples: int, vocab_size: int | None = None, cache: bool = True) -> Datasets:
    """Open the pairs that ``data`` names and pack the rows of training, validation and test.

    Prefixes are those of pairs, without ``_inputs_document``; splits, weighted groups
    and blends work as in ``gpt_dataset.build_datasets``, and the same errors are raised.
    """

    @remember
    def opened(prefix: str) -> PairedDataset:
        pairs = PairedDataset(prefix, data.data_impl, data.mmap_warmup)
        if vocab_size is not None:
            for side in (pairs.inputs, pairs.targets):
                for i in range(min(64, len(side))):
                    check_ids(side.get(i), vocab_size, side.prefix)
        return pairs

    def make(name: str, prefix: str, documents: np.ndarray, num_samples: int) -> PackedDataset:
        return PackedDataset(name, opened(prefix), documents, num_samples, seq_length, seed,
                             overlong=data.mtf_overlong, cache=cache, vocab_size=vocab_size)

    return assemble(data, lambda prefix: len(opened(prefix)), make, train_samples=train_samples,
                    valid_samples=valid_samples, test_samples=test_samples)
