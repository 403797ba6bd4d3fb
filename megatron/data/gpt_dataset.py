"""Rows of running text: ``seq_length + 1`` tokens cut from documents laid end to end."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache as remember

import numpy as np

from megatron.config import DataConfig, SplitGroup
from megatron.data.blending import BlendedDataset, Dataset, normalised, samples_per_dataset
from megatron.data.caching import cached_arrays
from megatron.data.index_arrays import (
    EpochPlan,
    build_doc_idx,
    build_sample_idx,
    build_shuffle_idx,
    plan_epochs,
    sample_dtype,
    shuffle_dtype,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import parse_data_path, parse_split, split_boundaries
from megatron.errors import SharedRunError

logger = logging.getLogger(__name__)


class GPTDataset:
    """At least ``num_samples`` rows ``{"text": int64[seq_length + 1]}`` from sequences of ``indexed``.

    ``documents`` (int) are the sequence numbers of the split. They are repeated
    for as many epochs as needed and shuffled, their tokens are laid end to end
    without separators, sample i begins at token ``i * seq_length``, and the
    samples are shuffled; ``seed`` decides all of it. ``name`` appears in the
    names of the index files, which with ``cache`` are kept beside the data under
    a name that covers all they depend on.

    ``vocab_size`` (number of token ids), if given, is what every id read must be
    below. Raises ValueError for documents without tokens and for such an id.
    """

    def __init__(self, name: str, indexed: IndexedDataset, documents: np.ndarray, num_samples: int,
                 seq_length: int, seed: int, *, cache: bool = True, vocab_size: int | None = None) -> None:
        if len(indexed) >= 2**31:
            raise ValueError(f"{indexed.prefix} holds {len(indexed)} sequences; "
                             f"at most {2**31 - 1} can be indexed")
        if indexed.dtype.kind not in "iu":
            raise ValueError(f"{indexed.prefix} holds {indexed.dtype} values, which are not token ids")
        self.name, self.indexed, self.seq_length, self.vocab_size = name, indexed, seq_length, vocab_size
        documents = np.asarray(documents, np.int32)
        sizes = indexed.sizes[documents]
        tokens = int(sizes.sum(dtype=np.int64))
        try:
            plan = plan_epochs(tokens, seq_length, num_samples)
        except ValueError as error:
            raise ValueError(f"{name}: {len(documents)} documents of {indexed.prefix}: {error}") from error
        if tokens <= seq_length:
            logger.warning("%s: the %d documents of %s hold %d tokens, fewer than the %d of one sample; "
                           "each sample repeats them", name, len(documents), indexed.prefix, tokens,
                           seq_length + 1)
        self.plan = plan
        stream = plan.num_epochs * len(documents)
        expected = {"doc_idx": (np.dtype(np.int32), (stream,)),
                    "sample_idx": (sample_dtype(stream), (plan.num_samples + 1, 2)),
                    "shuffle_idx": (shuffle_dtype(plan), (plan.num_samples,))}

        def build() -> dict[str, np.ndarray]:
            return _build_arrays(indexed.sizes, documents, plan, seq_length, seed)

        #: hex digest of all that the arrays depend on; equal on ranks that read the same samples
        self.index_hash = _index_hash(documents, sizes, plan, seq_length, seed, num_samples)
        if cache:
            readable = re.sub(r"[^\w.-]", "_", name)
            stem = (f"{indexed.prefix}_{readable}_indexmap_{num_samples}ns_{seq_length}sl_{seed}s_"
                    f"{self.index_hash}")
            arrays = cached_arrays(stem, expected, build)
        else:
            arrays = build()
        self.doc_idx, self.sample_idx, self.shuffle_idx = (arrays[key] for key in expected)

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, k: int) -> dict[str, np.ndarray]:
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {self.name}: there are {len(self)}")
        text = self._tokens(int(self.shuffle_idx[k]))
        if self.vocab_size is not None:
            check_ids(text, self.vocab_size, self.indexed.prefix)
        return {"text": text}

    def _tokens(self, sample: int) -> np.ndarray:
        # a sample ends with the very token that the next one begins with
        (first, begin), (last, final) = self.sample_idx[sample:sample + 2].tolist()
        pieces = []
        for position in range(first, last + 1):
            start = begin if position == first else 0
            stop = final + 1 if position == last else None
            pieces.append(self.indexed.get(int(self.doc_idx[position]), start,
                                           None if stop is None else stop - start))
        return np.concatenate(pieces).astype(np.int64)


def _build_arrays(sizes: np.ndarray, documents: np.ndarray, plan: EpochPlan, seq_length: int,
                  seed: int) -> dict[str, np.ndarray]:
    rng = np.random.RandomState(seed)  # documents are shuffled first, samples second
    doc_idx = build_doc_idx(documents, plan, rng)
    return {"doc_idx": doc_idx,
            "sample_idx": build_sample_idx(sizes, doc_idx, seq_length, plan.num_samples),
            "shuffle_idx": build_shuffle_idx(plan, rng)}


def _index_hash(documents: np.ndarray, sizes: np.ndarray, plan: EpochPlan, seq_length: int, seed: int,
                num_samples: int) -> str:
    # the plan stands for the rule of epochs: should the rule change, old files no longer match
    digest = hashlib.sha256(repr((plan, seq_length, seed, num_samples)).encode())
    digest.update(np.ascontiguousarray(documents, "<i4").data)
    digest.update(np.ascontiguousarray(sizes, "<i4").data)
    return digest.hexdigest()[:12]


def check_ids(tokens: np.ndarray, vocab_size: int, prefix: str) -> None:
    """Raise ValueError when a token is not an id 0 .. vocab_size - 1 of the model's vocabulary."""
    if not tokens.size:
        return
    worst = int(tokens.max()) if tokens.max() >= vocab_size else int(tokens.min())
    if not 0 <= worst < vocab_size:
        raise ValueError(f"{prefix} holds the token id {worst}, but the tokenizer of this run has "
                         f"{vocab_size} ids (0 .. {vocab_size - 1}); the data were made with another one, "
                         "so give the --tokenizer-type and files they were made with")


