"""A manifest says which files make up a tag: what else lies in the folder is never read, and named once."""

import dataclasses
import re
import shutil
import sys

import pytest
import torch
from launching import ROOT
from safetensors.torch import load_file
from small_runs import Case, write_base
from stray_jobs import go_on, save_beside_a_stranger, start_from

sys.path.insert(0, str(ROOT / "tools"))
import bitfit_delta
import convert_checkpoint

from megatron.checkpoint import files, manifest
from megatron.checkpoint.load_plan import contents, plan_load
from megatron.checkpoint.manifest import damage, usable_tag
from megatron.checkpoint.sources import open_source
from megatron.config import CheckpointConfig
from megatron.errors import RunError

CASE = Case(layers=1, optimizer="adam", lr=1e-2, dropout=0.1)
TAG = "global_step2"
OPTIMIZER = "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
#: stray file -> the file of the tag that it is a spoilt copy of
STRAYS = {
    "beyond-the-depth": {"layer_09-model_00-model_states.pt": "layer_05-model_00-model_states.pt"},
    "a-share-of-rank-1": {"layer_03-model_01-model_states.pt": "layer_03-model_00-model_states.pt"},
    "all-shares-of-rank-1": {f"layer_{index:02d}-model_01-model_states.pt": f"layer_{index:02d}-model_00-model_states.pt"
                             for index in (1, 3, 5)},
    "another-name-of-a-share": {"layer_003-model_00-model_states.pt": "layer_03-model_00-model_states.pt"},
    "optimizer-of-another-dp-rank": {OPTIMIZER.format(1, 0): OPTIMIZER.format(0, 0)},
    "optimizer-of-another-tp-rank": {OPTIMIZER.format(0, 1): OPTIMIZER.format(0, 0)},
    "optimizer-of-bf16": {f"bf16_{OPTIMIZER.format(0, 0)}": OPTIMIZER.format(0, 0)},
    "another-mp-rank": {"mp_rank_01_model_states.pt": "mp_rank_00_model_states.pt"},
    "a-delta": {"delta.safetensors": "layer_05-model_00-model_states.pt"},
}
STRAYS["all-at-once"] = {stray: of for several in STRAYS.values() for stray, of in several.items()}


def spoilt(value):
    """``value`` with other numbers in every tensor."""
    if torch.is_tensor(value):
        return value + 1
    if isinstance(value, dict):
        return {key: spoilt(each) for key, each in value.items()}
    return [spoilt(each) for each in value] if isinstance(value, list) else value


def put(folder, strays) -> None:
    for stray, of in strays.items():
        torch.save(spoilt(files.read(folder / TAG / of, trust=True)), folder / TAG / stray)


def named_once(text: str, folder, strays) -> bool:
    """Whether one line of ``text`` says what is left out, with the first three names."""
    said = re.findall(rf"^(?:warning: )?{re.escape(str(folder / TAG))}: (.*) ignored: not in manifest.json", text, re.MULTILINE)
    names = sorted(strays)
    more = f" and {len(names) - 3} more" if names[3:] else ""
    return said == [", ".join(names[:3]) + more]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, worker_group):
    """A run saved at TP = PP = DP = 1 after one step and after two, as it is and with each kind of strays in its last tag."""
    from resume_jobs import first_half

    root = tmp_path_factory.mktemp("strays")
    write_base(str(root / "base"), CASE)
    for steps in (1, 2):
        worker_group(1).run(first_half, CASE, str(root / "base"), steps, str(root / "sound"))
    result = {"sound": root / "sound"}
    for kind, strays in STRAYS.items():
        result[kind] = root / kind
        shutil.copytree(root / "sound", result[kind])
        put(result[kind], strays)
    return result


def tensors(folder) -> dict:
    """All tensors in files of weights below ``folder``, by file and name."""
    found = {path.name: load_file(path) for path in folder.rglob("*.safetensors")} | {
        path.name: files.read(path) for path in folder.rglob("layer_*")}
    return {f"{file} {name}": value for file, values in found.items() for name, value in values.items()}


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys() and one
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_a_resume_goes_on_as_without_the_stray_file(folders, worker_group):
    """deepspeedai/DeepSpeed#1377: a stray file was taken for a part of the checkpoint."""
    results = dict(zip(folders, worker_group(1).run(go_on, CASE, [str(folder) for folder in folders.values()], 2)[0], strict=True))
    wanted, text = results.pop("sound")
    assert wanted["progress"]["iteration"] == 4 and "ignored" not in text
    for kind, (found, text) in results.items():
        assert named_once(text, folders[kind], STRAYS[kind]), text
        assert {key: found[key] for key in found if key != "tensors"} == {key: wanted[key] for key in found if key != "tensors"}, kind
        assert_equal(found["tensors"], wanted["tensors"])


