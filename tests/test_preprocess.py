"""From text to token files: the bytes of the files, what is skipped or refused, and what dies cleanly.

The tokenizer of most tests gives every UTF-8 byte its own value as id, so the
expected tokens are the bytes of the text.
"""

import itertools
import json
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import preprocess_data

EOD = 256


def byte_vocab():
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)} | {"<|endoftext|>": EOD}


def write_tokenizer(folder, vocab):
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(folder / "vocab.json"),
            "--merge-file", str(folder / "merges.txt")]


@pytest.fixture
def job(tmp_path):
    """A function: lines (str, bytes or objects) and flags -> exit status; outputs go to tmp_path/out."""
    tokenizer = write_tokenizer(tmp_path, byte_vocab())

    def run(lines, *flags, path=None, tokenizer=tokenizer):
        if path is None:
            path = tmp_path / "in.jsonl"
            path.write_bytes(b"".join(_line(line) for line in lines))
        return preprocess_data.main(["--input", str(path), "--output-prefix", str(tmp_path / "out" / "d"),
                                     "--workers", "0", *tokenizer, *flags])
    run.folder = tmp_path
    return run


def _line(line):
    if isinstance(line, bytes):
        return line
    return (line if isinstance(line, str) else json.dumps(line)).encode() + b"\n"


def read(folder, name="d_text_document"):
    """Documents as lists of sequences of ids, by struct alone; checks that nothing else is in the files."""
    idx, data = (folder / "out" / f"{name}.idx").read_bytes(), (folder / "out" / f"{name}.bin").read_bytes()
    magic, version, code, n, d = struct.unpack_from("<9sQBQQ", idx)
    assert (magic, version) == (b"MMIDIDX\0\0", 1) and len(idx) == 34 + 12 * n + 8 * d
    sizes = struct.unpack_from(f"<{n}i", idx, 34)
    pointers = struct.unpack_from(f"<{n}q", idx, 34 + 4 * n)
    marks = struct.unpack_from(f"<{d}q", idx, 34 + 12 * n)
    letter, width = {8: ("H", 2), 4: ("i", 4)}[code]
    assert pointers == tuple(width * sum(sizes[:i]) for i in range(n)) and len(data) == width * sum(sizes)
    sequences = [list(struct.unpack_from(f"<{size}{letter}", data, at)) for size, at in zip(sizes, pointers)]
    assert marks[0] == 0 and marks[-1] == n
    return [sequences[a:b] for a, b in itertools.pairwise(marks)], code


def outputs(folder):
    return sorted(p.name for p in (folder / "out").iterdir()) if (folder / "out").exists() else []


def test_the_files_of_a_tiny_corpus_byte_by_byte(job):
    assert job([{"text": "ab"}, {"text": "é"}], "--append-eod") == 0
    base = job.folder / "out" / "d_text_document"
    assert base.with_suffix(".bin").read_bytes() == bytes.fromhex("6100 6200 0001 c300 a900 0001")
    assert base.with_suffix(".idx").read_bytes() == bytes.fromhex(
        "4d4d49444944580000 0100000000000000 08 0200000000000000 0300000000000000"
        "03000000 03000000 0000000000000000 0600000000000000"
        "0000000000000000 0100000000000000 0200000000000000")
    assert outputs(job.folder) == ["d_text_document.bin", "d_text_document.idx"]


def test_every_document_is_its_text_in_order(job):
    rng = random.Random(1)
    texts = ["".join(rng.choices("abc é\n世🙂'", k=rng.randrange(1, 200))) for _ in range(120)]
    assert job([{"text": text} for text in texts]) == 0
    assert read(job.folder) == ([[list(text.encode())] for text in texts], 8)


