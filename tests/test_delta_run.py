"""--save-delta-only: a run is its base plus one small file, and goes on from them as if all had been saved."""

import dataclasses
import json
import shutil
import struct

import pytest
import torch
from command_lines import TINY, refusal
from delta_jobs import go_on, refusal_of, switch_to_deltas, train_and_save, without_base
from hf_jobs import case_of, random_model
from launching import launch, training_lines
from safetensors.torch import load_file
from small_runs import Case, write_base
from test_hf_conversion import flags_of

from megatron.checkpoint import files
from megatron.checkpoint.delta import extract, is_delta_tag, open_stored
from megatron.checkpoint.delta_file import NAME, read_delta
from megatron.checkpoint.optimizer_shards import OptimizerShards
from megatron.checkpoint.resume import _numbers
from megatron.checkpoint.sources import open_source
from megatron.config import CheckpointConfig
from megatron.errors import RunError
from megatron.model.numbering import canonical_name

CASE = Case(tp=2, pp=2, bitfit=True, layers=2, optimizer="adam", lr=1e-2, dropout=0.1)
ELEMENTS = 11 * 24 * 2 + 2 * 24


@pytest.fixture(scope="module")
def runs(tmp_path_factory, worker_group):
    """A base; a run at TP=2, PP=2 saved both ways after two steps; its losses, and those of two more steps."""
    folder = tmp_path_factory.mktemp("delta-run")
    write_base(str(folder / "base"), CASE)
    group = worker_group(4)
    first = group.run(train_and_save, CASE, str(folder / "base"), 2, str(folder / "delta"), str(folder / "whole"))
    return folder, first, group.run(go_on, CASE, str(folder / "whole"), 2)


def test_a_tag_holds_biases_and_optimizer_but_no_frozen_weight(runs):
    tag = runs[0] / "delta" / "global_step2"
    names = {path.name for path in tag.iterdir()}
    assert NAME in names and not [name for name in names if name.startswith("layer_")]
    assert len([name for name in names if "optim_states" in name]) == 4
    assert NAME in json.loads((tag / "manifest.json").read_text())["files"]
    data = (tag / NAME).read_bytes()
    header, = struct.unpack("<Q", data[:8])
    assert len(data) == 8 + header + 4 * ELEMENTS and header < 2**16


def test_both_ways_of_saving_hold_the_same_biases_and_fingerprints(runs):
    folder = runs[0]
    saved, taken = read_delta(folder / "delta/global_step2" / NAME), extract(folder / "whole")
    assert saved.elements == ELEMENTS and saved.tensors.keys() == taken.tensors.keys()
    assert all(torch.equal(value, taken.tensors[name]) for name, value in saved.tensors.items())
    assert saved.facts.base_fingerprint == taken.facts.base_fingerprint
    # the base itself was written by one process, its vocabulary has no padding rows that are not zero
    assert extract(folder / "base").facts.prints == taken.facts.prints and len(taken.facts.prints) == 2 * 6 + 2 + 1
    assert (saved.facts.step, saved.facts.dtype, saved.facts.base) == (2, "fp32", str(folder / "base" / "global_step1"))


def test_a_resume_is_the_unbroken_run_bit_for_bit(runs, worker_group):
    folder, _, wanted = runs
    for (losses, tensors), (losses_wanted, tensors_wanted) in zip(
            worker_group(4).run(go_on, CASE, str(folder / "delta"), 2), wanted):
        assert losses == losses_wanted
        assert tensors and all(torch.equal(tensors[name], value) for name, value in tensors_wanted.items())


def test_files_that_the_manifest_does_not_list_are_no_part_of_it(runs, tmp_path):
    """Layer files in a tag of biases, a delta and shares of other degrees: what is read is what was saved."""
    tags = {}
    for way in ("delta", "whole"):
        shutil.copytree(runs[0] / way / "global_step2", tags.setdefault(way, tmp_path / way / "global_step2"))
    wanted, shards = whole_of(tags["delta"]), OptimizerShards(tags["delta"], 2, 2)
    stray = ["layer_03-model_00-model_states.pt", "mp_rank_07_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"]
    for way, names in (("delta", stray), ("whole", [NAME])):
        for name in names:
            (tags[way] / name).write_bytes(b"left of another run")
        assert is_delta_tag(tags[way]) is (way == "delta")
        source = open_source(tags[way])
        assert source.notes == (f"{tags[way]}: {', '.join(names)} ignored: not in manifest.json, which lists all files of this checkpoint",)
        found = whole_of(tags[way])
        assert found.keys() == wanted.keys() and all(torch.equal(value, wanted[name]) for name, value in found.items())
        assert OptimizerShards(tags[way], 2, 2).names == shards.names
    assert _numbers(tags["delta"], False) == {}
    assert extract(tags["delta"]).facts == read_delta(tags["delta"] / NAME).facts


