"""Deltas and Hugging Face folders made to mislead, and places where writing would destroy something."""

import contextlib
import copy
import dataclasses
import io
import json
import resource
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import transformers
from launching import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_deltas import random_model, same, state, tuned

from megatron.checkpoint.delta import extract
from megatron.checkpoint.delta_file import Delta, average, read_delta, write_delta
from megatron.deltas import apply_delta, check_base
from megatron.errors import RunError

sys.path.insert(0, str(ROOT / "tools"))
import bitfit_delta
import convert_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a BLOOM and a GPT-2, each with a delta on it, and the two models."""
    folder = tmp_path_factory.mktemp("hostile")
    models = {kind: random_model(kind) for kind in ("bloom", "gpt2")}
    for kind, base in models.items():
        base.save_pretrained(folder / kind)
        tuned(base, 1).save_pretrained(folder / "tuned")
        write_delta(folder / f"{kind}.safetensors", extract(folder / "tuned", folder / kind))
    return folder, models


def said(tool, *words) -> str:
    """The one sentence with which a tool refuses."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        assert tool.main([str(word) for word in words]) == 1
    lines = [line for line in stderr.getvalue().splitlines() if not line.startswith("writing")]
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


FUSED = "layers.self_attention.query_key_value"


@pytest.mark.parametrize("metadata, tensors, words", [
    ({}, {"layers.mlp.dense_h_to_4h.weight": torch.zeros(2, 144, 36)}, "layers.0.mlp.dense_h_to_4h.weight"),
    ({}, {"final_layernorm.bias": torch.ones(36, dtype=torch.int32)}, "int32"),
    ({}, {"final_layernorm.bias": torch.ones(6, 6)}, "(6, 6)"),
    ({}, {"layers.x.bias": torch.tensor(1.0)}, "0-d"),
    ({}, {f"{FUSED}.query.bias": torch.ones(2, 36)}, "as a part and as a whole"),
    ({"heads": "-6"}, {}, "-6 heads"),
    ({"frozen": '{"a":5}'}, {}, "int"),
    ({"frozen": "[" * 10**5}, {}, "recursion"),
    ({"arguments": "[]"}, {}, "arguments"),
    ({"base": "a\0b"}, {}, "base is no path"),
], ids=["weights", "whole numbers", "matrix", "number", "twice", "heads", "fingerprints", "deep", "arguments", "base"])
def test_a_file_that_would_do_else_than_set_biases_is_no_delta(metadata, tensors, words, made, tmp_path):
    good = made[0] / "bloom.safetensors"
    with safe_open(good, "pt") as file:
        save_file(load_file(good) | tensors, tmp_path / "bad", metadata=file.metadata() | metadata)
    with pytest.raises(RunError) as refused:
        read_delta(tmp_path / "bad")
    assert f"{tmp_path / 'bad'} is no bias delta" in str(refused.value) and words in str(refused.value)


def test_deltas_of_other_shapes_are_not_averaged(made):
    delta = read_delta(made[0] / "bloom.safetensors")
    short = Delta({**delta.tensors, "final_layernorm.bias": torch.ones(1)}, delta.facts)
    with pytest.raises(RunError, match="final_layernorm.bias differs"):
        average([delta, short])


def test_bases_that_lead_back_to_themselves(made, tmp_path):
    delta = read_delta(made[0] / "bloom.safetensors")
    for name, base in (("one", "two"), ("two", "one"), ("self", "self")):
        (tmp_path / name).mkdir()
        write_delta(tmp_path / name / "delta.safetensors",
                    Delta(delta.tensors, dataclasses.replace(delta.facts, base=str(tmp_path / base))))
    for name in ("one", "self"):
        assert "lead back" in said(convert_checkpoint, "to-hf", "--load", tmp_path / name, "--save", tmp_path / "out")


class Wrapped(torch.nn.Module):
    """As PEFT and torch.compile do: the config shows, the names are others."""

    def __init__(self, model):
        super().__init__()
        self.base_model, self.config = model, model.config


