"""Any tokenizer that transformers' AutoTokenizer loads."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron.errors import RunError
from megatron.tokenizer.base import Tokenizer


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

    def tokenize(self, text: str) -> list[int]:
        self._check_text(text)
        return self._backend(text, verbose=False)["input_ids"]  # verbose would warn of long documents

    def detokenize(self, ids: Sequence[int]) -> str:
        self._check_ids(ids)
        return self._backend.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _load(name: str):
    try:
        import transformers
    except ImportError as error:
        raise RunError(f"--tokenizer-type PretrainedFromHF needs transformers: {error}") from None
    folder = name
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
