"""From a dataset to an iterator of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import DataLoader

from megatron.data.blending import Dataset
from megatron.data.samplers import build_sampler


def build_loader(dataset: Dataset, *, batch_size: int, dp_rank: int, dp_size: int, consumed_samples: int,
                 kind: str, num_workers: int, seed: int, cycle: bool = False,
                 worker_start: Callable[[int], None] | None = None) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of this data-parallel rank, each value stacked along a new first dimension.

    ``batch_size`` is the micro-batch size; ``kind`` is single or cyclic;
    ``consumed_samples`` (over all ranks) says where to begin. A cyclic loader
    never ends, a sequential one only does without ``cycle``. Random numbers for
    the worker processes come from a generator of its own, made from ``seed``:
    only some ranks build loaders, and the global random state must stay the same
    on all. ``worker_start`` is called with its number in each of them. Raises ValueError when there is nothing to read.
    """
    sampler = build_sampler(kind, len(dataset), batch_size=batch_size, dp_rank=dp_rank, dp_size=dp_size,
                            consumed_samples=consumed_samples, cycle=cycle or kind == "cyclic")
    return iter(DataLoader(
        dataset,  # type: ignore[arg-type]  # numbered items are all it needs, no class of torch's
        batch_sampler=sampler, num_workers=num_workers, worker_init_fn=worker_start,
        generator=torch.Generator().manual_seed(seed), pin_memory=_has_device()))


def _has_device() -> bool:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return accelerator.device_name() != "cpu" and accelerator.is_available()
