"""The harness itself: answers per rank, failures told, a fresh group afterwards."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from worker_group import JobFailed, WorkerGroup


def total_of_ranks(offset: int) -> tuple[int, int, int]:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return dist.get_rank(), int(value), os.getpid()


def one_rank_raises() -> None:
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == 1:
        raise ValueError("told by rank one")
    dist.all_reduce(torch.zeros(1))


def one_rank_dies() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def one_rank_is_late() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def says_something_unpicklable():
    return lambda: None


def own_environment() -> tuple[str, str, str]:
    return os.environ["RANK"], os.environ["LOCAL_RANK"], dist.get_backend()


@pytest.fixture(scope="module")
def pair():
    group = WorkerGroup(2)
    yield group
    group.close()


def works(group: WorkerGroup) -> bool:
    return [answer[:2] for answer in group.run(total_of_ranks, 1)] == [(0, 3), (1, 3)]


def test_ranks_answer_in_order_and_the_next_job_meets_the_same_processes(pair):
    first, second = pair.run(total_of_ranks, 10), pair.run(total_of_ranks, 0)
    assert [answer[:2] for answer in first] == [(0, 21), (1, 21)]
    assert [answer[:2] for answer in second] == [(0, 1), (1, 1)]
    assert [answer[2] for answer in first] == [answer[2] for answer in second]
    assert os.getpid() not in [answer[2] for answer in first]


def test_each_rank_has_its_place_on_the_cpu(pair):
    assert pair.run(own_environment) == [("0", "0", "gloo"), ("1", "1", "gloo")]


def test_a_raising_rank_is_named_with_traceback_and_output(pair):
    with pytest.raises(JobFailed) as failure:
        pair.run(one_rank_raises)
    said = str(failure.value)
    assert said.startswith("rank 1 of 2: ValueError: told by rank one")
    assert "in one_rank_raises" in said and "rank 1 was here" in said and "rank 0 was here" not in said
    assert works(pair)


def test_a_rank_that_dies_is_named_though_others_fail_with_it(pair):
    with pytest.raises(JobFailed, match="rank 0 of 2: the process died"):
        pair.run(one_rank_dies)
    assert works(pair)


def test_a_late_rank_is_named_with_where_it_is(pair):
    started = time.monotonic()
    with pytest.raises(JobFailed) as failure:
        pair.run(one_rank_is_late, timeout=2)
    assert time.monotonic() - started < 20
    assert str(failure.value).startswith("rank 1 of 2: no answer within 2 s")
    assert "in one_rank_is_late" in str(failure.value)
    assert works(pair)


def test_what_cannot_be_sent_is_told_at_once(pair):
    with pytest.raises(JobFailed, match="pickle"):
        pair.run(says_something_unpicklable)
    with pytest.raises(ValueError, match="not a function at the top of a module"):
        pair.run(lambda: None)
    assert works(pair)


def test_a_group_whose_rank_died_between_jobs_is_started_anew(pair):
    victim = pair.run(total_of_ranks, 0)[0][2]
    os.kill(victim, 9)
    time.sleep(0.5)
    assert works(pair)
