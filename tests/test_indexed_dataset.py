"""Token files against bytes packed by hand, and damage of every kind."""

import os
import pickle
import random
import stat
import struct

import numpy as np
import pytest

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, best_dtype, byte_offsets

DOCUMENTS = [[5, 6, 7], [1], [2, 3, 4, 65499]]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def packed_index(code, sizes, itemsize, marks, modes=b""):
    """An index made with struct alone."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += size * itemsize
    n, d = len(sizes), len(marks)
    return (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, n, d)
        + struct.pack(f"<{n}i", *sizes)
        + struct.pack(f"<{n}q", *offsets)
        + struct.pack(f"<{d}q", *marks)
        + modes
    )


@pytest.mark.parametrize(
    "dtype, code, letter", [(np.uint16, 8, "H"), (np.int32, 4, "i"), (np.int64, 5, "q"), (np.uint8, 1, "B")]
)
def test_the_files_are_byte_for_byte_those_of_the_format(tmp_path, dtype, code, letter):
    documents = [[5, 6, 7], [1], [[2, 3], [4]]]
    prefix = write(tmp_path / "d", documents, dtype)
    itemsize = struct.calcsize("<" + letter)
    assert (tmp_path / "d.bin").read_bytes() == struct.pack(f"<7{letter}", 5, 6, 7, 1, 2, 3, 4)
    assert (tmp_path / "d.idx").read_bytes() == packed_index(code, [3, 1, 2, 1], itemsize, [0, 1, 2, 4])
    data = IndexedDataset(prefix)
    assert data.dtype == np.dtype(dtype) and len(data) == 4
    assert data.sizes.tolist() == [3, 1, 2, 1] and data.doc_idx.tolist() == [0, 1, 2, 4]
    assert [data[i].tolist() for i in range(4)] == [[5, 6, 7], [1], [2, 3], [4]]


def test_any_part_of_a_sequence_can_be_read_and_nothing_beyond(tmp_path):
    data = IndexedDataset(write(tmp_path / "d"), "mmap", warmup=True)
    whole = DOCUMENTS[2]
    for offset in range(5):
        assert data.get(2, offset).tolist() == whole[offset:]
        for length in range(5 - offset):
            assert data.get(2, offset, length).tolist() == whole[offset : offset + length]
    for bad in [(3,), (-1,), (2, 5), (2, -1), (0, 1, 3), (0, 0, -1)]:
        with pytest.raises(IndexError):
            data.get(*bad)


def test_random_documents_come_back_in_any_integer_type(tmp_path):
    rng = random.Random(1)
    for dtype in (np.uint16, np.int32):
        documents = [[rng.randrange(60000) for _ in range(rng.randrange(1, 40))] for _ in range(100)]
        data = IndexedDataset(write(tmp_path / np.dtype(dtype).name, documents, dtype))
        assert [data[i].tolist() for i in range(len(data))] == documents
        assert not data[0].flags.writeable


@pytest.mark.parametrize(
    "vocab, dtype",
    [
        (65499, np.uint16),
        (65500, np.int32),
        (65536, np.int32),
        (65537, np.int32),
        (250680, np.int32),
        (None, np.int32),
    ],
)
def test_the_token_type_follows_the_largest_id(tmp_path, vocab, dtype):
    """huggingface/transformers#2825: ids cut to 16 bits."""
    assert best_dtype(vocab) == dtype
    highest = (vocab or 2**31) - 1
    data = IndexedDataset(write(tmp_path / "d", [[0, highest]], best_dtype(vocab)))
    assert data[0].tolist() == [0, highest]


@pytest.mark.parametrize(
    "dtype, bad", [(np.uint16, 65536), (np.uint16, -1), (np.int32, 2**31), (np.int32, -5)]
)
def test_an_id_that_does_not_fit_is_refused_not_cut(tmp_path, dtype, bad):
    with pytest.raises(ValueError, match=str(bad)):
        write(tmp_path / "d", [[1], [1, bad]], dtype)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("document", [[], [[]], [[], []], [1.5, 2.0], [[[1]]]])
def test_a_document_that_is_no_list_of_tokens_is_refused(tmp_path, document):
    with pytest.raises(ValueError, match="d: "):
        write(tmp_path / "d", [[1], document])


@pytest.mark.parametrize("dtype, vocab", [(np.uint16, 65_525), (np.uint16, 250_680), (np.int32, 300)])
def test_the_token_type_is_that_of_the_file_whatever_vocabulary_reads_it(tmp_path, dtype, vocab):
    """huggingface/transformers#2825, from the reader's side: another writer may have changed to 32 bits elsewhere."""
    highest = min(vocab, 2**16) - 1
    data = GPTDataset("t", IndexedDataset(write(tmp_path / "d", [[highest] * 40], dtype)), np.arange(1), 3, 8, 0, cache=False,
                      vocab_size=vocab)
    assert best_dtype(vocab) != dtype and data.indexed.dtype == dtype
    assert data[0]["text"].tolist() == [highest] * 9


