"""Pairs of inputs and targets from JSON Lines: one pass, two passes, lines with a side missing, what is published."""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import preprocess_data
from test_preprocess import EOD, byte_vocab, outputs, read, write_tokenizer

from megatron.data import indexed_dataset
from megatron.data.indexed_dataset import IndexedDatasetWriter
from megatron.data.mtf_dataset import PairedDataset
from megatron.data.packed_dataset import PackedDataset
from megatron.tokenizer.encode import EncodeOptions, Skipped, encode_line

BOTH = ("--json-keys", "inputs", "targets")
INPUTS = ("--json-key", "inputs")
TARGETS = ("--json-key", "targets", "--append-eod", "--prepend-space")

#: (line, whether it is a pair)
LINES = [
    ({"inputs": "q1", "targets": "a1"}, True), ({"inputs": "", "targets": "a2"}, False),
    ({"inputs": "q3", "targets": ""}, False), ({"inputs": "q4"}, False), ({"targets": "a5"}, False),
    ({"inputs": "q6", "targets": None}, False), ("", False), ({"inputs": "", "targets": ""}, False),
    ({"targets": "a9", "inputs": "q9", "source": "x"}, True), ({"inputs": "", "targets": None}, False),
]


@pytest.fixture
def job(tmp_path):
    """A function: lines and flags -> exit status; outputs go to tmp_path/out."""
    tokenizer = write_tokenizer(tmp_path, byte_vocab())

    def run(lines, *flags, out="out"):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (tmp_path / "in.jsonl").write_text(text)
        return preprocess_data.main(["--input", str(tmp_path / "in.jsonl"), "--output-prefix",
                                     str(tmp_path / out / "d"), "--workers", "0", *tokenizer, *flags])
    run.folder = tmp_path
    return run


def sides(folder):
    return [[sequence for (sequence,) in read(folder, f"d_{side}_document")[0]] for side in ("inputs", "targets")]


def test_one_pass_makes_both_sides_and_ends_targets_only(job, capsys):
    """bigscience-workshop/Megatron-DeepSpeed#293: one end token, behind the target only."""
    lines = [line for line, _ in LINES]
    assert job(lines, *BOTH, "--append-eod", "--prepend-space") == 0
    inputs, targets = sides(job.folder)
    assert inputs == [list(b"q1"), list(b"q9")]
    assert targets == [[*b" a1", EOD], [*b" a9", EOD]]
    said = capsys.readouterr().out
    path = job.folder / "in.jsonl"
    assert "--append-eod, --prepend-space: on targets only" in said
    assert f"skipped 3 (empty text): {path}:2, {path}:3, {path}:8" in said
    assert f"skipped 4 (half of a pair missing): {path}:4, {path}:5, {path}:6, {path}:10" in said
    assert "2 documents from 10 lines" in said and "2 pairs: both sides are in step" in said
    assert outputs(job.folder) == [f"d_{side}_document.{end}" for side in ("inputs", "targets") for end in ("bin", "idx")]
    assert [[part.tolist() for part in pair] for pair in PairedDataset(str(job.folder / "out" / "d"))] == [
        list(pair) for pair in zip(inputs, targets)]


