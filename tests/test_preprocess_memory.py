"""How much memory preprocessing takes: one huge document, and words that never come again."""

import json
import random
import subprocess
import sys

import pytest
from launching import ROOT
from test_preprocess import EOD, byte_vocab, read, start_job_with, write_tokenizer

MEGABYTE = 1 << 20


@pytest.mark.parametrize("megabytes, allowed", [(3, 600), pytest.param(50, 2000, marks=pytest.mark.slow)])
def test_one_large_document(megabytes, allowed, tmp_path):
    """microsoft/superbenchmark#800 and others: a pool that dies, or takes all memory, over one large document.

    One token per byte is the worst case. The library alone would take 250 bytes for each: 830 MB for three, here 400.
    """
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=draw.randrange(2, 9))) for _ in range(5000)]
    text = " ".join(draw.choices(words, k=megabytes * MEGABYTE // 6))
    assert len(text) > 0.96 * megabytes * MEGABYTE
    process = start_job_with(tmp_path, """
        import atexit
        def note(who):
            # not ru_maxrss, which begins with what the process of the tests held
            peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
            open(sys.argv[2] + "." + who, "w").write(peak)
        atexit.register(note, "parent")  # workers leave without it
        def encode_line(line, *rest):
            result = original(line, *rest)
            note("worker")
            return result
    """, [{"text": "before"}, {"text": text}, {"text": "behind"}], 1)
    _, said = process.communicate(timeout=1500)
    assert process.returncode == 0, said
    documents, code = read(tmp_path)
    assert code == 8 and documents == [[list(each.encode())] for each in ("before", text, "behind")]
    for who in ("parent", "worker"):
        peak = int((tmp_path / f"in.jsonl.{who}").read_text()) // 1024
        assert peak < allowed, f"{who}: {peak} MB"


def test_words_that_never_come_again_are_not_kept(tmp_path):
    """microsoft/superbenchmark#800 and others: a cache of words in the tokenizer that grows with the corpus."""
    flags = write_tokenizer(tmp_path, byte_vocab())
    code = f"""
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
tokenizer, peaks = GPT2BPETokenizer({flags[3]!r}, {flags[5]!r}), []
letters = str.maketrans("01", "ab")
for first in range(0, 90_000, 1000):
    words = " ".join(f"{{number:020b}}" for number in range(first, first + 1000)).translate(letters)
    assert len(tokenizer.tokenize(words)) == 1000 * 21 - 1
    peaks.append(int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))))
print(peaks[29] // 1024, peaks[-1] // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    early, late = map(int, done.stdout.split())
    assert late - early < 10, f"{early} MB after 30,000 words, {late} MB after 90,000"
    assert json.loads((tmp_path / "vocab.json").read_text())["<|endoftext|>"] == EOD
