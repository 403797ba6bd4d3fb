"""Rows of running text against a slow reading of the rules, and their caches."""

import multiprocessing
import os
import pickle
import time

import numpy as np
import pytest

from megatron.config import DataConfig
from megatron.data import caching, gpt_dataset
from megatron.data.gpt_dataset import Datasets, GPTDataset, build_datasets, check_same_data
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.data.splits import parse_weighted_groups
from megatron.errors import RunError, SharedRunError


def write(prefix, sizes, first=0):
    """Documents whose tokens are all different, counting on from ``first``."""
    with IndexedDatasetWriter(str(prefix), np.int32) as writer:
        for size in sizes:
            writer.add_document(list(range(first, first + size)))
            first += size
    return str(prefix)


def slow_rows(documents, num_samples, seq_length, seed):
    """All rows in order, from lists of tokens per document, by counting instead of by formula."""
    rng = np.random.RandomState(seed)
    per_epoch = sum(map(len, documents))

    def rows_in(epochs):
        return (epochs * per_epoch - 1) // seq_length

    epochs = 1
    while rows_in(epochs) < num_samples:
        epochs += 1
    separate = epochs > 1 and num_samples - rows_in(epochs - 1) < int(0.95 * rows_in(1))
    rounds = [epochs - 1, 1] if separate else [epochs]
    order = []
    for count in rounds:
        part = np.array(list(range(len(documents))) * count)
        rng.shuffle(part)
        order += part.tolist()
    stream = [token for k in order for token in documents[k]]
    parts = (
        [list(range(rows_in(epochs - 1))), list(range(rows_in(epochs - 1), rows_in(epochs)))]
        if separate
        else [list(range(rows_in(epochs)))]
    )
    visited = []
    for part in map(np.array, parts):
        rng.shuffle(part)
        visited += part.tolist()
    return [stream[i * seq_length : (i + 1) * seq_length + 1] for i in visited]


def test_rows_equal_a_slow_reading_of_the_rules_on_random_datasets(tmp_path):
    rng = np.random.default_rng(0)
    separate = several = 0
    for case in range(150):
        sizes = rng.integers(1, 30, rng.integers(1, 12)).tolist()
        indexed = IndexedDataset(write(tmp_path / f"d{case}", sizes))
        start = int(rng.integers(0, len(sizes)))
        documents = np.arange(start, len(sizes))
        seq_length, samples = int(rng.integers(1, 20)), int(rng.integers(1, 60))
        data = GPTDataset("train", indexed, documents, samples, seq_length, case, cache=False)
        rows = slow_rows([indexed[k].tolist() for k in documents], samples, seq_length, case)
        assert [data[k]["text"].tolist() for k in range(len(data))] == rows
        assert data[0]["text"].dtype == np.int64 and len(data) >= samples
        separate += data.plan.separate_last_epoch
        several += data.plan.num_epochs > 1
    assert separate > 20 and several > separate + 20  # both branches were taken


def test_rows_outside_the_dataset_are_refused(tmp_path):
    data = GPTDataset("t", IndexedDataset(write(tmp_path / "d", [50])), np.arange(1), 3, 8, 0, cache=False)
    for k in (-1, len(data)):
        with pytest.raises(IndexError):
            data[k]


@pytest.mark.parametrize("extra", [-1, 0, 1, 16])
def test_a_dataset_about_as_long_as_one_row_is_covered_evenly(tmp_path, caplog, extra):
    # NVIDIA/Megatron-LM#176: an assertion about the last epoch
    # tokens = seq - 1, seq, seq + 1 and 2 seq, as one document: no shuffle of documents mixes the epochs
    seq_length, tokens = 16, 16 + extra
    data = GPTDataset(
        "train", IndexedDataset(write(tmp_path / "d", [tokens])), np.arange(1), 40, seq_length, 0, cache=False
    )
    assert len(data) >= 40
    targets = np.concatenate([data[k]["text"][1:] for k in range(len(data))])
    counts = np.bincount(targets, minlength=tokens)
    assert counts.max() - counts.min() <= 1
    assert ("fewer than the 17 of one sample" in caplog.text) == (tokens < 17)