@pytest.mark.parametrize("overlong, cut", [("drop", {}), ("truncate-inputs", {"b": 14, "g": 12})])
def test_from_lines_to_rows_every_pair_is_kept_cut_or_dropped_and_counted(job, capsys, caplog, overlong, cut):
    """alibaba/Pai-Megatron-Patch#636: records of long pairs stayed, empty; the count was wrong, and pairs got out of step."""
    # letters of inputs, of targets and their end token, and whether they fit into the 17 tokens of a row
    sizes = {"a": (3, 4, 1), "b": (20, 2, 0), "c": (2, 20, 0), "d": (9, 6, 1), "e": (10, 6, 1), "f": (5, 0, None), "g": (13, 4, 0),
             "h": (0, 5, None)}
    lines = [{"inputs": key * inputs, "targets": key.upper() * targets} for key, (inputs, targets, _) in sizes.items()]
    assert job(lines, *BOTH, "--append-eod") == 0
    path = job.folder / "in.jsonl"
    said = capsys.readouterr().out
    assert f"skipped 2 (empty text): {path}:6, {path}:8" in said and "6 documents from 8 lines" in said
    pairs = PairedDataset(str(job.folder / "out" / "d"))
    rows = PackedDataset("train", pairs, np.arange(len(pairs)), 20, 16, 0, overlong=overlong, cache=False)
    assert f"3 of 6 pairs of {pairs.prefix} have more than the 17 tokens of a row, up to 23; cut: {len(cut)}, dropped: {3 - len(cut)}" in caplog.text
    kept = {key: cut.get(key, inputs) for key, (inputs, _, fits) in sizes.items() if fits or key in cut}
    seen = set()
    for k in range(len(rows)):
        parts = rows.parts(k)
        tokens, segments = parts["decoder_token_ids"].tolist(), parts["decoder_segment_ids"]
        for segment in range(1, segments.max() + 1):
            whole = [token for token, own in zip(tokens, segments) if own == segment]
            key = chr(whole[0])
            assert whole == [*(key * kept[key] + key.upper() * sizes[key][1]).encode(), EOD]
            seen.add(key)
    assert seen == set(kept)


def test_two_passes_with_the_old_flags_give_the_same_bytes(job, capsys):
    # [BUG] of the original: a line with one empty side shifts all pairs behind it
    rng = random.Random(4)
    lines = [line for line, _ in LINES]
    for _ in range(200):
        lines.append({side: rng.choice(["", "é x" * rng.randrange(1, 90)]) for side in ("inputs", "targets")})
    rng.shuffle(lines)
    assert job(lines, *BOTH, "--append-eod", "--prepend-space") == 0
    assert job(lines, *INPUTS, out="two") == 0
    assert job(lines, *TARGETS, out="two") == 0
    for name in outputs(job.folder):
        assert (job.folder / "two" / name).read_bytes() == (job.folder / "out" / name).read_bytes()
    said = capsys.readouterr()
    assert said.out.count("both sides are in step") == 2 and said.err == ""


def test_without_flags_nothing_is_added(job):
    assert job([{"inputs": "q", "targets": "a"}], "--json-keys", "targets", "inputs") == 0
    assert sides(job.folder) == [[list(b"q")], [list(b"a")]]


def test_each_pass_takes_its_own_flags(job):
    assert job([{"inputs": "q", "targets": "a"}], *INPUTS, "--append-eod") == 0
    assert job([{"inputs": "q", "targets": "a"}], "--json-key", "targets") == 0
    assert sides(job.folder) == [[[*b"q", EOD]], [list(b"a")]]


def test_a_file_with_one_side_only_is_encoded_as_it_is(job, capsys):
    assert job([{"inputs": "q1"}, {"inputs": "q2"}], *INPUTS) == 0
    assert read(job.folder, "d_inputs_document")[0] == [[list(b"q1")], [list(b"q2")]]
    assert job([{"targets": "a1"}, {"targets": ""}], *TARGETS) == 0
    said = capsys.readouterr()
    assert "pairs of inputs" not in said.out and said.err == ""


def test_sides_of_different_files_are_warned_about(job, capsys):
    assert job([{"inputs": "q", "targets": "a"}] * 3, *INPUTS) == 0
    assert job([{"inputs": "q", "targets": "a"}] * 2, *TARGETS) == 0
    prefix = job.folder / "out" / "d"
    assert f"warning: {prefix}_inputs_document has 3 documents and {prefix}_targets_document 2" in capsys.readouterr().err


class Deaf:
    """Encodes letters only, so that a text may encode to nothing."""

    def tokenize(self, text):
        return [ord(letter) for letter in text if letter.isalpha()]

    eod = 0


