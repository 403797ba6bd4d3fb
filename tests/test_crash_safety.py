"""Whatever ends a save, the tags before it are what they were, and the run goes on from the newest of them."""

import contextlib
import dataclasses
import json
import random
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from command_lines import TINY, refusal
from forked import run_ranks
from launching import ROOT, rank_environments, training_lines
from small_runs import Case, settings_of
from tiny_data import small_model_flags

from megatron.checkpoint import files, manifest, save
from megatron.checkpoint.load_plan import plan_load
from megatron.checkpoint.manifest import crc32_of, newest_valid_tag, usable_tag
from megatron.checkpoint.writer import TagWriter
from megatron.config import CheckpointConfig
from megatron.errors import RunError
from megatron.mpu.context import ParallelContext

LENGTH = 6


class Jobs:
    """Runs of one model, all with the same data and seed."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._flags = [*small_model_flags(scratch), "--hidden-dropout", "0.1", "--attention-dropout", "0.1",
                       "--eval-iters", "0", "--save-interval", "1"]
        self._number = 0

    def run(self, folder: Path, *more: str, ranks: int = 1, iterations: int = LENGTH, crashes: dict | None = None,
            timeout: float = 400) -> tuple[list[int], str]:
        """Exit codes and output; ``crashes`` maps a rank to what happens in a save of its."""
        self._number += 1
        logs = self.scratch / f"job{self._number}"
        (logs / "pids").mkdir(parents=True)
        environments = rank_environments(ranks, {rank: {"CRASH": json.dumps(
            {**(crashes or {}).get(rank, {}), "pids": str(logs / "pids")})} for rank in range(ranks)})
        flags = [*self._flags, "--train-iters", str(iterations), "--save", str(folder), "--load", str(folder),
                 "--allow-fresh-start", "--pipeline-model-parallel-size", str(ranks), *more]
        return run_ranks(ROOT / "tests" / "crash_script.py", flags, environments, logs, timeout)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def unbroken(jobs, tmp_path_factory):
    """The folder of a run that nothing happened to, with a tag of every iteration, and its training lines."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    codes, text = jobs.run(folder)
    assert codes == [0], text
    return folder, training_lines(text)


def tensors(folder: Path) -> dict[str, str]:
    """Checksums of the weights' and optimizer's files in a tag; paths and flags are in the others."""
    return {path.name: crc32_of(path) for path in folder.iterdir() if re.match("layer_|zero_", path.name)}


def everything(folder: Path) -> dict[str, str]:
    """Checksum of every file below ``folder``."""
    return {str(path.relative_to(folder)): crc32_of(path) for path in folder.rglob("*") if path.is_file()}


def announced(text: str) -> list[str]:
    """Tags that the job said were saved."""
    return [f"global_step{number}" for number in re.findall(r"successfully saved checkpoint at iteration +(\d+)", text)]


def number(tag: str) -> int:
    return int(tag.removeprefix("global_step"))


def put_strangers(folder: Path, unbroken: Path) -> dict[str, str]:
    """What no removal may touch: a tag without manifest, one of another run, notes."""
    shutil.copytree(unbroken / "global_step1", folder / "global_step90")
    (folder / "global_step90" / manifest.NAME).unlink()
    shutil.copytree(unbroken / "global_step1", folder / "global_step91")
    facts = manifest.read(folder / "global_step91")
    manifest.write(folder / "global_step91", dataclasses.replace(facts, run="another", sequence=0))
    (folder / "notes").mkdir()
    (folder / "notes" / "model.pt").write_text("mine")
    return {name: crc for name, crc in everything(folder).items() if name.startswith(("global_step9", "notes"))}