def test_byte_offsets_are_64_bit_beyond_2_to_the_32():
    """NVIDIA/Megatron-LM#1672: sizes of 32 bits summed in 32 bits."""
    sizes = np.full(40, 2**30 - 1, np.int32)
    offsets = byte_offsets(sizes, 4)
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [4 * (2**30 - 1) * i for i in range(40)]
    assert byte_offsets(np.zeros(0, np.int32), 4).tolist() == []


@pytest.mark.parametrize("write_it", [False, True], ids=["read", "written and read"])
def test_tokens_beyond_2_to_the_32_bytes_are_found(tmp_path, write_it):
    """NVIDIA/Megatron-LM#1672, in whole files: a .bin of 17 GB, nearly all of it a hole that takes no room on the disk."""
    sizes = [2**30 - 1, 5, 2**30, 2**31 - 1, 3]
    last = 4 * sum(sizes[:4])
    assert last > 4 * 2**32
    with open(tmp_path / "d.bin", "wb") as file:
        file.seek(4 * sizes[0])
        file.write(struct.pack("<5i", *range(5)))
        file.seek(last)
        file.write(struct.pack("<3i", 7, 8, 9))
    (tmp_path / "d.idx").write_bytes(packed_index(4, sizes, 4, range(6)))
    if write_it:  # the index, as the writer makes it of sizes like these
        writer = IndexedDatasetWriter(str(tmp_path / "d"), np.int32)
        writer._sizes.extend(sizes)
        writer._marks.extend([1, 2, 3, 4, 5])
        with open(tmp_path / "again", "wb") as file:
            writer._write_index(file)
        assert (tmp_path / "again").read_bytes() == (tmp_path / "d.idx").read_bytes()
    data = IndexedDataset(str(tmp_path / "d"))
    assert data[1].tolist() == [0, 1, 2, 3, 4] and data[4].tolist() == [7, 8, 9] and data.get(4, 1, 1).tolist() == [8]
    documents = np.array([4, 1])
    rows = GPTDataset("t", data, documents, 2, 3, 0, cache=False)
    assert {int(token) for k in range(2) for token in rows[k]["text"]} <= {0, 1, 2, 3, 4, 7, 8, 9}


def test_files_appear_only_when_complete_and_leave_nothing_after_an_exception(tmp_path):
    with IndexedDatasetWriter(str(tmp_path / "d"), np.uint16) as writer:
        writer.add_document([1, 2])
        assert not (tmp_path / "d.bin").exists() and not (tmp_path / "d.idx").exists()
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]
    before = (tmp_path / "d.bin").read_bytes()
    with pytest.raises(KeyboardInterrupt), IndexedDatasetWriter(str(tmp_path / "d"), np.uint16) as writer:
        writer.add_document([3])
        raise KeyboardInterrupt
    assert sorted(os.listdir(tmp_path)) == ["d.bin", "d.idx"]
    assert (tmp_path / "d.bin").read_bytes() == before
    write(tmp_path / "d", [[9]])
    assert IndexedDataset(str(tmp_path / "d"))[0].tolist() == [9]


def test_files_carry_the_permissions_of_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        write(tmp_path / "d")
    finally:
        os.umask(old)
    for name in ("d.bin", "d.idx"):
        assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == 0o644


def test_a_dataset_without_documents_is_valid_and_empty(tmp_path):
    data = IndexedDataset(write(tmp_path / "d", []))
    assert len(data) == 0 and data.doc_idx.tolist() == [0]
    assert os.path.getsize(tmp_path / "d.idx") == 34 + 8


def test_empty_sequences_and_appended_modes_are_read(tmp_path):
    (tmp_path / "d.bin").write_bytes(struct.pack("<3H", 7, 8, 9))
    (tmp_path / "d.idx").write_bytes(packed_index(8, [0, 2, 0, 1], 2, [0, 2, 4], modes=b"\0\0\0\0"))
    data = IndexedDataset(str(tmp_path / "d"))
    assert [data[i].tolist() for i in range(4)] == [[], [7, 8], [], [9]]


def test_dtype_code_7_is_float64_or_float32_as_the_length_of_bin_says(tmp_path):
    for letter, dtype in (("d", np.float64), ("f", np.float32)):
        itemsize = struct.calcsize(letter)
        (tmp_path / "d.bin").write_bytes(struct.pack(f"<3{letter}", 1, 2, 3))
        (tmp_path / "d.idx").write_bytes(packed_index(7, [1, 2], itemsize, [0, 1, 2]))
        data = IndexedDataset(str(tmp_path / "d"))
        assert data.dtype == dtype and data[1].tolist() == [2.0, 3.0]


