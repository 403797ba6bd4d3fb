"""How many rows the embedding table gets for a vocabulary."""

from __future__ import annotations

from megatron.errors import RunError


def padded_vocab_size(true_size: int, *, tp: int, divisible_by: int, pad_to: int | None) -> int:
    """Rows of the embedding table over all ``tp`` tensor-parallel ranks, at least ``true_size``.

    ``true_size`` is the highest token id + 1. Without ``pad_to``: the smallest
    multiple of ``divisible_by * tp`` that holds it. With ``pad_to``: exactly that
    value. Raises RunError when ``pad_to`` is too small, is no multiple of
    ``divisible_by``, or cannot be cut into ``tp`` equal parts.
    """
    for flag, value in (("--make-vocab-size-divisible-by", divisible_by), ("--tensor-model-parallel-size", tp),
                        ("the number of token ids", true_size)):
        if value < 1:
            raise RunError(f"{flag} is {value}, but must be at least 1")
    if pad_to is None:
        unit = divisible_by * tp
        return -(-true_size // unit) * unit
    if pad_to < true_size:
        raise RunError(f"--pad-vocab-size-to {pad_to} is smaller than the tokenizer's {true_size} token ids")
    if pad_to % divisible_by:
        raise RunError(f"--pad-vocab-size-to {pad_to} is not a multiple of --make-vocab-size-divisible-by "
                       f"{divisible_by}; the next one is {-(-pad_to // divisible_by) * divisible_by}")
    if pad_to % tp:
        raise RunError(f"--pad-vocab-size-to {pad_to} does not divide by --tensor-model-parallel-size {tp}, "
                       "so the embedding cannot be shared out equally")
    return pad_to