@pytest.mark.parametrize("flags, counts", [(["--append-eod"], (0, 1, 3, 64)), (["--append-eod", "--split-sentences"], (0, 1, 2))])
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, flags, counts):
    """microsoft/superbenchmark#800: no workers crashed the pool; elsewhere one worker with sentences wrote nothing."""
    tokenizer = write_tokenizer(tmp_path, byte_vocab())
    rng = random.Random(2)
    texts = ["".join(rng.choices("abcdef ", k=rng.choice([0, 3, 2000]))).strip() for _ in range(300)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(_line({"text": text}) for text in texts))
    made = {}
    level = "sentence" if "--split-sentences" in flags else "document"
    for workers in counts:
        done = subprocess.run([sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(tmp_path / "in.jsonl"),
                               "--output-prefix", str(tmp_path / "out" / f"{workers}"), *tokenizer, *flags,
                               "--workers", str(workers)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        made[workers] = [(tmp_path / "out" / f"{workers}_text_{level}{end}").read_bytes() for end in (".bin", ".idx")]
    documents, _ = read(tmp_path, f"0_text_{level}")
    assert documents == [[[*text.encode(), EOD]] for text in texts if text]
    assert all(made[workers] == made[0] for workers in counts)


@pytest.mark.parametrize("flags, expected", [
    ([], b"x y"), (["--prepend-space"], b" x y"), (["--append-eod"], [*b"x y", EOD]),
    (["--append-eod", "--prepend-space"], [*b" x y", EOD]),
])
def test_flags_change_the_tokens_as_said(job, flags, expected):
    assert job([{"text": "x y"}], *flags) == 0
    assert read(job.folder)[0] == [[list(expected)]]


def test_bos_goes_to_the_end_unless_eod_does(tmp_path, job):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE(vocab=byte_vocab() | {"<s>": 257, "</s>": 258}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}))
    hf = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(tmp_path)]
    assert job([{"text": "ab"}], "--append-bos", tokenizer=hf) == 0
    assert read(tmp_path)[0] == [[[97, 98, 257]]]
    assert job([{"text": "ab"}], "--append-bos", "--append-eod", tokenizer=hf) == 0
    assert read(tmp_path)[0] == [[[97, 98, 258]]]


@pytest.mark.parametrize("level", ["document", "sentence"])
def test_empty_texts_and_blank_lines_are_skipped_counted_and_located(job, capsys, level):
    """NVIDIA/Megatron-LM#62: an empty text on the first line, in the middle and at the end, each to be given an end token."""
    lines = [{"text": ""}, {"text": "a"}, "", {"text": "b"}, {"text": ""}, "  ", {"text": ""}]
    assert job(lines, "--append-eod", "--prepend-space", *["--split-sentences"] * (level == "sentence")) == 0
    assert read(job.folder, f"d_text_{level}")[0] == [[[32, 97, EOD]], [[32, 98, EOD]]]
    said = capsys.readouterr().out
    path = job.folder / "in.jsonl"
    assert f"skipped 3 (empty text): {path}:1, {path}:5, {path}:7" in said
    assert f"skipped 2 (blank line): {path}:3, {path}:6" in said
    assert "2 documents from 7 lines" in said


def test_a_last_line_without_line_break_and_a_byte_order_mark_are_fine(job):
    assert job([b'\xef\xbb\xbf{"text": "a"}\r\n', b'{"text": "b"}']) == 0
    assert read(job.folder)[0] == [[[97]], [[98]]]


def test_datasets_of_several_keys_stay_in_step(job, capsys):
    pairs = [("q1", "a1"), ("", "a2"), ("q3", ""), ("q4", "a4"), ("", "")]
    assert job([{"left": i, "right": t} for i, t in pairs], "--json-keys", "left", "right", "--append-eod") == 0
    for name, side in (("left", 0), ("right", 1)):
        assert read(job.folder, f"d_{name}_document")[0] == [
            [[*pair[side].encode(), EOD]] for pair in pairs if all(pair)]
    assert "skipped 3 (empty text)" in capsys.readouterr().out


def test_json_key_is_another_name_of_json_keys(job):
    assert job([{"body": "a"}], "--json-key", "body") == 0
    assert outputs(job.folder) == ["d_body_document.bin", "d_body_document.idx"]


def test_sentences_are_sequences_and_eod_ends_the_last(job):
    lines = [{"text": "An be. C!\nD"}, {"text": " \n "}, {"text": "E"}]
    assert job(lines, "--split-sentences", "--append-eod", "--prepend-space") == 0
    assert read(job.folder, "d_text_sentence")[0] == [
        [list(b" An be."), list(b"C!"), [*b"D", EOD]], [[*b" E", EOD]]]
    assert job(lines, "--split-sentences", "--keep-newlines") == 0
    assert read(job.folder, "d_text_sentence")[0] == [[list(b"An be."), list(b"C!\n"), list(b"D")], [list(b"E")]]


