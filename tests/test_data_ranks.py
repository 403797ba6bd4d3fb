"""Several ranks, starts and nodes that open the same data at once: one index, one answer, or one sentence for all."""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from data_jobs import open_data, open_one_after_another
from small_runs import VOCAB, Case
from test_indexed_dataset import cut, spoil_index

from megatron.data.indexed_dataset import IndexedDatasetWriter

DP2, DP4, PP4 = Case(dp=2), Case(dp=4), Case(pp=4)
INDEX = re.compile(r"training data: \d+ samples, index hash (\w{12})\n")


def write(prefix, seed=0, documents=40):
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
        for _ in range(documents):
            writer.add_document(rng.integers(0, VOCAB, 25))
    return str(prefix)


def hashes(results):
    """The index hash that rank 0 printed for all; no rank may have failed or read other rows."""
    assert [result["error"] for result in results] == [None] * len(results)
    assert [result["half"] for result in results] == [[]] * len(results), "a file has its name only when it is whole"
    readers = [result["rows"] for result in results if result["reads"]]
    assert len(readers[0]) > 40 and all(rows == readers[0] for rows in readers)
    return INDEX.findall(results[0]["said"])


def caches(folder):
    """Number of index files; there is nothing else but the data."""
    names = os.listdir(folder)
    assert all(name.endswith((".npy", ".bin", ".idx")) for name in names), names
    return sum(name.endswith(".npy") for name in names)


# deepspeedai/Megatron-DeepSpeed#356: other ranks looked for index files that rank 0 was still writing, or wrote on another
# node. Here any rank may build: one does, the others of its host wait, and a file has its name only when it is whole
@pytest.mark.parametrize("pause", [0.1, pytest.param(5, marks=pytest.mark.slow)])
def test_two_starts_at_once_on_a_cold_cache_that_is_slow_to_write(tmp_path, worker_group, pause):
    (tmp_path / "meet").mkdir()
    (tmp_path / "data").mkdir()
    prefix = write(tmp_path / "data" / "d")
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(worker_group(case.dp).run, open_data, case, [prefix], pause, str(tmp_path / "meet"), 6)
                for case in (DP2, DP4)]
        results = [job.result() for job in jobs]
    found = [hashes(each) for each in results]
    assert len(found[0]) == 1 and found[0] == found[1]
    # train, valid and test, each built once among the six processes
    assert sum(result["built"] for each in results for result in each) == 3
    assert caches(tmp_path / "data") == 9


def test_nodes_with_disks_and_caches_of_their_own(tmp_path, worker_group):
    """deepspeedai/Megatron-DeepSpeed#356: index files exist on the first node only."""
    whole = write(tmp_path / "d")
    prefixes = []
    for node in range(4):
        (tmp_path / f"node{node}").mkdir()
        for end in (".bin", ".idx"):
            os.symlink(whole + end, tmp_path / f"node{node}" / f"d{end}")
        prefixes.append(str(tmp_path / f"node{node}" / "d"))
    results = worker_group(4).run(open_data, DP4, prefixes)
    assert len(hashes(results)) == 1
    assert [result["built"] for result in results] == [3] * 4
    assert [caches(tmp_path / f"node{node}") for node in range(4)] == [9] * 4
    # one node holds another version of the file: nobody trains on a mixture
    (tmp_path / "node2" / "d.idx").unlink()
    (tmp_path / "node2" / "d.bin").unlink()
    write(tmp_path / "node2" / "d", documents=41)
    results = worker_group(4).run(open_data, DP4, prefixes)
    assert {result["error"] for result in results} == {results[0]["error"]}
    assert re.fullmatch(r"the ranks read different training data: \d+ samples, index hash \w{12} on rank 0, "
                        r"\d+ samples, index hash \w{12} on rank 2; .*copies of its own", results[0]["error"])


def test_a_folder_without_write_permission_ends_every_rank_with_its_name(tmp_path, worker_group):
    """deepspeedai/Megatron-DeepSpeed#356: what one rank cannot write, the others must not wait for."""
    folder = tmp_path / "shared"
    folder.mkdir()
    prefix = write(folder / "d")
    folder.chmod(0o555)
    try:
        results = worker_group(4).run(open_data, PP4, [prefix])
    finally:
        folder.chmod(0o755)
    assert [result["reads"] for result in results] == [True, False, False, True]
    errors = {result["error"] for result in results}
    assert len(errors) == 1 and re.search(
        rf"index cache {prefix}_train_.*cannot be written \(Permission denied\); make its folder writable", errors.pop())
    assert caches(folder) == 0


def test_damaged_files_end_every_rank_with_the_path_and_what_is_wrong(tmp_path, worker_group):
    """EleutherAI/gpt-neox#1329: an index that is cut or of another kind, tokens that are cut or of another set."""
    write(tmp_path / "other", documents=5)
    spoils = {"cut index": (cut("d.idx", 8), r"d\.idx has \d+ bytes where 40 sequences"),
              "cut tokens": (cut("d.bin", 2), r"d\.bin has 1998 bytes, but .*d\.idx describes 1000 tokens"),
              "tokens of another": (lambda folder: shutil.copy(tmp_path / "other.bin", folder / "d.bin"),
                                    r"d\.bin has 250 bytes, but .*d\.idx describes 1000 tokens"),
              "magic": (spoil_index(0, b"\xb2"), r"d\.idx begins with b'\\xb2MIDIDX.*not the magic")}
    prefixes = []
    for name, (spoil, _) in spoils.items():
        (tmp_path / name).mkdir()
        prefixes.append(write(tmp_path / name / "d"))
        spoil(tmp_path / name)
    per_rank = worker_group(4).run(open_one_after_another, PP4, [*prefixes, write(tmp_path / "good")])
    for (name, (_, words)), prefix, *results in zip(spoils.items(), prefixes, *per_rank):
        errors = {result["error"] for result in results}
        assert len(errors) == 1 and re.search(words, error := errors.pop()) and f"--data-path {prefix}: " in error, (name, error)
    assert len(hashes([each[-1] for each in per_rank])) == 1  # and no rank is left behind in a collective
