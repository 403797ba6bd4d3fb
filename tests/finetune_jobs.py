"""Small runs of finetune_t0 inside started ranks, the pairs they train on, and the truth computed pair by pair.

Everything a worker group runs is importable by name from here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from small_runs import VOCAB, Case, local_tensors, pipeline_name, settings_of, write_base

from megatron.data.indexed_dataset import IndexedDatasetWriter

PAD, EOS, FIRST_WORD = 0, 1, 3
#: the model of the base checkpoint; its vocabulary has one id per word
CASE = Case(layers=2)
SEED = 1234


def write_tokenizer(folder: Path) -> list[str]:
    """A tokenizer of whole words w3 .. w92 with padding and end; returns the flags that name it."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(FIRST_WORD, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel({"<pad>": PAD, "</s>": EOS, "<unk>": 2, **words}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>",
                                         unk_token="<unk>").save_pretrained(folder / "tokenizer")
    return ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(folder / "tokenizer")]


def write_pairs(prefix: Path, pairs) -> str:
    """Two token datasets of (inputs, targets); returns the prefix of both."""
    for side, name in enumerate(("inputs", "targets")):
        with IndexedDatasetWriter(f"{prefix}_{name}_document", np.uint16) as writer:
            for pair in pairs:
                writer.add_document(pair[side])
    return str(prefix)


def draw_pairs(count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Pairs of 3 to 12 tokens, all different; targets end with EOS."""
    rng = np.random.default_rng(seed)

    def words(n: int) -> list[int]:
        return rng.integers(FIRST_WORD, VOCAB, n).tolist()

    pairs = [(words(rng.integers(1, 8)), [*words(rng.integers(1, 4)), EOS]) for _ in range(count)]
    assert len({repr(pair) for pair in pairs}) == count
    return pairs


def base_flags(folder: Path) -> list[str]:
    """Write base and tokenizer; the flags of a run from them, less data, batch, length and what a test varies."""
    write_base(str(folder / "base"), CASE)
    return [*write_tokenizer(folder), "--num-layers", "2", "--hidden-size", "24", "--num-attention-heads", "4",
            "--seq-length", "16", "--max-position-embeddings", "16", "--position-embedding-type", "alibi",
            "--embed-layernorm", "--make-vocab-size-divisible-by", "1", "--pad-vocab-size-to", "96",
            "--lr-decay-style", "constant", "--weight-decay", "0", "--seed", str(SEED), "--log-interval", "1",
            "--num-workers", "0", "--valid-num-workers", "0", "--load", str(folder / "base")]


class Recorded:
    """A dataset that notes the pairs of each row it hands out."""

    def __init__(self, dataset, read: list) -> None:
        self.dataset, self.read = dataset, read

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, k: int):
        from megatron.data.packed_dataset import split_entries

        row = self.dataset[k]
        tokens, marks = split_entries(row["text"])
        segments = marks >> 1
        self.read += [tokens[segments == each].tolist() for each in range(1, segments.max() + 1)]
        return row


def runs(*lines: list[str]) -> list[dict]:
    """Job: the real loop with the task of finetune_t0, once for each list of flags.

    Of each run: its log, the training lines in it (on the last rank), the pairs this rank read
    for training, in order, the samples it counted, and its share of all tensors at the end.
    """
    return [_run(flags) for flags in lines]


def _run(flags: list[str]) -> dict:
    import torch.distributed as dist
    from launching import training_lines

    import finetune_t0
    from megatron import training
    from megatron.arguments import parse_arguments

    read, built, trained = [], [], []

    def datasets(settings, wanted):
        made = finetune_t0.datasets(settings, wanted)
        return dataclasses.replace(made, train=Recorded(made.train, read))

    def build_engine(model, settings, context, *rest):
        engine, schedule = real_build(model, settings, context, *rest)
        built.append((engine, context))
        return engine, schedule

    def train(run, *rest):
        trained.append(run.progress)
        return real_train(run, *rest)

    real_build, real_train, log = training.build_engine, training.train, io.StringIO()
    settings = parse_arguments(flags, entry="finetune_t0")
    # the group lives on, so its ranks do not leave the world at the end of the run
    with (contextlib.redirect_stdout(log), mock.patch.object(training, "shutdown", dist.barrier),
          mock.patch.object(training, "build_engine", build_engine), mock.patch.object(training, "train", train)):
        training.pretrain(settings, training.Task(datasets=datasets, batch=finetune_t0.batch))
    sys.stdout.write(log.getvalue())
    ((engine, context),), (progress,) = built, trained
    return {"log": log.getvalue(), "lines": training_lines(log.getvalue()), "read": read, "consumed": progress.consumed_train_samples,
            "tensors": local_tensors(engine), "place": (context.pp_rank, context.dp_rank, context.tp_rank)}


# --- the truth: each pair alone, unpacked, in plain torch -------------------------------------


def pair_by_pair(folder: Path, groups: list[list], normalization: str, *, steps: int, lr: float) -> dict:
    """``steps`` plain steps of gradient descent on the pairs of one global batch, again and again.

    Returns losses and all tensors, also as they were before the first step. ``groups`` are the pairs of each micro-batch. No packing, masks or weights: the loss of a pair
    is torch's cross entropy of its targets when it is read alone, less those behind an EOS.
    """
    from megatron.model.pipe import GPTModel
    from megatron.mpu.context import ParallelContext
    from megatron.mpu.random import seed_everything

    context = ParallelContext()
    model = GPTModel(settings_of(CASE).model, context, seed_everything(1, context)).eval()
    for index, layer in model.layers.items():
        layer.load_state_dict(torch.load(folder / "base" / "global_step1" / f"layer_{int(index):02d}-model_00-model_states.pt",
                                         weights_only=True))
    before = {pipeline_name(name): param.detach().clone() for name, param in model.named_parameters()}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for _ in range(steps):
        optimizer.zero_grad()
        of_groups = [[losses_of(model, *pair) for pair in group] for group in groups]
        everything = [each for group in of_groups for each in group if len(each)]
        if normalization == "global-tokens":
            loss = torch.cat(everything).mean()
        elif normalization == "global-targets":
            loss = torch.stack([each.mean() for each in everything]).mean()
        else:
            cats = [torch.cat(group) for group in of_groups]
            loss = sum(each.mean() for each in cats if len(each)) / len(cats)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return {"losses": losses, "before": before,
            "tensors": {pipeline_name(name): param.detach().clone() for name, param in model.named_parameters()}}


def losses_of(model, inputs: list[int], targets: list[int]) -> torch.Tensor:
    """fp32 [n]: losses of the target tokens that follow another token than EOS."""
    ids = torch.tensor([inputs + targets])
    logits = model(ids[:, :-1])[0, :, :VOCAB]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    counts = (torch.arange(len(losses)) >= len(inputs) - 1) & (ids[0, :-1] != EOS)
    return losses[counts]
