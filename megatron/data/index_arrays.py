"""Which tokens make which sample, and which sample comes from which dataset of a blend.

The closed forms here are what the compiled ``megatron.data.helpers`` computes
faster; both give the same arrays. The extension is used when it was built,
unless ``MEGATRON_DATA_NUMPY=1`` is set in the environment.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass

import numpy as np

try:
    from megatron.data import helpers
except ImportError:
    helpers = None  # type: ignore[assignment]  # not built; used only where HAVE_HELPERS

logger = logging.getLogger(__name__)

#: whether the compiled helpers can be imported
HAVE_HELPERS = helpers is not None


def _use_helpers(force_numpy: bool) -> bool:
    return HAVE_HELPERS and not force_numpy and os.environ.get("MEGATRON_DATA_NUMPY", "0") in ("", "0")


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How often a dataset is passed for the samples asked for, and what that yields."""

    tokens_per_epoch: int
    num_epochs: int
    num_samples: int
    """samples in num_epochs epochs; at least the number asked for"""
    full_samples: int
    """samples shuffled among themselves before the last epoch; all of them unless the last is separate"""

    @property
    def separate_last_epoch(self) -> bool:
        """Whether the last epoch, being used in part only, is shuffled on its own."""
        return self.full_samples < self.num_samples


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> EpochPlan:
    """Smallest number of epochs whose token stream holds ``num_samples`` samples.

    A sample is ``seq_length + 1`` tokens and shares one with the next, so E
    epochs hold ``(E * tokens - 1) // seq_length``. The last epoch is shuffled
    apart when less than 95 % of its samples are asked for. A dataset smaller
    than one sample is passed several times per sample; one without tokens is a
    ValueError.
    """
    needed = num_samples * seq_length + 1
    if tokens_per_epoch < 1:
        raise ValueError(f"{num_samples} samples of {seq_length} tokens need {needed} tokens, found 0")
    epochs = max(1, -(-needed // tokens_per_epoch))
    total = (epochs * tokens_per_epoch - 1) // seq_length
    full = total
    if epochs > 1:
        before = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
        per_epoch = (tokens_per_epoch - 1) // seq_length
        # num_samples - before may be per_epoch + 1, since each floor drops a part of a
        # sample: such a last epoch is simply full, there is nothing to refuse
        if num_samples - before < int(0.95 * per_epoch):
            full = before
    return EpochPlan(tokens_per_epoch=tokens_per_epoch, num_epochs=epochs, num_samples=total,
                     full_samples=full)


def build_doc_idx(documents: np.ndarray, plan: EpochPlan, rng: np.random.RandomState) -> np.ndarray:
    """int32[epochs * len(documents)]: the order in which documents form the token stream."""
    last = 1 if plan.separate_last_epoch else 0
    parts = [np.tile(np.asarray(documents, np.int32), count) for count in (plan.num_epochs - last, last)]
    for part in parts[:1 + last]:
        rng.shuffle(part)
    return np.concatenate(parts)


def build_shuffle_idx(plan: EpochPlan, rng: np.random.RandomState) -> np.ndarray:
    """uint32[num_samples] (int64 from 2**32 - 2 samples on): the order in which samples are visited."""
    dtype = shuffle_dtype(plan)
    order = np.arange(plan.num_samples, dtype=dtype)
    rng.shuffle(order[:plan.full_samples])
    if plan.separate_last_epoch:
        rng.shuffle(order[plan.full_samples:])
    return order


def shuffle_dtype(plan: EpochPlan) -> np.dtype:
    return np.dtype(np.uint32 if plan.num_samples < 2**32 - 2 else np.int64)


def sample_dtype(stream_documents: int) -> np.dtype:
    return np.dtype(np.int32 if stream_documents < 2**31 else np.int64)


def build_sample_idx(sizes: np.ndarray, doc_idx: np.ndarray, seq_length: int, num_samples: int, *,
                     force_numpy: bool = False) -> np.ndarray:
    """int32[num_samples + 1, 2]: (index into doc_idx, offset in that document) of each sample's first token.

    ``sizes`` int32[N] holds the tokens of every document, ``doc_idx`` the
    documents in stream order. Row i is stream position ``i * seq_length``; the
    offset is below the document's size, so documents without tokens are passed
    over. int64 when ``doc_idx`` has 2**31 entries or more. ValueError when the
    stream is too short.
    """
    dtype = sample_dtype(len(doc_idx))
    if _use_helpers(force_numpy):
        # the sizes of an index file are not aligned in memory
        sizes, doc_idx = (np.require(each, np.int32, ["C", "A"]) for each in (sizes, doc_idx))
        return helpers.build_sample_idx(sizes, doc_idx, seq_length, num_samples, dtype == np.int64)
    lengths = np.asarray(sizes)[doc_idx]
    ends = np.cumsum(lengths, dtype=np.int64)
    if num_samples * seq_length >= (ends[-1] if len(ends) else 0):
        raise ValueError("the documents hold too few tokens for that many samples")
    positions = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    rows = np.empty((num_samples + 1, 2), dtype)
    rows[:, 0] = index = np.searchsorted(ends, positions, side="right")
    rows[:, 1] = positions - (ends[index] - lengths[index])
    return rows


def build_blending_indices(weights: np.ndarray, length: int, *,
                           force_numpy: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Dataset (uint16[length]) and index in it (int64[length]) of each sample of a blend.

    ``weights`` are float64 and sum to one. Sample i comes from the dataset k
    with the largest ``weights[k] * max(i, 1) - taken[k]``, the first on a tie;
    its index there is ``taken[k]``, the samples already drawn from k. A dataset
    of weight zero is never drawn from.
    """
    weights = np.asarray(weights, np.float64)
    if weights.ndim != 1 or not 1 <= len(weights) <= 65535 or not (weights >= 0).all() or not weights.any():
        raise ValueError(f"a blend needs 1 .. 65535 weights, none negative and not all zero; got {weights}")
    if _use_helpers(force_numpy):
        return helpers.build_blending_indices(weights, length)
    if length > 10_000_000:
        logger.warning("a blend of %d samples is computed in Python, at some microseconds each; build the "
                       "extension megatron.data.helpers, which is far faster", length)
    which, local = np.empty(length, np.uint16), np.empty(length, np.int64)
    candidates = [(k, weight) for k, weight in enumerate(weights.tolist()) if weight]
    taken = [0] * len(weights)
    for i in range(length):
        reached = max(i, 1)
        best, best_lag = -1, -math.inf
        for k, weight in candidates:
            lag = weight * reached - taken[k]
            if lag > best_lag:  # not >=: of equals the first stays
                best, best_lag = k, lag
        which[i], local[i] = best, taken[best]
        taken[best] += 1
    return which, local
