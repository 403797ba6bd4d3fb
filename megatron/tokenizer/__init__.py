"""Tokenizers under one small interface. Importing this loads no tokenizer library."""

from __future__ import annotations

from megatron.config import TokenizerConfig
from megatron.errors import RunError
from megatron.tokenizer.base import MissingToken, Tokenizer

TYPES = ("GPT2BPETokenizer", "PretrainedFromHF")
UNSUPPORTED_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")

__all__ = ["TYPES", "UNSUPPORTED_TYPES", "MissingToken", "Tokenizer", "build_tokenizer"]


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that ``config`` describes; RunError names the flag that is missing or wrong."""
    kind = config.tokenizer_type
    if kind in UNSUPPORTED_TYPES:
        raise RunError(f"--tokenizer-type {kind} is for BERT, which is not trained here; "
                       f"use {' or '.join(TYPES)}")
    if config.vocab_extra_ids < 0:
        raise RunError(f"--vocab-extra-ids {config.vocab_extra_ids} is negative")
    if kind == "GPT2BPETokenizer":
        if not config.vocab_file or not config.merge_file:
            raise RunError("--tokenizer-type GPT2BPETokenizer needs "
                           f"{'--merge-file' if config.vocab_file else '--vocab-file'}")
        if config.vocab_extra_ids:
            raise RunError(f"--vocab-extra-ids {config.vocab_extra_ids} needs --tokenizer-type PretrainedFromHF; "
                           "GPT2BPETokenizer knows no added tokens")
        from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer

        return GPT2BPETokenizer(config.vocab_file, config.merge_file)
    if kind == "PretrainedFromHF":
        if not config.tokenizer_name_or_path:
            raise RunError("--tokenizer-type PretrainedFromHF needs --tokenizer-name-or-path")
        from megatron.tokenizer.pretrained import PretrainedFromHF

        return PretrainedFromHF(config.tokenizer_name_or_path, config.vocab_extra_ids)
    raise RunError(f"--tokenizer-type {kind!r} is not one of {', '.join(TYPES)}")
