"""What a checkpoint knows: loss per language, loss of held-out prompts, answers ranked, change of biases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.checkpoint.sources import open_source
from megatron.checkpoint.weights import fill_layer
from megatron.config import BIAS_TERMS, ModelConfig
from megatron.model.pipe import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import seed_everything

TOKENS_AT_ONCE = 2048


def load_model(folder: Path, config: ModelConfig) -> GPTModel:
    """The whole model of the tag folder ``folder``, for evaluation, in this process alone."""
    context = ParallelContext()
    model = GPTModel(config, context, seed_everything(1, context)).eval()
    source = open_source(folder)
    for index, layer in model.layers.items():
        if list(layer.parameters()):
            fill_layer(layer, int(index), source, context)
    return model


def _batches(order: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Numbers in ``order`` (shortest first) in groups that pad to about TOKENS_AT_ONCE."""
    group: list[int] = []
    for number in order:
        if group and (len(group) + 1) * lengths[number] > TOKENS_AT_ONCE:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


@torch.inference_mode()
def losses(model: GPTModel, rows: list[tuple[list[int], int]]) -> list[float]:
    """Summed loss in nats of each row: of its tokens from the given place on (place 1: all that can be predicted).

    Rows are token ids and that place. Each is read alone, padded behind its end, where causal
    attention does not look.
    """
    lengths = [len(ids) for ids, _ in rows]
    found = [0.0] * len(rows)
    for group in _batches(sorted(range(len(rows)), key=lengths.__getitem__), lengths):
        longest = max(lengths[number] for number in group)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        counts = torch.zeros(len(group), longest - 1, dtype=torch.bool)
        for line, number in enumerate(group):
            row, first = rows[number]
            ids[line, :len(row)] = torch.tensor(row)
            counts[line, first - 1:len(row) - 1] = True
        tokens = ids[:, :-1].contiguous()
        # one document a row
        inputs = (tokens, None, torch.ones_like(tokens)) if model.config.reset_attention_mask else (tokens,)
        logits = model(*inputs)[counts][:, :model.config.vocab_size]
        each = torch.zeros(counts.shape)
        each[counts] = torch.nn.functional.cross_entropy(logits, ids[:, 1:][counts], reduction="none")
        for number, total in zip(group, each.sum(1).tolist()):
            found[number] = total
    return found


def language_losses(model: GPTModel, held_out: dict[str, list[list[int]]]) -> dict[str, float]:
    """Nats per token of each language."""
    rows = [(language, ids) for language, group in held_out.items() for ids in group]
    found = losses(model, [(ids, 1) for _, ids in rows])
    totals = dict.fromkeys(held_out, 0.0)
    for (language, _), loss in zip(rows, found):
        totals[language] += loss
    return {language: total / sum(len(ids) - 1 for ids in held_out[language]) for language, total in totals.items()}


def _row(prompt: dict, option: int) -> tuple[list[int], int]:
    return [*prompt["inputs"], *prompt["options"][option]], len(prompt["inputs"])


def task_losses(model: GPTModel, prompts: dict[str, list[dict]]) -> dict[str, float]:
    """Nats per token of the right answers of each template, end tokens included."""
    asked = [(name, prompt) for name, group in prompts.items() for prompt in group]
    found = losses(model, [_row(prompt, 0) for _, prompt in asked])
    totals = dict.fromkeys(prompts, 0.0)
    for (name, _), loss in zip(asked, found):
        totals[name] += loss
    return {name: total / sum(len(prompt["options"][0]) for prompt in prompts[name]) for name, total in totals.items()}


def task_accuracy(model: GPTModel, prompts: dict[str, list[dict]]) -> dict[str, float]:
    """Share of prompts of each template whose right answer is the likeliest option (summed log-likelihood)."""
    asked = [(name, prompt) for name, group in prompts.items() for prompt in group]
    rows = [_row(prompt, option) for _, prompt in asked for option in range(len(prompt["options"]))]
    found = iter(losses(model, rows))
    right = dict.fromkeys(prompts, 0)
    for name, prompt in asked:
        options = [next(found) for _ in prompt["options"]]
        right[name] += options[0] < min(options[1:])
    return {name: count / len(prompts[name]) for name, count in right.items()}


def bias_changes(model: GPTModel, base: GPTModel) -> dict[str, list[float]]:
    """Mean |change| of each bias term in each block, both LayerNorms of a block together."""
    config = model.config
    before = dict(base.named_parameters())
    owners = {"dense": "attention_output", "dense_h_to_4h": "mlp_intermediate", "dense_4h_to_h": "mlp_output",
              "input_layernorm": "layernorm", "post_attention_layernorm": "layernorm"}
    found: dict[str, list[list[torch.Tensor]]] = {term: [[] for _ in range(config.num_layers)] for term in BIAS_TERMS}
    for name, param in model.named_parameters():
        _, index, *path = name.split(".")
        block = int(index) - 3
        if path[-1] != "bias" or not 0 <= block < config.num_layers:
            continue
        change = (param - before[name]).detach().abs()
        if path[-2] == "query_key_value":  # [head][query, key, value][width of a head]
            parts = change.view(config.num_attention_heads, 3, -1)
            for i, term in enumerate(("query", "key", "value")):
                found[term][block].append(parts[:, i].flatten())
        else:
            found[owners[path[-2]]][block].append(change)
    return {term: [float(torch.cat(parts).mean()) for parts in blocks] for term, blocks in found.items()}
