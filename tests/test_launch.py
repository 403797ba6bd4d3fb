"""Whole jobs through torchrun: the pull request's own experiment, and what a user does next."""

import re
import shutil
import subprocess
import sys

import pytest
import torch
from launching import ROOT, facts, launch, run_alone, torchrun, training_lines
from tiny_data import small_model_flags, write_tokenizer

from megatron.checkpoint import files
from megatron.data.indexed_dataset import IndexedDataset

GRID = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
#: what two runs that should be one must share in each training line
KEPT = ("iteration", "consumed_samples", "learning_rate", "global_batch_size", "loss", "grad_norm")
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]


def labels_of(log: str) -> list[str]:
    """Field names of the first training line, in order."""
    line = next(line for line in log.splitlines() if re.search(r"iteration +1/", line))
    return re.findall(r"\| ([a-zA-Z ()]+):", line)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A base trained with TP=2, PP=2, and the flags of every further launch."""
    folder = tmp_path_factory.mktemp("job")
    flags = [*small_model_flags(folder), *GRID]
    base = launch([*flags, "--train-iters", "12", "--save", str(folder / "base"), "--save-interval", "12"])
    assert training_lines(base)[-1]["loss"] < training_lines(base)[0]["loss"]
    return folder, flags


@pytest.mark.parametrize("nodes", [pytest.param(1, id="one node"),
                                   pytest.param(2, id="two nodes", marks=pytest.mark.slow)])
def test_two_launches_that_differ_in_bitfit_alone(nodes, job):
    folder, flags = job
    flags = [*flags, "--train-iters", "4", "--load", str(folder / "base")]
    full = torchrun(flags, nodes=nodes)
    bitfit = torchrun([*flags, "--bitfit"], nodes=nodes)
    first_full, first_bitfit = training_lines(full)[0], training_lines(bitfit)[0]
    assert first_full["loss"] == first_bitfit["loss"], "the same forward pass, dropout included"
    assert 0 < first_bitfit["grad_norm"] < first_full["grad_norm"]
    assert labels_of(full) == labels_of(bitfit) and len(labels_of(full)) >= 11
    assert facts(full)["trainable parameters"] == facts(full)["total parameters"]
    layers, hidden = 2, 32
    assert facts(bitfit)["trainable parameters"] == 11 * hidden * layers + 2 * hidden
    assert facts(bitfit)["optimizer state bytes (all ranks)"] < facts(full)["optimizer state bytes (all ranks)"] / 20


def test_bitfit_learns_saves_and_resumes_without_edited_flags(job, tmp_path, monkeypatch):
    """deepspeedai/DeepSpeed#943: no accelerator, and no compiler on the path."""
    monkeypatch.setenv("PATH", "/nonexistent")
    folder, flags = job
    run = str(tmp_path / "run")
    flags = [*flags, *NO_DROPOUT, "--bitfit", "--load", str(folder / "base"), "--save", run,
             "--save-interval", "10", "--train-iters", "20"]
    first = launch([*flags, "--exit-interval", "10"])
    assert "weights only" in first and training_lines(first)[-1]["iteration"] == 10
    later = launch(flags)
    assert "resuming" in later and training_lines(later)[0]["iteration"] == 11
    losses = [line["loss"] for line in training_lines(first) + training_lines(later)]
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.1, losses
    for path in sorted((tmp_path / "run" / "global_step20").glob("layer_*")):
        before = files.read(folder / "base" / "global_step12" / path.name)
        for name, tensor in files.read(path).items():
            if name.rpartition(".")[2] != "bias":
                assert torch.equal(tensor, before[name]), f"{name} in {path.name} is frozen but moved"
            elif name != "self_attention.query_key_value.bias":
                assert not torch.equal(tensor, before[name]), f"{name} in {path.name} did not train"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_torchrun_needs_neither_accelerator_nor_compiler(dtype, tmp_path, monkeypatch):
    """deepspeedai/DeepSpeed#943: 3 steps, save and resume by one line at TP=2, PP=2."""
    monkeypatch.setenv("PATH", "/nonexistent")
    flags = [*small_model_flags(tmp_path), *GRID, "--bitfit", *dtype, "--train-iters", "6", "--exit-interval", "3",
             "--save", str(tmp_path / "run"), "--save-interval", "3"]
    lines = training_lines(torchrun(flags)) + training_lines(torchrun(flags))
    assert [line["iteration"] for line in lines] == list(range(1, 7))
    whole = training_lines(torchrun([*flags, "--save", str(tmp_path / "whole"), "--exit-interval", "6"]))
    assert [{key: line[key] for key in KEPT} for line in whole] == [{key: line[key] for key in KEPT} for line in lines]


