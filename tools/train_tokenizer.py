"""Train a byte-level BPE tokenizer on JSON Lines text.

Writes into --output-dir: vocab.json and merges.txt (--tokenizer-type GPT2BPETokenizer),
and tokenizer.json with tokenizer_config.json (--tokenizer-type PretrainedFromHF and
--tokenizer-name-or-path DIR). Both give the same ids for ordinary text. They differ in
two points: only the second recognises special tokens typed in a text, and the document
end is <|endoftext|> in the first and </s> in the second, so use one kind for
preprocessing and training.

Ids: <unk> 0, <s> 1, </s> 2, <pad> 3 (as BLOOM has them), <|endoftext|> 4, the 256 bytes,
then the merges.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import RunError
from megatron.tokenizer.encode import read_texts

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<|endoftext|>")
SMALLEST = len(SPECIAL_TOKENS) + 256
FILES = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json")


def train(input_path: str, vocab_size: int, output_dir: str, key: str = "text", min_frequency: int = 2) -> int:
    """Train on the texts under ``key`` and write FILES; returns the size reached, at most ``vocab_size``.

    Each file is replaced in one step. Raises RunError for a broken line (with file and
    line), a text file without text, or a size that cannot hold all bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST:
        raise RunError(f"--vocab-size {vocab_size} is too small: {len(SPECIAL_TOKENS)} special tokens and "
                       f"256 bytes take {SMALLEST}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=min_frequency, show_progress=False,
                                  special_tokens=list(SPECIAL_TOKENS),
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    # read before the library does: it would wrap an error of ours in one of its own
    texts = list(read_texts(input_path, key))
    if not texts:
        raise RunError(f"--input {input_path} has no text under {key!r}")
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    _save(tokenizer, Path(output_dir))
    return tokenizer.get_vocab_size()


def _save(tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=folder))
    try:
        tokenizer.model.save(str(part))
        tokenizer.save(str(part / "tokenizer.json"))
        (part / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>",
            "eos_token": "</s>", "pad_token": "<pad>", "add_prefix_space": False,
            "clean_up_tokenization_spaces": False, "padding_side": "left"}, indent=2) + "\n", encoding="utf-8")
        for name in FILES:
            with open(part / name, "rb") as done:
                os.fsync(done.fileno())
            os.replace(part / name, folder / name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 after one sentence on stderr."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--input", required=True, metavar="FILE", help="JSON Lines file, UTF-8")
    p.add_argument("--vocab-size", required=True, type=int, metavar="N",
                   help=f"token ids at most, special tokens included; at least {SMALLEST}")
    p.add_argument("--output-dir", required=True, metavar="DIR", help="folder for the four files")
    p.add_argument("--json-key", default="text", metavar="KEY", help="key of the text (default: text)")
    p.add_argument("--min-frequency", type=int, default=2, metavar="N",
                   help="merge only pairs seen this often (default: 2)")
    args = p.parse_args(argv)
    try:
        size = train(args.input, args.vocab_size, args.output_dir, args.json_key, args.min_frequency)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    short = f" (asked for {args.vocab_size}: the text has no more pairs seen {args.min_frequency} times)"
    print(f"{args.output_dir}: {size} token ids{short if size < args.vocab_size else ''}; wrote {', '.join(FILES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
