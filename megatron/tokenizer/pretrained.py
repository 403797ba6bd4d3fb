"""Any tokenizer that transformers' AutoTokenizer loads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from megatron.errors import RunError
from megatron.tokenizer import segments
from megatron.tokenizer.base import Tokenizer

#: steps of the ``tokenizers`` library that look at no more than the characters around a place
_WORD_BY_WORD = {"Sequence", "Split", "ByteLevel", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
_AROUND = 256
"""characters on each side that decide whether a text is cut at a place"""
_PROBE = "a b c d e f gh ij kl m1 n2 3 4 5 6 78 90 A B Cd"
"""all its words must begin at their spaces"""


class PretrainedFromHF(Tokenizer):
    """A tokenizer folder, a ``tokenizer.json`` or a hub name.

    The end of a document is the tokenizer's eos. Text is encoded with the
    tokenizer's own habit of adding special tokens (BLOOM's adds none), and special
    tokens typed in the text are recognised. A ``tokenizer.json`` that stands beside
    a ``tokenizer_config.json`` is read together with it; alone it names no roles,
    so it has no eod.
    """

    def __init__(self, name_or_path: str, vocab_extra_ids: int = 0) -> None:
        """Appends ``<extra_id_0>`` .. as special tokens. Raises RunError when nothing loads."""
        backend = _load(name_or_path)
        if vocab_extra_ids:
            from tokenizers import AddedToken

            extra = [AddedToken(f"<extra_id_{i}>", special=True) for i in range(vocab_extra_ids)]
            backend.add_tokens(extra, special_tokens=True)
        roles = {"eod": "eos", "bos": "bos", "eos": "eos", "pad": "pad", "cls": "cls", "sep": "sep", "mask": "mask"}
        # *_token is asked first: transformers logs a complaint when the id of an absent token is read
        special = {role: getattr(backend, f"{token}_token_id") for role, token in roles.items()
                   if getattr(backend, f"{token}_token", None) is not None}
        size = max(backend.get_vocab().values(), default=-1) + 1
        super().__init__(f"PretrainedFromHF({name_or_path})", size,
                         {role: i for role, i in special.items() if i is not None})
        self._backend = backend
        self._by_words = _encodes_words(backend)
        added = list(getattr(backend, "added_tokens_decoder", {}).values())
        #: added tokens that may reach over a space, as they hold one, or that take the one behind them
        self._spaced = [token.content for token in added if " " in token.content[1:]]
        self._grasping = tuple(token.content for token in added if token.rstrip)

    def tokenize(self, text: str) -> list[int]:
        self._check_text(text)
        if not self._by_words or len(text) <= segments.SEGMENT:
            return self._encode(text)
        ids: list[int] = []
        for segment in segments.segments(text, segments.SEGMENT, self._is_cut):
            ids += self._encode(segment)
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._backend(text, verbose=False)["input_ids"]  # verbose would warn of long documents

    def _is_cut(self, text: str, at: int) -> bool:
        """Whether a word ends and one begins here, and what stands around is encoded alike in one piece and in two.

        Added tokens are looked for in the text: which of several that overlap are found depends on all before them.
        """
        if text.endswith(self._grasping, 0, at) or any(
                token in text[max(0, at - len(token) + 1):at + len(token) - 1] for token in self._spaced):
            return False
        before, behind = text[max(0, at - _AROUND):at], text[at:at + _AROUND]
        return (_begins_words(self._backend.backend_tokenizer.pre_tokenizer, before + behind, [len(before)])
                and self._encode(before + behind) == self._encode(before) + self._encode(behind))

    def detokenize(self, ids: Sequence[int]) -> str:
        self._check_ids(ids)
        return self._backend.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _encodes_words(backend) -> bool:
    """Whether each word is encoded by itself, and nothing is added at the ends of a text.

    So it is for the byte-level BPE of BLOOM and GPT-2. Others, of which this is not known, get their texts whole,
    such as those whose "words" are lines or reach over spaces: how these are merged depends on all that comes before.
    """
    library = getattr(backend, "backend_tokenizer", None)
    if library is None or library.normalizer is not None or library.pre_tokenizer is None:
        return False
    steps = [json.loads(library.pre_tokenizer.__getstate__())]
    for step in steps:
        steps += step.get("pretokenizers", [])
    spaces = [at for at, char in enumerate(_PROBE) if char == " "]
    return (all(step["type"] in _WORD_BY_WORD and not step.get("add_prefix_space") for step in steps)
            and _begins_words(library.pre_tokenizer, _PROBE, spaces)
            and backend("a b")["input_ids"] == backend("a b", add_special_tokens=False)["input_ids"])


def _begins_words(pre_tokenizer, text: str, places: Sequence[int]) -> bool:
    """Whether no word of ``text`` reaches over one of these places."""
    words = [ends for _, ends in pre_tokenizer.pre_tokenize_str(text)]
    return not any(start < place < stop for start, stop in words for place in places)


def _load(name: str):
    try:
        import transformers
    except ImportError as error:
        raise RunError(f"--tokenizer-type PretrainedFromHF needs transformers: {error}") from None
    folder: str | None = name
    if os.path.isfile(name):
        folder = os.path.dirname(os.path.abspath(name))
        beside = os.path.join(folder, "tokenizer_config.json")
        if os.path.basename(name) != "tokenizer.json" or not os.path.isfile(beside):
            folder = None
    try:
        if folder is None:
            return transformers.PreTrainedTokenizerFast(tokenizer_file=name)
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever transformers, its hub client or the file format raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(f"--tokenizer-name-or-path {name}: no tokenizer could be loaded (allowed: a folder with "
                       f"tokenizer files, a tokenizer.json, a hub name): {reason}") from error