def legacy_index(sizes, code=4, itemsize=4):
    n, offsets = len(sizes), [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    body = list(range(n + 1)) + offsets + list(sizes) + list(range(n + 1))
    return (
        b"TNTIDX\0\0"
        + struct.pack("<6Q", 1, code, itemsize, n, n, n + 1)
        + struct.pack(f"<{len(body)}q", *body)
    )


@pytest.mark.parametrize("impl", ["infer", "cached", "lazy"])
def test_the_legacy_layout_is_read(tmp_path, impl):
    (tmp_path / "d.bin").write_bytes(struct.pack("<6i", *range(10, 16)))
    (tmp_path / "d.idx").write_bytes(legacy_index([1, 3, 2]))
    data = IndexedDataset(str(tmp_path / "d"), impl)
    assert [data[i].tolist() for i in range(3)] == [[10], [11, 12, 13], [14, 15]]
    assert data.doc_idx.tolist() == [0, 1, 2, 3] and data.sizes.dtype == np.int32
    with pytest.raises(ValueError, match="--data-impl mmap"):
        IndexedDataset(str(tmp_path / "d"), "mmap")


def test_the_kind_asked_for_must_be_that_of_the_file(tmp_path):
    prefix = write(tmp_path / "d")
    with pytest.raises(ValueError, match="--data-impl cached"):
        IndexedDataset(prefix, "cached")
    with pytest.raises(ValueError, match="--data-impl 'hdf5'"):
        IndexedDataset(prefix, "hdf5")


def spoil_index(at, new):
    def spoil(tmp_path):
        raw = bytearray((tmp_path / "d.idx").read_bytes())
        raw[at : at + len(new)] = new
        (tmp_path / "d.idx").write_bytes(raw)

    return spoil


def cut(name, count):
    def spoil(tmp_path):
        raw = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(raw[:-count])

    return spoil


def swap_bin(tmp_path):
    write(tmp_path / "other", [[1, 2, 3]])
    os.replace(tmp_path / "other.bin", tmp_path / "d.bin")


DAMAGE = {
    "idx cut by 8 bytes": (cut("d.idx", 8), "d.idx has"),
    "idx cut within the header": (cut("d.idx", 90), "header"),
    "idx empty": (lambda path: (path / "d.idx").write_bytes(b""), "magic"),
    "bin cut": (cut("d.bin", 2), "d.bin has 14 bytes"),
    "bin longer": (lambda path: (path / "d.bin").write_bytes(b"\0" * 18), "d.bin has 18 bytes"),
    "bin of another dataset": (swap_bin, "d.bin has 6 bytes"),
    "magic flipped": (spoil_index(0, b"X"), "magic"),
    "version 2": (spoil_index(9, b"\2"), "version 2"),
    "dtype code 0": (spoil_index(17, b"\0"), "code 0"),
    "dtype code 9": (spoil_index(17, b"\t"), "code 9"),
    "more sequences announced": (spoil_index(18, struct.pack("<Q", 2**40)), "sequences"),
    "negative size": (spoil_index(34, struct.pack("<2i", -1, 5)), "negative"),
    "sizes exchanged": (spoil_index(34, struct.pack("<2i", 1, 3)), "offsets"),
    "first offset not 0": (spoil_index(46, struct.pack("<q", 2)), "byte 2"),
    "offset past the end": (spoil_index(62, struct.pack("<q", 10**9)), "offsets"),
    "documents go back": (spoil_index(78, struct.pack("<q", 9)), "document marks"),
    "documents end early": (spoil_index(94, struct.pack("<q", 2)), "document marks"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_at_opening_and_said_with_the_path(tmp_path, kind):
    """EleutherAI/gpt-neox#1329: an assertion about the format of an index; test_data_ranks.py has several ranks meet it."""
    write(tmp_path / "d")
    assert os.path.getsize(tmp_path / "d.idx") == 34 + 12 * 3 + 8 * 4
    spoil, message = DAMAGE[kind]
    spoil(tmp_path)
    with pytest.raises(ValueError) as error:
        IndexedDataset(str(tmp_path / "d"))
    assert message in str(error.value) and str(tmp_path / "d.") in str(error.value)


@pytest.mark.parametrize("name", ["d.idx", "d.bin"])
def test_a_missing_file_is_named(tmp_path, name):
    write(tmp_path / "d")
    os.unlink(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=name):
        IndexedDataset(str(tmp_path / "d"))


def test_a_pickled_dataset_opens_the_files_again(tmp_path):
    data = IndexedDataset(write(tmp_path / "d", [list(range(60000))]))
    raw = pickle.dumps(data)
    assert len(raw) < 1000 and pickle.loads(raw)[0].tolist() == list(range(60000))
