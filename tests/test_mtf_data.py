"""Packed pairs: rows against hand-made packs and a slow reading of the rules, masks, caches, splits."""

import logging
import os
import pickle
import time

import numpy as np
import pytest
import small_model
import torch

from megatron.config import DataConfig
from megatron.data import packed_dataset, packing
from megatron.data.broadcast import BroadcastRows
from megatron.data.indexed_dataset import IndexedDatasetWriter
from megatron.data.loaders import build_loader
from megatron.data.mtf_batch import batch_function, mtf_batch
from megatron.data.mtf_dataset import PairedDataset
from megatron.data.packed_dataset import PackedDataset, build_mtf_datasets
from megatron.data.packing import pack
from megatron.data.samplers import build_sampler
from megatron.data.splits import parse_weighted_groups
from megatron.model.pipe import loss_function

EOD, PAD = 2, 3


def write(prefix, pairs, dtype=np.int32):
    """Pairs of lists of tokens; returns the prefix of both sides."""
    for side in (0, 1):
        with IndexedDatasetWriter(f"{prefix}_{('inputs', 'targets')[side]}_document", dtype) as writer:
            for pair in pairs:
                writer.add_document(pair[side])
    return str(prefix)


def counted(sizes, first=100):
    """Pairs of the given (inputs, targets) sizes whose tokens are all different; targets end with EOD."""
    pairs = []
    for inputs, targets in sizes:
        tokens = list(range(first, first + inputs + targets - 1)) + [EOD]
        pairs.append((tokens[:inputs], tokens[inputs:]))
        first += inputs + targets
    return pairs


def packed(prefix, documents=None, samples=1, seq_length=16, seed=0, **more):
    pairs = PairedDataset(prefix)
    documents = np.arange(len(pairs)) if documents is None else np.array(documents)
    return PackedDataset("train", pairs, documents, samples, seq_length, seed, **{"cache": False, **more})


# --- which pairs make which row ---


def slow_pack(sizes, row_length, num_rows, seed):
    """Order and rows by taking one document after the other."""
    rng = np.random.RandomState(seed)
    order, rows = [], []
    start = fill = 0
    while len(rows) <= num_rows:
        epoch = np.arange(len(sizes), dtype=np.int64)
        rng.shuffle(epoch)
        for document in epoch.tolist():
            position, size = len(order), sizes[document]
            order.append(document)
            if fill + size <= row_length:
                fill += size
                continue
            if position > start:
                rows.append([start, position])
            start, fill = (position + 1, 0) if size > row_length else (position, size)
    return order, rows