class Survivor:
    """A run that is killed again and again, and what must hold after each time."""

    def __init__(self, jobs: Jobs, folder: Path, unbroken: Path, lines: list[dict], ranks: int, *more: str) -> None:
        self.jobs, self.folder, self.more, self.ranks = jobs, folder, more, ranks
        self.expected = {line["iteration"]: (line["loss"], line["grad_norm"]) for line in lines}
        self.exact = {f"global_step{each}": tensors(unbroken / f"global_step{each}") for each in self.expected}
        self.strangers: dict[str, str] = {}
        self.unbroken, self.newest, self.inside = unbroken, 0, 0

    def run(self, crash: dict | None, iterations: int, rank: int = 0) -> str:
        codes, text = self.jobs.run(self.folder, *self.more, ranks=self.ranks, iterations=iterations,
                                    crashes={rank: crash} if crash else None)
        assert codes == ([-9] if crash else [0]) * self.ranks, (codes, text[-3000:])
        if self.newest:
            assert f"resuming from {self.folder} (global_step{self.newest})" in text, text[-3000:]
            assert training_lines(text)[0]["iteration"] == self.newest + 1
        for line in training_lines(text):
            assert (line["loss"], line["grad_norm"]) == self.expected[line["iteration"]]
        self.check(text)
        return text

    def check(self, text: str) -> None:
        tag, warning = usable_tag(self.folder, verify=True)
        if tag is None:
            assert not announced(text) and not self.newest
            return
        # killed right before the very first `latest`
        assert warning is None or (number(tag) == 1 and "has no file 'latest'" in warning), warning
        begun = re.findall(r"saving checkpoint at iteration +(\d+) to", text)
        self.inside += bool(begun) and f"global_step{begun[-1]}" not in announced(text)
        assert number(tag) >= max([self.newest, *map(number, announced(text))])
        for saved in [f"global_step{each}" for each in range(max(1, number(tag) - 1), number(tag) + 1)]:
            assert manifest.damage(self.folder / saved, verify=True) is None
            assert tensors(self.folder / saved) == self.exact[saved]
        assert self.strangers.items() <= everything(self.folder).items()
        self.newest = number(tag)
        self.strangers = self.strangers or put_strangers(self.folder, self.unbroken)


def test_a_run_killed_while_it_saves_goes_on_as_if_nothing_had_happened(jobs, unbroken, tmp_path):
    folder, lines = unbroken
    run = Survivor(jobs, tmp_path / "run", folder, lines, 1, "--keep-last", "2")
    # in the middle of the files, between manifest and folder, between folder and latest, in a removal
    run.run({"save": 2, "call": 11}, LENGTH)
    assert run.newest == 1 and (tmp_path / "run" / "global_step2.part").is_dir()
    run.run({"save": 2, "at": ["os.rename", "/global_step3"]}, LENGTH)
    assert run.newest == 2 and (tmp_path / "run" / "global_step3.part" / manifest.NAME).exists()
    run.run({"save": 2, "at": ["os.rename", "/latest"]}, LENGTH)
    assert run.newest == 3 and manifest.damage(tmp_path / "run" / "global_step4", verify=True) is None
    run.run(None, LENGTH)
    assert run.newest == LENGTH and run.inside == 3
    left = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
    assert left == {"global_step5", "global_step6", "global_step90", "global_step91", "notes"}


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--async-save"]], ids=["sync", "async"])
def test_two_ranks_killed_at_twenty_random_moments_of_a_save(more, jobs, tmp_path):
    """Half of them by the clock, half before a random one of the file operations of a random rank."""
    draw, length = random.Random(20), 48
    codes, text = jobs.run(tmp_path / "unbroken", ranks=2, iterations=length, crashes={0: {"save": 3}})
    assert codes == [0, 0], text
    seconds = min(float(each) for each in re.findall(r"saving took ([\d.]+) s", text))
    calls = int(re.search(r"file operations: (\d+)", text)[1])
    run = Survivor(jobs, tmp_path / "run", tmp_path / "unbroken", training_lines(text), 2, "--keep-last", "2", *more)
    for kill in range(20):
        moment = {"call": draw.randint(1, calls)} if kill % 2 else {"seconds": draw.uniform(0, seconds)}
        run.run({"save": draw.choice([1, 2]), **moment}, length, rank=0 if kill % 2 else draw.choice([0, 1]))
    run.run(None, length)
    assert run.newest == length and run.inside >= 15
    left = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
    assert left == {f"global_step{length - 1}", f"global_step{length}", "global_step90", "global_step91", "notes"}


