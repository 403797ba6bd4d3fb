"""Random streams and recomputation, against streams made by hand."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F

from megatron.mpu import random as streams_module
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import capture_rng_state, checkpoint, restore_rng_state, seed_everything


def draws_of(seed: int, count: int = 5) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def test_default_stream_has_the_seed_of_the_stage_whatever_the_tp_and_dp_rank():
    for context in (ParallelContext(tp_size=2, tp_rank=1, pp_size=4, pp_rank=3),
                    ParallelContext(dp_size=2, dp_rank=1, pp_size=4, pp_rank=3)):
        seed_everything(42, context)
        assert torch.equal(torch.rand(5), draws_of(342))
        assert random.random() == random.Random(342).random()
        assert numpy.random.rand() == numpy.random.RandomState(342).rand()


def test_model_parallel_stream_differs_per_tp_rank_and_continues_between_forks():
    for rank in (0, 1):
        streams = seed_everything(42, ParallelContext(tp_size=2, tp_rank=rank, pp_size=2, pp_rank=1))
        expected = draws_of(142 + 2718 + rank, 10)
        got = []
        for _ in range(2):
            with streams.fork():
                got.append(torch.rand(5))
        assert torch.equal(torch.cat(got), expected)


def test_fork_leaves_the_default_stream_untouched_also_after_an_error():
    streams = seed_everything(7, ParallelContext())
    first = torch.rand(2)
    with pytest.raises(KeyError), streams.fork():
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.cat((first, torch.rand(3))), draws_of(7))


def test_fork_does_not_nest():
    streams = seed_everything(7, ParallelContext())
    with streams.fork(), pytest.raises(RuntimeError, match="does not nest"), streams.fork():
        pass
    with streams.fork():
        assert torch.rand(1).numel() == 1


@pytest.mark.parametrize("seed", [-1, 2**32 - 50])
def test_seed_out_of_range_is_refused_by_name(seed):
    with pytest.raises(ValueError, match=f"--seed {seed} is out of range"):
        seed_everything(seed, ParallelContext(pp_size=2, pp_rank=1))


def draw_everything(streams):
    with streams.fork():
        private = torch.rand(4)
    return (random.random(), random.gauss(0, 1), float(numpy.random.normal()), torch.rand(4), private)


def same(a, b) -> bool:
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


def test_states_survive_a_safe_load_and_continue_all_five_streams(tmp_path):
    streams = seed_everything(3, ParallelContext())
    draw_everything(streams)
    random.gauss(0, 1)  # leaves half a pair behind in python and numpy, which a state must keep
    numpy.random.normal()
    torch.save(capture_rng_state(streams), tmp_path / "state.pt")
    expected = draw_everything(streams)

    other = seed_everything(99, ParallelContext())
    assert not same(draw_everything(other), expected)
    restore_rng_state(torch.load(tmp_path / "state.pt", weights_only=True), other)
    assert same(draw_everything(other), expected)


def test_state_of_another_kind_of_device_is_refused_and_changes_nothing():
    streams = seed_everything(3, ParallelContext())
    state = capture_rng_state(streams)
    state["cuda_rng_state"] = torch.zeros(16, dtype=torch.uint8)
    before = draw_everything(seed_everything(3, ParallelContext()))
    streams = seed_everything(3, ParallelContext())
    with pytest.raises(ValueError, match="cuda_rng_state holds 16 bytes.*--no-load-rng"):
        restore_rng_state(state, streams)
    assert same(draw_everything(streams), before)


def noisy(weight, streams, x):
    """Draws from both streams, in turn, with something to save after each."""
    x = F.dropout(torch.tanh(x * weight), 0.5)
    with streams.fork():
        x = F.dropout(torch.tanh(x * weight), 0.5)
    return F.dropout(torch.tanh(x * weight), 0.5)


@pytest.mark.parametrize("input_needs_grad", [True, False])
def test_recomputation_replays_both_streams_and_leaves_them_where_they_were(input_needs_grad):
    x = torch.linspace(-1, 1, 64, requires_grad=input_needs_grad)
    results = []
    for recompute in (False, True):
        streams = seed_everything(5, ParallelContext())
        weight = torch.full((64,), 1.5, requires_grad=True)
        total = 0.0
        for _ in range(2):  # the second call starts where the first one left the streams
            args = (weight, streams, x)
            total = total + (checkpoint(noisy, *args, streams=streams) if recompute else noisy(*args)).sum()
        total.backward()
        results.append((float(total.detach()), weight.grad, *draw_everything(streams)))
    assert same(*results)


def test_recomputation_keeps_only_the_input():
    streams = seed_everything(5, ParallelContext())
    weight = torch.full((64,), 1.5, requires_grad=True)
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        noisy(weight, streams, torch.ones(64))
        plain, _ = sum(kept), kept.clear()
        checkpoint(noisy, weight, streams, torch.ones(64), streams=streams)
    assert sum(kept) <= 2 * 64 < plain


def test_stream_name_is_the_one_existing_checkpoints_use():
    state = capture_rng_state(seed_everything(1, ParallelContext()))
    assert list(state["rng_tracker_states"]) == ["model-parallel-rng"]
    assert streams_module._STREAM_NAME == "model-parallel-rng"