BROKEN = [
    ('{"text": "cut', "is not one JSON object: Unterminated string"),
    ('{"text": "a"} {"text": "b"}', "is not one JSON object: Extra data"),
    ('["a"]', "holds an array"), ('"a"', "holds a string"), ("null", "holds null"), ("7", "holds a number"),
    ('{"body": "a"}', "has no key 'text' (keys: 'body')"), ("{}", "has no key 'text' (keys: none)"),
    ('{"text": null}', "has null under 'text'"), ('{"text": ["a"]}', "has an array under 'text'"),
    (b'{"text": "\xff"}\n', "is not UTF-8 at byte 10"), ('{"text": "a\\ud800"}', "the lone surrogate U+D800"),
    ("[" * 100_000, "is JSON that cannot be read"), ('{"n": ' + "9" * 5000 + "}", "is JSON that cannot be read"),
]


@pytest.mark.parametrize("line, message", BROKEN)
def test_a_broken_line_ends_the_job_with_file_and_line(job, capsys, line, message):
    """facebookresearch/lingua#42: a line that is cut, holds two objects, is no object; a blank line before it is none of these."""
    assert job([{"text": "a"}, "", line, {"text": "b"}]) == 1
    said = capsys.readouterr().err
    assert f"{job.folder / 'in.jsonl'}:3 " in said and message in said and said.count("\n") == 1
    assert outputs(job.folder) == []


def test_broken_lines_are_skipped_and_counted_when_asked(job, capsys):
    """facebookresearch/lingua#42: lines that went missing without a word."""
    lines = [{"text": "a"}, *(line for line, _ in BROKEN), {"text": "b"}]
    assert job(lines, "--skip-invalid") == 0
    assert read(job.folder)[0] == [[[97]], [[98]]]
    said = capsys.readouterr()
    assert f"skipped {len(BROKEN)} (invalid line): {job.folder / 'in.jsonl'}:2, " in said.out
    assert f"{job.folder / 'in.jsonl'}:3: is not one JSON object: Extra data" in said.err


def test_a_broken_line_met_by_a_worker_reaches_the_parent(tmp_path):
    """facebookresearch/lingua#42: a data process died and the job ended as if all were well."""
    tokenizer = write_tokenizer(tmp_path, byte_vocab())
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "a"}\n' * 1000 + b"{\n" + b'{"text": "a"}\n' * 1000)
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(tmp_path / "in.jsonl"),
                           "--output-prefix", str(tmp_path / "out" / "d"), *tokenizer, "--workers", "2"],
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "in.jsonl:1001 is not one JSON object" in done.stderr
    assert outputs(tmp_path) == []


@pytest.mark.parametrize("content, message", [
    (None, "No such file"), ("folder", "Is a directory"), (b"", "is empty"), (b"\n\n", "gave no document (2 lines)"),
    (b"\x28\xb5\x2f\xfd\x04\x00", "zstd-compressed"), (b"\x1f\x8b\x08\x00", "gzip-compressed"),
    (b'[{"text": "a"}, {"text": "b"}]\n', ":1 holds an array"), (b'{"text": ""}\n', "gave no document (1 lines); skipped 1"),
    ("a b".encode("utf-16"), ":1 is not UTF-8"),
])
@pytest.mark.parametrize("flags", [[], ["--skip-invalid"], ["--workers", "2"]])
def test_input_without_a_document_fails_and_leaves_no_file(job, capsys, content, message, flags):
    """EleutherAI/gpt-neox#552: what the reader did not know gave datasets without documents, and status 0."""
    path = job.folder / "data.jsonl.zst"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert job([], *flags, path=path) == 1
    said = capsys.readouterr().err
    assert str(path) in said and (message in said or (flags and "gave no document" in said))
    assert outputs(job.folder) == []


def test_a_failed_job_leaves_an_older_dataset_alone(job):
    assert job([{"text": "old"}]) == 0
    assert job([{"text": "new"}, "{"]) == 1
    assert read(job.folder)[0] == [[list(b"old")]] and len(outputs(job.folder)) == 2


@pytest.mark.parametrize("size, code", [(65_499, 8), (65_500, 4), (65_536, 4), (65_537, 4), (250_680, 4)])
def test_the_highest_id_survives_at_the_limits_of_the_dtype(job, size, code):
    """huggingface/transformers#2825: ids cut to 16 bits."""
    vocab = {"<|endoftext|>": 0, **{f"filler{i}": i for i in range(1, size - 1)}, "z": size - 1}
    (job.folder / "big").mkdir()
    assert job([{"text": "zz"}], tokenizer=write_tokenizer(job.folder / "big", vocab)) == 0
    assert read(job.folder) == ([[[size - 1, size - 1]]], code)