def test_one_of_two_ranks_that_dies_or_cannot_write_ends_both(jobs, tmp_path):
    folder = tmp_path / "run"
    codes, killed = jobs.run(folder, ranks=2, crashes={1: {"save": 2, "call": 7, "alone": True}})
    assert codes == [1, -9], killed
    assert usable_tag(folder, verify=True) == ("global_step1", None)
    before = everything(folder / "global_step1")
    # a limit of the process stands for a disk that is full for one rank alone
    codes, refused = jobs.run(folder, ranks=2, crashes={1: {"save": 1, "limit": 40_000}})
    assert codes == [1, 1], refused
    said = re.findall(rf"^error: .*--save {folder}: global_step2 could not be written.*File too large.*", refused, re.M)
    assert len(said) == 1 and "rank 1: " in said[0] and "the previous checkpoint is untouched" in said[0]
    assert usable_tag(folder, verify=True) == ("global_step1", None)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"global_step1"}
    codes, text = jobs.run(folder, "--exit-interval", "2", ranks=2)
    assert codes == [0, 0], text
    assert everything(folder / "global_step1") == before
    assert [training_lines(each)[-1]["loss"] for each in (killed, refused)] == [training_lines(text)[0]["loss"]] * 2


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
    """A tmpfs of ``size`` mounted at ``folder``; yields False where this user may not mount."""
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
                                    stderr=subprocess.DEVNULL).returncode == 0
    try:
        yield bool(done)
    finally:
        if done:
            subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_the_run_and_costs_no_checkpoint(jobs, unbroken, tmp_path):
    """On a tmpfs with room for one tag and a half; without the right to mount, a limit on the length of files."""
    folder, stop = tmp_path / "disk" / "run", ["--exit-interval", "3", "--keep-last", "1"]
    with small_disk(tmp_path / "disk", "1100k") as mounted:
        crashes = {} if mounted else {0: {"save": 2, "limit": 60_000}}
        codes, text = jobs.run(folder, *stop, crashes=crashes)
        assert codes == [1], text
        assert re.search(rf"error.*--save {folder}: global_step2 could not be written: .*0 MiB are free there" if mounted
                         else "error.*global_step2 could not be written", text)
        assert usable_tag(folder, verify=True) == ("global_step1", None)
        assert tensors(folder / "global_step1") == tensors(unbroken[0] / "global_step1")
        assert not (folder / "global_step2.part").exists()
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=4m", str(tmp_path / "disk")], check=True)
        codes, text = jobs.run(folder, *stop)
        assert codes == [0] and f"resuming from {folder} (global_step1)" in text, text
        assert {path.name for path in folder.iterdir() if path.is_dir()} == {"global_step3"}
        assert tensors(folder / "global_step3") == tensors(unbroken[0] / "global_step3")


# --- damaged tags -------------------------------------------------------------------------------


def truncate(tag: Path) -> str:
    path = tag / "layer_03-model_00-model_states.pt"
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path} has "


def lose(tag: Path) -> str:
    path = next(tag.glob("zero_*"))
    path.unlink()
    return f"{path} is missing"


def rename(tag: Path) -> str:
    path = tag / "layer_01-model_00-model_states.pt"
    path.rename(tag / "layer_001-model_00-model_states.pt")
    return f"{path} is missing, manifest.json lists it"


def scramble(tag: Path) -> str:
    (tag / manifest.NAME).write_text("{")
    return f"{tag / manifest.NAME} cannot be read"


def rot(tag: Path) -> str:
    path = tag / "layer_04-model_00-model_states.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return f"{path} has checksum"


