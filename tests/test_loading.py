"""Which part of a checkpoint a start takes: docs/loading.md, cell by cell, and the folders it can be given."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from loading_jobs import cells, step_without_rate, weights_without_optimizer, what_all_say

from megatron.checkpoint import load_plan, manifest
from megatron.checkpoint.load_plan import plan_load
from megatron.config import CheckpointConfig
from megatron.errors import RunError

DOC = Path(__file__).parent.parent / "docs" / "loading.md"


def table():
    """Rows of the table in docs/loading.md: flags -> {column: word}."""
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")]
             for line in DOC.read_text().splitlines() if line.startswith("| ")]
    head = next(at for at, line in enumerate(lines) if line[0] == "flags")
    rows = {}
    for flags, *words in lines[head + 2:]:
        if not flags.startswith("`"):
            break
        assert flags.strip("`") not in rows, f"{flags} stands in the table twice"
        rows[flags.strip("`")] = dict(zip(lines[head][1:], words, strict=True))
    return rows


#: folder that was read, below the test's own -> what the table calls its contents
SOURCES = {"nothing": "nothing", "BASE/global_step1": "BASE", "RUN/global_step2": "RUN", "TORN/global_step1": "RUN before",
           "ONE/global_step1": "BASE", "SEVERAL/global_step1": "BASE", "HF": "BASE"}
COLUMNS = ("weights", "fp32 masters", "Adam", "iteration", "samples", "LR progress", "LR constants", "loss scale", "RNG")


@pytest.fixture(scope="module")
def started(worker_group, tmp_path_factory):
    """What the saved runs and the starts of all rows hold."""
    known, seen = worker_group(1).run(cells, str(tmp_path_factory.mktemp("loading")), list(table()))[0]
    for column in COLUMNS:
        # otherwise a cell could not tell one from the other
        values = [known[name][column] for name in ("BASE", "RUN before", "RUN", "fresh")]
        least = {"LR constants": 2}.get(column, 3)
        assert len({repr(value) for value in values}) >= least, column
    return known, seen


def word_for(column: str, values: dict, known: dict, source: str) -> str:
    """What docs/loading.md calls the value that a start holds."""
    value = values[column]
    if column == "fp32 masters" and value == values["weights as masters"]:
        return "= weights"
    if source in known and value == known[source][column]:
        return "restored"
    return "fresh" if value == known["fresh"][column] else f"neither ({value})"


def test_the_table_names_all_parts_and_the_usual_lines():
    rows = table()
    assert all(tuple(row) == ("read", *COLUMNS) for row in rows.values())
    assert len(rows) >= 35


@pytest.mark.parametrize("row", list(table()))
def test_a_start_holds_what_the_table_says(row, started):
    """deepspeedai/DeepSpeedExamples#114: flags of fine-tuning were ignored under DeepSpeed; here each cell of the table is real."""
    known, seen = started
    said, values = table()[row], seen[row]
    if said["read"] == "error":
        assert isinstance(values, str), f"not refused: {values}"
        assert set(said.values()) == {"error"}
        return
    assert isinstance(values, dict), f"refused: {values}"
    source = SOURCES[values["read"]]
    found = {column: word_for(column, values, known, source) for column in COLUMNS}
    rate = float((re.search(r"--lr (\S+)", row) or ["", "1e-3"])[1])
    if said["LR constants"] == "flags" and values["LR constants"] == {
            "max_lr": rate, "min_lr": 0.0, "warmup_steps": 0, "decay_steps": 400, "decay_style": "linear"}:
        found["LR constants"] = "flags"
    assert {"read": source, **found} == said
    assert values["rate"] == values["wanted rate"], "the optimizer does not use the rate of the schedule"


@pytest.mark.parametrize("row, words", [
    ("--load RUN --save RUN --lr 5e-4", ["0.001", "0.0005", "--override-lr-scheduler", "--use-checkpoint-lr-scheduler"]),
    ("--load MISSING --save NEW", ["MISSING", "no such folder", "--allow-fresh-start"]),
    ("--load EMPTY --save NEW", ["EMPTY", "is empty", "--allow-fresh-start"]),
    ("--load TORN --save NEW", ["TORN", "layer_03", "bytes", "tags there: global_step1, global_step2"]),
    ("--load STRANGE --save NEW", ["STRANGE", "'../BASE/global_step1'", "name of one folder"]),
    ("--load BASE --save STRANGE", ["--save", "STRANGE", "'../BASE/global_step1'"]),
    ("--load SEVERAL --save NEW", ["global_step1, global_step2", "SEVERAL/latest", "--load", "SEVERAL/global_step2"]),
])
def test_an_error_says_what_was_found_and_what_to_do(row, words, started):
    """NVIDIA-NeMo/Megatron-Bridge#1649: a wrong path, and training went on from random weights; above all BitFit must not.

    bigscience-workshop/Megatron-DeepSpeed#343 with #350: without ``latest`` one of several tags must be named.
    """
    said = started[1][row]
    assert all(word in said for word in words), said
    assert said.count("\n") == 0


