"""The harness itself: answers per rank, failures told, a fresh group afterwards."""

import pytest
from worker_group import JobFailed, WorkerGroup


def total_of_ranks(offset: int) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return dist.get_rank(), int(value)


def one_rank_raises() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("told by rank one")
    dist.all_reduce(torch.zeros(1))


def one_rank_dies() -> None:
    import os

    import torch.distributed as dist

    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


@pytest.fixture
def pair():
    group = WorkerGroup(2)
    yield group
    group.close()


def test_ranks_answer_in_order_and_failures_do_not_stick(pair):
    assert pair.run(total_of_ranks, 10) == [(0, 21), (1, 21)]
    with pytest.raises(JobFailed, match="told by rank one"):
        pair.run(one_rank_raises)
    assert pair.run(total_of_ranks, 0) == [(0, 1), (1, 1)]
    with pytest.raises(JobFailed, match="rank"):
        pair.run(one_rank_dies)
    assert pair.run(total_of_ranks, 1) == [(0, 3), (1, 3)]
