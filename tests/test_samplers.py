"""Which rank reads which sample, resuming, loaders and batches."""

import itertools

import numpy as np
import pytest
import torch
from finetune_jobs import write_pairs

from megatron.config import DataConfig
from megatron.data.batch import gpt_batch
from megatron.data.loaders import build_loader
from megatron.data.mtf_dataset import PairedDataset
from megatron.data.packed_dataset import PackedDataset
from megatron.data.samplers import build_sampler


def per_rank(kind, total, batch, dp, consumed=0, cycle=False, count=None):
    """For every step the batches of all ranks."""
    samplers = [
        build_sampler(
            kind, total, batch_size=batch, dp_rank=rank, dp_size=dp, consumed_samples=consumed, cycle=cycle
        )
        for rank in range(dp)
    ]
    return list(itertools.islice(zip(*samplers, strict=count is None), count))


def test_single_hands_out_consecutive_chunks_and_drops_the_incomplete_one():
    assert per_rank("single", 13, 2, 3) == [([0, 1], [2, 3], [4, 5]), ([6, 7], [8, 9], [10, 11])]
    assert per_rank("single", 13, 2, 3, consumed=6) == [([6, 7], [8, 9], [10, 11])]
    # it begins at consumed samples exactly, also after a change of batch size
    assert per_rank("single", 13, 2, 3, consumed=7) == [([7, 8], [9, 10], [11, 12])]


def test_cyclic_shuffles_each_rank_within_its_own_bucket_seeded_by_the_pass():
    steps = per_rank("cyclic", 20, 2, 3, cycle=True, count=9)
    bucket = 20 // 6 * 2
    for number in range(3):
        order = torch.randperm(bucket, generator=torch.Generator().manual_seed(number))
        for rank in range(3):
            ids = [k for step in steps[3 * number : 3 * number + 3] for k in step[rank]]
            assert ids == [int(k) + rank * bucket for k in order]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("total, batch, dp", [(10, 2, 3), (13, 2, 3), (24, 2, 3), (7, 1, 1)])
