"""A byte-level tokenizer without merges and a small learnable dataset, for whole launches."""

from __future__ import annotations

import json
import random
from pathlib import Path

from megatron.data.indexed_dataset import IndexedDatasetWriter, best_dtype

#: 256 bytes and the end of a document
VOCAB_SIZE = 257
EOD = 256


def write_tokenizer(folder: Path) -> list[str]:
    """Write vocab.json and merges.txt; returns the flags that name them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    symbols = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocab = {symbols[byte]: byte for byte in range(256)} | {"<|endoftext|>": EOD}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(folder / "vocab.json"),
            "--merge-file", str(folder / "merges.txt")]


def write_documents(prefix: Path, documents: int = 60, seed: int = 5) -> str:
    """Documents of counted words, so that there is something to learn; returns the prefix."""
    draw = random.Random(seed)
    with IndexedDatasetWriter(str(prefix), best_dtype(VOCAB_SIZE)) as writer:
        for _ in range(documents):
            start = draw.randrange(20)
            text = " ".join(f"number {start + step}," for step in range(draw.randrange(10, 30)))
            writer.add_document([*text.encode(), EOD])
    return str(prefix)


def small_model_flags(folder: Path) -> list[str]:
    """All but the grid, the length and what a test varies."""
    return [*write_tokenizer(folder), "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4",
            "--seq-length", "32", "--max-position-embeddings", "32", "--position-embedding-type", "alibi",
            "--embed-layernorm", "--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-2",
            "--lr-decay-style", "constant", "--log-interval", "1", "--eval-iters", "1", "--eval-interval", "100",
            "--num-workers", "0", "--valid-num-workers", "0", "--data-path", write_documents(folder / "train"),
            "--split", "90,10,0", "--distributed-backend", "nccl"]
