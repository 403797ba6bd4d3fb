"""Pairs of inputs and targets for multitask prompted fine-tuning (T0, arXiv 2110.08207; BLOOMZ, 2211.01786).

A prefix P names two token datasets, ``P_inputs_document`` and ``P_targets_document``;
sequence i of one belongs to sequence i of the other.
"""

from __future__ import annotations

import numpy as np

from megatron.data.indexed_dataset import IndexedDataset

SIDES = ("inputs", "targets")


def side_prefix(prefix: str, side: str) -> str:
    """Prefix of the files of one side (inputs or targets) of the pairs ``prefix``."""
    return f"{prefix}_{side}_document"


class PairedDataset:
    """Read-only pairs of ``prefix``; item i is (inputs, targets), two one-dimensional arrays of token ids.

    ``impl`` and ``warmup`` are those of IndexedDataset. Raises FileNotFoundError for
    a missing file; ValueError when the sides differ in number, hold no token ids, or
    one of them has a sequence without tokens.
    """

    def __init__(self, prefix: str, impl: str = "infer", warmup: bool = False) -> None:
        self.prefix = prefix
        self.inputs, self.targets = (IndexedDataset(side_prefix(prefix, side), impl, warmup) for side in SIDES)
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{self.inputs.prefix} holds {len(self.inputs)} sequences and {self.targets.prefix} "
                             f"{len(self.targets)}; the pairs are out of step, make both again from one file")
        for side in (self.inputs, self.targets):
            if side.dtype.kind not in "iu":
                raise ValueError(f"{side.prefix} holds {side.dtype} values, which are not token ids")
            if len(side) and side.sizes.min() < 1:
                raise ValueError(f"{side.prefix}: sequence {int(np.argmin(side.sizes))} holds no tokens; "
                                 "each side of a pair needs at least one")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs.get(i), self.targets.get(i)

    def sizes(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the inputs and of the targets of each of ``pairs``, int64."""
        return self.inputs.sizes[pairs].astype(np.int64), self.targets.sizes[pairs].astype(np.int64)