def test_documents_without_tokens_are_refused_with_the_numbers(tmp_path):
    """NVIDIA/Megatron-LM#176: tokens needed and found are said."""
    indexed = IndexedDataset(write(tmp_path / "d", []))
    with pytest.raises(ValueError, match="need 81 tokens, found 0") as error:
        GPTDataset("train", indexed, np.arange(0), 10, 8, 0)
    assert str(tmp_path / "d") in str(error.value)


# --- caches ---


def caches(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".npy"))


def test_the_cache_is_named_after_the_historical_pattern_and_read_memory_mapped(tmp_path):
    indexed = IndexedDataset(write(tmp_path / "d", [30, 20, 40]))
    first = GPTDataset("my val/é", indexed, np.arange(3), 20, 7, 5)
    key = first.index_hash
    assert caches(tmp_path) == [
        f"d_my_val_é_indexmap_20ns_7sl_5s_{key}_{kind}.npy"
        for kind in ("doc_idx", "sample_idx", "shuffle_idx")
    ]
    assert isinstance(first.sample_idx, np.memmap)
    stem = tmp_path / f"d_my_val_é_indexmap_20ns_7sl_5s_{key}"
    dtypes = {kind: np.load(f"{stem}_{kind}.npy").dtype for kind in ("doc_idx", "sample_idx", "shuffle_idx")}
    assert dtypes == {"doc_idx": np.int32, "sample_idx": np.int32, "shuffle_idx": np.uint32}
    fresh = GPTDataset("my val/é", indexed, np.arange(3), 20, 7, 5, cache=False)
    assert all((first[k]["text"] == fresh[k]["text"]).all() for k in range(len(fresh)))


def test_a_second_start_reads_the_cache_and_builds_nothing(tmp_path, monkeypatch):
    indexed = IndexedDataset(write(tmp_path / "d", [30, 20]))
    rows = [GPTDataset("train", indexed, np.arange(2), 9, 7, 5)[k]["text"].tolist() for k in range(9)]
    monkeypatch.setattr(gpt_dataset, "_build_arrays", None)
    again = GPTDataset("train", indexed, np.arange(2), 9, 7, 5)
    assert [again[k]["text"].tolist() for k in range(9)] == rows


def test_the_cache_is_keyed_by_everything_it_depends_on(tmp_path):
    prefix = write(tmp_path / "d", [30, 20, 30, 20])  # two ranges of equal sizes

    def key(documents=(0, 1, 2, 3), samples=20, seq_length=7, seed=5):
        return GPTDataset(
            "train", IndexedDataset(prefix), np.array(documents), samples, seq_length, seed
        ).index_hash

    keys = [
        key(),
        key(documents=(0, 1)),
        key(documents=(2, 3)),
        key(samples=21),
        key(seq_length=8),
        key(seed=6),
    ]
    write(tmp_path / "d", [30, 21, 29, 20])  # other data under the same name, as many tokens
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert len(caches(tmp_path)) == 3 * len(keys)
    assert key() == keys[-1]


def test_a_cache_file_appears_whole_and_an_exception_keeps_the_older_one(tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), caching.atomic_file(str(path)) as file:
        file.write(b"half")
        file.flush()
        assert path.read_bytes() == b"old"
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.npy"]
    with caching.atomic_file(str(path)) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["x.npy"]


