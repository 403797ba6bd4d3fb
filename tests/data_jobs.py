"""Jobs that open data on several ranks at once: slow disks, folders without write permission, damaged and differing copies."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from small_runs import Case, settings_of

#: CAP_DAC_OVERRIDE, by which root writes where permissions forbid it, and the version of the calls
_OVERRIDE, _VERSION = 1 << 1, 0x20080522


@contextlib.contextmanager
def permissions_apply():
    """Give up, for a while, the right of root to write into any folder."""
    if os.geteuid():
        yield
        return
    header, sets = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, sets) == 0
    try:
        sets[0] &= ~_OVERRIDE
        assert libc.capset(header, sets) == 0
        yield
    finally:
        sets[0] |= _OVERRIDE
        assert libc.capset(header, sets) == 0


def open_data(case: Case, prefixes: list[str], *more) -> dict:
    """Open the first (of a rank's own) data as the loop does; see ``_open``."""
    rank = dist.get_rank()
    return _open(case, prefixes[rank % len(prefixes)], *more)


def open_one_after_another(case: Case, prefixes: list[str]) -> list[dict]:
    """Open each of ``prefixes``, on all ranks, whether or not the ones before could be."""
    return [_open(case, prefix) for prefix in prefixes]


def _open(case: Case, prefix: str, pause: float = 0.0, meet: str | None = None, together: int = 0) -> dict:
    """What ``training._datasets`` gives this rank: all rows of training, what it printed, how often indexes were built,
    and index files that were in place (``half``) while it was writing them.

    ``pause`` seconds pass while each file of an index is written. With ``meet`` it begins when
    ``together`` processes have put a file into that folder. ``error`` is the sentence it ends with, or None.
    """
    import pretrain_gpt
    from megatron import training
    from megatron.config import DataConfig
    from megatron.data import caching, gpt_dataset
    from megatron.errors import SharedRunError
    from megatron.mpu.context import build_context

    rank, built = dist.get_rank(), []
    settings = dataclasses.replace(settings_of(case, rank), data=DataConfig(data_path=(prefix,), split="8,1,1"))
    context = build_context(case.tp, case.pp, dist.get_world_size(), rank)
    said = io.StringIO()
    run = SimpleNamespace(settings=settings, context=context, train_iters=5, progress=SimpleNamespace(iteration=0, consumed_train_samples=0),
                          say=lambda text: print(text, file=said))
    save, build = caching.np.save, gpt_dataset._build_arrays

    def slow_save(file, array, **options):
        file.write(b"half of it")
        file.flush()
        time.sleep(pause)
        half.extend(path.name for path in Path(prefix).parent.glob("*.npy") if path.read_bytes() == b"half of it")
        file.seek(0)
        save(file, array, **options)

    def counted(*arguments):
        built.append(1)
        return build(*arguments)

    if meet is not None:
        Path(meet, str(os.getpid())).touch()
        end = time.monotonic() + 60
        while len(os.listdir(meet)) < together and time.monotonic() < end:
            time.sleep(0.01)
    error, rows, half = None, [], []
    with (mock.patch.object(caching.np, "save", slow_save), mock.patch.object(gpt_dataset, "_build_arrays", counted),
          permissions_apply()):
        try:
            datasets = training._datasets(run, training.Task(datasets=pretrain_gpt.datasets, batch=None))
            if datasets.train is not None:
                rows = [datasets.train[k]["text"].tolist() for k in range(len(datasets.train))]
        except SharedRunError as fault:
            error = str(fault)
    return {"error": error, "rows": rows, "said": said.getvalue(), "built": len(built), "reads": context.reads_data, "half": half}
