"""The retention experiment: catalogues against polib, the split on the files trained on, losses row by row, interpolation."""

import dataclasses
import json
import random
import sys
import zipfile
from pathlib import Path

import numpy as np
import polib
import pytest
import torch
from small_runs import VOCAB, Case, settings_of

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "retention"
sys.path.insert(0, str(EXAMPLE))

import analysis
import catalogues
import measure
import plan as plans
import prepare
import report
import tasks

from megatron.data.indexed_dataset import IndexedDataset
from megatron.model.pipe import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import seed_everything

LETTERS = {language: "abcdefghijklmnop"[i % 16] for i, language in enumerate(catalogues.LANGUAGES)}


def entries(application: str) -> list[tuple[str, str | None]]:
    """English messages of an application, with plurals of some."""
    draw = random.Random(application)
    words = ["page", "user", "image", "delete", "open", "", "comment", "language", "folder", "search"]
    made = []
    for i in range(90):
        words[5] = draw.choice(["%(name)s", "%s", "{count}", "{user}", "%d"])
        text = " ".join(draw.choices(words, k=8)) + f" {application} n{i}"
        made.append((text, f"{text}s" if i % 3 == 0 else None))
    return made


def catalogue(application: str, language: str) -> bytes:
    file = polib.MOFile()
    file.metadata = {"Content-Type": "text/plain; charset=utf-8"}
    for source, plural in entries(application):
        said = f"{language} {source.translate(str.maketrans('aeiou', LETTERS[language] * 5))} ÿ"
        if plural:
            file.append(polib.MOEntry(msgid=source, msgid_plural=plural, msgstr_plural={0: said, 1: f"{said}s"}))
        else:
            file.append(polib.MOEntry(msgid=source, msgstr=said, msgctxt="a place" if "open" in source else None))
    # a message in capitals is a copy of its plain form and must go with it; so must what is said alike
    for i, (source, _) in enumerate(entries(application)[:40]):
        file.append(polib.MOEntry(msgid=f"{source.upper()}!", msgstr=f"{language} said alike {i % 20}"))
    return file.to_binary()


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Folder of a prepared experiment with made-up wheels, its facts and its split."""
    folder = tmp_path_factory.mktemp("retention")
    (folder / "wheels").mkdir()
    for name, version in catalogues.PACKAGES.items():
        with zipfile.ZipFile(folder / "wheels" / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            for language in catalogues.LANGUAGES:
                wheel.writestr(f"{name}/locale/{language}/LC_MESSAGES/django.mo", catalogue(name, language))
    plan = dataclasses.replace(plans.FAST, language_tokens=300, prompts=10)
    facts = prepare.prepare(folder, plan)
    messages = catalogues.read_messages(catalogues.fetch(folder / "wheels"), catalogues.LANGUAGES)
    return folder, facts, catalogues.split(messages)


def test_compiled_catalogues_are_read_as_polib_reads_them(tmp_path):
    data = catalogue("django", "fr")
    (tmp_path / "x.mo").write_bytes(data)
    expected = set()
    for entry in polib.mofile(str(tmp_path / "x.mo")):
        forms = [entry.msgstr_plural[i] for i in sorted(entry.msgstr_plural)] or [entry.msgstr]
        context = f"{entry.msgctxt}\x04" if entry.msgctxt else ""
        source = "\0".join(filter(None, (entry.msgid, entry.msgid_plural)))
        expected.add((context + source, "\0".join(forms)))
    assert {pair for pair in catalogues.read_mo(data) if pair[0]} == expected
    for broken in (b"PK\x03\x04" + data, data[:50], data[:-30]):
        with pytest.raises(ValueError):
            list(catalogues.read_mo(broken))


def test_no_copy_of_a_held_out_message_is_trained_on_in_any_language(experiment):
    folder, facts, split = experiment
    tokenizer = prepare.open_tokenizer(folder)
    dataset = IndexedDataset(str(folder / "data" / "text_text_document"))
    trained = {catalogues.canonical(line) for i in range(len(dataset))
               for line in tokenizer.detokenize(dataset.get(i)[:-1].tolist()).split("\n")}
    assert len(trained) > 5000  # the reading itself works
    held_out = [(language, text) for each in split.held_out for language, text in each.texts.items()]
    assert len(held_out) > 500 and {language for language, _ in held_out} == set(prepare.LANGUAGES)
    assert not [each for each in held_out if catalogues.canonical(each[1]) in trained]
    # copies in capitals share the fate of their plain form, and plurals that of their singular
    assert {catalogues.Message(text, "x").held_out for text in ("One page.", "ONE PAGE", "one (page)")} in ({True}, {False})
    plurals = [each.plural for each in split.train if each.plural]
    assert len(plurals) > 50 and all(catalogues.canonical(plural) in trained for plural in plurals)
    # nor asked about: sources of training prompts and of held-out ones are different messages
    training = {prompt.inputs for group in tasks.prompts(split.train).values() for prompt in group}
    asked = {prompt.inputs for group in tasks.prompts(split.held_out).values() for prompt in group}
    assert asked and not asked & training
    # and what is measured is held-out text alone
    measured = json.loads((folder / "data" / "held_out.json").read_text())
    allowed = {catalogues.canonical(text) for _, text in held_out}
    for rows in measured["languages"].values():
        for row in rows:
            assert row[0] == tokenizer.eod and len(row) <= plans.LENGTH + 1
            assert {catalogues.canonical(line) for line in tokenizer.detokenize(row[1:]).split("\n")} <= allowed
    assert sum(facts["training_tokens"].values()) == sum(len(dataset.get(i)) for i in range(len(dataset)))


def test_measured_prompts_have_the_tokens_of_preprocessed_ones(experiment):
    folder, _, split = experiment
    tokenizer = prepare.open_tokenizer(folder)
    sides = [IndexedDataset(str(folder / "data" / f"tasks_{side}_document")) for side in ("inputs", "targets")]
    prompts = [each for group in tasks.prompts(split.train, plans.FAST.training_prompts).values() for each in group]
    assert len(prompts) == len(sides[0]) > 100
    for i in range(0, len(prompts), 7):
        encoded = prepare.encode_prompt(prompts[i], tokenizer)
        assert sides[0].get(i).tolist() == encoded["inputs"]
        assert sides[1].get(i).tolist() == encoded["options"][0]


def test_options_hold_the_right_answer_once():
    messages = [catalogues.Message(source, name, plural) for name in catalogues.PACKAGES
                for source, plural in entries(name)]
    for name, group in tasks.prompts(messages).items():
        assert group, name
        for prompt in group:
            assert len(set(prompt.options)) == len(prompt.options) == round(1 / tasks.CHANCE[name])
            assert prompt.target not in prompt.options[1:]


def test_losses_and_answers_equal_rows_read_one_by_one():
    config = dataclasses.replace(settings_of(Case(layers=2)).model, reset_attention_mask=True)
    context = ParallelContext()
    model = GPTModel(config, context, seed_everything(3, context)).eval()
    draw = np.random.default_rng(2)
    rows = [(draw.integers(0, VOCAB, draw.integers(4, 15)).tolist(), int(draw.integers(1, 4))) for _ in range(9)]
    plain = GPTModel(dataclasses.replace(config, reset_attention_mask=False), context, seed_everything(3, context)).eval()

    @torch.inference_mode()
    def truth(ids, first):
        logits = plain(torch.tensor([ids]))[0, :, :VOCAB].log_softmax(-1)
        return -sum(float(logits[i - 1, ids[i]]) for i in range(first, len(ids)))

    expected = [truth(*row) for row in rows]
    assert measure.losses(model, rows) == pytest.approx(expected, rel=1e-5)
    prompts = {"a": [{"inputs": ids[:2], "options": [ids[2:4], [5, 6], [8, 9]]} for ids, _ in rows]}
    right = [min(range(3), key=lambda i: truth([*each["inputs"], *each["options"][i]], 2)) == 0 for each in prompts["a"]]
    assert 0 < sum(right) < len(right)
    assert measure.task_accuracy(model, prompts) == {"a": sum(right) / len(right)}
    tokens = sum(len(each["options"][0]) for each in prompts["a"])
    assert measure.task_losses(model, prompts)["a"] == pytest.approx(
        sum(truth([*each["inputs"], *each["options"][0]], 2) for each in prompts["a"]) / tokens, rel=1e-5)


def test_changes_are_those_of_the_slices_that_moved():
    config = settings_of(Case(layers=2)).model
    context = ParallelContext()
    base, moved = (GPTModel(config, context, seed_everything(3, context)) for _ in range(2))
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    with torch.no_grad():
        bias = dict(moved.named_parameters())["layers.4.self_attention.query_key_value.bias"]
        for head in range(heads):  # the value third of each head, in the second block
            start = (3 * head + 2) * width
            bias[start:start + width] += 0.5
    changes = measure.bias_changes(moved, base)
    assert changes.pop("value") == pytest.approx([0, 0.5])
    assert set(map(tuple, changes.values())) == {(0, 0)}


def curve(method, rate, seed, *values):
    points = [analysis.Point(i, task, lost, lost / 2, {"de": lost, "fr": lost}) for i, (task, lost) in enumerate(values)]
    return analysis.Curve("S", method, rate, seed, tuple(points), {"a": 0.5}, {})


def test_interpolation_at_equal_task_loss():
    line = curve("full", 1e-4, 1, (4, 0), (3, 0.1), (2, 0.5))
    assert line.at(2.5).lost == pytest.approx(0.3) and line.at(2.5).english == pytest.approx(0.15)
    assert line.at(4).lost == 0 and line.at(2).per_language["fr"] == pytest.approx(0.5)
    assert line.at(1.9) is None


def made_up(bitfit_lost: float) -> dict:
    """Contents of results.json: full loses 0.2 at its end, the others ``bitfit_lost``; all reach task loss 2."""
    def job(method, seed, end):
        languages = [3.0, 4.0 + end + seed / 1e4, 4.0 + end]
        return {"job": "x", "size": "S", "method": method, "rate": 1e-3, "seed": seed, "accuracy": {"a": 0.5},
                "points": [{"step": 5, "languages": languages, "tasks": {"a": 2.0 if method else 4.0}}],
                "weights": 1000, "biases": 10, "bias_changes": {"query": [0.1]}, "cpu_seconds": 1.0}

    runs = [job(None, 0, 0.0)] + [job(name, seed, lost) for seed in (1, 2, 3)
                                  for name, lost in (("full", 0.2), ("bitfit", bitfit_lost))]
    facts = {"packages": {}, "messages": [1, 1], "training_tokens": dict.fromkeys(("en", "de", "fr"), 5),
             "unigram": dict.fromkeys(("en", "de", "fr"), 6.0), "held_out_tokens": {"en": 1}, "chance": {"a": 0.25},
             "training_prompts": {"a": 1}, "held_out_prompts": {"a": 1}}
    return {"machine": "some", "costs": {"wall_seconds": 1.0, "jobs_cpu_seconds": 1.0}, "facts": facts,
            "plan": {"pretraining_steps": 1, "pretraining_rows": 1, "steps": 1, "rows": 1},
            "sizes": {"S": {"block_weights": 5}}, "methods": {"full": "full", "bitfit": "BitFit"}, "jobs": runs}


@pytest.mark.parametrize("lost, keeps", [(0.1, "better in every"), (0.3, "worse in every"), (0.2, "depends on")])
def test_the_report_says_what_the_figures_say(lost, keeps):
    text = report.report_text(made_up(lost))
    assert keeps in text
    assert f"full fine-tuning has lost 0.200 ± 0.000, BitFit {lost:.3f} ± 0.000" in text

def test_committed_report_is_made_from_the_committed_figures():
    everything = json.loads((EXAMPLE / "results.json").read_text())
    assert report.report_text(everything) == (EXAMPLE / "RESULTS.md").read_text()
    assert len(everything["sizes"]) >= 3 and len(report.results_of(everything).seeds) >= 3
    # each language was learnt: well below what counts of tokens give
    for base in report.results_of(everything).bases.values():
        for language, loss in base["points"][-1]["languages"].items():
            assert loss < everything["facts"]["unigram"][language] - 0.5, language
