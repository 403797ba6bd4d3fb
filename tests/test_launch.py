"""Whole jobs through torchrun: the pull request's own experiment, and what a user does next."""

import re

import pytest
import torch
from launching import facts, launch, training_lines
from tiny_data import small_model_flags

from megatron.checkpoint import files

GRID = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
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


@pytest.mark.parametrize("nodes", [1, 2], ids=["one node", "two nodes"])
def test_two_launches_that_differ_in_bitfit_alone(nodes, job):
    folder, flags = job
    flags = [*flags, "--train-iters", "4", "--load", str(folder / "base")]
    full = launch(flags, nodes=nodes)
    bitfit = launch([*flags, "--bitfit"], nodes=nodes)
    first_full, first_bitfit = training_lines(full)[0], training_lines(bitfit)[0]
    assert first_full["loss"] == first_bitfit["loss"], "the same forward pass, dropout included"
    assert 0 < first_bitfit["grad_norm"] < first_full["grad_norm"]
    assert labels_of(full) == labels_of(bitfit) and len(labels_of(full)) >= 11
    assert facts(full)["trainable parameters"] == facts(full)["total parameters"]
    layers, hidden = 2, 32
    assert facts(bitfit)["trainable parameters"] == 11 * hidden * layers + 2 * hidden
    assert facts(bitfit)["optimizer state bytes (all ranks)"] < facts(full)["optimizer state bytes (all ranks)"] / 20


def test_bitfit_learns_saves_and_resumes_without_edited_flags(job, tmp_path):
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


def test_one_process_needs_no_launcher(tmp_path):
    import os
    import subprocess
    import sys

    from launching import ROOT
    environ = {name: value for name, value in os.environ.items()
               if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, str(ROOT / "pretrain_gpt.py"), *small_model_flags(tmp_path),
                           "--train-iters", "2", "--bitfit", "--bf16"], cwd=tmp_path, text=True,
                          capture_output=True, env={**environ, "OMP_NUM_THREADS": "1"}, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(training_lines(done.stdout)) == 2
    assert "trainable 768 of" in done.stdout


@pytest.mark.parametrize("flag, words", [
    (["--load", "/nowhere/at/all"], ["--load /nowhere/at/all", "--allow-fresh-start"]),
    (["--data-path", "/no/such/prefix"], ["/no/such/prefix"]),
])
def test_a_fault_ends_all_ranks_with_one_sentence(flag, words, tmp_path):
    flags = [*small_model_flags(tmp_path), *GRID, "--train-iters", "2", *flag]
    if flag[0] == "--data-path":
        at = flags.index("--data-path")
        del flags[at:at + 2]
    said = launch(flags, expect=1)
    sentences = [line for line in said.splitlines() if line.startswith("error")]
    assert len(sentences) == 1 and all(word in sentences[0] for word in words), said[-3000:]
    assert not re.search(r"File \".*megatron/", said), "a traceback of ours"