@pytest.mark.parametrize("row, words", [
    ("--save TORN", ["global_step2 is damaged", "layer_03", "global_step1"]),
    ("--load ONE --save NEW", ["no file 'latest'", "its only tag global_step1 is read"]),
    ("--load SEVERAL/TAG --save NEW", ["is one tag itself"]),
    ("--load BASE --save RUN", []),
])
def test_what_is_odd_about_a_checkpoint_is_said(row, words, started):
    """bigscience-workshop/Megatron-DeepSpeed#343 with #350, deepspeedai#352: no ``latest``, and a tag that is named."""
    said = started[1][row]["warning"]
    assert all(word in said for word in words) if words else said is None, said


# --- masters ------------------------------------------------------------------------------------

WEIGHTS_ONLY = ["--load {run} --save {new}", "--load {run} --save {run} --no-load-optim"]


WITHOUT_OPTIMIZER = ["--load RUN --save NEW --finetune --no-load-optim --no-load-rng",
                     "--load RUN --save RUN --finetune --no-load-optim --no-load-rng --verify-checkpoint",
                     "--load RUN --save NEW --bitfit --verify-checkpoint",
                     "--load RUN/global_step2 --save NEW --finetune --no-load-optim --no-load-rng"]


def test_weights_alone_need_no_optimizer_file_and_count_from_0(worker_group, tmp_path):
    """deepspeedai/DeepSpeedExamples#114, deepspeedai/Megatron-DeepSpeed#308: counters went on, optimizer files were demanded."""
    run, fresh, seen = worker_group(1).run(weights_without_optimizer, str(tmp_path), WITHOUT_OPTIMIZER)[0]
    assert run["iteration"] == 2 and len(seen) == 4
    for row, (held, read, counters) in seen.items():
        assert read == "global_step2" and counters == (0, 0, 0, 0), row
        assert held["weights"] == run["weights"] != fresh["weights"]
        assert held["fp32 masters"] == held["weights as masters"]
        for column in ("Adam", "iteration", "samples", "LR progress", "loss scale", "RNG"):
            assert held[column] == fresh[column] != run[column], (row, column)


@pytest.mark.parametrize("precision, stage", [("", 0), ("", 1), ("--bf16", 0), ("--bf16", 1), ("--fp16", 0), ("--fp16", 1),
                                              ("--bitfit", 1), ("--bitfit --bf16", 1), ("--bitfit --fp16", 0)])
def test_after_a_load_of_weights_a_step_with_rate_0_changes_nothing(precision, stage, worker_group, tmp_path):
    told = worker_group(1).run(step_without_rate, str(tmp_path), stage, precision, WEIGHTS_ONLY)[0]
    for kind, (masters_equal, weights_loaded, changed, adam_saw) in told.items():
        assert masters_equal and weights_loaded and changed == 0 and adam_saw, (kind, told[kind])


# --- folders ------------------------------------------------------------------------------------


def tag_in(folder: Path, tag: str = "global_step5", weights: bytes = b"w", latest: bool = True) -> Path:
    """A folder that looks like a checkpoint to all that does not read its files."""
    (folder / tag).mkdir(parents=True)
    (folder / tag / "layer_01-model_00-model_states.pt").write_bytes(weights)
    (folder / tag / "mp_rank_00_model_states.pt").write_bytes(b"state")
    if latest:
        (folder / "latest").write_text(tag)
    return folder


@pytest.mark.parametrize("text", ["../x", "/etc", "a/b", "..", ".", "a\nb", "a b", "\0", ".hidden", "x" * 5000, "a\\b"])
@pytest.mark.parametrize("flags", [dict(load=""), dict(save=""), dict(load="", save="")], ids=["load", "save", "both"])
def test_a_latest_that_is_no_plain_name_is_refused(text, flags, tmp_path):
    tag_in(tmp_path / "run" / "inner")
    root = tag_in(tmp_path / "run")
    (root / "latest").write_text(text)
    with pytest.raises(RunError, match=r"its file 'latest' holds '.*should hold the name of one folder in it.*global_step5") as caught:
        plan_load(CheckpointConfig(**dict.fromkeys(flags, str(root)), save_interval=1, allow_fresh_start=True))
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_an_empty_latest_is_refused_and_so_is_one_that_cannot_be_read(tmp_path):
    root = tag_in(tmp_path / "run")
    (root / "latest").write_text(" \n")
    for config in (CheckpointConfig(load=str(root)), CheckpointConfig(save=str(root)), CheckpointConfig(load=str(root), save=str(root))):
        with pytest.raises(RunError, match="'latest' (holds ''|names nothing).*global_step5"):
            plan_load(config)
    (root / "latest").unlink()
    (root / "latest").mkdir()
    with pytest.raises(RunError, match="'latest' cannot be read"):
        plan_load(CheckpointConfig(load=str(root)))