@pytest.mark.parametrize(
    "spoil", [lambda raw: raw[:-4], lambda raw: b"", lambda raw: raw[:20], lambda raw: b"garbage" + raw]
)
def test_a_damaged_cache_is_noticed_and_built_again(tmp_path, caplog, spoil):
    indexed = IndexedDataset(write(tmp_path / "d", [30, 20]))
    GPTDataset("train", indexed, np.arange(2), 9, 7, 5)
    whole = {name: (tmp_path / name).read_bytes() for name in caches(tmp_path)}
    for name, raw in whole.items():
        (tmp_path / name).write_bytes(spoil(raw))
        GPTDataset("train", indexed, np.arange(2), 9, 7, 5)
        assert name in caplog.text
        assert {name: (tmp_path / name).read_bytes() for name in caches(tmp_path)} == whole


def test_a_cache_of_another_shape_or_with_pickled_objects_is_not_used(tmp_path):
    indexed = IndexedDataset(write(tmp_path / "d", [30, 20]))
    rows = GPTDataset("train", indexed, np.arange(2), 9, 7, 5)[0]["text"].tolist()
    for wrong in (np.zeros(3, np.uint32), np.zeros(9, np.int64), np.array([print, 1], object)):
        np.save(tmp_path / caches(tmp_path)[2], wrong, allow_pickle=True)
        assert GPTDataset("train", indexed, np.arange(2), 9, 7, 5)[0]["text"].tolist() == rows


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        OSError(30, "Read-only file system"),
        OSError(28, "No space left on device"),
    ],
)
def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_no_rest(tmp_path, monkeypatch, error):
    indexed = IndexedDataset(write(tmp_path / "d", [30, 20]))

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(caching.np, "save", refuse)
    with pytest.raises(RunError, match=f"{tmp_path}/d_train_.*cannot be written .{error.strerror}.*writable"):
        GPTDataset("train", indexed, np.arange(2), 9, 7, 5)
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]


def slow_start(prefix, ready, go, results, locks):
    """One process of a launch whose writes take long; reports its rows and whether it built."""
    built, save, build = [], np.save, gpt_dataset._build_arrays

    def slow_save(file, array, **options):
        save(file, array, **options)
        file.flush()
        time.sleep(0.1)

    def counted(*arguments):
        built.append(1)
        return build(*arguments)

    caching.np.save, gpt_dataset._build_arrays = slow_save, counted
    if not locks:

        def no_lock(*_):
            raise OSError(95, "Operation not supported")

        caching.fcntl.flock = no_lock
    ready.release()
    go.wait()
    try:
        data = GPTDataset("train", IndexedDataset(prefix), np.arange(40), 100, 16, 3)
        results.put((len(built), data.index_hash, [data[k]["text"].tolist() for k in range(len(data))]))
    except BaseException as error:
        results.put(repr(error))
        raise