@pytest.mark.parametrize("piece, cases", [(1, 40), (7, 60), (packing.PIECE, 200)])
def test_packing_equals_a_slow_reading_of_the_rules_on_random_sizes(monkeypatch, piece, cases):
    monkeypatch.setattr(packing, "PIECE", piece)
    rng = np.random.default_rng(piece)
    several = overlong = straddling = 0
    for seed in range(cases):
        row_length = int(rng.integers(2, 40))
        sizes = rng.integers(2, rng.integers(4, 60), rng.integers(1, 40))
        if sizes.min() > row_length:
            continue
        num_rows = int(rng.integers(1, 30))
        order, rows = pack(sizes, row_length, num_rows, seed)
        assert (order.tolist(), rows.tolist()) == slow_pack(sizes.tolist(), row_length, num_rows, seed)
        assert order.dtype == rows.dtype == np.int64
        several += len(order) > len(sizes)
        overlong += sizes.max() > row_length
        straddling += bool((rows[:, 0] // len(sizes) < (rows[:, 1] - 1) // len(sizes)).any())
    assert min(several, overlong, straddling) > cases // 5


def test_every_epoch_sees_every_pair_once():
    """bigscience-workshop/Megatron-DeepSpeed#293: a last row that is not full goes on into the next epoch, and is not lost."""
    sizes = np.random.default_rng(3).integers(2, 30, 50)
    order, rows = pack(sizes, 32, 200, 7)
    epochs = order.reshape(-1, 50)
    assert len(epochs) > 3 and (np.sort(epochs) == np.arange(50)).all()
    assert len({epoch.tobytes() for epoch in epochs}) == len(epochs)
    # rows follow one another without a gap, so all but the open last row is read
    assert rows[0, 0] == 0 and (rows[1:, 0] == rows[:-1, 1]).all()
    assert sizes[order[rows[-1, 1]:]].sum() <= 2 * 32


def test_a_million_pairs_are_packed_within_seconds():
    rng = np.random.default_rng(0)
    sizes = rng.integers(10, 700, 1_000_000)
    begin = time.process_time()
    order, rows = pack(sizes, 2049, 160_000, 1)
    assert time.process_time() - begin < 5
    sums = np.add.reduceat(sizes[order], rows[:, 0])[:-1]
    assert len(order) == 1_000_000 and sums.max() <= 2049 and sums.min() > 2049 - 700


# --- what is in a row ---


def test_rows_of_hand_made_packs_token_by_token(tmp_path):
    # bigscience-workshop/Megatron-DeepSpeed#293: one end token, that of the target; nothing else between pairs
    pairs = [([11, 12, 13], [21, EOD]), ([14, 15], [22, 23, EOD]), ([16, 17, 18], [24, 25, EOD])]
    data = packed(write(tmp_path / "p", pairs), seq_length=16)  # 5 + 5 + 6 tokens, and one of padding
    order = np.arange(3)
    np.random.RandomState(0).shuffle(order)
    assert order.tolist() == [2, 1, 0] and data.numbers(0).tolist() == [2, 1, 0]
    parts = data.parts(0)
    assert parts["decoder_token_ids"].tolist() == [16, 17, 18, 24, 25, EOD, 14, 15, 22, 23, EOD, 11, 12, 13, 21, EOD, 0]
    assert parts["decoder_segment_ids"].tolist() == [1] * 6 + [2] * 5 + [3] * 5 + [0]
    assert parts["decoder_is_inputs"].astype(int).tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert {key: part.dtype for key, part in parts.items()} == {
        "decoder_token_ids": np.int64, "decoder_segment_ids": np.int64, "decoder_is_inputs": bool}
    assert data[0]["text"].dtype == np.int64 and data[0]["text"][5] == EOD + (2 << 32)


def test_an_exact_fit_has_no_padding_and_the_two_sides_may_differ_in_dtype(tmp_path):
    prefix = write(tmp_path / "p", [([70_000] * 9, [5] * 8)])
    with IndexedDatasetWriter(f"{prefix}_targets_document", np.uint16) as writer:
        writer.add_document([5] * 8)
    parts = packed(prefix).parts(0)
    assert parts["decoder_token_ids"].tolist() == [70_000] * 9 + [5] * 8
    assert parts["decoder_segment_ids"].tolist() == [1] * 17


def rows_of(data):
    return [data.parts(k)["decoder_token_ids"].tolist() for k in range(len(data))]


def test_rows_equal_those_made_of_the_pairs_by_hand(tmp_path):
    rng = np.random.default_rng(5)
    pairs = counted(rng.integers(1, 12, (40, 2)))
    documents = np.arange(10, 40)
    data = packed(write(tmp_path / "p", pairs), documents, samples=50, seq_length=20, seed=9)
    order, rows = slow_pack([len(pairs[i][0]) + len(pairs[i][1]) for i in documents], 21, 50, 9)
    assert len(data) == len(rows) > 50
    for k, (start, end) in enumerate(rows):
        chosen = [pairs[documents[i]] for i in order[start:end]]
        tokens = [token for inputs, targets in chosen for token in inputs + targets]
        segments = [n for n, pair in enumerate(chosen, 1) for _ in pair[0] + pair[1]]
        is_input = [token for inputs, targets in chosen for token in [1] * len(inputs) + [0] * len(targets)]
        rest = [0] * (21 - len(tokens))
        parts = data.parts(k)
        assert parts["decoder_token_ids"].tolist() == tokens + rest
        assert parts["decoder_segment_ids"].tolist() == segments + rest
        assert parts["decoder_is_inputs"].astype(int).tolist() == is_input + rest


# --- pairs that do not fit or cannot be used ---


OVERLONG = [(12, 5), (12, 6), (20, 3), (3, 17), (2, 16), (4, 4)]  # rows of 17 tokens


# alibaba/Pai-Megatron-Patch#636: long pairs were left out, but records without tokens stayed, and the count was wrong
def test_overlong_pairs_are_dropped_and_counted(tmp_path, caplog):
    prefix = write(tmp_path / "p", counted(OVERLONG))
    data = packed(prefix, samples=20)
    assert set(np.concatenate([data.numbers(k) for k in range(len(data))]).tolist()) == {0, 5}
    assert f"4 of 6 pairs of {prefix} have more than the 17 tokens of a row, up to 23; cut: 0, dropped: 4" in caplog.text


def test_truncation_cuts_the_front_of_the_inputs_only(tmp_path, caplog):
    pairs = counted(OVERLONG)
    data = packed(write(tmp_path / "p", pairs), samples=20, overlong="truncate-inputs")
    seen = set()
    for k, row in enumerate(rows_of(data)):
        tokens = [token for i in data.numbers(k) for token in (pairs[i][0] + pairs[i][1])[-17:]]
        assert row == tokens + [0] * (17 - len(tokens))
        is_input = data.parts(k)["decoder_is_inputs"]
        assert is_input[0] and is_input.sum() == sum(min(OVERLONG[i][0], 17 - OVERLONG[i][1]) for i in data.numbers(k))
        seen.update(data.numbers(k).tolist())
    assert seen == {0, 1, 2, 4, 5}  # targets of 16 tokens keep one input token; those of 17 have no room for one
    assert "cut: 3, dropped: 1" in caplog.text


def test_overlong_pairs_are_an_error_when_asked(tmp_path, caplog):
    prefix = write(tmp_path / "p", counted(OVERLONG))
    with pytest.raises(ValueError, match="4 of 6 pairs.*17 tokens of a row, up to 23.*--mtf-overlong error"):  # alibaba/Pai-Megatron-Patch#636
        packed(prefix, overlong="error")
    packed(prefix, [0, 5], overlong="error")
    with pytest.raises(ValueError, match="--mtf-overlong 'cut' is not one of drop, truncate-inputs, error"):
        packed(prefix, overlong="cut")


@pytest.mark.parametrize("documents, message", [
    ([1, 2, 3], "none of 3 pairs fits into a row of 17 tokens; the shortest has 18"), ([], "none of 0 pairs fits")])
def test_without_a_usable_pair_the_build_fails_at_once(tmp_path, documents, message):
    prefix = write(tmp_path / "p", counted(OVERLONG))
    with pytest.raises(ValueError, match=message) as error:
        packed(prefix, np.array(documents, int), cache=True)
    assert prefix in str(error.value) and "--seq-length 16" in str(error.value)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".npy")]


