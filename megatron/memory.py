"""What a rank's memory holds: weights, gradients, optimizer state, activations.

Everything is counted from tensors that exist, each storage once, whatever number of
views of it there are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

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


# --- weights, gradients, optimizer ------------------------------------------------------------


def tensors_within(root, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of all tensors that objects and containers below ``root`` refer to.

    Follows attributes, items and ``.grad``, each object once, breadth first; stops at
    modules, classes and functions.
    """
    seen: set[int] = set()
    waiting = deque([(path, root)])
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen or isinstance(value, (torch.nn.Module, type, str, bytes)):
            continue
        seen.add(id(value))
        if torch.is_tensor(value):
            yield path, value
            if value.is_leaf and value.grad is not None:
                waiting.append((f"{path}.grad", value.grad))
        if isinstance(value, Mapping):
            waiting.extend((f"{path}[{key if isinstance(key, str) else ''}]", item) for key, item in value.items())
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting.extend((f"{path}[]", item) for item in value)
        elif not callable(value) or isinstance(value, torch.optim.Optimizer):
            waiting.extend((f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items())


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of this rank's tensors that outlive a micro-batch, each storage once."""

    weights: int
    """parameters and buffers of the module, frozen ones in the dtype they have"""
    gradients: int
    """of parameters and of fp32 masters, flat buffers for them, buckets"""
    optimizer: int
    """fp32 masters and moments; the copy of fp32 weights that ZeRO updates"""


def held_bytes(engine) -> HeldBytes:
    """Count what a DeepSpeed engine's module and optimizer hold now."""
    kinds: dict[tuple, tuple[str, int]] = {}

    def count(kind: str, tensor: torch.Tensor) -> None:
        if tensor.numel() and not tensor.is_meta:  # ZeRO remembers shapes as tensors without memory
            kinds.setdefault(storage_key(tensor), (kind, tensor.untyped_storage().nbytes()))

    for tensor in (*engine.module.parameters(), *engine.module.buffers()):
        count("weights", tensor)
    for param in engine.module.parameters():
        if param.grad is not None:
            count("gradients", param.grad)
    found = list(tensors_within(engine.optimizer, "optimizer"))
    for path, tensor in sorted(found, key=lambda pair: "grad" not in pair[0]):
        count("gradients" if "grad" in path else "optimizer", tensor)
    totals: Counter[str] = Counter()
    for kind, size in kinds.values():
        totals[kind] += size
    return HeldBytes(**{kind: totals[kind] for kind in ("weights", "gradients", "optimizer")})


def expected_bytes(engine, dtype: str, optimizer: str, momentum: float) -> HeldBytes:
    """What ``held_bytes`` will be while a step is under way, told before the first one.

    Per trained element in ``dtype`` a gradient of its width, under bf16 a sum in fp32
    beside it; per element of this rank's masters two moments of Adam, one of SGD with
    momentum, in fp32.
    """
    now = held_bytes(engine)
    trained = sum(param.numel() for param in engine.module.parameters() if param.requires_grad)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    masters = sum(param.numel() for group in inner.param_groups for param in group["params"])
    moments = 2 if optimizer == "adam" else int(momentum > 0)
    return HeldBytes(weights=now.weights, gradients=trained * {"fp32": 4, "bf16": 2 + 4, "fp16": 2}[dtype],
                     optimizer=masters * 4 * (1 + moments))