def test_a_newline_after_the_name_is_no_reason_to_refuse(tmp_path):
    root = tag_in(tmp_path / "base")
    (root / "latest").write_text("global_step5\n")
    assert plan_load(CheckpointConfig(load=str(root))).tag == "global_step5"


def test_tags_are_found_by_what_they_hold(tmp_path):
    for tag in ("global_step10", "global_step9", "release"):
        tag_in(tmp_path, tag, latest=False)
    for no_tag in ("global_step11.part", "global_step8.old", ".hidden"):
        tag_in(tmp_path, no_tag, latest=False)
    (tmp_path / "logs").mkdir()
    assert load_plan.tags_in(tmp_path) == ["global_step9", "global_step10", "release"]


def test_a_run_is_not_led_back_by_naming_one_of_its_tags(tmp_path):
    root = str(tag_in(tag_in(tmp_path / "run"), "global_step7"))
    with pytest.raises(RunError, match="global_step5 is a tag of this run, which would go on from global_step7.*write global_step5 into"):
        plan_load(CheckpointConfig(load=f"{root}/global_step5", save=root))
    plan = plan_load(CheckpointConfig(load=f"{root}/global_step5", save=str(tmp_path / "other")))
    assert plan.weights_only and plan.path == Path(root, "global_step5")
    # a base that lies in the folder of the run is a base
    tag_in(Path(root, "base"), "global_step1")
    assert plan_load(CheckpointConfig(load=f"{root}/base", save=root)).tag == "global_step7"


def test_a_hugging_face_folder_is_a_base(tmp_path):
    root = tmp_path / "bloom"
    root.mkdir()
    (root / "config.json").write_text("{}")
    (root / "model.safetensors").write_bytes(b"")
    for config in (CheckpointConfig(load=str(root), save=str(tmp_path / "new")), CheckpointConfig(load=str(root), save=str(root))):
        plan = plan_load(config)
        assert plan.weights_only and plan.tag is None and plan.path == root and "Hugging Face" in plan.reason
    assert plan_load(CheckpointConfig(load=str(root)), eval_only=True).weights_only
    tag_in(root)
    assert not load_plan.is_hugging_face(root) and plan_load(CheckpointConfig(load=str(root))).tag == "global_step5"


@pytest.mark.parametrize("flags", [dict(finetune=True), dict(reset_progress=True)], ids=["finetune", "reset-progress"])
def test_flags_that_act_at_every_start_are_pointed_out(flags, tmp_path):
    root, other = str(tag_in(tmp_path / "run")), str(tmp_path / "other")
    told = plan_load(CheckpointConfig(load=root, save=root, **flags)).reason
    assert "each start with these flags counts from 0 again" in told and "replaces checkpoints" in told and "--save" in told
    assert "each start" not in plan_load(CheckpointConfig(load=root, save=root)).reason
    assert "each start" not in plan_load(CheckpointConfig(load=root, save=other, **flags)).reason


def test_a_run_of_biases_says_that_its_base_is_read_again(tmp_path):
    root, base = tag_in(tmp_path / "run"), tag_in(tmp_path / "base")
    config = CheckpointConfig(load=str(base), save=str(root))
    assert f"--load {base} was its base and is not read again" in plan_load(config).reason
    (root / "global_step5" / "layer_01-model_00-model_states.pt").rename(root / "global_step5" / "delta.safetensors")
    assert f"the weights that do not train come from its base, --load {base}" in plan_load(config).reason


def test_another_format_is_named(tmp_path):
    (tmp_path / "latest_universal").write_text("1000")
    with pytest.raises(RunError, match="latest_universal in it shows .* format, which is not read"):
        plan_load(CheckpointConfig(load=str(tmp_path)))


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(RunError, match="weights.pt holds no checkpoint .it is a file"):
        plan_load(CheckpointConfig(load=str(tmp_path / "weights.pt")))


# --- all ranks ----------------------------------------------------------------------------------


def other_state(root: Path) -> None:
    """Another iteration in a state file of the same length, as a zip file shows it at its end."""
    path = root / "run" / "global_step5" / "mp_rank_00_model_states.pt"
    torch.save({"iteration": 6}, path)


def other_manifest(root: Path) -> None:
    entry = manifest.Entry("layer_01-model_00-model_states.pt", 1, "deadbeef")
    state = root / "run" / "global_step5" / "mp_rank_00_model_states.pt"
    manifest.write(root / "run" / "global_step5",
                   manifest.Manifest(5, "r", 1, {}, "fp32", (entry, manifest.Entry(state.name, state.stat().st_size, "0" * 8))))