def test_a_resume_anywhere_reads_what_the_unbroken_run_reads(kind, total, batch, dp):
    """NVIDIA-NeMo/Megatron-Bridge#4565"""
    chunk = batch * dp
    count = 3 * (total // chunk)
    unbroken = per_rank(kind, total, batch, dp, cycle=True, count=count)
    for step in range(count):
        resumed = per_rank(kind, total, batch, dp, consumed=step * chunk, cycle=True, count=count - step)
        assert resumed == unbroken[step:]


@pytest.mark.parametrize("dp, micro, size", [(3, 2, 6), (3, 1, 12), (3, 2, 30)], ids=lambda value: str(value))
def test_three_epochs_of_ten_samples_are_read_alike_however_often_a_run_stops(dp, micro, size, tmp_path):
    """NVIDIA-NeMo/Megatron-Bridge#4565: a resume skipped samples again in each later epoch and read the tail twice.

    Ten pairs of a row each, three epochs, stops in the middle of each of them, global batches of 6, 12 and 30.
    """
    prefix = write_pairs(tmp_path / "pairs", [([5] * 8, [number] * 9) for number in range(10, 20)])
    rows = PackedDataset("train", PairedDataset(prefix), np.arange(10), 30, 16, 7, cache=False)

    def read(micro, size, consumed, steps):
        """Numbers of the pairs in each global batch, by rank, and the samples consumed after it."""
        samplers = [iter(build_sampler("single", 30, batch_size=micro, dp_rank=rank, dp_size=dp, consumed_samples=consumed))
                    for rank in range(dp)]
        batches = [[[int(number) for _ in range(size // (micro * dp)) for k in next(sampler) for number in rows.numbers(k)]
                    for sampler in samplers] for _ in range(steps)]
        if consumed + steps * size > 30 - micro * dp:  # not one rank has a batch more than the others
            assert [next(sampler, None) for sampler in samplers] == [None] * dp
        return batches, consumed + steps * size

    def in_order(batches):
        return [sorted(number for own in batch for number in own) for batch in batches]

    whole, end = read(micro, size, 0, 30 // size)
    by_six, _ = read(2, 6, 0, 5)
    everything = [number for batch in by_six for own in batch for number in own]
    for epoch in range(3):
        assert sorted(everything[10 * epoch:10 * epoch + 10]) == list(range(10)), "each once per epoch"
    assert in_order(whole) == [sorted(everything[start:start + size]) for start in range(0, end, size)]
    for stop in range(1, 30 // size):
        first, consumed = read(micro, size, 0, stop)
        then, _ = read(micro, size, consumed, 30 // size - stop)
        assert first + then == whole
    for stop in range(1, 5):  # and on with a batch of this size after one of 6
        first, consumed = read(2, 6, 0, stop)
        then, last = read(micro, size, consumed, (30 - consumed) // size)
        assert sorted(sum(in_order(first + then), [])) == sorted(everything[:last])


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_each_sample_is_read_once_per_pass(kind):
    """NVIDIA-NeMo/Megatron-Bridge#4565"""
    for total, batch, dp in [(10, 2, 3), (13, 2, 3), (24, 2, 3), (7, 1, 1)]:
        steps_per_pass = total // (batch * dp)
        steps = per_rank(kind, total, batch, dp, cycle=True, count=3 * steps_per_pass)
        for start in range(0, len(steps), steps_per_pass):
            ids = [k for step in steps[start : start + steps_per_pass] for own in step for k in own]
            assert sorted(ids) == list(range(steps_per_pass * batch * dp))


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_another_grid_goes_on_where_the_run_stopped(kind):
    # 24 samples, 12 of the second pass consumed with 2 x 3, then 4 x 1, 1 x 6 and back
    for batch, dp in [(4, 1), (1, 6), (2, 3)]:
        steps = per_rank(kind, 24, batch, dp, consumed=24 + 12, cycle=True, count=12 // (batch * dp))
        ids = [k for step in steps for own in step for k in own]
        assert len(set(ids)) == 12
        if kind == "single":
            assert sorted(ids) == list(range(12, 24))


def test_consumed_samples_between_two_chunks_lead_to_the_next_and_stay_consistent():
    # 5 of chunks of 6 are consumed: rounded up to 6; after one more step 11 are, rounded up to 12
    steps = per_rank("single", 24, 2, 3, cycle=True, count=8)
    assert per_rank("single", 24, 2, 3, consumed=5, cycle=True, count=7) == steps[1:]
    assert per_rank("single", 24, 2, 3, consumed=11, cycle=True, count=6) == steps[2:]


def test_without_cycle_a_pass_ends_with_as_many_batches_on_every_rank():
    assert len(per_rank("cyclic", 25, 2, 3)) == len(per_rank("single", 25, 2, 3)) == 4


@pytest.mark.parametrize(
    "kind, total, consumed, cycle, message",
    [
        ("single", 5, 0, False, "5 samples.* = 6"),
        ("single", 0, 0, True, "0 samples"),
        ("cyclic", 5, 0, True, "= 6"),
        ("single", 12, 12, False, "12 samples are consumed"),
        ("shuffled", 12, 0, False, "--dataloader-type 'shuffled'"),
    ],
)
def test_a_sampler_with_nothing_to_give_is_refused(kind, total, consumed, cycle, message):
    with pytest.raises(ValueError, match=message):
        build_sampler(kind, total, batch_size=2, dp_rank=0, dp_size=3, consumed_samples=consumed, cycle=cycle)


# --- loaders ---


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 14

    def __getitem__(self, k):
        return {"text": torch.arange(k, k + 5)}


def loader(workers=0, kind="single", cycle=False, dp_rank=1, consumed=0):
    return build_loader(
        Rows(),
        batch_size=2,
        dp_rank=dp_rank,
        dp_size=2,
        consumed_samples=consumed,
        kind=kind,
        num_workers=workers,
        seed=1,
        cycle=cycle,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_stacks_the_rows_of_its_rank_and_leaves_the_global_random_state_alone(workers):
    state = torch.get_rng_state()
    batches = [batch["text"] for batch in loader(workers)]
    assert torch.equal(torch.get_rng_state(), state)
    assert [batch[:, 0].tolist() for batch in batches] == [[2, 3], [6, 7], [10, 11]]
    assert batches[0].dtype == torch.int64 and batches[0].shape == (2, 5)


@pytest.mark.parametrize("kind, cycle", [("single", True), ("cyclic", False), ("cyclic", True)])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_cycling_loader_never_ends_and_resumes(kind, cycle, workers):
    rows = [batch["text"][:, 0].tolist() for batch in itertools.islice(loader(workers, kind, cycle), 8)]
    assert len(rows) == 8
    later = loader(workers, kind, cycle, consumed=5 * 4)
    assert [next(later)["text"][:, 0].tolist() for _ in range(3)] == rows[5:]


def test_a_sequential_loader_ends_with_its_pass():
    assert len(list(loader(consumed=4))) == 2


# --- batches ---

ROW = torch.tensor([[5, 9, 6, 7, 9, 8, 8, 1, 4]])


def test_documents_restart_after_their_end_token():
    batch = gpt_batch(
        ROW, DataConfig(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True), 9
    )
    assert batch.tokens.tolist() == [[5, 9, 6, 7, 9, 8, 8, 1]]
    assert batch.labels.tolist() == [[9, 6, 7, 9, 8, 8, 1, 4]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]
    assert batch.segment_ids.tolist() == [[0, 0, 1, 1, 1, 2, 2, 2]]  # blocks of 2, 3 and 3
    assert batch.loss_mask.tolist() == [[1, 0, 1, 1, 0, 1, 1, 1]]


def test_without_flags_a_row_is_one_document():
    batch = gpt_batch(ROW, DataConfig(), None)
    assert batch.position_ids.tolist() == [list(range(8))] and batch.segment_ids is None
    assert batch.loss_mask.tolist() == [[1.0] * 8] and batch.loss_mask.dtype == torch.float32


def test_random_rows_equal_a_loop_over_their_tokens():
    rows = torch.randint(0, 4, (30, 18), generator=torch.Generator().manual_seed(0))
    batch = gpt_batch(
        rows, DataConfig(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True), 3
    )
    for row, positions, segments, mask in zip(
        rows.tolist(), batch.position_ids.tolist(), batch.segment_ids.tolist(), batch.loss_mask.tolist()
    ):
        position = segment = 0
        for j, token in enumerate(row[:-1]):
            assert (positions[j], segments[j], mask[j]) == (position, segment, 0 if token == 3 else 1)
            position, segment = (0, segment + 1) if token == 3 else (position + 1, segment)
    assert all(
        each.dtype == torch.int64 and each.is_contiguous()
        for each in (batch.tokens, batch.labels, batch.position_ids, batch.segment_ids)
    )


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_each_flag_needs_an_end_token_and_does_only_its_own_part(flag):
    with pytest.raises(ValueError, match="end-of-document"):
        gpt_batch(ROW, DataConfig(**{flag: True}), None)
    plain, batch = gpt_batch(ROW, DataConfig(), 9), gpt_batch(ROW, DataConfig(**{flag: True}), 9)
    assert torch.equal(batch.position_ids, plain.position_ids) == (flag != "reset_position_ids")
    assert (batch.segment_ids is None) == (flag != "reset_attention_mask")
    assert torch.equal(batch.loss_mask, plain.loss_mask) == (flag != "eod_mask_loss")
