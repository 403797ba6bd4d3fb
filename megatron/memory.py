"""What a rank's memory holds: weights, gradients, optimizer state, activations.

Everything is counted from tensors that exist, each storage once, whatever number of
views of it there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch


def storage_key(tensor: torch.Tensor) -> tuple:
    """What tells two living storages apart, the same for all views of one."""
    return str(tensor.device), tensor.untyped_storage().data_ptr()


class _Saved:
    """One tensor as autograd keeps it; gone when autograd lets go of it."""

    __slots__ = ("owner", "tensor", "key")

    def __init__(self, owner: SavedBytes, tensor: torch.Tensor, key: tuple) -> None:
        self.owner, self.tensor, self.key = owner, tensor, key

    def __del__(self) -> None:
        self.owner._release(self.key)


class SavedBytes:
    """Counts the bytes that autograd keeps for backward inside a ``with`` block.

        with SavedBytes(exclude=module.parameters()) as kept:
            loss = module(x)
        kept.bytes, kept.peak, kept.by_shape

    Several views of one storage count once, with all of that storage's bytes; storages
    of ``exclude``, as they are on entry, do not count. What is kept only inside a chunk
    of recomputed blocks (``mpu.random.checkpoint``) is not kept and does not count, nor
    is it seen while backward computes it again; the chunk's inputs do count.

    Tensors saved inside the block are followed until autograd frees them, also after
    the block has ended.
    """

    def __init__(self, exclude: Iterable[torch.Tensor] = ()) -> None:
        self.bytes = 0
        """held now"""
        self.peak = 0
        """most bytes held at one time"""
        self._exclude = {storage_key(tensor) for tensor in exclude if tensor.numel()}
        self._uses: Counter[tuple] = Counter()
        self._sizes: dict[tuple, tuple[int, tuple[int, ...]]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)

    @property
    def by_shape(self) -> dict[tuple[int, ...], int]:
        """Bytes held now by the shape under which a storage was first saved, largest first."""
        totals: Counter[tuple[int, ...]] = Counter()
        for size, shape in self._sizes.values():
            totals[shape] += size
        return dict(totals.most_common())

    def _pack(self, tensor: torch.Tensor):
        if not tensor.numel() or (key := storage_key(tensor)) in self._exclude:
            return tensor
        if not self._uses[key]:
            size = tensor.untyped_storage().nbytes()
            self._sizes[key] = (size, tuple(tensor.shape))
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
        self._uses[key] += 1
        return _Saved(self, tensor, key)

    @staticmethod
    def _unpack(saved):
        return saved.tensor if isinstance(saved, _Saved) else saved

    def _release(self, key: tuple) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.bytes -= self._sizes.pop(key)[0]
