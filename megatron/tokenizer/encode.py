"""From one line of a JSON Lines file to the token ids of a document."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from megatron.errors import RunError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.sentences import split_sentences

#: why a line gave no document. The first kind is a fault of the file, the others are not.
INVALID, BLANK, EMPTY, HALF = "invalid line", "blank line", "empty text", "half of a pair missing"

#: keys of the two sides of a pair (multitask prompted fine-tuning)
PAIR = ("inputs", "targets")

_BOM = b"\xef\xbb\xbf"
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}


@dataclass(frozen=True)
class EncodeOptions:
    """How a text becomes tokens; the fields are the flags of preprocess_data.py."""

    keys: tuple[str, ...] = ("text",)
    split_sentences: bool = False
    keep_newlines: bool = False
    append_eod: bool = False
    append_bos: bool = False
    """append the bos id at the END; without effect beside append_eod"""
    prepend_space: bool = False
    dressed: tuple[str, ...] | None = None
    """keys that append_eod, append_bos and prepend_space apply to; None: all"""
    pairs: bool = False
    """lines hold pairs: one counts only with a text under both keys of PAIR, whichever of them ``keys`` names"""


@dataclass(frozen=True)
class Skipped:
    """A line without a document: ``reason`` is INVALID, BLANK, EMPTY or HALF, ``detail`` says what exactly."""

    reason: str
    detail: str = ""


def parse_line(line: bytes, keys: Sequence[str], *, pairs: bool = False) -> list[str] | Skipped:
    """The texts under ``keys`` of one line, a JSON object in UTF-8; or why there are none.

    With ``pairs`` a line where only some of the keys are absent or null is HALF, not INVALID.
    """
    if not line.strip():
        return Skipped(BLANK)
    try:
        record = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        return Skipped(INVALID, f"is not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return Skipped(INVALID, f"is not one JSON object: {error.msg.removesuffix(' at')} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        return Skipped(INVALID, f"is JSON that cannot be read: {error}")
    if not isinstance(record, dict):
        return Skipped(INVALID, f"holds {_kind(record)}; each line must be one JSON object")
    absent = [key for key in keys if record.get(key) is None]
    if pairs and 0 < len(absent) < len(keys):
        return Skipped(HALF, f"nothing under {', '.join(map(repr, absent))}")
    texts = []
    for key in keys:
        if key not in record:
            return Skipped(INVALID, f"has no key {key!r} (keys: {', '.join(map(repr, record)) or 'none'})")
        if not isinstance(record[key], str):
            return Skipped(INVALID, f"has {_kind(record[key])} under {key!r}; it must be a string")
        texts.append(record[key])
    return texts


def encode_line(line: bytes, tokenizer: Tokenizer, options: EncodeOptions) -> list[list[np.ndarray]] | Skipped:
    """The sequences (int32 arrays, none empty) of each key, in the order of ``options.keys``.

    One sequence per key, or one per sentence with ``split_sentences``. A line is kept
    or dropped as a whole, so the datasets of several keys stay in step: when the text
    under one key is empty or encodes to nothing (whether or not an eod would be
    appended), the line is Skipped as EMPTY. With ``pairs`` that holds for both sides
    of the pair, also when only one is encoded: two passes over a file, one per side,
    drop the same lines as one pass.
    """
    wanted = PAIR if options.pairs else options.keys
    texts = parse_line(line, wanted, pairs=options.pairs)
    if isinstance(texts, Skipped):
        return texts
    by_key = dict(zip(wanted, texts))
    if options.pairs:
        for key, text in by_key.items():
            try:
                if not _has_tokens(text, tokenizer):
                    return Skipped(EMPTY, f"nothing to encode under {key!r}")
            except ValueError as error:
                return Skipped(INVALID, f"has a text under {key!r} that cannot be encoded: {error}")
    document = []
    for key in options.keys:
        dressed = options.dressed is None or key in options.dressed
        try:
            sequences = _encode_text(by_key[key], tokenizer, options, dressed)
        except ValueError as error:
            return Skipped(INVALID, f"has a text under {key!r} that cannot be encoded: {error}")
        if not sequences:
            return Skipped(EMPTY, f"nothing to encode under {key!r}")
        document.append([np.asarray(sequence, np.int32) for sequence in sequences])
    return document


def _has_tokens(text: str, tokenizer: Tokenizer) -> bool:
    """Whether ``text`` as it stands encodes to something; ValueError for what is no text."""
    text.encode()
    # the start of a text nearly always decides, and costs little where only the other side is written
    return bool(text) and bool(tokenizer.tokenize(text[:64]) or tokenizer.tokenize(text))


def holds_pairs(lines: Iterable[bytes]) -> bool:
    """Whether one of ``lines`` has a text under both keys of PAIR."""
    return any(not isinstance(parse_line(line, PAIR), Skipped) for line in lines)


def _encode_text(text: str, tokenizer: Tokenizer, options: EncodeOptions, dressed: bool) -> list[list[int]]:
    parts = split_sentences(text, options.keep_newlines) if options.split_sentences else [text] * bool(text)
    if options.prepend_space and dressed and parts:
        parts[0] = " " + parts[0]
    sequences = [ids for part in parts if (ids := tokenizer.tokenize(part))]
    if not (sequences and dressed):
        return sequences
    if options.append_eod:
        sequences[-1].append(tokenizer.eod)
    elif options.append_bos:
        sequences[-1].append(tokenizer.bos)
    return sequences


def open_jsonl(path: str) -> BinaryIO:
    """Open ``path`` for reading lines, behind a byte-order mark if there is one.

    Raises RunError for what is no readable file of text: missing, a folder, empty,
    or compressed (told by the first bytes, not by the name).
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  the caller closes it
    except OSError as error:
        raise RunError(f"--input {path} cannot be read: {error.strerror}") from None
    start = file.peek(8)[:8]
    if not start:
        file.close()
        raise RunError(f"--input {path} is empty")
    for magic, kind in _PACKED.items():
        if start.startswith(magic):
            file.close()
            raise RunError(f"--input {path} is {kind}-compressed; unpack it first, one JSON object per line")
    if start.startswith(_BOM):
        file.read(len(_BOM))
    return file


def read_texts(path: str, key: str) -> Iterator[str]:
    """The non-empty texts under ``key``, in order; RunError with file and line for a broken one."""
    with open_jsonl(path) as file:
        for number, line in enumerate(file, 1):
            texts = parse_line(line, [key])
            if isinstance(texts, Skipped):
                if texts.reason == INVALID:
                    raise RunError(f"{path}:{number} {texts.detail}")
            elif texts[0]:
                try:
                    texts[0].encode()
                except UnicodeEncodeError:
                    raise RunError(f"{path}:{number} holds half of a surrogate pair, which is no text") from None
                yield texts[0]


def _kind(value: object) -> str:
    return {list: "an array", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number")
