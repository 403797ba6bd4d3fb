"""Fixtures shared by all tests, and an environment without network or surprises."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[variable] = "1"
for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# the truths are computed on the CPU, so all of it runs there; the gate of two accelerators
# (test_gpu_smoke.py) alone launches on them where they are
os.environ["DS_ACCELERATOR"] = "cpu"

import pytest  # noqa: E402
from worker_group import WorkerGroup  # noqa: E402


@pytest.fixture(scope="session")
def worker_group():
    """``worker_group(n)``: the shared group of n started ranks, up to the end of the session."""
    groups: dict[int, WorkerGroup] = {}

    def of_size(size: int) -> WorkerGroup:
        return groups.setdefault(size, WorkerGroup(size))

    yield of_size
    for group in groups.values():
        group.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folder of a checkpoint with the weights of ``small_runs.Case()``."""
    from small_runs import Case, write_base

    folder = str(tmp_path_factory.mktemp("base") / "checkpoint")
    write_base(folder, Case())
    return folder