def misname(tag: Path) -> str:
    (tag.parent / "latest").write_text("global_step77")
    return "its file 'latest' names global_step77"


def empty(tag: Path) -> str:
    (tag.parent / "latest").write_text("")
    return "its file 'latest' names nothing"


def hide(tag: Path) -> str:
    (tag.parent / "latest").unlink()
    return "has no file 'latest'"


@pytest.mark.parametrize("damage", [truncate, lose, rename, scramble, misname, empty, hide, rot])
def test_a_resume_goes_on_from_the_newest_whole_tag_and_says_why(damage, unbroken, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(unbroken[0], folder, copy_function=shutil.copy)
    what = damage(folder / "global_step6")
    whole = "global_step6" if damage in (misname, empty, hide) else "global_step5"
    tag, warning = usable_tag(folder, verify=True)
    assert tag == whole and what in warning and f"from {whole}" in warning
    assert newest_valid_tag(folder, verify=True) == whole
    if damage is rot:  # found by checksums alone
        assert usable_tag(folder) == ("global_step6", None)
        return
    plan = plan_load(CheckpointConfig(load=str(folder), save=str(folder), save_interval=1))
    assert plan.tag == whole and plan.resume and plan.progress and what in plan.warning
    if damage is lose:  # the optimizer's files, which a start from weights alone does not read
        for load_only in (CheckpointConfig(load=str(folder)), CheckpointConfig(load=str(folder), save=str(folder), load_optim=False)):
            assert (plan_load(load_only).tag, plan_load(load_only).warning) == ("global_step6", None)
    if damage in (truncate, rename, scramble):  # a base must be what it is said to be
        with pytest.raises(RunError, match=re.escape(what)):
            plan_load(CheckpointConfig(load=str(folder)))


def test_without_any_whole_tag_the_sentence_names_the_file(unbroken, tmp_path):
    shutil.copytree(unbroken[0] / "global_step1", tmp_path / "global_step1")
    (tmp_path / "latest").write_text("global_step1")
    what = truncate(tmp_path / "global_step1")
    for config in (CheckpointConfig(save=str(tmp_path), save_interval=1), CheckpointConfig(load=str(tmp_path))):
        with pytest.raises(RunError, match=re.escape(what)):
            plan_load(config)


def test_four_damages_at_once_and_the_run_goes_on_untouched(jobs, unbroken, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(unbroken[0], folder)
    what = misname(folder / "global_step6")
    truncate(folder / "global_step6")
    rename(folder / "global_step5")
    rot(folder / "global_step4")
    before = everything(folder)
    codes, text = jobs.run(folder, "--verify-checkpoint", "--exit-interval", "4")
    assert codes == [0] and what in text and f"resuming from {folder} (global_step3)" in text, text
    after = everything(folder)
    assert {name for name in before if before[name] != after[name]} == {
        "latest", "global_step4/manifest.json", "global_step4/mp_rank_00_model_states.pt",
        "global_step4/layer_04-model_00-model_states.pt"}
    assert before.keys() == after.keys()
    assert tensors(folder / "global_step4") == tensors(unbroken[0] / "global_step4")


def test_a_tag_without_manifest_loads_with_a_note(unbroken, tmp_path):
    shutil.copytree(unbroken[0] / "global_step1", tmp_path / "global_step1")
    (tmp_path / "global_step1" / manifest.NAME).unlink()
    (tmp_path / "latest").write_text("global_step1")
    plan = plan_load(CheckpointConfig(save=str(tmp_path), save_interval=1, verify_checkpoint=True))
    assert plan.tag == "global_step1" and plan.resume
    assert "has no manifest.json" in plan.warning and "\n" not in plan.warning


@pytest.mark.parametrize("edit", [
    {"files": {"a.pt": {"bytes": "3", "crc32": "0"}}}, {"files": {"../a.pt": {"bytes": 3, "crc32": "0"}}}, {"files": ["a.pt"]},
    {"sequence": "1"}, {"iteration": None}, {"more": 1}], ids=str)
def test_an_edited_manifest_is_damage_and_no_other_error(edit, tmp_path):
    tag = tmp_path / "global_step1"
    tag.mkdir()
    (tag / "a.pt").write_bytes(b"abc")
    manifest.write(tag, manifest.Manifest(1, "run", 1, {}, "fp32", (manifest.Entry("a.pt", 3, "352441c2"),)))
    assert manifest.damage(tag, verify=True) is None
    assert manifest.tags_with_manifest(tmp_path)[0][1].run == "run"
    (tag / manifest.NAME).write_text(json.dumps({**json.loads((tag / manifest.NAME).read_text()), **edit}))
    assert f"{tag / manifest.NAME} cannot be read" in manifest.damage(tag, verify=True)
    assert manifest.tags_with_manifest(tmp_path) == [("global_step1", None)]


def test_a_start_that_counts_anew_is_another_run_whose_base_stays(unbroken):
    """--keep-last removes tags of the run that saves, and what a run started from is none of them."""
    own = manifest.read(unbroken[0] / "global_step6").run
    config = CheckpointConfig(load=str(unbroken[0]), save=str(unbroken[0]), save_interval=1, keep_last=1)
    runs = [save._run_of(plan_load(dataclasses.replace(config, **more)))
            for more in ({}, {"load": None}, {"finetune": True}, {"reset_progress": True}, {"save": "elsewhere"})]
    assert runs[:2] == [own, own] and len({own, *runs[2:]}) == 4


def test_a_tag_that_was_being_replaced_is_found(unbroken, tmp_path):
    """Killed between the two renames of replacing it."""
    shutil.copytree(unbroken[0] / "global_step2", tmp_path / "global_step2")
    (tmp_path / "latest").write_text("global_step2")
    (tmp_path / "global_step2").rename(files.aside(tmp_path / "global_step2"))
    plan = plan_load(CheckpointConfig(save=str(tmp_path), save_interval=1))
    assert plan.path == tmp_path / ".global_step2.old" and plan.resume


# --- writing ------------------------------------------------------------------------------------


def test_a_manifest_lists_what_is_on_disk(unbroken):
    for tag in unbroken[0].glob("global_step*"):
        facts = manifest.read(tag)
        assert facts.iteration == facts.sequence == number(tag.name)
        assert facts.degrees == {"tp": 1, "pp": 1, "dp": 1} and facts.dtype == "fp32"
        on_disk = {path.name for path in tag.iterdir()} - {manifest.NAME}
        assert {entry.name for entry in facts.files} == on_disk and len(on_disk) == 6
        assert all(entry.bytes == (tag / entry.name).stat().st_size for entry in facts.files)
    small = next(entry for entry in facts.files if entry.name.startswith("layer_06"))
    assert int(small.crc32, 16) == plain_crc32((tag / small.name).read_bytes())


def plain_crc32(data: bytes) -> int:
    """CRC-32 of ISO 3309, bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_a_writer_keeps_the_first_error_and_leaves_nothing_behind(tmp_path, monkeypatch):
    real = open

    def full(path, mode="r", *more, **named):
        return real("/dev/full" if "bad" in str(path) and "w" in mode else path, mode, *more, **named)

    monkeypatch.setattr("builtins.open", full)
    for background in (False, True):
        writer = TagWriter(background=background)
        writer.save({"x": torch.ones(3)}, tmp_path / f"good{background}.pt")
        writer.save({"x": torch.ones(100_000)}, tmp_path / "bad.pt")
        writer.save({"x": torch.ones(3)}, tmp_path / "later.pt")
        entries, problem = writer.finish()
        assert [entry.name for entry in entries] == [f"good{background}.pt"]
        assert "No space left on device" in problem
    assert sorted(path.name for path in tmp_path.iterdir()) == ["goodFalse.pt", "goodTrue.pt"]


def test_a_background_writer_writes_the_state_of_the_call(tmp_path, monkeypatch):
    gate, replace = threading.Event(), files.replace

    def slow(path, write):
        assert gate.wait(20)
        replace(path, write)

    monkeypatch.setattr(files, "replace", slow)
    whole = torch.arange(12.0)
    state = {"a": whole[:6], "b": whole[3:], "c": {"d": [torch.ones(2, dtype=torch.bfloat16)]}}
    now = TagWriter()
    gate.set()
    now.save(state, tmp_path / "now.pt")
    gate.clear()
    later = TagWriter(background=True)
    later.save(state, tmp_path / "later.pt")
    later.write_bytes(b"delta", tmp_path / "delta.bin")
    whole.zero_()  # training goes on
    assert not later.done and not (tmp_path / "later.pt").exists()
    gate.set()
    (now_entry,), _ = now.finish()
    entries, problem = later.finish()
    assert problem is None and later.done
    assert (tmp_path / "later.pt").read_bytes() == (tmp_path / "now.pt").read_bytes()
    assert [(each.bytes, each.crc32) for each in entries] == [
        (now_entry.bytes, now_entry.crc32), (5, f"{plain_crc32(b'delta'):08x}")]


def test_rank_0_waits_for_files_of_other_nodes_and_says_when_they_never_come(tmp_path, monkeypatch):
    saver = save.Saver(settings_of(Case(save=str(tmp_path))), ParallelContext())
    (tmp_path / "global_step3.part").mkdir()
    pending = save._Pending("global_step3", 3, TagWriter(), 0.0, torch.device("cpu"))
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    entries = [manifest.Entry("layer_03-model_00-model_states.pt", 4, "00000000")]
    with pytest.raises(RunError, match="layer_03.*missing.*file system that all ranks share"):
        saver._publish(pending, entries)
    assert sum(waited) == sum(save.NETWORK_DELAYS) and not (tmp_path / "latest").exists()
    monkeypatch.setattr("time.sleep", lambda seconds: seconds == 4 and (
        tmp_path / "global_step3.part" / entries[0].name).write_text("late"))
    saver._publish(pending, entries)
    assert usable_tag(tmp_path) == ("global_step3", None)


def test_a_second_job_in_the_same_folder_is_noticed(tmp_path):
    """A requeued job whose first instance still runs: the later save of the two ends its job, and removes nothing."""
    def publish(saver, iteration):
        (tmp_path / f"global_step{iteration}.part").mkdir()
        saver._publish(save._Pending(f"global_step{iteration}", iteration, TagWriter(), 0.0, torch.device("cpu")), [])

    one, other = (save.Saver(settings_of(Case(save=str(tmp_path))), ParallelContext()) for _ in range(2))
    publish(one, 5)
    publish(one, 10)
    with pytest.raises(RunError, match="another job has saved global_step10 into this folder"):
        publish(other, 7)
    assert usable_tag(tmp_path) == ("global_step10", None)
    publish(one, 15)
    publish(save.Saver(settings_of(Case(save=str(tmp_path))), ParallelContext()), 20)
    assert manifest.read(tmp_path / "global_step20").sequence == 4


@pytest.mark.parametrize("flag", ["--keep-last 2", "--async-save"])
def test_flags_about_saving_need_a_folder_to_save_to(flag, capsys):
    assert f"{flag} concerns what is saved; give --save too" in refusal(capsys, f"{TINY} {flag}")


def test_an_asynchronous_save_writes_the_files_of_a_synchronous_one(jobs, unbroken, tmp_path):
    codes, text = jobs.run(tmp_path / "run", "--async-save", "--exit-interval", "3")
    assert codes == [0] and announced(text) == ["global_step1", "global_step2", "global_step3"], text
    for tag in announced(text):
        assert tensors(tmp_path / "run" / tag) == tensors(unbroken[0] / tag)
        assert manifest.damage(tmp_path / "run" / tag, verify=True) is None
    assert usable_tag(tmp_path / "run", verify=True) == ("global_step3", None)