# alibaba/Pai-Megatron-Patch#636: records without tokens; elsewhere a side with one more or one less shifted all behind it
def test_sides_out_of_step_or_without_tokens_are_refused(tmp_path):
    prefix = write(tmp_path / "p", counted([(2, 2)] * 3))
    with IndexedDatasetWriter(f"{prefix}_inputs_document", np.int32) as writer:
        for _ in range(4):
            writer.add_document([1])
    with pytest.raises(ValueError, match="holds 4 sequences and .*targets_document 3;"):
        PairedDataset(prefix)
    with IndexedDatasetWriter(f"{prefix}_inputs_document", np.int32) as writer:
        writer.add_document([[1], [], [1]])
    with pytest.raises(ValueError, match="inputs_document: sequence 1 holds no tokens"):
        PairedDataset(prefix)
    os.unlink(f"{prefix}_targets_document.idx")
    with pytest.raises(FileNotFoundError, match="p_targets_document.idx"):
        PairedDataset(prefix)


@pytest.mark.parametrize("token, vocab_size", [(7, 7), (-1, None)])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, token, vocab_size):
    prefix = write(tmp_path / "p", [([1], [1])])
    bin_file = tmp_path / "p_targets_document.bin"
    bin_file.write_bytes(np.array([token], "<i4").tobytes())
    with pytest.raises(ValueError, match=f"holds the token id {token},"):
        packed(prefix, vocab_size=vocab_size)[0]


