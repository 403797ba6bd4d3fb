"""What the loop does around the steps: ramp, discarded data, evaluation, stops, curves."""

import re

import pytest
from batch_jobs import loss_scales, refused_in_fp16
from launching import facts, run_alone, training_lines
from small_runs import Case, write_base
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_data import small_model_flags, write_documents

from megatron.config import ModelConfig
from megatron.flops import operations_needed
from megatron.phases import PHASES


def without(flags: list[str], *names: str) -> list[str]:
    """``flags`` less the named ones and their values."""
    flags = list(flags)
    for name in names:
        at = flags.index(name)
        del flags[at:at + 2]
    return flags


@pytest.fixture
def flags(tmp_path):
    return [*small_model_flags(tmp_path), "--hidden-dropout", "0", "--attention-dropout", "0"]


def test_a_batch_ramp_follows_its_formula_and_goes_on_after_a_stop(flags, tmp_path):
    """deepspeedai/DeepSpeedExamples#418, deepspeedai/DeepSpeed#2798: 4 to 16 by 4, stopped on the way up.

    verl-project/verl#7953: the stop comes after the warm-up, which must not begin again.
    """
    ramp = [*without(flags, "--lr-decay-style", "--global-batch-size"), "--global-batch-size", "16", "--train-samples", "96",
            "--rampup-batch-size", "4", "4", "36",
            "--lr-warmup-samples", "20", "--eval-iters", "0", "--save-interval", "100"]
    whole = training_lines(run_alone([*ramp, "--save", str(tmp_path / "whole")]))
    parts = [*ramp, "--load", str(tmp_path / "parts"), "--save", str(tmp_path / "parts")]
    halves = training_lines(run_alone([*parts, "--exit-interval", "5", "--allow-fresh-start"]))
    assert halves[-1]["iteration"] == 5 and halves[-1]["global_batch_size"] < 16 and halves[-1]["consumed_samples"] > 20
    halves += training_lines(said := run_alone(parts))
    assert "nothing is left to train" not in said
    said = run_alone(parts)  # a job that is queued once too often
    assert f"of iteration {halves[-1]['iteration']}, the run ends at {halves[-1]['iteration']};" in said and not training_lines(said)
    consumed = 0
    for line in whole:
        size = 16 if consumed > 36 else min(16, 4 + int(consumed / (36 / 3)) * 4)
        assert line["global_batch_size"] == size
        consumed += size
        assert line["consumed_samples"] == consumed
        rate = 1e-2 * (consumed / 20 if consumed <= 20 else 1 - (consumed - 20) / (96 - 20))
        assert line["learning_rate"] == pytest.approx(rate, rel=1e-3)
    timeless = [{name: value for name, value in line.items()
                 if name not in ("seconds_per_iteration", "samples_per_second", "tflops")} for line in whole]
    again = [{name: line[name] for name in expected} for expected, line in zip(timeless, halves)]
    assert len(whole) == len(halves) and again == timeless


def test_discarded_iterations_move_the_counters_and_nothing_else(flags):
    flags = [*flags, "--train-iters", "5", "--eval-iters", "0"]
    plain, skipping = (training_lines(run_alone([*flags, *more]))
                       for more in ([], ["--skip-train-iteration-range", "2-3"]))
    assert [line["iteration"] for line in skipping] == [1, 4, 5]
    assert [line["consumed_samples"] for line in skipping] == [8, 32, 40]
    assert skipping[0]["loss"] == plain[0]["loss"] and skipping[1]["loss"] != plain[3]["loss"]
    assert skipping[1]["seconds_per_iteration"] > 0


def test_every_validation_group_has_its_own_lines_and_curves(flags, tmp_path):
    other = write_documents(tmp_path / "other", 40, seed=9)
    train = flags[flags.index("--data-path") + 1]
    said = run_alone([
        *without(flags, "--data-path", "--split", "--eval-interval", "--eval-iters"), "--train-iters", "4",
        "--train-weighted-split-paths", f"train: 1 0:0.9 {train}",
        "--valid-weighted-split-paths", f"counting: 1 0.9:1 {train}", f"elsewhere: 0.5 0:1 {other}, 0.5 0.5:1 {train}",
        "--eval-interval", "2", "--eval-iters", "2", "--tensorboard-dir", str(tmp_path / "curves"),
        "--log-validation-ppl-to-tensorboard", "--log-params-norm", "--log-timers-to-tensorboard", "--log-path", str(tmp_path / "arguments")])
    for group in ("counting", "elsewhere"):
        for prefix in ("iteration 2", "iteration 4", "the end of training for val data"):
            assert said.count(f"{group} loss at {prefix} | lm loss value: ") == 1
    curves = EventAccumulator(str(tmp_path / "curves")).Reload()
    names = set(curves.Tags()["scalars"])
    assert {"lm-loss-training/lm loss", "lm-loss-training/lm loss vs samples", "grad-norm/grad-norm",
            "lm-loss-validation/counting/lm loss validation", "lm-loss-validation/elsewhere/lm loss validation ppl",
            "learning-rate/learning-rate", "params-norm/params-norm"} <= names
    lines = training_lines(said)
    assert [event.step for event in curves.Scalars("lm-loss-training/lm loss vs samples")] == [8, 16, 24, 32]
    assert [event.value for event in curves.Scalars("lm-loss-training/lm loss")] == pytest.approx(
        [line["loss"] for line in lines], rel=1e-6)
    assert all(line["params_norm"] > 0 for line in lines)
    assert len(list((tmp_path / "arguments").glob("args_*.txt"))) == 1
    check_accounts(facts(said), lines, curves)