def test_a_base_is_read_as_without_the_stray_file(folders, worker_group):
    """deepspeedai/DeepSpeed#1377: a stray file was taken for a part of the checkpoint."""
    results = dict(zip(folders, worker_group(1).run(start_from, CASE, [str(folder) for folder in folders.values()])[0], strict=True))
    wanted, text = results.pop("sound")
    assert "ignored" not in text
    for kind, (found, text) in results.items():
        assert named_once(text, folders[kind], STRAYS[kind]), text
        assert_equal(found, wanted)


@pytest.mark.parametrize("strays", STRAYS)
def test_tools_read_and_copy_what_is_listed(strays, folders, tmp_path, capsys):
    """deepspeedai/DeepSpeed#1377: a stray file was taken for a part of the checkpoint."""
    def written(kind):
        load, out = str(folders[kind]), tmp_path / kind
        said = []
        for tool, line in ((convert_checkpoint, ["reshape", "--load", load, "--save", out / "two", "--target-tp", "2"]),
                           (convert_checkpoint, ["to-hf", "--load", load, "--save", out / "hf"]),
                           (bitfit_delta, ["extract", "--checkpoint", load, "--output", out / "x" / "own.safetensors"]),
                           (bitfit_delta, ["apply", "--base", load, "--delta", out / "x" / "own.safetensors",
                                           "--output", out / "x" / "merged"])):
            (out / "x").mkdir(parents=True, exist_ok=True)
            assert tool.main([str(word) for word in line]) == 0, (line, capsys.readouterr().err)
            captured = capsys.readouterr()
            said.append(captured.out + captured.err)
        return out, said

    sound, _ = written("sound")
    out, said = written(strays)
    for text in said:
        assert named_once(text, folders[strays], STRAYS[strays]), text
    names = [sorted(str(path.relative_to(each)) for path in each.rglob("*")) for each in (out, sound)]
    assert names[0] == names[1] and "x/merged/global_step2/layer_03-model_00-model_states.pt" in names[0]
    for part in ("two", "hf", "x"):
        assert_equal(tensors(out / part), tensors(sound / part))


@pytest.mark.parametrize("strays", STRAYS)
def test_a_stray_file_is_no_damage_and_a_missing_one_is(strays, folders, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(folders[strays], folder)
    assert damage(folder / TAG, verify=True) is None and usable_tag(folder, verify=True) == (TAG, None)
    # ranks that do not see the strays of another disk see the same tag
    there, here = (contents(each / TAG) for each in (folders["sound"], folder))
    assert there == here
    lost = folder / TAG / next(iter(STRAYS[strays].values()))
    lost.unlink()  # what lies beside it, under another name, does not stand in for it
    for config in (CheckpointConfig(load=str(folder), save=str(folder)), CheckpointConfig(save=str(folder))):
        plan = plan_load(config)
        assert plan.tag == "global_step1" and f"{lost} is missing, manifest.json lists it" in plan.warning
    assert contents(folder / TAG) != there
    if "optim" not in lost.name:
        with pytest.raises(RunError, match=re.escape(f"{lost} is missing")):
            plan_load(CheckpointConfig(load=str(folder)))


def test_a_file_that_the_manifest_forgot_is_not_read(folders, tmp_path):
    shutil.copytree(folders["sound"] / TAG, tmp_path / TAG)
    facts = manifest.read(tmp_path / TAG)
    for name in ("layer_01-model_00-model_states.pt", "layer_03-model_00-model_states.pt"):
        manifest.write(tmp_path / TAG, dataclasses.replace(facts, files=tuple(each for each in facts.files if each.name != name)))
        assert manifest.unlisted(tmp_path / TAG) == [name]
        with pytest.raises(RunError, match=rf"is incomplete: it has no file for pipeline layer {name[7]} \({name}\)"):
            open_source(tmp_path / TAG)


def test_without_a_manifest_all_files_are_those_of_the_tag(folders, tmp_path):
    shutil.copytree(folders["all-shares-of-rank-1"] / TAG, tmp_path / TAG)
    (tmp_path / TAG / manifest.NAME).unlink()
    assert manifest.files_of(tmp_path / TAG) == sorted((tmp_path / TAG).iterdir())
    assert manifest.unlisted(tmp_path / TAG) == [] and open_source(tmp_path / TAG).degree == 2


def test_a_save_that_finds_a_file_of_another_job_in_its_tag_ends(folders, tmp_path, worker_group):
    base, name = folders["sound"].parent / "base", "layer_09-model_00-model_states.pt"
    said, = worker_group(1).run(save_beside_a_stranger, CASE, str(base), str(tmp_path / "run"), name)
    assert f"{name} is there, but none of this job's ranks wrote it" in said
    assert not [path for path in (tmp_path / "run").iterdir() if path.is_dir() or path.name == "latest"]