@pytest.mark.parametrize("keys", [("inputs",), ("targets",), ("inputs", "targets")])
def test_what_encodes_to_nothing_is_dropped_whichever_side_is_written(keys):
    options = EncodeOptions(keys=keys, pairs=True, append_eod=True)

    def encode(inputs, targets):
        return encode_line(json.dumps({"inputs": inputs, "targets": targets}).encode(), Deaf(), options)

    for pair in (("?", "a"), ("a", "..." * 40), ("", "a")):
        assert encode(*pair).reason == "empty text"
    assert not isinstance(encode("." * 100 + "a", "b"), Skipped)  # the tokens come late
    for pair in (("x" * 100 + "\ud800", "a"), ("a", "\ud800")):
        assert encode(*pair).reason == "invalid line"


@pytest.mark.parametrize("line", [{"inputs": "q", "targets": 7}, {"inputs": ["q"], "targets": "a"}, {"text": "a"}, [1]])
def test_a_broken_line_ends_any_pass(job, capsys, line):
    for flags in (BOTH, INPUTS, TARGETS):
        assert job([{"inputs": "q", "targets": "a"}, line], *flags) == 1
        assert f"{job.folder / 'in.jsonl'}:2 " in capsys.readouterr().err
    assert outputs(job.folder) == []


def test_no_pair_at_all_fails(job, capsys):
    assert job([{"inputs": "q"}, {"targets": "a"}], *BOTH) == 1
    assert "gave no document (2 lines); skipped 2 (half of a pair missing)" in capsys.readouterr().err
    assert outputs(job.folder) == []


def test_sentences_of_pairs_are_refused(job, capsys):
    assert job([{"inputs": "q", "targets": "a"}], *BOTH, "--split-sentences") == 1
    assert "--split-sentences" in capsys.readouterr().err and outputs(job.folder) == []


def test_unequal_sides_are_never_published(job, capsys, monkeypatch):
    add = IndexedDatasetWriter.add_document
    monkeypatch.setattr(IndexedDatasetWriter, "add_document", lambda self, tokens: (
        None if "inputs" in self.prefix and self.documents else add(self, tokens)))
    assert job([{"inputs": "q", "targets": "a"}] * 3, *BOTH) == 1
    said = capsys.readouterr().err
    assert "d_inputs_document has 1" in said and "d_targets_document has 3" in said and outputs(job.folder) == []


def test_a_full_disk_at_the_second_side_leaves_the_older_pair(job, monkeypatch):
    assert job([{"inputs": "old", "targets": "old"}], *BOTH) == 0
    before = sides(job.folder)
    flush, calls = indexed_dataset.flush_to_disk, []

    def full(file):
        calls.append(file)
        if len(calls) == 4:  # the tokens of the targets, when all else is on the disk
            raise OSError(28, "No space left on device")
        flush(file)

    monkeypatch.setattr(indexed_dataset, "flush_to_disk", full)
    assert job([{"inputs": "new", "targets": "new"}] * 2, *BOTH) == 1
    assert len(calls) == 4 and sides(job.folder) == before and len(outputs(job.folder)) == 4


def test_a_job_killed_between_the_renames_leaves_no_pair_of_old_and_new(job, monkeypatch):
    assert job([{"inputs": "old", "targets": "old"}], *BOTH) == 0
    replace, calls = os.replace, []

    def killed(*names):
        calls.append(names)
        replace(*names)
        if len(calls) == 2:  # one side is in place, the other is not
            raise KeyboardInterrupt

    monkeypatch.setattr(indexed_dataset.os, "replace", killed)
    assert job([{"inputs": "new", "targets": "new"}], *BOTH) == 130
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match=r"_document\.idx"):
        PairedDataset(str(job.folder / "out" / "d"))
    assert job([{"inputs": "new", "targets": "new"}], *BOTH) == 0
    assert sides(job.folder) == [[list(b"new")]] * 2 and len(outputs(job.folder)) == 4