# --- splits, groups, blends ---

WANTED = {"seq_length": 16, "seed": 1, "train_samples": 30, "valid_samples": 12, "test_samples": 5}


def numbers_of(dataset):
    return {int(i) for k in range(len(dataset)) for i in dataset.numbers(k)}


def test_the_start_of_a_range_is_honoured(tmp_path):
    # [BUG] of the original: 0.95:1 reads the first pairs
    prefix = write(tmp_path / "p", counted([(3, 2)] * 100))
    groups = {"train_groups": parse_weighted_groups("--train-x", [f"train: 1 0:0.95 {prefix}"]),
              "valid_groups": parse_weighted_groups("--valid-x", [f"left: 1 0.95:1 {prefix}", f"mid: 1 0.5:0.6 {prefix}"])}
    built = build_mtf_datasets(DataConfig(**groups), **WANTED)
    assert list(built.valid) == ["left", "mid"] and built.test == {}
    assert numbers_of(built.train) <= set(range(95))
    assert numbers_of(built.valid["left"]) == set(range(95, 100))
    assert numbers_of(built.valid["mid"]) == set(range(50, 60))
    split = build_mtf_datasets(DataConfig(data_path=(prefix,), split="80,10,10"), **WANTED)
    assert [sorted(numbers_of(each)) for each in (split.valid["valid"], split.test["test"])] == [
        list(range(80, 90)), list(range(90, 100))]
    assert len(split.train) > 30


def test_blends_draw_rows_by_weight(tmp_path):
    a, b = write(tmp_path / "a", counted([(3, 2)] * 20)), write(tmp_path / "b", counted([(3, 2)] * 20, first=5000))
    for data in (DataConfig(data_path=("3", a, "1", b), split="1"),
                 DataConfig(train_groups=parse_weighted_groups("--train-x", [f"train: 3 0:1 {a}, 1 0:1 {b}"]))):
        train = build_mtf_datasets(data, **WANTED).train
        rows = np.stack([train[k]["text"] for k in range(28)])
        assert ((rows[:, 0] & 0xFFFFFFFF) < 5000).sum() == 21
    with pytest.raises(ValueError, match="a_inputs_document holds the token id 152"):
        build_mtf_datasets(data, vocab_size=150, **WANTED)


