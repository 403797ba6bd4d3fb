"""Fine-tune on prompted tasks (T0, BLOOMZ), packed pairs of inputs and targets, with ``--bitfit`` or in full."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.arguments import parse_arguments
from megatron.config import Settings

if TYPE_CHECKING:  # torch is loaded once the command line is known to be right
    import torch

    from megatron.data.gpt_dataset import Datasets
    from megatron.tokenizer import Tokenizer


def datasets(settings: Settings, wanted: tuple[int, int, int]) -> Datasets:
    """Rows of ``seq_length`` + 1 entries, packed with whole pairs, for training, validation and test."""
    from megatron.data.packed_dataset import build_mtf_datasets

    train, valid, test = wanted
    return build_mtf_datasets(settings.data, seq_length=settings.model.seq_length, seed=settings.train.seed,
                              train_samples=train, valid_samples=valid, test_samples=test,
                              vocab_size=settings.model.vocab_size)


def batch(settings: Settings, tokenizer: Tokenizer) -> Callable[[torch.Tensor], tuple]:
    """Function from rows [b, s + 1] to what the first and the last stage take.

    Raises SharedRunError when ``--eod-mask-loss`` asks for an end token that the tokenizer lacks.
    """
    from megatron.data.mtf_batch import batch_function
    from megatron.errors import SharedRunError

    if settings.data.eod_mask_loss and not tokenizer.has("eod"):
        raise SharedRunError(f"--eod-mask-loss needs a tokenizer with an end token; {tokenizer.describe()}")
    return batch_function(settings.data, tokenizer)


def main() -> int:
    """Parse, run, and turn a fault the user can mend into one sentence."""
    settings = parse_arguments(entry="finetune_t0")
    from megatron.launch import run_task
    from megatron.training import Task

    return run_task(settings, Task(datasets=datasets, batch=batch))


if __name__ == "__main__":
    sys.exit(main())