def test_added_tokens_count_for_the_dtype(job):
    """huggingface/transformers#2825, where added tokens lie behind the last id that 16 bits were chosen for."""
    from tokenizers import AddedToken, Tokenizer, models

    vocab = {f"filler{i}": i for i in range(65_498)} | {"z": 65_498}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens([AddedToken(f"<add{i}>") for i in range(3)])
    backend.save(str(job.folder / "added.json"))
    hf = ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(job.folder / "added.json")]
    assert job([{"text": "z<add2>"}], tokenizer=hf) == 0
    assert read(job.folder) == ([[[65_498, 65_501]]], 4)
    assert job([{"text": "z"}], "--append-eod", tokenizer=hf) == 1  # the file names no eos


def test_progress_lines_come_every_log_interval(job, capsys):
    assert job([{"text": "a"}] * 25, "--log-interval", "10") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("processed ")]
    assert [line.split()[1] for line in lines] == ["10", "20"]
    assert all("documents/s" in line and "MB/s" in line for line in lines)


@pytest.mark.parametrize("flags, message", [
    (["--workers", "-1"], "--workers -1"), (["--log-interval", "0"], "--log-interval 0"),
    (["--dataset-impl", "lazy"], "--dataset-impl lazy"), (["--json-keys", "a", "a"], "--json-keys a a"),
    (["--json-keys", "a/b"], "--json-keys 'a/b'"), (["--keep-newlines"], "--keep-newlines"),
    (["--append-bos"], "--append-bos"), (["--pad-vocab-size-to", "128"], "--pad-vocab-size-to 128"),
    (["--tokenizer-type", "BertWordPieceCase"], "BertWordPieceCase is for BERT"),
])
def test_an_impossible_flag_is_refused_before_anything_is_written(job, capsys, flags, message):
    assert job([{"text": "a"}], *flags) == 1
    assert message in capsys.readouterr().err and outputs(job.folder) == []


def start_job_with(folder, patch, lines, workers=2):
    """Run the tool in a process of its own whose encode_line is ``patch``'s; fork hands it to the workers."""
    tokenizer = write_tokenizer(folder, byte_vocab())
    (folder / "in.jsonl").write_bytes(b"".join(map(_line, lines)))
    code = textwrap.dedent("""
        import os, signal, sys, time
        import preprocess_data
        original = preprocess_data.encode_line
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in its background
    """) + textwrap.dedent(patch) + textwrap.dedent("""
        preprocess_data.encode_line = encode_line
        sys.exit(preprocess_data.on_sigterm(preprocess_data.main))
    """)
    return subprocess.Popen([sys.executable, "-c", code, "--input", str(folder / "in.jsonl"), "--output-prefix",
                             str(folder / "out" / "d"), *tokenizer, "--workers", str(workers), "--log-interval", "1"],
                            cwd=ROOT / "tools", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_worker_ends_the_job_within_seconds_and_leaves_nothing(tmp_path):
    """microsoft/superbenchmark#800 and others: the pool waits for ever, or half of the files stay."""
    process = start_job_with(tmp_path, """
        def encode_line(line, *rest):
            if b"poison" in line:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(line, *rest)
    """, [{"text": "a"}] * 500 + [{"text": "poison"}] + [{"text": "a"}] * 500)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 1 and "a worker process died" in said
    assert outputs(tmp_path) == []


@pytest.mark.parametrize("how, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_job_ends_its_workers_and_leaves_nothing(tmp_path, how, status):
    process = start_job_with(tmp_path, """
        def encode_line(line, *rest):
            if b"slow" in line:
                open(os.environ["PIDS"], "a").write(f"{os.getpid()}\\n")
                time.sleep(60)
            return original(line, *rest)
        os.environ["PIDS"] = sys.argv[2] + ".pids"
    """, [{"text": "a"}] * 50 + [{"text": "slow"}] * 50)
    pids, end = tmp_path / "in.jsonl.pids", time.monotonic() + 20
    while not (pids.exists() and len(pids.read_text().split()) == 2) and time.monotonic() < end:
        time.sleep(0.05)
    workers = [int(pid) for pid in pids.read_text().split()]
    process.send_signal(how)
    process.communicate(timeout=20)
    assert process.returncode == status and outputs(tmp_path) == []
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