def test_tools_need_neither_accelerator_nor_compiler(job, tmp_path, monkeypatch):
    """deepspeedai/DeepSpeed#943: preprocessing, and conversion of a checkpoint."""
    monkeypatch.setenv("PATH", "/nonexistent")
    folder, _ = job
    text = [f"number {number}" for number in range(9)]
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in text))
    run_alone(["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "text"), "--workers", "1",
               "--dataset-impl", "mmap", "--append-eod", *write_tokenizer(tmp_path)], script="tools/preprocess_data.py")
    indexed = IndexedDataset(str(tmp_path / "text_text_document"))
    assert [bytes(indexed.get(i)[:-1].astype("uint8")).decode() for i in range(len(indexed))] == text
    run_alone(["reshape", "--load", str(folder / "base"), "--save", str(tmp_path / "one"), "--target-tp", "1"],
              script="tools/convert_checkpoint.py")
    whole, = (tmp_path / "one").rglob("layer_03-model_00-model_states.pt")
    name = "mlp.dense_h_to_4h.weight"  # cut along its first dimension
    shares = [files.read(folder / "base" / "global_step12" / f"layer_03-model_0{tp}-model_states.pt")[name] for tp in (0, 1)]
    assert torch.equal(files.read(whole)[name], torch.cat(shares))


def test_one_process_needs_no_launcher(tmp_path):
    said = run_alone([*small_model_flags(tmp_path), "--train-iters", "2", "--bitfit", "--bf16"])
    assert len(training_lines(said)) == 2
    assert "trainable 768 of" in said
    # deepspeedai/DeepSpeed#8029: what trains, and its 12 bytes an element (master and two moments), are both printed
    assert facts(said)["trainable parameters"] == 768
    assert 12 * 768 <= facts(said)["optimizer state bytes (all ranks)"] <= 12 * (768 + 64)
    # deepspeedai/DeepSpeed#1800: the log says which dtype accumulates
    assert "gradients add up over micro-batches in fp32 and over replicas in fp32; the optimizer steps in fp32" in said


def test_without_local_rank_each_rank_uses_the_device_of_its_own(tmp_path):
    """deepspeed-course#20: the default of an argument won over the launcher's LOCAL_RANK, and all ranks were on device 0."""
    said = launch([*small_model_flags(tmp_path), "--train-iters", "2", "--distributed-backend", "gloo"], ranks=2,
                  timeout=60, script="tests/two_devices_script.py")
    assert len(training_lines(said)) == 2
    assert re.findall(r"rank (\d) used the devices \{(.*)\}", said) == [("0", "0"), ("1", "1")], said[-3000:]


@pytest.mark.parametrize("flag, words", [
    (["--load", "/nowhere/at/all"], ["--load /nowhere/at/all", "--allow-fresh-start"]),
    (["--data-path", "/no/such/prefix"], ["/no/such/prefix"]),
])
def test_a_fault_ends_all_ranks_with_one_sentence(flag, words, tmp_path):
    """NVIDIA-NeMo/Megatron-Bridge#1649 and the like: a path that leads nowhere."""
    flags = [*small_model_flags(tmp_path), *GRID, "--train-iters", "2", *flag]
    if flag[0] == "--data-path":
        at = flags.index("--data-path")
        del flags[at:at + 2]
    said = torchrun(flags, expect=1)
    sentences = [line for line in said.splitlines() if line.startswith("error")]
    assert len(sentences) == 1 and all(word in sentences[0] for word in words), said[-3000:]
    assert not re.search(r"File \".*megatron/", said), "a traceback of ours"