@pytest.mark.parametrize("locks", [True, False], ids=["lockable", "no locks"])
def test_four_processes_may_start_at_once_on_a_cold_cache(tmp_path, locks):
    prefix = write(tmp_path / "d", [25] * 40)
    fork = multiprocessing.get_context("fork")
    ready, go, results = fork.Semaphore(0), fork.Event(), fork.Queue()
    workers = [fork.Process(target=slow_start, args=(prefix, ready, go, results, locks)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for _ in workers:
        assert ready.acquire(timeout=30)
    go.set()
    found = [results.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join(30)
    assert all(isinstance(each, tuple) for each in found), found
    assert len({each[1] for each in found}) == 1
    documents = [list(range(25 * k, 25 * k + 25)) for k in range(40)]
    truth = slow_rows(documents, 100, 16, 3)
    assert all(each[2] == truth for each in found)
    assert sum(each[0] for each in found) == 1 if locks else sum(each[0] for each in found) >= 1
    assert len(caches(tmp_path)) == 3 and len(os.listdir(tmp_path)) == 5  # no temporary file is left


def test_a_dataset_can_be_sent_to_a_worker_process(tmp_path):
    data = GPTDataset("train", IndexedDataset(write(tmp_path / "d", [30, 20])), np.arange(2), 9, 7, 5)
    copy = pickle.loads(pickle.dumps(data))
    assert all((copy[k]["text"] == data[k]["text"]).all() for k in range(len(data)))


# --- all the datasets of a run ---

WANTED = {"seq_length": 8, "seed": 1, "train_samples": 40, "valid_samples": 10, "test_samples": 5}


def tokens_of(dataset):
    return {int(token) for k in range(len(dataset)) for token in dataset[k]["text"]}


def test_a_split_gives_each_set_its_own_documents(tmp_path):
    prefix = write(tmp_path / "d", [10] * 20)
    built = build_datasets(DataConfig(data_path=(prefix,), split="8,1,1"), **WANTED)
    assert list(built.valid) == ["valid"] and list(built.test) == ["test"]
    assert tokens_of(built.train) <= set(range(160)) and len(tokens_of(built.train)) > 150
    assert tokens_of(built.valid["valid"]) <= set(range(160, 180))
    assert tokens_of(built.test["test"]) <= set(range(180, 200))
    assert len(built.train) >= 40 and len(built.valid["valid"]) >= 10


def test_an_empty_split_or_no_samples_give_no_dataset(tmp_path):
    prefix = write(tmp_path / "d", [10] * 20)
    built = build_datasets(DataConfig(data_path=(prefix,), split="1"), **WANTED)
    assert built.train is not None and built.valid == {} and built.test == {}
    built = build_datasets(DataConfig(data_path=(prefix,), split="0,1,1"), **{**WANTED, "test_samples": 0})
    assert built.train is None and list(built.valid) == ["valid"] and built.test == {}


def test_weighted_groups_read_their_ranges_and_keep_their_names(tmp_path):
    a, b = write(tmp_path / "a", [10] * 20), write(tmp_path / "b", [10] * 20, first=1000)
    built = build_datasets(
        DataConfig(
            train_groups=parse_weighted_groups("--train-x", [f"train: 3 0:0.5 {a}, 1 0.5:1 {b}"]),
            valid_groups=parse_weighted_groups("--valid-x", [f"left: 0 0.9:1 {a}", f"right: 1 0:0.1 {b}"]),
        ),
        **WANTED,
    )
    assert list(built.valid) == ["left", "right"] and built.test == {}
    assert tokens_of(built.valid["left"]) <= set(range(180, 200))
    assert tokens_of(built.valid["right"]) <= set(range(1000, 1020))
    first = [int(built.train[k]["text"][0]) for k in range(40)]
    assert all(token < 100 or 1100 <= token < 1200 for token in first)
    assert sum(token < 100 for token in first) == 30
    # what the start of the log says; NVIDIA/Megatron-LM#705: nobody knew what the weights had become
    facts = built.facts()
    assert list(facts) == ["training", "validation left", "validation right"]
    assert facts["training"] == (f"49 samples, {37 / 49:.4%} of {a}, {12 / 49:.4%} of {b}, "
                                 f"index hash {built.train.index_hash}")
    # each part was built with ceil(n w 1.005) samples
    assert [
        name.split("_")[3] for name in caches(tmp_path) if name.endswith("doc_idx.npy") and "train" in name
    ] == ["31ns", "11ns"]


def test_ranks_may_read_a_blend_from_folders_of_their_own_but_no_other_blend(tmp_path):
    def prints(folder, sizes=(10, 20), weight="1"):
        (tmp_path / folder).mkdir()
        a, b = (write(tmp_path / folder / name, [size] * 20) for name, size in zip("ab", sizes))
        return build_datasets(DataConfig(data_path=(weight, a, "2", b), split="8,1,1"), **WANTED).prints()

    first = prints("first")
    assert list(first) == ["training", "validation valid", "test test"][:len(first)] and len(first) > 1
    check_same_data([first, None, prints("second"), None])
    for other in (prints("third", sizes=(10, 21)), prints("fourth", weight="3")):
        with pytest.raises(SharedRunError, match=r"different training data: \d+ samples, index hash \w{12} on rank 0, .* on rank 2;"):
            check_same_data([first, None, other])


def test_a_range_without_documents_is_refused(tmp_path):
    a = write(tmp_path / "a", [10] * 5)
    groups = parse_weighted_groups("--valid-x", [f"late: 1 0.95:1 {a}"])
    with pytest.raises(ValueError, match="'late'.*0.95:1.*5 documents"):
        build_datasets(DataConfig(valid_groups=groups), **WANTED)


@pytest.mark.parametrize("size_of_a", [400, 9], ids=["equal sets", "one sample"])
@pytest.mark.parametrize("weights", [(0.001, 0.999), (0.999, 0.001), (0, 1), (1, 0)])
def test_extreme_weights_read_every_sample_and_keep_their_shares(tmp_path, weights, size_of_a):
    """NVIDIA/Megatron-LM#705: an IndexError for a weight so small or large that a share ran past the end of its dataset."""
    a, b = write(tmp_path / "a", [size_of_a]), write(tmp_path / "b", [400], first=1000)
    data_path = (str(weights[0]), a, str(weights[1]), b)
    train = build_datasets(DataConfig(data_path=data_path, split="1"), **{**WANTED, "train_samples": 300}).train
    assert len(train) >= 300
    of_a = np.cumsum([train[k]["text"][0] < 1000 for k in range(len(train))])
    assert np.abs(of_a - weights[0] * np.arange(1, len(train) + 1)).max() <= 1
    for _, prefix, weight in zip("ab", (a, b), weights):
        said = Datasets(train=train).facts()["training"]
        assert (f"% of {prefix}" in said) == (weight > 0)


def test_a_blend_leaves_out_weight_zero_and_sets_without_documents(tmp_path, caplog):
    """NVIDIA/Megatron-LM#705: what weights mean."""
    a, b, c = (
        write(tmp_path / name, [10] * n, first)
        for name, n, first in [("a", 20, 0), ("b", 20, 1000), ("c", 1, 5000)]
    )
    built = build_datasets(DataConfig(data_path=("0", a, "1", b, "1", c), split="1,1"), **WANTED)
    assert tokens_of(built.valid["valid"]) <= set(range(1100, 1200))
    assert f"valid: {c} has no documents" in caplog.text
    assert min(tokens_of(built.train)) >= 1000


def test_a_token_id_beyond_the_vocabulary_is_refused_with_id_and_path(tmp_path):
    """deepspeedai/DeepSpeed-MII#473 and others: data of another tokenizer; at the start, or when a sample holds the id."""
    prefix = write(tmp_path / "d", [10] * 100)
    config = DataConfig(data_path=(prefix,), split="1")
    with pytest.raises(ValueError, match="token id 9,") as error:
        build_datasets(config, **WANTED, vocab_size=9)
    assert prefix in str(error.value)
    # ids 640.. are beyond what is looked at when opening: found when a row holds one
    late = build_datasets(config, **{**WANTED, "train_samples": 120}, vocab_size=700).train
    good = bad = 0
    for k in range(len(late)):
        try:
            assert late[k]["text"].max() < 700
            good += 1
        except ValueError as error:
            assert prefix in str(error) and "0 .. 699" in str(error)
            bad += 1
    assert good and bad
    assert build_datasets(config, **WANTED, vocab_size=1000).train[0]["text"].shape == (9,)


def test_values_that_are_no_token_ids_are_refused(tmp_path):
    prefix = write(tmp_path / "d", [10] * 4)
    raw = bytearray((tmp_path / "d.idx").read_bytes())
    raw[17] = 7
    (tmp_path / "d.idx").write_bytes(raw)  # 4-byte floats of NVIDIA's table
    with pytest.raises(ValueError, match="float32"):
        GPTDataset("t", IndexedDataset(prefix), np.arange(4), 3, 8, 0)