def test_a_run_broken_off_in_an_epoch_reads_each_row_once(tmp_path):
    data = packed(write(tmp_path / "p", counted([(3, 2)] * 60)), samples=24, seed=4)
    seen = []
    for rank in (0, 1):
        whole = list(build_sampler("single", len(data), batch_size=2, dp_rank=rank, dp_size=2))
        rest = list(build_sampler("single", len(data), batch_size=2, dp_rank=rank, dp_size=2, consumed_samples=8))
        assert whole[2:] == rest
        seen += [k for batch in whole[:2] + rest for k in batch]
    assert sorted(seen) == list(range(len(data) // 4 * 4))
    pairs = np.concatenate([data.numbers(k) for k in range(20)])  # 60 pairs, three to a row
    assert sorted(pairs.tolist()) == list(range(60))


# --- caches ---


def caches(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".npy"))


def test_the_cache_is_named_after_the_historical_pattern_and_read_again(tmp_path, monkeypatch):
    prefix = write(tmp_path / "p", counted([(3, 2)] * 20))
    first = packed(prefix, samples=10, seed=5, cache=True)
    stem = f"p_train_indexmap_10ns_16sl_5s_{first.index_hash}_decoder_packed"
    assert caches(tmp_path) == [f"{stem}_batch_idx.npy", f"{stem}_shuffle_idx.npy"]
    rows, order = (np.load(tmp_path / name) for name in caches(tmp_path))
    assert rows.dtype == order.dtype == np.int64 and rows.shape == (len(first), 2) and len(order) % 20 == 0
    monkeypatch.setattr(packed_dataset, "pack", None)
    again = packed(prefix, samples=10, seed=5, cache=True)
    assert isinstance(again.rows, np.memmap) and rows_of(again) == rows_of(first)
    copy = pickle.loads(pickle.dumps(again))
    assert rows_of(copy) == rows_of(first)
    np.save(tmp_path / f"{stem}_shuffle_idx.npy", order[:3])
    with pytest.raises(ValueError, match="do not belong together; delete"):
        packed(prefix, samples=10, seed=5, cache=True)


def test_a_damaged_cache_is_built_again(tmp_path, caplog):
    prefix = write(tmp_path / "p", counted([(3, 2)] * 20))
    truth = rows_of(packed(prefix, samples=10, cache=True))
    batch_idx, shuffle_idx = caches(tmp_path)
    (tmp_path / batch_idx).write_bytes((tmp_path / batch_idx).read_bytes()[:-8])
    np.save(tmp_path / shuffle_idx, np.zeros((3, 2), np.int64))
    assert rows_of(packed(prefix, samples=10, cache=True)) == truth
    assert batch_idx in caplog.text and shuffle_idx in caplog.text


def test_the_cache_is_keyed_by_everything_it_depends_on(tmp_path):
    # [BUG] of the original: neither row length nor range is in the name
    prefix = write(tmp_path / "p", counted([(3, 2), (2, 3)] * 10))

    def key(documents=range(20), **more):
        return packed(prefix, list(documents), cache=True, **{"samples": 10, **more}).index_hash

    keys = [key(), key(range(10)), key(range(10, 20)), key(samples=11), key(seq_length=17), key(seed=1),
            key(overlong="truncate-inputs")]
    write(tmp_path / "p", counted([(2, 3), (3, 2)] * 10))  # as many tokens, other sides
    keys.append(key())
    assert len(set(keys)) == len(keys) and len(caches(tmp_path)) == 2 * len(keys)
    assert key() == keys[-1]


def test_nothing_is_said_and_nothing_cut_where_all_pairs_fit(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    packed(write(tmp_path / "p", counted([(3, 2)] * 20)), overlong="truncate-inputs")
    assert caplog.text == ""


# --- batches ---

#: pairs (inputs, targets): 2 + 3, 1 + 1, 3 + 2 tokens, then two of padding: s = 13
TOKENS = [11, 12, 21, 22, EOD, 13, EOD, 14, 15, 16, 23, EOD, 0, 0]
SEGMENTS = [1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 0, 0]
IS_INPUT = [1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0]
#: 1 where the NEXT token belongs to a target
MASK = [0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0]


def entries(tokens=TOKENS, segments=SEGMENTS, is_input=IS_INPUT):
    return torch.tensor(tokens) + ((2 * torch.tensor(segments) + torch.tensor(is_input)) << 32)


# fla-org/flash-linear-attention#1217: the last token of a sample was trained to predict the first one of the next
def test_a_batch_of_a_hand_made_row(tmp_path):
    batch = mtf_batch(entries()[None], DataConfig(), pad=PAD)
    assert batch.tokens.tolist() == [TOKENS[:12] + [PAD]]
    assert batch.labels.tolist() == [TOKENS[1:12] + [PAD, PAD]]
    assert batch.loss_mask.tolist() == [MASK]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 0]]
    assert batch.segment_ids.tolist() == [SEGMENTS[:-1]]
    for name in ("tokens", "labels", "position_ids", "segment_ids"):
        assert getattr(batch, name).dtype == torch.int64 and getattr(batch, name).is_contiguous()
    assert batch.loss_mask.dtype == torch.float32


