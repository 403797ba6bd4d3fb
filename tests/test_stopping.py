"""Bad days: a run that is told to stop saves once, ends everywhere alike, and goes on as if nothing had happened."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from bitfit_jobs import tensors_in
from command_lines import TINY, refusal
from forked import run_ranks
from launching import ROOT, rank_environments, training_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_data import small_model_flags

from megatron.checkpoint import files
from megatron.checkpoint.manifest import crc32_of, usable_tag
from megatron.stopping import REQUEUE

LENGTH = 5
HANDLER = "--exit-signal-handler"
PIPELINE = ("--pipeline-model-parallel-size", "2")


class Jobs:
    """Runs of one model on two ranks, all with the same data and seed."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self._number = scratch, 0
        self._flags = [*small_model_flags(scratch), "--hidden-dropout", "0.1", "--eval-iters", "0",
                       "--train-iters", str(LENGTH), "--allow-fresh-start"]

    def run(self, folder: Path, *more: str, days: dict[int, dict] | None = None, ranks: int = 2,
            interval: int = LENGTH) -> tuple[list[int], str]:
        """Exit codes and output; ``days`` maps a rank to what happens to it (see stop_script.py)."""
        self._number += 1
        logs = self.scratch / f"job{self._number}"
        logs.mkdir()
        environments = rank_environments(ranks, {rank: {"BAD_DAY": json.dumps((days or {}).get(rank, {}))} for rank in range(ranks)})
        flags = [*self._flags, "--save", str(folder), "--load", str(folder), "--save-interval", str(interval), *more]
        return run_ranks(ROOT / "tests" / "stop_script.py", flags, environments, logs, 60)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def unbroken(jobs, tmp_path_factory):
    """Folder and training lines of a run that could have been stopped and was not."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    codes, text = jobs.run(folder, *PIPELINE, HANDLER)
    assert codes == [0, 0], text
    return folder, training_lines(text)


def tags(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("global_step*"))


def stopped(text: str) -> tuple[int, str]:
    """Iteration and reason of the one line that says where the run ended."""
    (iteration, reason), = re.findall(r"exiting program at iteration (\d+): (.*)", text)
    return int(iteration), reason


def check_goes_on(jobs: Jobs, folder: Path, first: str, unbroken: tuple[Path, list[dict]]) -> None:
    """A second start makes the rest of the unbroken run, to the bit."""
    whole, lines = unbroken
    codes, text = jobs.run(folder, *PIPELINE, HANDLER)
    assert codes == [0, 0], text
    both = training_lines(first) + training_lines(text)
    assert [(line["iteration"], line["loss"], line["grad_norm"]) for line in both] == [
        (line["iteration"], line["loss"], line["grad_norm"]) for line in lines]
    for path in (whole / f"global_step{LENGTH}").iterdir():
        if re.match("layer_|zero_", path.name):
            assert crc32_of(path) == crc32_of(folder / f"global_step{LENGTH}" / path.name), path.name


@pytest.mark.parametrize("days, name, more", [
    ({1: {"after": 2, "signals": ["SIGTERM"]}}, "SIGTERM", ()),
    # both at once, through two paths each, and the loader's processes as well
    ({rank: {"after": 2, "signals": ["SIGUSR1", "SIGUSR1"], "gap": 0.02, "workers": True} for rank in (0, 1)}, "SIGUSR1",
     ("--async-save", "--num-workers", "1")),
    pytest.param({rank: {"after": 1, "signals": ["SIGTERM", "SIGTERM"], "gap": 0.02, "workers": True} for rank in (0, 1)},
                 "SIGTERM", ("--num-workers", "1", "--bitfit"), marks=pytest.mark.slow),
], ids=["one rank", "all ranks", "all ranks and workers"])
def test_a_signal_saves_once_and_ends_all_ranks_with_the_code_to_requeue(days, name, more, jobs, unbroken, tmp_path):
    codes, text = jobs.run(tmp_path / "run", *PIPELINE, HANDLER, *more, days=days)
    assert codes == [REQUEUE, REQUEUE], text
    at, reason = stopped(text)
    assert at < LENGTH and name in reason and training_lines(text)[-1]["iteration"] == at
    assert text.count("successfully saved checkpoint") == 1
    assert usable_tag(tmp_path / "run", verify=True) == (f"global_step{at}", None) and tags(tmp_path / "run") == [
        f"global_step{at}"]
    if "--bitfit" not in more:
        check_goes_on(jobs, tmp_path / "run", text, unbroken)


def test_a_second_signal_quits_at_once_even_when_the_other_rank_never_comes(jobs, tmp_path):
    """goodfire-ai/spd#741"""
    twice = {"after": 1, "signals": ["SIGTERM", "SIGTERM"], "gap": 1.2}
    codes, text = jobs.run(tmp_path / "run", *PIPELINE, HANDLER, days={0: twice, 1: {**twice, "sleep": 60}})
    assert codes == [128 + signal.SIGTERM] * 2, text
    assert text.count("second signal, SIGTERM: quitting at once") == 2 and not tags(tmp_path / "run")


def test_without_the_flag_a_signal_kills_as_ever(jobs, tmp_path):
    codes, text = jobs.run(tmp_path / "run", days={0: {"after": 1, "signals": ["SIGTERM"], "sleep": 60}}, ranks=1)
    assert codes == [-signal.SIGTERM] and not tags(tmp_path / "run"), text


