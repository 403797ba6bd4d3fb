"""Compiled helpers, NumPy forms and a count of every token give the same arrays."""

import importlib.util
import pathlib
import shutil
import subprocess
import sysconfig

import numpy as np
import pytest

from megatron.data import index_arrays
from megatron.data.index_arrays import build_blending_indices, build_sample_idx, plan_epochs

SOURCE = pathlib.Path(index_arrays.__file__).with_name("helpers.cpp")


@pytest.fixture(scope="session")
def helpers(tmp_path_factory):
    """The extension as it stands in the source, compiled for this session."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: only the NumPy forms can be tested here")
    import pybind11

    target = tmp_path_factory.mktemp("native") / ("helpers" + sysconfig.get_config_var("EXT_SUFFIX"))
    subprocess.run(
        [
            compiler,
            "-O1",
            "-shared",
            "-fPIC",
            "-std=c++17",
            "-Wall",
            "-Wextra",
            "-fvisibility=hidden",
            f"-I{pybind11.get_include()}",
            f"-I{sysconfig.get_paths()['include']}",
            str(SOURCE),
            "-o",
            str(target),
        ],
        check=True,
    )
    spec = importlib.util.spec_from_file_location("megatron.data.helpers", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["numpy", "compiled"])
def force_numpy(request, monkeypatch):
    """Runs a test once per path; the value is what to pass as force_numpy."""
    if request.param == "numpy":
        return True
    monkeypatch.setattr(index_arrays, "helpers", request.getfixturevalue("helpers"))
    monkeypatch.setattr(index_arrays, "HAVE_HELPERS", True)
    monkeypatch.delenv("MEGATRON_DATA_NUMPY", raising=False)
    return False


def counted_rows(sizes, doc_idx, seq_length, num_samples):
    """Every token of the stream, one by one."""
    stream = [(position, offset) for position, doc in enumerate(doc_idx) for offset in range(sizes[doc])]
    return [list(stream[i * seq_length]) for i in range(num_samples + 1)]


def random_case(rng):
    sizes = rng.integers(0, rng.choice([3, 20, 60]), rng.integers(1, 12)).astype(np.int32)
    if not sizes.sum():
        sizes[0] = 1
    doc_idx = np.concatenate([rng.permutation(len(sizes)) for _ in range(rng.integers(1, 4))]).astype(
        np.int32
    )
    seq_length = int(rng.integers(1, 25))
    return sizes, doc_idx, seq_length, (int(sizes[doc_idx].sum()) - 1) // seq_length


def test_sample_rows_equal_the_count_of_every_token(force_numpy):
    rng = np.random.default_rng(0)
    for _ in range(300):
        sizes, doc_idx, seq_length, num_samples = random_case(rng)
        rows = build_sample_idx(sizes, doc_idx, seq_length, num_samples, force_numpy=force_numpy)
        assert rows.dtype == np.int32 and rows.shape == (num_samples + 1, 2)
        assert rows.tolist() == counted_rows(sizes, doc_idx, seq_length, num_samples)


def test_both_paths_give_identical_sample_rows_on_larger_cases(helpers):
    rng = np.random.default_rng(1)
    for wide in (False, True):
        for _ in range(150):
            sizes = rng.integers(0, 500, 400).astype(np.int32)
            doc_idx = rng.permutation(np.tile(np.arange(400, dtype=np.int32), 3))
            seq_length = int(rng.integers(1, 600))
            num_samples = (int(sizes.sum()) * 3 - 1) // seq_length
            compiled = helpers.build_sample_idx(sizes, doc_idx, seq_length, num_samples, wide)
            ours = build_sample_idx(sizes, doc_idx, seq_length, num_samples, force_numpy=True)
            assert compiled.dtype == (np.int64 if wide else np.int32)
            assert np.array_equal(compiled, ours)


def test_streams_beyond_2_to_the_32_tokens_do_not_wrap(force_numpy):
    """NVIDIA/Megatron-LM#1672, for positions in the stream of tokens."""
    sizes = np.array([2**31 - 1, 2**31 - 2, 2**31 - 1], np.int32)
    rows = build_sample_idx(sizes, np.array([2, 1, 0], np.int32), 2**31, 2, force_numpy=force_numpy)
    assert rows.tolist() == [[0, 0], [1, 1], [2, 2**32 - (2**32 - 3)]]


def test_sizes_may_lie_unaligned_in_memory(force_numpy):
    raw = b"\0\0" + np.array([4, 9, 2], "<i4").tobytes()
    sizes = np.frombuffer(raw, "<i4", 3, 2)
    rows = build_sample_idx(sizes, np.array([0, 1, 2], np.int32), 7, 2, force_numpy=force_numpy)
    assert rows.tolist() == [[0, 0], [1, 3], [2, 1]]


