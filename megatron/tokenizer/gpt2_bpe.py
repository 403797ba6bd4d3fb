"""GPT-2's byte-level BPE from vocab.json and merges.txt.

Bytes are written as printable characters, text is cut into words by GPT-2's
pattern, and within a word the best-ranked pair is merged until none is left
(Radford et al. 2019, "Language Models are Unsupervised Multitask Learners",
section 2.2). The work is done by the Hugging Face ``tokenizers`` library.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import RunError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.segments import SEGMENT, segments

EOD = "<|endoftext|>"


class GPT2BPETokenizer(Tokenizer):
    """``<|endoftext|>`` is the end of a document; there is no pad, bos or eos.

    Special tokens typed in the text are text: ``<|endoftext|>`` is cut up like any
    other word. A piece that the vocabulary lacks becomes id 0, whatever token that is.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        """Raises RunError when a file is missing or damaged or has no ``<|endoftext|>``."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        vocab = _read_vocab(vocab_file)
        merges = _read_merges(merge_file)
        if EOD not in vocab:
            raise RunError(f"--vocab-file {vocab_file} has no {EOD} token, which GPT2BPETokenizer ends documents with")
        super().__init__(f"GPT2BPETokenizer({vocab_file})", max(vocab.values()) + 1, {"eod": vocab[EOD]})
        # The library refuses merges of pieces without an id and drops bytes without one. Both get
        # an id past the end of the vocabulary, and whatever comes out with such an id is unknown.
        pieces = dict(vocab)
        needed = [*sorted(pre_tokenizers.ByteLevel.alphabet()),
                  *(piece for left, right in merges for piece in (left, right, left + right))]
        for piece in needed:
            pieces.setdefault(piece, self.vocab_size + len(pieces) - len(vocab))
        self._complete = len(pieces) == len(vocab)
        self._backend = Backend(models.BPE(vocab=pieces, merges=merges))
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self._backend.decoder = decoders.ByteLevel()

    def tokenize(self, text: str) -> list[int]:
        self._check_text(text)
        ids: list[int] = []
        for segment in segments(text, SEGMENT):  # GPT-2's pattern begins a word at each of these places
            ids += self._backend.encode(segment).ids
        if self._complete:
            return ids
        return [i if i < self.vocab_size else 0 for i in ids]

    def detokenize(self, ids: Sequence[int]) -> str:
        self._check_ids(ids)
        return self._backend.decode(list(ids), skip_special_tokens=False)


def _read_vocab(path: str) -> dict[str, int]:
    try:
        vocab = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"--vocab-file {path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise RunError(f"--vocab-file {path} nests its brackets too deep to be an object of token -> id") from None
    except ValueError as error:
        raise RunError(f"--vocab-file {path} is not JSON: {error}") from None
    if not isinstance(vocab, dict) or not vocab or not all(
            type(i) is int and 0 <= i < 2**31 for i in vocab.values()):
        raise RunError(f"--vocab-file {path} is not a JSON object of token -> id")
    if len(set(vocab.values())) < len(vocab):
        raise RunError(f"--vocab-file {path} gives the same id to two tokens")
    return vocab


def _read_merges(path: str) -> list[tuple[str, str]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RunError(f"--merge-file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RunError(f"--merge-file {path} is not UTF-8: {error}") from None
    merges = []
    for number, line in enumerate(lines[1:], 2):  # the first line is a header
        pair = line.removesuffix("\r").split(" ")
        if pair == [""] and number == len(lines):
            continue
        if len(pair) != 2 or not all(pair):
            raise RunError(f"--merge-file {path}, line {number}: {line!r} is not two pieces with a space between")
        merges.append((pair[0], pair[1]))
    return merges