def test_a_base_loads_at_other_degrees_and_from_layer_files_alone(job, tmp_path):
    """Trained at TP=2, PP=2; started from at TP=1, PP=1, through a delta, and at TP=1, PP=2."""
    folder, _ = job
    flags = [*small_model_flags(tmp_path), *NO_DROPOUT, "--bitfit", "--train-iters", "2"]
    at = flags.index("--data-path")
    flags[at + 1] = str(folder / "train")
    alone = training_lines(run_alone([*flags, "--load", str(folder / "base"), "--save", str(tmp_path / "run"),
                                      "--save-interval", "2"]))
    staged = training_lines(launch([*flags, "--pipeline-model-parallel-size", "2", "--load", str(folder / "base")],
                                   ranks=2))
    assert alone[0]["loss"] == pytest.approx(staged[0]["loss"], rel=1e-5) and alone[0]["loss"] < 4.5
    tool = [sys.executable, str(ROOT / "tools" / "bitfit_delta.py")]
    delta, merged = str(tmp_path / "d.safetensors"), str(tmp_path / "merged")
    subprocess.run([*tool, "extract", "--checkpoint", str(tmp_path / "run"), "--output", delta], check=True)
    subprocess.run([*tool, "apply", "--base", str(folder / "base"), "--delta", delta, "--output", merged], check=True)
    on = training_lines(launch([*flags, "--tensor-model-parallel-size", "2", "--load", merged], ranks=2))
    again = training_lines(run_alone([*flags, "--load", str(tmp_path / "run"), "--save", str(tmp_path / "other"),
                                      "--save-interval", "9"]))
    assert on[0]["loss"] == pytest.approx(again[0]["loss"], rel=1e-5)
    assert on[0]["loss"] != alone[0]["loss"], "the delta changed something"


@pytest.mark.slow
def test_shuffled_data_with_workers_and_dropout_resume_as_if_unbroken(job, tmp_path):
    folder, flags = job
    at = flags.index("--num-workers")
    flags = [*flags[:at], "--num-workers", "2", *flags[at + 2:], "--dataloader-type", "cyclic", "--bitfit",
             "--load", str(folder / "base"), "--train-iters", "6", "--save-interval", "3"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    unbroken = training_lines(launch([*flags, "--save", str(whole)]))
    broken = training_lines(launch([*flags, "--save", str(parts), "--exit-interval", "3"]))
    broken += training_lines(launch([*flags, "--save", str(parts)]))
    for one, other in zip(unbroken, broken, strict=True):
        assert {key: one[key] for key in KEPT} == {key: other[key] for key in KEPT}
    for path in sorted((whole / "global_step6").glob("layer_*")):
        ours, theirs = files.read(path), files.read(parts / "global_step6" / path.name)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), path.name
    progress = [files.read(run / "global_step6" / "mp_rank_00_model_states.pt")["progress"] for run in (whole, parts)]
    assert progress[0] == progress[1]


def test_what_does_not_fit_is_refused_before_training(job, tmp_path):
    folder, _ = job
    flags = [*small_model_flags(tmp_path), "--train-iters", "3", "--load", str(folder / "base")]
    for changed, words in ((["--num-attention-heads", "2"], ["num_attention_heads 4", "--num-attention-heads"]),
                           (["--hidden-size", "64"], ["hidden_size 32", "--hidden-size"]),
                           (["--position-embedding-type", "absolute"], ["alibi", "absolute"])):
        said = run_alone([*flags, *changed], expect=1)
        assert all(word in said for word in words) and not training_lines(said), said[-2000:]
    (tmp_path / "file").write_text("")
    said = run_alone([*flags, "--save", str(tmp_path / "file" / "x"), "--save-interval", "1"], expect=1)
    assert f"--save {tmp_path / 'file' / 'x'} cannot be written" in said and "Traceback" not in said
    copy = tmp_path / "incomplete"
    shutil.copytree(folder / "base", copy)
    (copy / "global_step12" / "layer_01-model_01-model_states.pt").unlink()
    for manifest in ("whole", "gone"):  # files are missed with and without a list of them
        said = run_alone([*small_model_flags(tmp_path), "--train-iters", "3", "--load", str(copy)], expect=1)
        assert "layer_01-model_01-model_states.pt" in said and not training_lines(said), (manifest, said[-2000:])
        (copy / "global_step12" / "manifest.json").unlink(missing_ok=True)


def test_a_save_folder_is_resumed_without_load_and_never_rewound(tmp_path):
    flags = [*small_model_flags(tmp_path), "--save", str(tmp_path / "run"), "--save-interval", "2"]
    run_alone([*flags, "--train-iters", "3", "--lr-decay-iters", "9"])
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    said = run_alone([*flags, "--train-iters", "3", "--lr-decay-iters", "9"])
    assert "resuming" in said and training_lines(said) == []
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    stale = tmp_path / "run" / "global_step4"
    stale.mkdir()
    (stale / "layer_01-model_01-model_states.pt").write_bytes(b"of a killed save at other degrees")
    said = run_alone([*flags, "--train-iters", "4", "--lr-decay-iters", "9"])
    assert [line["iteration"] for line in training_lines(said)] == [4]
    assert not (stale / "layer_01-model_01-model_states.pt").exists() and (stale / "mp_rank_00_model_states.pt").exists()
    assert "resuming" in run_alone([*flags, "--train-iters", "5", "--lr-decay-iters", "9"])
