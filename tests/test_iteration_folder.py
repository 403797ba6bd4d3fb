"""Checkpoints of Megatron-LM without DeepSpeed: one file per rank, three orders of the fused projection."""

import sys

import pytest
import torch
from foreign_folders import bigscience_state, cut, layers_of
from launching import ROOT
from small_model import ALONE, absolute, batch, build, config
from small_runs import Case, settings_of

sys.path.insert(0, str(ROOT / "tools"))
import convert_checkpoint

from megatron.checkpoint.load_plan import plan_load
from megatron.checkpoint.resume import check_stored
from megatron.checkpoint.sources import open_source
from megatron.checkpoint.weights import fill_layer
from megatron.config import CheckpointConfig
from megatron.errors import RunError
from megatron.model.pipe import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import seed_everything

SIX = {"num_attention_heads": 6, "padded_vocab_size": 60}


def as_stored(fused, heads, version):
    """Rows [head][q, k, v][dim] of one rank in the order that files of ``version`` have."""
    parts = fused.reshape(heads, 3, -1, *fused.shape[1:])
    if version == 0:
        parts = parts.transpose(0, 1)
    elif version == 1.0:
        parts = parts.transpose(1, 2)
    return parts.reshape(fused.shape).clone()


def write_iteration(root, model, *, tp=1, pp=1, version=3.0, latest="12", folder="iter_0000012", stack="encoder", old=False):
    """The files of one iteration, each stage with the same number of blocks, and the file that names it."""
    settings, layers = model.config, layers_of(model)
    state = bigscience_state(settings, tp)
    if version:
        state["checkpoint_version"] = version
    else:
        del state["checkpoint_version"]
    root.mkdir()
    for rank in range(tp):
        for stage in range(pp):
            language = {}
            if stage == 0:
                language["embedding"] = {}
                for name, value in layers[1].items():
                    table, local = name.split(".", 1)
                    language["embedding"].setdefault(table, {})[local] = cut(name, value, rank, tp)
            blocks = {}
            for block in range(settings.num_layers // pp):
                for name, value in layers[3 + stage * settings.num_layers // pp + block].items():
                    share = cut(name, value, rank, tp)
                    if "query_key_value" in name:
                        share = as_stored(share, settings.num_attention_heads // tp, version)
                    blocks[f"layers.{block}.{name.replace('self_attention', 'attention') if old else name}"] = share
            if stage == pp - 1:
                blocks |= {f"final_layernorm.{name}": value for name, value in layers[settings.num_layers + 4].items()}
            language[stack] = blocks
            contents = state | {"model": {"language_model": language}, "optimizer": {"fp32": [torch.ones(3)]}}
            if stage == pp - 1 > 0:
                contents["model"]["word_embeddings_for_head"] = {
                    "weight": cut("word_embeddings.weight", layers[1]["word_embeddings.weight"], rank, tp)}
            target = root / folder / (f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}")
            target.mkdir(parents=True)
            torch.save(contents, target / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(latest)
    return root


@pytest.mark.parametrize("settings, options", [
    (config(**SIX), {"tp": 2, "pp": 2}),
    (config(**SIX), {"tp": 3, "version": 1.0, "stack": "transformer", "old": True}),
    (absolute(**SIX), {"tp": 2, "version": 0, "old": True}),
    (config(**SIX, num_layers=4), {"pp": 4, "folder": "release", "latest": "release"}),
], ids=["version-3-pp", "version-1", "version-0", "release"])
def test_each_version_fills_the_model_bit_for_bit(settings, options, tmp_path):
    wanted = build(settings)
    write_iteration(tmp_path / "run", wanted, **options)
    plan = plan_load(CheckpointConfig(load=str(tmp_path / "run")))
    assert plan.weights_only and plan.tag == options.get("folder", "iter_0000012")
    source = open_source(plan.path)
    assert source.num_layers == settings.num_layers and source.degree == options.get("tp", 1)
    model = GPTModel(settings, ALONE, seed_everything(99, ALONE))
    for index, layer in model.layers.items():
        fill_layer(layer, int(index), source, ALONE)
    for (name, mine), theirs in zip(model.state_dict().items(), wanted.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert torch.equal(model(batch()[0]), wanted(batch()[0]))


def test_it_is_reshaped_into_layer_files(tmp_path):
    settings = config(**SIX)
    wanted = build(settings)
    write_iteration(tmp_path / "run", wanted, tp=2, pp=2, version=1.0)
    assert convert_checkpoint.main(["reshape", "--load", str(tmp_path / "run"), "--save", str(tmp_path / "out"),
                                    "--target-tp", "3"]) == 0
    folder = tmp_path / "out" / (tmp_path / "out" / "latest").read_text()
    for index, tensors in layers_of(wanted).items():
        for rank in range(3):
            share = torch.load(folder / f"layer_{index:02d}-model_{rank:02d}-model_states.pt", weights_only=True)
            assert share.keys() == tensors.keys()
            for name, whole in tensors.items():
                assert torch.equal(share[name], cut(name, whole, rank, 3)), name


def test_its_arguments_are_compared_and_a_tag_may_be_named(tmp_path):
    import dataclasses

    settings = settings_of(Case(hidden=24, heads=6, layers=2))
    write_iteration(tmp_path / "run", build(settings.model), tp=2)
    plan = plan_load(CheckpointConfig(load=str(tmp_path / "run" / "iter_0000012")))
    assert plan.path == tmp_path / "run" / "iter_0000012" and plan.weights_only
    assert check_stored(plan, settings, ParallelContext())["iteration"] == 12
    other = dataclasses.replace(settings, model=dataclasses.replace(settings.model, num_attention_heads=4))
    with pytest.raises(Exception, match="num_attention_heads 6, this run has 4"):
        check_stored(plan, other, ParallelContext())


def test_what_is_missing_is_named(tmp_path):
    model = build(config(**SIX))
    root = write_iteration(tmp_path / "run", model, tp=2, pp=2)
    (root / "iter_0000012" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(RunError, match="no file of TP rank 1 at pipeline stage 1"):
        open_source(root / "iter_0000012")
    root = write_iteration(tmp_path / "half", model, tp=1, pp=2)
    (root / "iter_0000012" / "mp_rank_00_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(RunError, match="1 blocks, an embedding and no final LayerNorm"):
        open_source(root / "iter_0000012")
    for text, words in (("13", "means iter_0000013, but there is no such folder"), ("../x", "should hold a number or 'release'")):
        (root / "latest_checkpointed_iteration.txt").write_text(text)
        with pytest.raises(RunError, match=words):
            plan_load(CheckpointConfig(load=str(root)))