def test_a_stream_too_short_for_its_samples_is_refused(force_numpy):
    for sizes, docs, samples in [([3], [0], 1), ([], [], 0), ([0], [0], 0)]:
        with pytest.raises(ValueError, match="too few tokens"):
            build_sample_idx(
                np.array(sizes, np.int32), np.array(docs, np.int32), 3, samples, force_numpy=force_numpy
            )


def test_a_blend_of_6_3_1_has_the_known_order(force_numpy):
    # the third sample is a tie of 0 and 2, which the rounding of the normalised weights gives to 0
    weights = np.array([0.6, 0.3, 0.1]) / (0.6 + 0.3 + 0.1)
    which, local = build_blending_indices(weights, 12, force_numpy=force_numpy)
    assert which.tolist() == [0, 1, 0, 2, 0, 1, 0, 0, 1, 0, 0, 1]
    assert local.tolist() == [0, 0, 1, 0, 2, 1, 3, 4, 2, 5, 6, 3]
    assert local.dtype == np.int64


def naive_blend(weights, length):
    taken, order = [0] * len(weights), []
    for i in range(length):
        lags = np.array(weights) * max(i, 1) - np.array(taken, float)
        lags[np.array(weights) == 0] = -np.inf
        best = int(np.argmax(lags))  # the first of equals
        order.append((best, taken[best]))
        taken[best] += 1
    return order


def test_blends_equal_the_rule_spelled_out(force_numpy):
    rng = np.random.default_rng(2)
    for case in range(200):
        raw = rng.choice([rng.random(5), rng.integers(0, 3, 5), 10.0 ** rng.integers(-6, 3, 5)])
        raw = raw[: rng.integers(1, 6)].astype(float)
        if not raw.any():
            raw[0] = 1
        weights = raw / raw.sum()
        which, local = build_blending_indices(weights, 80, force_numpy=force_numpy)
        assert list(zip(which.tolist(), local.tolist())) == naive_blend(weights, 80), (case, weights)


def test_both_paths_blend_identically_on_longer_cases(helpers):
    rng = np.random.default_rng(3)
    for _ in range(100):
        weights = rng.dirichlet(np.full(int(rng.integers(1, 30)), 0.5))
        which, local = helpers.build_blending_indices(weights, 700)
        ours = build_blending_indices(weights, 700, force_numpy=True)
        assert np.array_equal(which, ours[0]) and np.array_equal(local, ours[1])


@pytest.mark.parametrize("weights", [[], [-0.5, 1.5], [0.0, 0.0], [np.nan, 1.0], [[1.0]]])
def test_weights_without_meaning_are_refused(weights, force_numpy):
    with pytest.raises(ValueError, match="weights"):
        build_blending_indices(np.array(weights), 3, force_numpy=force_numpy)


def test_the_environment_can_turn_the_compiled_path_off(monkeypatch):
    class Broken:
        def build_blending_indices(self, *_):
            raise RuntimeError("called")

    monkeypatch.setattr(index_arrays, "helpers", Broken())
    monkeypatch.setattr(index_arrays, "HAVE_HELPERS", True)
    monkeypatch.delenv("MEGATRON_DATA_NUMPY", raising=False)
    with pytest.raises(RuntimeError, match="called"):
        build_blending_indices(np.array([1.0]), 3)
    monkeypatch.setenv("MEGATRON_DATA_NUMPY", "1")
    assert build_blending_indices(np.array([1.0]), 3)[1].tolist() == [0, 1, 2]


def test_the_number_of_epochs_is_the_smallest_that_suffices():
    for tokens in (1, 2, 9, 10, 11, 50):
        for seq_length in (1, 3, 10):
            for samples in (0, 1, 2, 5, 17, 40):
                epochs = 1
                while (epochs * tokens - 1) // seq_length < samples:
                    epochs += 1
                plan = plan_epochs(tokens, seq_length, samples)
                assert plan.num_epochs == epochs
                assert plan.num_samples == (epochs * tokens - 1) // seq_length >= samples


def test_the_last_epoch_is_separate_below_95_percent_of_its_samples():
    # 101 tokens in rows of 1: 100 samples per epoch, 201 in two, 95 % of an epoch are 95
    assert plan_epochs(101, 1, 100).full_samples == 100
    for asked, separate in [(101, True), (194, True), (195, False), (196, False), (201, False)]:
        plan = plan_epochs(101, 1, asked)
        assert plan.num_epochs == 2 and plan.separate_last_epoch == separate, asked
        assert plan.full_samples == (100 if separate else 201)


def test_a_last_epoch_that_needs_one_sample_more_than_it_holds_alone_is_just_full():
    """NVIDIA/Megatron-LM#176: "last epoch number of samples exceeded max value"."""
    # 14 tokens, rows of 5: one epoch holds 2 samples, two hold 5, so the second gives 3
    plan = plan_epochs(14, 5, 5)
    assert plan.num_epochs == 2 and plan.num_samples == 5 and not plan.separate_last_epoch
