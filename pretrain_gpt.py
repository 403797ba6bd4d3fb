"""Pretrain a GPT, or fine-tune one with ``--bitfit``, from indexed text."""

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
    """Training, validation and test samples of ``seq_length`` + 1 tokens."""
    from megatron.data.gpt_dataset import build_datasets

    train, valid, test = wanted
    return build_datasets(settings.data, seq_length=settings.model.seq_length, seed=settings.train.seed,
                          train_samples=train, valid_samples=valid, test_samples=test,
                          vocab_size=settings.model.vocab_size)


def batch(settings: Settings, tokenizer: Tokenizer) -> Callable[[torch.Tensor], tuple]:
    """Function from rows [b, s + 1] to what the first and the last stage take."""
    from megatron.data.batch import gpt_batch

    def split(rows: torch.Tensor) -> tuple:
        parts = gpt_batch(rows, settings.data, tokenizer.eod)
        inputs: tuple = (parts.tokens, parts.position_ids)
        if settings.model.reset_attention_mask:
            inputs += (parts.segment_ids,)
        return inputs, (parts.labels, parts.loss_mask)

    return split


def main() -> int:
    """Parse, run, and turn a fault the user can mend into one sentence."""
    settings = parse_arguments(entry="pretrain_gpt")
    from megatron.launch import run_task
    from megatron.training import Task

    return run_task(settings, Task(datasets=datasets, batch=batch))


if __name__ == "__main__":
    sys.exit(main())