def check_accounts(told, lines, curves):
    """The run facts of a full fp32 training on one rank, and the curves that go with them."""
    shape = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=32, embed_layernorm=True,
                        padded_vocab_size=(told["total parameters"] - 2 * 13 * 32 - 2 * 12 * 32**2 - 4 * 32) // 32)
    needed = operations_needed(shape, 1, bitfit=False).total
    assert told["FLOP per sample (operations needed)"] == needed
    weights = 4 * told["total parameters"]
    held = {kind: told[f"memory bytes: {kind} (max over ranks)"]
            for kind in ("weights", "gradients", "optimizer", "activations", "rest")}
    assert held["weights"] == held["gradients"] == weights
    assert held["optimizer"] == pytest.approx(3 * weights, rel=1e-3)  # and padding, a step count per group
    assert held["activations"] > 2 * 2 * 32 * 32 * 4 * 10
    assert sum(held.values()) == told["peak memory bytes (max over ranks)"]
    shares = {phase: told[f"share of step time: {phase} (percent, mean over ranks)"] for phase in PHASES}
    assert sum(shares.values()) == pytest.approx(100, abs=0.01)
    assert shares["forward"] > 0 and shares["backward"] > 0 and shares["optimizer"] > 0
    assert shares["send"] == shares["pipeline wait"] == 0
    drawn = {phase: curves.Scalars(f"time-share/{phase}") for phase in PHASES}
    for at in range(len(lines)):
        assert sum(curve[at].value for curve in drawn.values()) == pytest.approx(1, abs=1e-5)
    rates = [event.value for event in curves.Scalars("iteration-time/TFLOPs per gpu (operations needed)")]
    times = [event.value for event in curves.Scalars("iteration-time/iteration-time")]
    assert [rate * seconds for rate, seconds in zip(rates, times)] == pytest.approx([needed * 8 / 1e12] * len(lines))


def test_evaluation_changes_nothing_in_training(flags):
    """deepspeedai/DeepSpeed#3316"""
    flags = [*without(flags, "--eval-interval", "--hidden-dropout"), "--hidden-dropout", "0.1", "--train-iters", "6"]
    often, never = (training_lines(run_alone([*flags, "--eval-interval", every])) for every in ("2", "50"))
    for one, other in zip(often, never):
        assert one["loss"] == other["loss"] and one["grad_norm"] == other["grad_norm"]


def test_evaluation_alone_reads_the_checkpoint_and_trains_nothing(flags, tmp_path):
    run = str(tmp_path / "run")
    trained = run_alone([*flags, "--train-iters", "3", "--save", run, "--save-interval", "3"])
    said = run_alone([*flags, "--train-iters", "3", "--load", run, "--eval-only", "true"])
    assert training_lines(said) == []
    line = next(line for line in trained.splitlines() if line.startswith("valid loss at the end"))
    value = line.split("lm loss value: ")[1].split()[0]
    assert f"lm loss value: {value}" in said


def test_overflow_at_the_lowest_loss_scale_ends_a_run_with_the_way_out(flags, worker_group):
    """deepspeedai/DeepSpeedExamples#418: "Current loss scale already at minimum" says nothing of what to do. Weights explode here."""
    said, = worker_group(1).run(refused_in_fp16, [
        *without(flags, "--lr"), "--lr", "1e4", "--train-iters", "30", "--initial-loss-scale", "4", "--hysteresis", "1"])
    assert re.match(r"iteration \d+: gradients overflow even at the lowest loss scale \(--min-loss-scale\); train with --bf16", said)


def test_the_loss_scale_and_its_window_survive_a_stop(tmp_path, worker_group):
    """deepspeedai/DeepSpeedExamples#418: batches that overflow, a scale that comes down and grows again, a stop in its window."""
    case = Case(bitfit=True, dtype="fp16", optimizer="adam", lr=1e-3, initial_scale_power=22)
    write_base(str(tmp_path / "base"), case)
    (whole, parts), = worker_group(1).run(loss_scales, case, str(tmp_path / "base"), str(tmp_path / "run"), 14, 9)
    assert whole == parts
    skipped, scales = [told[1] for told in whole], [told[2] for told in whole]
    assert skipped[0] and not all(skipped) and max(scales[9:]) > min(scales), "down, and up again"
    assert whole[8][3] % 3 != 0, "stopped inside a window"


def test_a_kill_switch_file_saves_and_ends_the_run(flags, tmp_path):
    (tmp_path / "stop").touch()
    said = run_alone([*flags, "--train-iters", "9", "--kill-switch-path", str(tmp_path / "stop"),
                      "--save", str(tmp_path / "run"), "--save-interval", "9"])
    assert [line["iteration"] for line in training_lines(said)] == [1]
    assert "--kill-switch-path" in said and (tmp_path / "run" / "latest").read_text() == "global_step1"
