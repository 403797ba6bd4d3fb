"""tools/merge_datasets.py: equal to one dataset written from the joined documents."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_data import write_tokenizer

from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter

TOOL = Path(__file__).parent.parent / "tools" / "merge_datasets.py"
spec = importlib.util.spec_from_file_location("merge_datasets", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

sys.path.insert(0, str(TOOL.parent))
import preprocess_data  # noqa: E402

PARTS = [[[1, 2, 3]], [], [[[4, 5], [6]], [7], [[8], [9, 10], [11]]], [[12], [13]]]


def write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def test_a_merge_is_byte_for_byte_the_dataset_of_the_joined_documents(tmp_path):
    """NVIDIA/Megatron-LM#81: document marks copied without the shift, or with the zero of each part."""
    prefixes = [write(tmp_path / f"part{k}", part) for k, part in enumerate(PARTS)]
    write(tmp_path / "truth", [document for part in PARTS for document in part])
    assert tool.main(["--datasets", *prefixes, "--output-prefix", str(tmp_path / "all")]) == 0
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"all{ending}").read_bytes() == (tmp_path / f"truth{ending}").read_bytes()
    merged = IndexedDataset(str(tmp_path / "all"))
    assert merged.doc_idx.tolist() == [0, 1, 3, 4, 7, 8, 9]
    assert np.concatenate([merged[i] for i in range(len(merged))]).tolist() == list(range(1, 14))


@pytest.mark.parametrize("level", ["document", "sentence"])
def test_a_merge_is_the_preprocessing_of_the_joined_text(tmp_path, level):
    """NVIDIA/Megatron-LM#81: three datasets, one of a single document, one of none."""
    tokenizer = write_tokenizer(tmp_path)
    texts = [["One. Two? Three"], [], ["a bb. C", "d", "E! F"]]

    def preprocessed(name, lines):
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
        assert preprocess_data.main(["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / name), "--workers",
                                     "0", "--append-eod", *tokenizer, *["--split-sentences"] * (level == "sentence")]) == 0
        return f"{tmp_path / name}_text_{level}"

    parts = [preprocessed(f"part{k}", lines) if lines else write(tmp_path / "none", []) for k, lines in enumerate(texts)]
    whole = preprocessed("whole", [text for lines in texts for text in lines])
    assert tool.main(["--datasets", *parts, "--output-prefix", str(tmp_path / "merged")]) == 0
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"merged{ending}").read_bytes() == Path(whole + ending).read_bytes()
    assert IndexedDataset(whole).doc_idx.tolist() == ([0, 1, 2, 3, 4] if level == "document" else [0, 3, 5, 6, 8])


def test_different_token_types_are_refused_and_nothing_is_written(tmp_path, capsys):
    """NVIDIA/Megatron-LM#81 and others: tokens of 2 and of 4 bytes in one file."""
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