def test_models_that_a_delta_does_not_fit_stay_as_they_are(made):
    folder, models = made
    bloom, gpt2 = (read_delta(folder / f"{kind}.safetensors") for kind in models)

    def other(**changes):
        config = copy.deepcopy(models["bloom"].config)
        config.update(changes)
        return transformers.BloomForCausalLM(config)

    with torch.device("meta"):
        nowhere = other()
    for model, delta, words in ((other(n_layer=3), bloom, "2 layers, this BloomForCausalLM has 3"),
                                (other(n_head=4), bloom, "6 attention heads"), (nowhere, bloom, "meta device"),
                                (models["bloom"], gpt2, "embedding.position_embeddings.weight"),
                                (models["gpt2"], bloom, "embedding.word_embeddings.norm"),
                                (Wrapped(models["bloom"]), bloom, "unwrap")):
        before = state(model)
        for act in (apply_delta, check_base):
            with pytest.raises(RunError, match=words):
                act(model, delta)
        assert model is nowhere or same(state(model), before)


def test_what_is_read_is_not_removed_and_weights_are_not_overwritten(made, tmp_path):
    folder, models = made
    models["bloom"].save_pretrained(tmp_path / "new.part")
    before = {path: path.read_bytes() for path in (tmp_path / "new.part").iterdir()}
    assert "what is read" in said(convert_checkpoint, "to-hf", "--load", tmp_path / "new.part", "--save", tmp_path / "new")
    assert "what is read" in said(bitfit_delta, "apply", "--base", tmp_path / "new.part", "--delta", folder / "bloom.safetensors",
                                  "--output", tmp_path / "new")
    weights = tmp_path / "new.part" / "model.safetensors"
    assert "is no delta" in said(bitfit_delta, "extract", "--checkpoint", tmp_path / "new.part", "--output", weights)
    assert {path: path.read_bytes() for path in (tmp_path / "new.part").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["new.part"]


def test_links_into_a_cache_are_followed_and_names_are_harmless_in_a_picture(made, tmp_path):
    folder, _ = made
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    # of other weights: from_pretrained does not look at it
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    for path in (folder / "bloom").iterdir():  # as the cache of Hugging Face lays them out
        (snapshot / path.name).symlink_to(path)
    delta, odd = folder / "bloom.safetensors", tmp_path / "<a & b>\x01\n.safetensors"
    assert bitfit_delta.main(["apply", "--base", str(snapshot), "--delta", str(delta), "--output", str(tmp_path / "merged")]) == 0
    assert not any(path.is_symlink() or "index" in path.name for path in (tmp_path / "merged").iterdir())
    assert bitfit_delta.main(["remove", "--checkpoint", str(tmp_path / "merged"), "--output", str(tmp_path / "back")]) == 0
    for path in (folder / "bloom").iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    write_delta(odd, read_delta(delta))
    assert bitfit_delta.main(["show", "--delta", str(odd), "--base", str(snapshot), "--plot", str(tmp_path / "plot.svg")]) == 0
    assert "<a & b>??.safetensors" in ElementTree.parse(tmp_path / "plot.svg").getroot()[0].text


@pytest.mark.parametrize("changes, words", [
    ({"architectures": 3, "model_type": None}, "type 3"), ({"seq_length": "long"}, "seq_length"), ({"n_layer": True}, "n_layer"),
    ({"layer_norm_epsilon": "nan"}, "layer_norm_epsilon"), ({"layer_norm_epsilon": -1}, "layer_norm_epsilon"),
    ({"n_layer": 10**8}, "too few"), ({"weight_map": 5}, "weight_map"), ({"weight_map": "../x"}, "no file beside it"),
    ({"lm_head.weight": torch.tensor(1.0)}, "head of its own"),
    ({"transformer.ln_f.bias": torch.ones(36).to(torch.float8_e4m3fn)}, "float8")], ids=lambda value: value if isinstance(value, str) else "".join(value))
def test_odd_hugging_face_folders(changes, words, made, tmp_path):
    folder, config = made[0] / "bloom", json.loads((made[0] / "bloom" / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors") | {key: value for key, value in changes.items() if torch.is_tensor(value)}
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file(tensors, hf / ("model-1.safetensors" if "weight_map" in changes else "model.safetensors"))
    if "weight_map" in changes:
        (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, changes["weight_map"])}))
    config |= {key: value for key, value in changes.items() if not torch.is_tensor(value)}
    (hf / "config.json").write_text(json.dumps(config))
    for command in ("from-hf", "to-hf"):
        assert words in said(convert_checkpoint, command, "--load", hf, "--save", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_leaves_no_folder(made, tmp_path):
    """Here: a limit on the size of files, which stops writes in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, hard))
    try:
        line = said(convert_checkpoint, "to-hf", "--load", made[0] / "bloom", "--save", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"{tmp_path / 'out'} cannot be written" in line and not list(tmp_path.iterdir())
