"""Blends: proportions, extremes and ends."""

import math

import numpy as np
import pytest

from megatron.data.blending import BlendedDataset, normalised, samples_per_dataset


class Numbered:
    """Sample k of dataset ``name`` is (name, k); anything outside is an IndexError."""

    def __init__(self, name, length):
        self.name, self.length = name, length

    def __len__(self):
        return self.length

    def __getitem__(self, k):
        if not 0 <= k < self.length:
            raise IndexError(f"{self.name}[{k}]")
        return {"from": self.name, "k": k}


def blend(lengths, weights):
    return BlendedDataset([Numbered(name, length) for name, length in enumerate(lengths)], weights)


def test_6_3_1_is_drawn_in_the_known_order_and_counts_up_in_each_dataset():
    data = blend([8, 4, 2], [0.6, 0.3, 0.1])
    order = [data[k]["from"] for k in range(12)]
    assert order == [0, 1, 0, 2, 0, 1, 0, 0, 1, 0, 0, 1]
    for name in range(3):
        drawn = [data[k]["k"] for k in range(12) if order[k] == name]
        assert drawn == list(range(len(drawn)))
    assert len(data) == 14


@pytest.mark.parametrize(
    "lengths, weights",
    [
        ((50, 50), (0.001, 0.999)),
        ((50, 50), (0.999, 0.001)),
        ((50, 50), (0, 1)),
        ((50, 50), (1, 0)),
        ((1, 50), (0.5, 0.5)),
        ((1, 1, 1), (1e-9, 1, 1e9)),
        ((0, 50), (0, 1)),
        ((3, 40, 7), (0.2, 0.2, 0.6)),
    ],
)
def test_no_weights_run_past_an_end_and_every_share_is_within_one_sample(lengths, weights):
    """NVIDIA/Megatron-LM#705: an IndexError in extreme cases."""
    data = blend(lengths, weights)
    assert len(data) == sum(length for length, weight in zip(lengths, weights) if weight)
    drawn = [data[k]["from"] for k in range(len(data))]  # no IndexError
    for n in range(1, len(data) + 1):
        for name, weight in enumerate(weights):
            share = weight / sum(weights)
            assert abs(drawn[:n].count(name) - n * share) <= 1
            assert weight or name not in drawn[:n]
    for k in (-1, len(data)):
        with pytest.raises(IndexError, match="a blend of"):
            data[k]


def test_a_dataset_too_short_for_its_share_starts_over():
    data = blend([2, 6], [1, 1])
    assert [data[k]["k"] for k in range(8) if data[k]["from"] == 0] == [0, 1, 0, 1]


def test_datasets_built_as_told_suffice_for_the_samples_asked_for():
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(1, 8))
        weights = (10.0 ** rng.uniform(-5, 0, count)).tolist()
        wanted = int(rng.integers(1, 300))
        lengths = samples_per_dataset(weights, wanted)
        data = blend(lengths, weights)
        assert len(data) >= wanted
        assert all(data.sample_index[k] < lengths[data.dataset_index[k]] for k in range(wanted))


def test_each_dataset_gets_half_a_percent_more_rounded_up():
    assert samples_per_dataset([3, 1], 1000) == [math.ceil(753.75), math.ceil(251.25)]
    assert samples_per_dataset([0, 2], 10) == [0, 11]


@pytest.mark.parametrize("weights", [[], [-1, 2], [0, 0], [math.inf, 1], [math.nan, 1]])
def test_weights_without_meaning_are_refused(weights):
    """NVIDIA/Megatron-LM#705: a weight below zero is none."""
    for act in (normalised, lambda each: blend([3] * len(each), each)):
        with pytest.raises(ValueError, match="weights"):
            act(weights)


def test_a_set_without_samples_or_a_weight_too_many_is_refused():
    with pytest.raises(ValueError, match="without samples"):
        blend([0, 5], [1, 1])
    with pytest.raises(ValueError, match="2 datasets was given 3 weights"):
        blend([5, 5], [1, 1, 1])


def test_realised_shares_are_told():
    assert blend([30, 10], [3, 1]).shares(40) == [0.75, 0.25]
