"""Several datasets read as one, in fixed proportions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from megatron.data.index_arrays import build_blending_indices


class Dataset(Protocol):
    """Samples by number: what loaders, samplers and blends work with."""

    def __len__(self) -> int: ...

    def __getitem__(self, k: int) -> dict[str, Any]: ...


def normalised(weights: Sequence[float]) -> list[float]:
    """``weights`` divided by their sum; ValueError if one is negative or all are zero."""
    if not weights or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise ValueError(f"blend weights {list(weights)} must be finite and zero or more, "
                         "with a positive sum")
    total = sum(weights)
    return [weight / total for weight in weights]


def samples_per_dataset(weights: Sequence[float], num_samples: int) -> list[int]:
    """Samples each dataset of a blend is built with: half a percent above its share, rounded up."""
    return [math.ceil(num_samples * weight * 1.005) for weight in normalised(weights)]


class BlendedDataset:
    """Draws from ``datasets`` so that each is as close to its weight as it can be at every point.

    Its length is that of the datasets of positive weight together. A dataset of
    weight zero is never drawn from. One that is too short for its share starts
    over from its first sample, so no weights can run past an end; the shares
    stay right, and datasets built with ``samples_per_dataset`` start over only
    beyond the number of samples asked for.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float], *,
                 names: Sequence[str] = (), force_numpy: bool = False) -> None:
        if len(datasets) != len(weights):
            raise ValueError(f"a blend of {len(datasets)} datasets was given {len(weights)} weights")
        self.datasets = list(datasets)
        self.names = list(names) or [str(k) for k in range(len(self.datasets))]
        self.weights = np.array(normalised(weights))
        used = [dataset for dataset, weight in zip(datasets, weights) if weight > 0]
        if any(len(dataset) == 0 for dataset in used):
            raise ValueError("a dataset without samples cannot be blended with a weight above zero")
        length = sum(len(dataset) for dataset in used)
        self.dataset_index, self.sample_index = build_blending_indices(self.weights, length,
                                                                       force_numpy=force_numpy)

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, k: int) -> dict[str, Any]:
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of a blend of {len(self)}")
        dataset = self.datasets[self.dataset_index[k]]
        return dataset[int(self.sample_index[k]) % len(dataset)]

    @property
    def index_hash(self) -> str:
        """Hex digest of the weights and of all that the datasets depend on."""
        parts = [getattr(dataset, "index_hash", "") for dataset in self.datasets]
        return hashlib.sha256(repr((self.weights.tolist(), parts)).encode()).hexdigest()[:12]

    def shares(self, num_samples: int) -> list[float]:
        """Fraction of the first ``num_samples`` samples that each dataset provides."""
        drawn = self.dataset_index[:num_samples]
        return (np.bincount(drawn, minlength=len(self.datasets)) / max(1, len(drawn))).tolist()