CHANGES = {
    "no folder": lambda root: shutil.rmtree(root / "run"),
    "no latest": lambda root: (root / "run" / "latest").unlink(),
    "another latest": lambda root: tag_in(root / "run", "global_step6"),
    "a file less": lambda root: (root / "run" / "global_step5" / "layer_01-model_00-model_states.pt").unlink(),
    "another length": lambda root: (root / "run" / "global_step5" / "layer_01-model_00-model_states.pt").write_bytes(b"ww"),
    "another iteration": other_state,
    "another manifest": other_manifest,
}


def test_ranks_that_see_other_files_stop_together(worker_group, tmp_path):
    """huggingface/transformers#28270: one rank resumed and the other began anew.

    Each rank works in a folder of its own, as on nodes whose file systems differ.
    """
    views = {}
    for change in (None, *CHANGES):
        roots = [tmp_path / f"{change}{rank}" for rank in range(2)]
        for root in roots:
            torch.save({"iteration": 5}, tag_in(root / "run") / "global_step5" / "mp_rank_00_model_states.pt")
            if change == "another manifest":
                other_manifest(root)
        if change == "another manifest":
            path = roots[1] / "run" / "global_step5" / manifest.NAME
            path.write_text(path.read_text().replace("deadbeef", "deadbeee"))
        elif change:
            CHANGES[change](roots[1])
        views[change] = [str(root) for root in roots]
    group = worker_group(2)
    for flags in (dict(load="run"), dict(save="run")):
        assert group.run(what_all_say, views[None], flags) == ["run global_step5"] * 2
    for flags in (dict(save="run"), dict(load="run")):
        answers = group.run(all_views, views, flags)
        for change, said in answers[0].items():
            assert said == answers[1][change]
            if change is not None:
                assert said.startswith("refused: rank 1: sees ") and "where rank 0 sees" in said and "\n" not in said, said
    assert "no folder" in answers[0]["no folder"] and "'global_step6'" in answers[0]["another latest"]
    assert "1 files of" in answers[0]["a file less"]
    there, away = views["no folder"]
    assert group.run(what_all_say, [away, there], dict(load="run", allow_fresh_start=True)) == 2 * [
        "refused: rank 1: sees 'global_step5' in run/latest, where rank 0 sees no folder (No such file or directory); "
        "all ranks need the same files"]


def complete(folder: Path, tag: str, sequence: int) -> None:
    """Give a tag the manifest of its files."""
    path = tag_in(folder, tag, weights=bytes(100 * [sequence])) / tag
    entries = tuple(manifest.Entry(file.name, file.stat().st_size, manifest.crc32_of(file)) for file in sorted(path.iterdir()))
    manifest.write(path, manifest.Manifest(sequence, "r", sequence, {}, "fp32", entries))


def test_ranks_share_the_reading_of_checksums(worker_group, tmp_path):
    views = {}
    for name in ("layer_01-model_00-model_states.pt", "mp_rank_00_model_states.pt", None):
        root = tmp_path / str(name)
        for sequence, tag in enumerate(("global_step5", "global_step7"), start=1):
            complete(root / "run", tag, sequence)
        if name:
            path = root / "run" / "global_step7" / name
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        views[name] = [str(root)] * 2
    group = worker_group(2)
    for verify, damaged in ((False, "global_step7"), (True, "global_step5")):
        for said in group.run(all_views, views, dict(save="run", verify_checkpoint=verify)):
            assert said == {name: f"run {damaged if name else 'global_step7'}" for name in views}
    for said in group.run(all_views, views, dict(load="run", verify_checkpoint=True)):
        assert said.pop(None) == "run global_step7"
        for name, sentence in said.items():
            assert sentence.startswith("refused: --load run: global_step7 is damaged") and name in sentence and "checksum" in sentence


def test_a_latest_that_names_nothing_stops_a_base_and_not_a_resume(tmp_path):
    root = tmp_path / "run"
    complete(root, "global_step5", 1)
    (root / "latest").write_text("global_step9")
    for config in (CheckpointConfig(save=str(root)), CheckpointConfig(load=str(root), save=str(root))):
        plan = plan_load(config)
        assert plan.resume and plan.tag == "global_step5" and "names global_step9" in plan.warning
    with pytest.raises(RunError, match="names global_step9.*tags there: global_step5"):
        plan_load(CheckpointConfig(load=str(root), allow_fresh_start=True))
    with pytest.raises(RunError, match="names global_step9"):
        plan_load(CheckpointConfig(load=str(root), save=str(root)), eval_only=True)


def all_views(views: dict, flags: dict) -> dict:
    """Job: what all say of each set of folders."""
    return {name: what_all_say(folders, flags) for name, folders in views.items()}