# fla-org/flash-linear-attention#1217, where the next sample begins with a target
def test_nothing_is_predicted_across_the_border_of_two_pairs():
    row = entries([7, 8, 8, 8], [1, 1, 2, 2], [1, 0, 0, 0])[None]  # a second pair without inputs
    assert mtf_batch(row, DataConfig()).loss_mask.tolist() == [[1, 0, 1]]


def test_the_end_token_is_trained_even_when_it_is_the_padding(tmp_path):
    # [BUG] of the original: labels equal to the padding id never count
    batch = mtf_batch(entries()[None], DataConfig(), pad=EOD)
    assert batch.loss_mask.tolist() == [MASK] and batch.labels[0, 11:].tolist() == [EOD, EOD]
    assert mtf_batch(entries()[None], DataConfig()).tokens[0, 12] == 0


def test_prefixlm_marks_inputs_and_lets_them_see_each_other():
    marks = mtf_batch(entries()[None], DataConfig(prefixlm=True)).segment_ids[0]
    assert marks.tolist() == [2 * s + i for s, i in zip(SEGMENTS, IS_INPUT)][:-1]
    for i in range(13):
        for j in range(13):
            ours = bool((marks[i] >> 1 == marks[j] >> 1) & ((j <= i) | (marks[i] & marks[j] & 1 == 1)))
            meant = SEGMENTS[i] == SEGMENTS[j] and (j <= i or bool(IS_INPUT[i] and IS_INPUT[j]))
            assert ours == meant


def test_each_target_weighs_one_when_normalised(tmp_path):
    # [BUG] of the original: a target at the end of a row and one at the start of the next are one
    full = entries([1, 8, 8, 8], [1, 1, 1, 1], [1, 0, 0, 0])
    start = entries([1, 8, 8, 0], [1, 1, 1, 0], [1, 0, 0, 0])
    weights = mtf_batch(torch.stack([full, start]), DataConfig(norm_target_loss=True)).loss_mask
    assert torch.allclose(weights, torch.tensor([[1 / 3, 1 / 3, 1 / 3], [1 / 2, 1 / 2, 0]]))
    weights = mtf_batch(entries()[None], DataConfig(norm_target_loss=True)).loss_mask
    third, half = 1 / 3, 1 / 2
    assert torch.allclose(weights, torch.tensor([[0, third, third, third, 0, 1, 0, 0, 0, half, half, 0, 0]]))


def test_eod_mask_loss_leaves_out_what_an_end_token_predicts(tmp_path):
    row = entries([7, EOD, 8, EOD], [1, 1, 1, 1], [1, 1, 0, 0])[None]  # inputs end with an end token, too
    assert mtf_batch(row, DataConfig()).loss_mask.tolist() == [[0, 1, 1]]
    for norm in (False, True):
        data = DataConfig(eod_mask_loss=True, norm_target_loss=norm)
        assert mtf_batch(row, data, eod=EOD).loss_mask.tolist() == [[0, 0, 1]]
    with pytest.raises(ValueError, match="--eod-mask-loss"):
        mtf_batch(row, data)