def whole_of(folder) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by canonical name."""
    return {canonical_name(index, name, 2): tensors[name] for index, _, tags, tensors in open_stored(folder).layers() for name in tags}


def test_slices_in_16_bits_on_an_fp32_base(tmp_path, worker_group):
    """Two bytes per trained element; what is frozen is compared as the run held it, rounded."""
    case = Case(tp=2, bitfit=True, layers=1, dtype="bf16", bias_terms=("query", "mlp_output"), optimizer="adam", lr=1e-2)
    write_base(str(tmp_path / "base"), case)
    group = worker_group(2)
    group.run(train_and_save, case, str(tmp_path / "base"), 1, str(tmp_path / "delta"), str(tmp_path / "whole"))
    tag = tmp_path / "delta/global_step1"
    data = (tag / NAME).read_bytes()
    assert len(data) == 8 + struct.unpack("<Q", data[:8])[0] + 2 * (24 + 24)
    saved, taken = read_delta(tag / NAME), extract(tmp_path / "whole")
    assert saved.facts.prints == taken.facts.prints and saved.facts.terms == ("query", "mlp_output")
    assert saved.tensors.keys() == {"layers.0.self_attention.query_key_value.query.bias", "layers.0.mlp.dense_4h_to_h.bias"}
    assert extract(tmp_path / "whole", tmp_path / "base").tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(value, taken.tensors[name]) for name, value in saved.tensors.items())
    for (losses, _), (wanted, _) in zip(group.run(go_on, case, str(tmp_path / "delta"), 1),
                                        group.run(go_on, case, str(tmp_path / "whole"), 1)):
        assert losses == wanted
    # a run of other terms whose base is a delta itself, saved in the background
    other = dataclasses.replace(case, bias_terms=("layernorm",))
    group.run(train_and_save, other, str(tmp_path / "delta"), 1, str(tmp_path / "second"), None, True)
    assert read_delta(tmp_path / "second/global_step1" / NAME).facts.base == str(tag)
    assert extract(tmp_path / "second", tmp_path / "delta").elements == 4 * 24
    group.run(go_on, other, str(tmp_path / "second"), 1)


def test_it_becomes_a_hugging_face_folder_without_being_put_together_first(runs, tmp_path):
    from megatron.checkpoint.hugging_face_export import to_folder

    for kind in ("delta", "whole"):
        to_folder(runs[0] / kind, tmp_path / kind)
    one, other = (load_file(tmp_path / kind / "model.safetensors") for kind in ("delta", "whole"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_biases_of_a_hugging_face_base_are_resumed_from_it(dtype, tmp_path, worker_group):
    """The base is a folder without tags, its word table lacks the rows of padding, and its numbers are fp32."""
    case = case_of("bloom", tp=2, bitfit=True, optimizer="adam", lr=1e-2, dropout=0.1, dtype=dtype)
    base = tmp_path / "hf"
    random_model("bloom").save_pretrained(base)
    group = worker_group(2)
    group.run(train_and_save, case, str(base), 2, str(tmp_path / "delta"), str(tmp_path / "whole"), False, None)
    assert read_delta(tmp_path / "delta/global_step2" / NAME).facts.base == str(base)
    wanted = group.run(go_on, case, str(tmp_path / "whole"), 2)
    for (losses, tensors), (losses_wanted, tensors_wanted) in zip(group.run(go_on, case, str(tmp_path / "delta"), 2), wanted):
        assert losses == losses_wanted and all(torch.equal(tensors[name], value) for name, value in tensors_wanted.items())


@pytest.mark.slow
@pytest.mark.parametrize("grid", [["--tensor-model-parallel-size", "2"], ["--bf16"]], ids=["TP2", "DP2-bf16"])
def test_a_command_line_with_a_hugging_face_base_resumes_its_deltas(grid, tmp_path):
    random_model("bloom", vocab=260).save_pretrained(tmp_path / "hf")
    flags = [*flags_of(tmp_path, tmp_path / "hf"), *grid, "--train-iters", "4", "--save", str(tmp_path / "run"), "--save-interval", "2",
             "--save-delta-only"]
    unbroken = training_lines(launch(flags, ranks=2))
    for more in ([], ["--load", str(tmp_path / "run")]):  # the base of the line, then the recorded one
        shutil.rmtree(tmp_path / "run" / "global_step4")
        files.write_text(tmp_path / "run" / "latest", "global_step2")
        resumed = training_lines(launch([*flags, *more], ranks=2))
        for key in ("iteration", "loss", "grad_norm"):
            assert [line[key] for line in resumed] == [line[key] for line in unbroken[2:]]


def test_one_process_goes_on_from_four(runs, worker_group):
    alone = dataclasses.replace(CASE, tp=1, pp=1, dropout=0.0)
    (delta, _), = worker_group(1).run(go_on, alone, str(runs[0] / "delta"), 2)
    (whole, _), = worker_group(1).run(go_on, alone, str(runs[0] / "whole"), 2)
    assert delta == whole


@pytest.mark.parametrize("index, name, told", [
    (3, "mlp.dense_h_to_4h.weight", "layers.0.mlp.dense_h_to_4h.weight"),
    (4, "input_layernorm.weight", "layers.1.input_layernorm.weight"),
    (1, "word_embeddings.weight", "embedding.word_embeddings.weight"),
    (6, "weight", "final_layernorm.weight")])
def test_another_base_is_refused_naming_the_first_tensor_that_differs(index, name, told, runs, tmp_path):
    shutil.copytree(runs[0] / "base", tmp_path / "other")
    path = files.layer_file(tmp_path / "other" / "global_step1", index, 0)
    values = files.read(path)
    values[name].view(-1)[-1 if index != 1 else 92 * 24] *= 1.0001  # the last row that is no padding
    torch.save(values, path)
    source = open_source(runs[0] / "delta/global_step2", CheckpointConfig(load=str(tmp_path / "other")))
    tags = {name: param.tag for name, param in _layer(index).named_parameters()}
    with pytest.raises(RunError, match=rf"other/global_step1 is not the base of .*, their {told} differs"):
        source.layer(index, tags)


def _layer(index):
    from small_runs import settings_of

    from megatron.model.pipe import GPTModel
    from megatron.mpu.context import ParallelContext
    from megatron.mpu.random import RandomStreams

    return GPTModel(settings_of(CASE).model, ParallelContext(), RandomStreams(1)).layers[str(index)]


def test_all_ranks_refuse_another_base_and_take_a_base_that_moved(runs, tmp_path, worker_group):
    folder = runs[0]
    shutil.copytree(folder / "delta", tmp_path / "run")
    write_base(str(tmp_path / "other"), CASE, seed=4)
    case = dataclasses.replace(CASE, tp=1, pp=2, save=str(tmp_path / "run"), load=str(tmp_path / "other"))
    said = worker_group(2).run(refusal_of, case)
    assert said[0] == said[1] and "their embedding.word_embeddings.weight differs" in said[0]
    shutil.copytree(folder / "base", tmp_path / "moved")
    assert worker_group(2).run(refusal_of, dataclasses.replace(case, load=str(tmp_path / "moved"))) == [None, None]


def test_padding_rows_do_not_count_and_a_lost_base_is_asked_for(runs, tmp_path):
    shutil.copytree(runs[0] / "base", tmp_path / "base")
    shutil.copytree(runs[0] / "delta", tmp_path / "run")
    path = files.layer_file(tmp_path / "base" / "global_step1", 1, 0)
    values = files.read(path)
    values["word_embeddings.weight"][93:] = 5.0
    torch.save(values, path)
    source = open_source(tmp_path / "run/global_step2", CheckpointConfig(load=str(tmp_path / "base")))
    source.layer(1, {name: param.tag for name, param in _layer(1).named_parameters()})
    delta = read_delta(tmp_path / "run/global_step2" / NAME)
    gone = dataclasses.replace(delta, facts=dataclasses.replace(delta.facts, base=str(tmp_path / "gone")))
    from megatron.checkpoint.delta_file import write_delta
    write_delta(tmp_path / "run/global_step2" / NAME, gone)
    with pytest.raises(RunError, match="holds biases only.*/gone.*resume with --load BASE"):
        open_source(tmp_path / "run/global_step2", CheckpointConfig(save=str(tmp_path / "run")))


def test_a_start_without_a_base_or_without_biases_is_refused(tmp_path, worker_group, capsys):
    said, = worker_group(1).run(without_base, Case(layers=1, bitfit=True, save=str(tmp_path / "run")))
    assert "starts from random weights: give the base they belong to with --load" in said
    for line in (f"{TINY} --save {tmp_path} --save-interval 5 --save-delta-only", f"{TINY} --bitfit --save-delta-only"):
        assert "--save-delta-only" in refusal(capsys, line)


def test_a_run_that_saved_whole_tags_needs_its_base_named(runs, tmp_path, worker_group):
    folder = runs[0]
    case = dataclasses.replace(CASE, tp=2, pp=1)
    shutil.copytree(folder / "whole", tmp_path / "run")
    said, _ = worker_group(2).run(switch_to_deltas, case, str(tmp_path / "run"), None)
    assert "does not say what its base was; give the base with --load" in said
    assert worker_group(2).run(switch_to_deltas, case, str(tmp_path / "run"), str(folder / "base")) == [None, None]
    write_base(str(tmp_path / "other"), CASE, seed=4)
    said, _ = worker_group(2).run(switch_to_deltas, case, str(tmp_path / "run"), str(tmp_path / "other"))
    assert "is not the base of this run" in said
