"""Log lines: exact text, and back from text to values."""

import random
import re
import time

import pytest

from megatron import log_lines
from megatron.config import ParallelConfig, TrainConfig
from megatron.log_lines import TrainingFacts, parse_training_line, training_line
from megatron.optimizer.batch_size import BatchSizeSchedule, training_iterations


def facts(**changes):
    return TrainingFacts(**{
        "iteration": 2, "train_iters": 868_457, "consumed_samples": 384, "consumed_tokens": 786_432,
        "seconds_per_iteration": 13.648, "learning_rate": 6.29e-7, "global_batch_size": 192, "loss": 12.4375,
        "loss_scale": 4096.0, "grad_norm": 54.1316, "num_zeros": 0.0, "samples_per_second": 14.068,
        "tflops": 13.652, **changes})


def test_the_example_line_field_by_field():
    train = TrainConfig(micro_batch_size=1, global_batch_size=256, train_samples=220_000_000,
                        rampup_batch_size=(192, 32, 9_765_625))
    sizes, consumed = BatchSizeSchedule(train, 8), 0
    for _ in range(2):
        consumed += sizes.size(consumed)
    line = training_line(facts(train_iters=training_iterations(train, 8), consumed_samples=consumed,
                               consumed_tokens=consumed * 2048, global_batch_size=sizes.size(consumed)))
    assert line.startswith(" iteration        2/  868457 | consumed samples:          384 | ")
    assert line == (
        " iteration        2/  868457 | consumed samples:          384 | consumed tokens:       786432 |"
        " elapsed time per iteration (s): 13.65 | learning rate: 6.290E-07 | global batch size:   192 |"
        " lm loss: 1.243750E+01 | loss scale: 4096.0 | grad norm: 54.132 | num zeros: 0.0 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
        " samples per second: 14.068 | TFLOPs: 13.65 |")


def test_optional_fields_come_and_go():
    assert "loss scale" not in training_line(facts(loss_scale=None))
    assert "grad norm" not in training_line(facts(grad_norm=None))
    assert " num zeros: 0.0 | params norm: 12.346 | number" in training_line(facts(params_norm=12.3456))
    for loss in (None, float("nan"), 0.0, -1.0):
        assert "lm loss" not in training_line(facts(loss=loss))
    assert "number of nan iterations:  12 |" in training_line(facts(loss=float("nan"), nan_iterations=12))


def test_parsing_a_line_gives_back_what_was_formatted():
    random.seed(5)
    for _ in range(200):
        said = facts(iteration=random.randrange(10**random.randrange(1, 10)), train_iters=random.randrange(10**9),
                     consumed_samples=random.randrange(10**13), consumed_tokens=random.randrange(10**16),
                     seconds_per_iteration=random.expovariate(0.01), learning_rate=random.random() * 1e-3,
                     global_batch_size=random.randrange(1, 10**6), loss=random.choice([None, random.random() * 12]),
                     loss_scale=random.choice([None, 2.0**random.randrange(32)]),
                     grad_norm=random.choice([None, random.expovariate(1), float("inf")]),
                     params_norm=random.choice([None, random.random() * 1e4]),
                     skipped_iterations=random.randrange(2000), nan_iterations=random.randrange(3),
                     samples_per_second=random.random() * 1e3, tflops=random.random() * 200)
        line = training_line(said)
        heard = parse_training_line(random.choice(["", "[default3]:", "2026-01-02 03:04:05 "]) + line + "\n")
        present = {name: value for name, value in vars(said).items() if value is not None}
        assert set(heard) == set(present)
        for name, value in present.items():
            tolerance = {"learning_rate": {"rel": 1e-3}, "loss": {"rel": 1e-6}, "loss_scale": {"abs": 0.051},
                         "tflops": {"abs": 0.0051}, "seconds_per_iteration": {"abs": 0.0051}}
            assert heard[name] == pytest.approx(value, **tolerance.get(name, {"abs": 0.00051}))
            assert type(heard[name]) is type(value)
        assert training_line(TrainingFacts(**{"loss": None, **heard})) == line


def test_unknown_fields_are_kept_and_other_lines_are_none():
    line = "[default7]:" + training_line(facts()).replace(" TFLOPs", " curriculum seqlen:  2048 | mood: good | TFLOPs")
    values = parse_training_line(line)
    assert values["curriculum seqlen"] == 2048.0 and values["mood"] == "good" and values["tflops"] == 13.65
    for other in ("", "saving checkpoint at iteration      10 to /x",
                  log_lines.evaluation_lines("valid", "iteration 10", 3.0)[1]):
        assert parse_training_line(other) is None


def test_evaluation_lines_are_framed_by_dashes_one_longer_than_the_line():
    top, line, bottom = log_lines.evaluation_lines("valid_fr", "iteration 1000", 2.0)
    assert line == "valid_fr loss at iteration 1000 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert top == bottom == "-" * (len(line) + 1)


def test_perplexity_is_cut_off_at_exp_20_and_nan_stays_nan():
    assert "PPL: 4.851652E+08" in log_lines.evaluation_lines("valid", "iteration 1", 1000.0)[1]
    assert "value: NAN | lm loss PPL: NAN" in log_lines.evaluation_lines("valid", "iteration 1", float("nan"))[1]


def test_the_other_lines():
    assert log_lines.saving_line(50, "/c") == "saving checkpoint at iteration      50 to /c"
    assert log_lines.saved_line(50, "/c") == "  successfully saved checkpoint at iteration      50 to /c"
    assert log_lines.loaded_line("/c", 50) == "  successfully loaded checkpoint from /c at iteration 50"
    assert log_lines.padded_vocab_line(250_680, 250_880) == (
        " > padded vocab (size: 250680) with 200 dummy tokens (new size: 250880)")
    assert log_lines.training_iterations_line(115_311) == "setting training iterations to 115311"
    grid = ParallelConfig(world_size=384, tensor_model_parallel_size=4, pipeline_model_parallel_size=12)
    assert log_lines.world_size_line(grid) == ("using world size: 384, data-parallel-size: 8, tensor-model-parallel "
                                               "size: 4, pipeline-model-parallel size: 12 ")
    assert log_lines.timers_line({"forward": 1.234, "save": 10}) == "time (ms) | forward: 1.23 | save: 10.00"


def test_the_date_has_its_old_shape():
    moment = time.strptime("2026-03-04 05:06:07", "%Y-%m-%d %H:%M:%S")
    assert log_lines.datetime_line("after the model is built", moment) == (
        "[after the model is built] datetime: 2026-03-04 05:06:07 ")
    assert re.fullmatch(r"\[x\] datetime: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", log_lines.datetime_line("x"))


def test_run_facts_survive_a_log():
    said = {"trainable parameters": 12_032, "share": 0.25, "bitfit": 1, "dtype": "bf16"}
    lines = ["noise | a | b", *("[default0]:" + log_lines.format_run_fact(*item) for item in said.items()),
             log_lines.format_run_fact("peak memory bytes (max over ranks)", 2**40, "bytes"), "run fact | torn"]
    assert lines[1] == "[default0]:run fact | trainable parameters | 12032"
    heard = log_lines.parse_run_facts(lines)
    assert heard == {**said, "peak memory bytes (max over ranks)": 2**40}
    assert type(heard["trainable parameters"]) is int


@pytest.mark.parametrize("parts", [("a|b", 1), ("a", "x\ny"), ("", 1), ("a ", 1)])
def test_a_run_fact_that_would_not_come_back_is_refused(parts):
    with pytest.raises(ValueError, match="run fact"):
        log_lines.format_run_fact(*parts)