def test_time_is_up_for_all_when_it_is_for_one(jobs, tmp_path):
    codes, text = jobs.run(tmp_path / "run", "--exit-duration-in-mins", "2", "--async-save",
                           days={1: {"after": 2, "ahead": 121}})
    assert codes == [0, 0] and stopped(text) == (2, "--exit-duration-in-mins 2"), text
    assert tags(tmp_path / "run") == ["global_step2"]


def test_updates_with_nan_are_skipped_together_named_counted_and_in_the_end_given_up(jobs, tmp_path):
    """deepspeedai/DeepSpeed#8415. Two replicas; NaN on one of them in iteration 2, where a save is due, and from 5 on."""
    days = {1: {"nan": ["4.mlp.dense_4h_to_h.bias", [2, 5, 6, 7]]}}
    codes, text = jobs.run(tmp_path / "run", "--train-iters", "9", "--max-skipped-iterations", "2", "--async-save",
                           days=days, interval=2)
    assert codes == [1, 1], text
    lines = training_lines(text)
    assert [(line["iteration"], line["skipped_iterations"], line["nan_iterations"]) for line in lines] == [
        (1, 0, 0), (2, 1, 0), (3, 0, 0), (4, 0, 0), (5, 1, 0), (6, 1, 0)]
    assert re.findall(r"iteration (\d+): update skipped, (.*)", text) == [
        (number, "the gradient of layers.1.mlp.dense_4h_to_h.bias is not finite") for number in "256"]
    last = text.strip().splitlines()
    sentence = next(line for line in last if line.startswith("error"))
    assert "iteration 6" in sentence and "--max-skipped-iterations 2" in sentence and "Traceback" not in text
    assert tags(tmp_path / "run") == ["global_step3", "global_step4"], "the save due at 2 waited for a good update"
    assert usable_tag(tmp_path / "run", verify=True) == ("global_step4", None)


COPY, SHARE = "4.mlp.dense_4h_to_h.bias", "4.mlp.dense_h_to_4h.bias"


@pytest.mark.parametrize("dtype, grid, name", [
    # a copy that TP rank 1 has, which the norm leaves to TP rank 0
    ("--bf16", ("--tensor-model-parallel-size", "2"), COPY),
    (None, ("--tensor-model-parallel-size", "2"), COPY),
    pytest.param("--bf16", ("--tensor-model-parallel-size", "2"), SHARE, marks=pytest.mark.slow),
    pytest.param("--bf16", PIPELINE, COPY, marks=pytest.mark.slow),
    pytest.param("--bf16", (), COPY, marks=pytest.mark.slow),
], ids=["bf16 TP2 copy", "fp32 TP2 copy", "bf16 TP2 share", "bf16 PP2", "bf16 DP2"])
def test_infinity_in_one_bias_gradient_on_one_rank_skips_the_update_on_all(dtype, grid, name, jobs, tmp_path):
    """deepspeedai/DeepSpeed#8415: a step skipped without a word, or NaN in weights and moments.

    Samples count on, the learning rate stays where it was; then training goes on. PaddlePaddle/Paddle#50676: the loop
    compares copies over TP after each iteration, and they are still equal.
    """
    codes, text = jobs.run(tmp_path / "run", *grid, *filter(None, [dtype]), "--bitfit", "--lr-warmup-iters", "4",
                           "--check-tp-duplicated-parameters", "1", "--tensorboard-dir", str(tmp_path / "curves"),
                           days={1: {"inf": [name, [3]]}})
    assert codes == [0, 0], text
    lines = training_lines(text)
    assert [line["skipped_iterations"] for line in lines] == [0, 0, 1, 0, 0]
    assert [line["nan_iterations"] for line in lines] == [0] * 5
    assert re.findall(r"iteration (\d+): update skipped, (.*)", text) == [
        ("3", f"the gradient of layers.1{name[1:]} is not finite")]
    assert [line["learning_rate"] for line in lines] == pytest.approx([2.5e-3, 5e-3, 5e-3, 7.5e-3, 1e-2], rel=1e-3)
    assert [line["consumed_samples"] for line in lines] == [8, 16, 24, 32, 40]
    tensors = [tensor for path in (tmp_path / "run" / f"global_step{LENGTH}").glob("*_states.pt")
               for tensor in tensors_in(files.read(path))]
    assert len(tensors) > 30 and all(torch.isfinite(tensor).all() for tensor in tensors)
    if "--tensor-model-parallel-size" in grid:
        compared = EventAccumulator(str(tmp_path / "curves")).Reload().Scalars("replicas/tensors that differ over TP")
        assert [(event.step, event.value) for event in compared] == [(step, 0.0) for step in range(LENGTH + 1)]


def test_of_all_gradients_that_are_spoilt_the_first_of_the_backward_pass_is_named(jobs, tmp_path):
    """NaN comes down from the output of the first block, which the second stage's gradients do not see."""
    codes, text = jobs.run(tmp_path / "run", *PIPELINE, "--train-iters", "1", "--bitfit", days={0: {"nan": [3, [1]]}})
    assert codes == [0, 0], text
    told, = re.findall(r"iteration 1: update skipped, the gradient of (\S+) is not finite, and (\d+) after it", text)
    # six biases in a block, one of the embedding's LayerNorm
    assert told == ("layers.0.mlp.dense_4h_to_h.bias", "6"), text


def test_the_handler_needs_a_place_to_save(capsys):
    assert "--save" in refusal(capsys, TINY + " " + HANDLER)
