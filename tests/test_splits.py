"""Splits, weighted groups and blends as text."""

import random
from fractions import Fraction

import pytest

from megatron.data.splits import (
    parse_data_path,
    parse_split,
    parse_weighted_groups,
    read_weighted_groups_file,
    split_boundaries,
)

VALID = "--valid-weighted-split-paths"
TRAIN = "--train-weighted-split-paths"


@pytest.mark.parametrize(
    "text, parts",
    [
        ("969, 30, 1", (969, 30, 1)),
        ("969,30,1", (969, 30, 1)),
        ("8/1/1", (8, 1, 1)),
        ("3", (3, 0, 0)),
        ("1,3", (1, 3, 0)),
        ("0, 0, 5", (0, 0, 5)),
        ("0.5, 0.25, 0.25", (2, 1, 1)),
    ],
)
def test_a_split_is_normalised_to_sum_one(text, parts):
    expected = [float(Fraction(part, sum(parts))) for part in parts]
    assert parse_split(text) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    "text", ["", "a,b", "1,2,3,4", "-1,2,3", "0,0,0", "nan", "inf,1", "1;2", "1,,2", "1e308,1e308"]
)
def test_a_bad_split_is_refused_naming_the_flag(text):
    with pytest.raises(ValueError, match="--split"):
        parse_split(text)


@pytest.mark.parametrize(
    "split, n, expected",
    [
        ((0.5, 0.5, 0), 3, [0, 1, 3, 3]),  # 1.5 and 1.5 both round to 2: one too many, taken from all
        ((1 / 3, 1 / 3, 1 / 3), 1, [0, 1, 1, 1]),
        ((0.5, 0.5, 0), 5, [0, 3, 5, 5]),  # 2.5 rounds to even, 2: one too few
        ((0.969, 0.03, 0.001), 100, [0, 97, 100, 100]),
        ((0.969, 0.03, 0.001), 1000, [0, 969, 999, 1000]),
        ((0, 0.5, 0.5), 3, [0, 0, 1, 3]),  # would be -1
        ((1, 0, 0), 0, [0, 0, 0, 0]),
    ],
)
def test_boundaries_round_half_to_even_and_pass_on_the_difference(split, n, expected):
    assert split_boundaries(split, n) == expected


def test_boundaries_always_cover_every_document_once():
    rng = random.Random(0)
    for _ in range(500):
        n = rng.randrange(0, 50)
        whole = [rng.choice([1, 2, 5, 50]), rng.choice([0, 1, 50]), rng.choice([0, 1, 2])]
        split = parse_split(",".join(map(str, rng.sample(whole, 3))))
        b = split_boundaries(split, n)
        assert b[0] == 0 and b[-1] == n and b == sorted(b)


def test_groups_follow_the_grammar():
    (one, two) = parse_weighted_groups(VALID, ["a b: 0.6 0:0.95 /d/a, 0.4 0.5:1 /d/b:c", "other:3 0:1 /d/x"])
    assert one.name == "a b"
    assert one.paths == ("/d/a", "/d/b:c")
    assert one.weights == (0.6, 0.4)
    assert one.splits == ((0.0, 0.95), (0.5, 1.0))
    assert (two.name, two.paths, two.weights, two.splits) == ("other", ("/d/x",), (3.0,), ((0.0, 1.0),))


@pytest.mark.parametrize(
    "text, offending",
    [
        ("no colon at all", "no colon at all"),
        (": 1 0:1 /a", ": 1 0:1 /a"),
        ("n:", "0 fields"),
        ("n: 1 0:1", "1 0:1"),
        ("n: 1 0:1 /with space/a", "4 fields"),
        ("n: x 0:1 /a", "'x'"),
        ("n: 1 0 /a", "'0'"),
        ("n: 1 0:1:2 /a", "0:1:2"),
        ("n: 1 .5:.5 /a", ".5:.5"),
        ("n: 1 .9:.1 /a", ".9:.1"),
        ("n: 1 0:1.5 /a", "0:1.5"),
        ("n: 1 -1:1 /a", "-1:1"),
        ("n: -1 0:1 /a", "-1"),
        ("n: nan 0:1 /a", "nan"),
        ("n: 1 0:x /a", "'x'"),
        ("n: 1 0:1 /a,", "0 fields"),
        ("n: 0 0:1 /a, 0 0:1 /b", "'n'"),
    ],
)
def test_a_bad_group_is_refused_naming_flag_and_text(text, offending):
    with pytest.raises(ValueError) as error:
        parse_weighted_groups(VALID, [text])
    assert VALID in str(error.value) and offending in str(error.value)


def test_training_takes_exactly_one_group_and_names_are_distinct():
    with pytest.raises(ValueError, match="exactly one"):
        parse_weighted_groups(TRAIN, ["a: 1 0:1 /a", "b: 1 0:1 /b"])
    with pytest.raises(ValueError, match="'a'"):
        parse_weighted_groups(VALID, ["a: 1 0:1 /a", "a: 1 0:1 /b"])
    with pytest.raises(ValueError, match="no group"):
        parse_weighted_groups(VALID, [])


def test_the_file_form_equals_the_argument_form(tmp_path):
    groups = ["train: 0.6 0:0.95 /d/a, 0.4 0:0.95 /d/b", "more: 1 0:1 /d/c"]
    path = tmp_path / "paths.txt"
    path.write_text('"' + '" "'.join(groups) + '"\n')
    assert read_weighted_groups_file(VALID + "-path", str(path)) == parse_weighted_groups(VALID, groups)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n",
        "a: 1 0:1 /a\n",
        '"a: 1 0:1 /a"\n"b: 1 0:1 /b"\n',
        '"\n',
        '"a: 1 0:1 /a"  "b: 1 0:1 /b"\n',
        '"a: 1 0:1 /a\n',
    ],
)
def test_a_bad_file_is_refused_naming_flag_and_file(tmp_path, content):
    path = tmp_path / "paths.txt"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        read_weighted_groups_file(VALID + "-path", str(path))
    assert VALID + "-path" in str(error.value) and str(path) in str(error.value)


def test_a_missing_file_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        read_weighted_groups_file(VALID + "-path", str(tmp_path / "nowhere"))


def test_data_path_is_one_prefix_or_weights_and_prefixes():
    assert parse_data_path(["/d/a"]) == (["/d/a"], [1.0])
    assert parse_data_path(["0.3", "/d/a", "7", "/d/b"]) == (["/d/a", "/d/b"], [0.3, 7.0])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["1", "/a", "2"],
        ["/a", "1", "/b", "2"],
        ["-1", "/a", "2", "/b"],
        ["0", "/a", "0", "/b"],
        ["inf", "/a"],
    ],
)
def test_a_bad_data_path_is_refused(arguments):
    with pytest.raises(ValueError, match="--data-path"):
        parse_data_path(arguments)