def test_masks_of_random_rows_equal_a_slow_reading(tmp_path):
    rng = np.random.default_rng(8)
    pairs = counted(rng.integers(1, 9, (60, 2)))
    data = packed(write(tmp_path / "p", pairs), samples=40, seq_length=24)
    rows = torch.from_numpy(np.stack([data[k]["text"] for k in range(40)]))
    plain, normed = (mtf_batch(rows, DataConfig(norm_target_loss=norm)) for norm in (False, True))
    for k in range(40):
        expected, weights, positions = [], [], []
        for i in data.numbers(k):
            inputs, targets = pairs[i]
            expected += [0.0] * len(inputs) + [1.0] * len(targets)
            weights += [0.0] * len(inputs) + [1 / len(targets)] * len(targets)
            positions += range(len(inputs) + len(targets))
        rest = 25 - len(expected)
        assert plain.loss_mask[k].tolist() == (expected + [0.0] * rest)[1:]
        assert torch.allclose(normed.loss_mask[k], torch.tensor(weights + [0.0] * rest)[1:])
        assert plain.position_ids[k].tolist() == [*positions, *range(rest)][:24]
        assert plain.labels[k][plain.loss_mask[k] > 0].tolist() == [t for i in data.numbers(k) for t in pairs[i][1]]
    assert float(normed.loss_mask.sum()) == pytest.approx(sum(len(data.numbers(k)) for k in range(40)))


class Roles:
    """As much of a tokenizer as a batch asks for."""

    def __init__(self, **ids):
        self.ids = ids

    def has(self, role):
        return role in self.ids

    def special(self, role):
        return self.ids[role]


def test_the_batch_function_needs_neither_padding_nor_end_token():
    for tokenizer, filler in ((Roles(), 0), (Roles(pad=PAD, eod=EOD), PAD)):
        inputs, labels = batch_function(DataConfig(), tokenizer)(entries()[None])
        assert [each.shape for each in (*inputs, *labels)] == [(1, 13)] * 5
        assert inputs[0][0, 12] == filler and labels[1].tolist() == [MASK]
        assert inputs[1][0, 5] == 0 and inputs[2].tolist() == [SEGMENTS[:-1]]


# --- through the model ---


# NVIDIA/Megatron-LM#2357: pairs of one row saw each other
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["alibi", "rotary"])
def test_the_loss_of_a_packed_row_is_that_of_its_pairs_alone(kind, fused):
    settings = small_model.config(position_embedding_type=kind, reset_attention_mask=True, seq_length=13, masked_softmax_fusion=fused)
    model = small_model.build(settings)
    loss_of = loss_function(settings, small_model.ALONE)
    spans = [(0, 5), (5, 7), (7, 12)]

    def loss(row, pad=PAD, **data):
        part = mtf_batch(row[None], DataConfig(**data), pad=pad)
        logits = model(part.tokens, segment_ids=part.segment_ids)
        return loss_of(logits, (part.labels, part.loss_mask)).item()

    packed_row = entries()
    alone = [packed_row[start:end] for start, end in spans]
    each, counts = [loss(row) for row in alone], [3, 1, 2]
    assert loss(packed_row) == pytest.approx(sum(a * b for a, b in zip(each, counts)) / 6, rel=1e-5)
    assert loss(packed_row, norm_target_loss=True) == pytest.approx(sum(each) / 3, rel=1e-5)
    assert loss(packed_row) == pytest.approx(loss(packed_row, pad=EOD), rel=1e-6)  # what fills a row is nobody's business


def test_rows_pass_through_loaders_as_rows_of_text_do(tmp_path):
    data = packed(write(tmp_path / "p", counted([(3, 2)] * 30)), samples=12)
    loader = build_loader(data, batch_size=2, dp_rank=1, dp_size=2, consumed_samples=4, kind="single", num_workers=0,
                          seed=1)
    rows = next(BroadcastRows(loader, small_model.ALONE, 2, 17))
    assert rows.dtype == torch.int64 and rows.tolist() == [data[k]["text"].tolist() for k in (6, 7)]
    assert int(rows.min()) >= 0  # broadcasts keep -1 for "the reader failed"
