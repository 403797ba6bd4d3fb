"""tools/merge_datasets.py: equal to one dataset written from the joined documents."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter

TOOL = pathlib.Path(__file__).parent.parent / "tools" / "merge_datasets.py"
spec = importlib.util.spec_from_file_location("merge_datasets", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

PARTS = [[[1, 2, 3]], [], [[[4, 5], [6]], [7], [[8], [9, 10], [11]]], [[12], [13]]]


def write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def test_a_merge_is_byte_for_byte_the_dataset_of_the_joined_documents(tmp_path):
    prefixes = [write(tmp_path / f"part{k}", part) for k, part in enumerate(PARTS)]
    write(tmp_path / "truth", [document for part in PARTS for document in part])
    assert tool.main(["--datasets", *prefixes, "--output-prefix", str(tmp_path / "all")]) == 0
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"all{ending}").read_bytes() == (tmp_path / f"truth{ending}").read_bytes()
    merged = IndexedDataset(str(tmp_path / "all"))
    assert merged.doc_idx.tolist() == [0, 1, 3, 4, 7, 8, 9]
    assert np.concatenate([merged[i] for i in range(len(merged))]).tolist() == list(range(1, 14))


def test_different_token_types_are_refused_and_nothing_is_written(tmp_path, capsys):
    a, b = write(tmp_path / "a", [[1]]), write(tmp_path / "b", [[1]], np.int32)
    before = sorted(os.listdir(tmp_path))
    assert tool.main(["--datasets", a, b, "--output-prefix", str(tmp_path / "c")]) == 1
    message = capsys.readouterr().err
    assert "uint16" in message and "int32" in message and b in message
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("spoil", ["missing", "cut"])
def test_a_missing_or_damaged_input_ends_it_before_anything_is_written(tmp_path, capsys, spoil):
    a, b = write(tmp_path / "a", [[1]]), write(tmp_path / "b", [[1, 2]])
    if spoil == "missing":
        os.unlink(b + ".idx")
    else:
        (tmp_path / "b.bin").write_bytes(b"\1\0")
    before = sorted(os.listdir(tmp_path))
    assert tool.main(["--datasets", a, b, "--output-prefix", str(tmp_path / "c")]) == 1
    assert b in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == before


def test_an_input_cannot_be_the_output(tmp_path, capsys):
    a = write(tmp_path / "a", [[1]])
    assert tool.main(["--datasets", a, a, "--output-prefix", str(tmp_path / "." / "a")]) == 1
    assert "--output-prefix" in capsys.readouterr().err
    assert IndexedDataset(a)[0].tolist() == [1]


def test_it_runs_as_a_script_from_any_folder(tmp_path):
    a, b = write(tmp_path / "a", [[1]]), write(tmp_path / "b", [[2]])
    done = subprocess.run(
        [sys.executable, str(TOOL), "--datasets", a, b, "--output-prefix", "c"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2 documents" in done.stdout
    assert len(IndexedDataset(str(tmp_path / "c"))) == 2