# --- all the datasets of a run ---


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a run reads. Validation and test sets are evaluated apart and reported under their names."""

    train: Dataset | None
    """None when no training samples are wanted or the split gives it no documents"""
    valid: Mapping[str, Dataset | None] = field(default_factory=dict)
    """None under a name: the set is not read on this rank"""
    test: Mapping[str, Dataset | None] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """What each set holds, in words."""
        return {name: _facts(dataset) for name, dataset in self._sets().items()}

    def prints(self) -> dict[str, str]:
        """Length and hash of each set; equal on ranks that read the same samples in the same order, wherever these lie."""
        return {name: _print(dataset) for name, dataset in self._sets().items()}

    def _sets(self) -> dict[str, Dataset]:
        sets = {"training": self.train, **{f"validation {name}": each for name, each in self.valid.items()},
                **{f"test {name}": each for name, each in self.test.items()}}
        return {name: dataset for name, dataset in sets.items() if dataset is not None}


def _print(dataset: Dataset) -> str:
    return f"{len(dataset)} samples, index hash {getattr(dataset, 'index_hash', 'none')}"


def _facts(dataset: Dataset) -> str:
    if not isinstance(dataset, BlendedDataset):
        return _print(dataset)
    samples, index_hash = _print(dataset).split(", ")
    shares = zip(dataset.names, dataset.shares(len(dataset)))
    return ", ".join([samples, *(f"{share:.4%} of {name}" for name, share in shares), index_hash])


def check_same_data(prints: Sequence[dict[str, str] | None]) -> None:
    """Refuse ranks that read other samples than rank 0. ``prints`` are those of each rank, None where nothing is read.

    Raises SharedRunError, as on all ranks that are given the same list.
    """
    first = prints[0] or {}
    for rank, other in enumerate(prints):
        if other is not None and other != first:
            name = next(name for name in {**first, **other} if first.get(name) != other.get(name))
            raise SharedRunError(f"the ranks read different {name} data: {first.get(name)} on rank 0, {other.get(name)} on "
                                 f"rank {rank}; all must read the same files, also where each node has copies of its own")


#: (name, prefix, documents, number of samples) -> dataset
Maker = Callable[[str, str, np.ndarray, int], Dataset]


def build_datasets(data: DataConfig, *, seq_length: int, seed: int, train_samples: int, valid_samples: int,
                   test_samples: int, vocab_size: int | None = None, cache: bool = True) -> Datasets:
    """Open what ``data`` names and build the samples of training, validation and test.

    With ``--data-path`` the sets are called train, valid and test; with weighted
    split paths each group is a set under its own name. A split of zero samples
    or without documents gives no dataset. Raises FileNotFoundError and
    ValueError, naming the file, for data that are missing, damaged, empty or
    hold ids that ``vocab_size`` does not cover (checked on the first tokens
    here and on every sample when it is read).
    """

    @remember
    def opened(prefix: str) -> IndexedDataset:
        indexed = IndexedDataset(prefix, data.data_impl, data.mmap_warmup)
        if vocab_size is not None and indexed.dtype.kind in "iu":
            for i in range(min(64, len(indexed))):
                check_ids(indexed.get(i), vocab_size, prefix)
        return indexed

    def make(name: str, prefix: str, documents: np.ndarray, num_samples: int) -> GPTDataset:
        return GPTDataset(name, opened(prefix), documents, num_samples, seq_length, seed, cache=cache,
                          vocab_size=vocab_size)

    return assemble(data, lambda prefix: len(opened(prefix)), make, train_samples=train_samples,
                    valid_samples=valid_samples, test_samples=test_samples)


def assemble(data: DataConfig, count: Callable[[str], int], make: Maker, *, train_samples: int,
             valid_samples: int, test_samples: int) -> Datasets:
    """Split and blend the datasets that ``data`` names, whatever kind ``make`` builds.

    ``count`` tells how many documents a prefix has.
    """
    if data.data_path:
        prefixes, weights = parse_data_path(data.data_path)
        bounds = [split_boundaries(parse_split(data.split), _counted("--data-path", prefix, count)) for prefix in prefixes]
        train, valid, test = (
            _blend(name, prefixes, weights, [(each[k], each[k + 1]) for each in bounds], samples, make)
            for k, (name, samples) in enumerate([("train", train_samples), ("valid", valid_samples),
                                                 ("test", test_samples)]))
        return Datasets(train=train, valid={} if valid is None else {"valid": valid},
                        test={} if test is None else {"test": test})

    def build(part: str, groups: Sequence[SplitGroup], samples: int) -> dict[str, Dataset]:
        built = {group.name: _blend(group.name, group.paths, group.weights, _ranges(part, group, count),
                                    samples, make) for group in groups}
        return {name: dataset for name, dataset in built.items() if dataset is not None}

    trained = list(build("train", data.train_groups, train_samples).values())
    if len(trained) > 1:
        raise ValueError(f"training takes one group of weighted split paths, {len(trained)} were given")
    return Datasets(train=trained[0] if trained else None, valid=build("valid", data.valid_groups, valid_samples),
                    test=build("test", data.test_groups, test_samples))


def _counted(flag: str, prefix: str, count: Callable[[str], int]) -> int:
    try:
        return count(prefix)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{flag} {prefix}: {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} {prefix}: {error}") from error


def _ranges(part: str, group: SplitGroup, count: Callable[[str], int]) -> list[tuple[int, int]]:
    flag, ranges = f"--{part}-weighted-split-paths", []
    for path, (start, end) in zip(group.paths, group.splits):
        n = _counted(flag, path, count)
        ranges.append((round(start * n), round(end * n)))
        if ranges[-1][0] == ranges[-1][1]:
            raise ValueError(f"{flag}: group {group.name!r}: the range {start:g}:{end:g} of {path}, which has {n} "
                             "documents, holds none; widen the range")
    return ranges


def _blend(name: str, prefixes: Sequence[str], weights: Sequence[float], ranges: Sequence[tuple[int, int]],
           num_samples: int, make: Maker) -> Dataset | None:
    """One dataset over document ranges of several; None without samples or documents.

    A single dataset gets ``num_samples`` as they are, its weight means nothing.
    Datasets of weight zero are left out.
    """
    single = len(prefixes) == 1
    parts = [(prefix, 1.0 if single else weight, start, end)
             for prefix, weight, (start, end) in zip(prefixes, weights, ranges)
             if end > start and (single or weight > 0)]
    for prefix, weight, (start, end) in zip(prefixes, weights, ranges):
        if num_samples and not single and weight > 0 and end == start:
            logger.warning("%s: %s has no documents in this split and is left out of the blend", name, prefix)
    if not parts or not num_samples:
        return None
    shares = normalised([part[1] for part in parts])
    wanted = [num_samples] if single else samples_per_dataset(shares, num_samples)
    datasets = [make(name, prefix, np.arange(start, end, dtype=np.int32), samples)
                for (prefix, _, start, end), samples in zip(parts, wanted)]
    if single:
        return datasets[0]
    return BlendedDataset(datasets, shares, names=[part[0] for part in parts])
