"""The comparison of runs, against figures worked out by hand."""

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron.errors import RunError
from megatron.log_lines import TrainingFacts, evaluation_lines, format_run_fact, training_line, world_size_line
from megatron.run_logs import LONGEST_LINE, read_run

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import compare_runs


def run_tool(*args):
    return subprocess.run([sys.executable, str(ROOT / "tools" / "compare_runs.py"), *map(str, args)], text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)


@pytest.fixture
def tool(capsys):
    """The tool within this process: its standard output, and its notes; it must succeed."""
    def call(*args):
        assert compare_runs.main(list(map(str, args))) == 0, capsys.readouterr().err
        said = capsys.readouterr()
        call.notes = said.err
        return said.out
    return call


def line(iteration, **changes):
    said = {"train_iters": 100, "consumed_samples": 8 * iteration, "consumed_tokens": 64 * iteration,
            "seconds_per_iteration": 1.0, "learning_rate": 1e-3, "global_batch_size": 8, "loss": 2.0,
            "grad_norm": 1.0, "num_zeros": 0.0, "tflops": 1.0, **changes}
    said.setdefault("samples_per_second", said["global_batch_size"] / said["seconds_per_iteration"])
    return training_line(TrainingFacts(iteration=iteration, **said))


def write(path, *lines):
    path.write_text("".join(text + "\n" for text in lines), encoding="utf-8")
    return path


SUMMED, FORMERLY = "gradient bytes per step, to be summed over DP (all ranks)", "gradient bytes reduced per step (all ranks)"


def write_log(path, *, seconds, losses, norms, trainable, tee="", facts=True, summed=SUMMED):
    lines = ["using world size: 4, ...", *evaluation_lines("valid", "iteration 2", 5.0)]
    for i, (time, loss, norm) in enumerate(zip(seconds, losses, norms, strict=True), start=1):
        lines.append(line(i, seconds_per_iteration=time, loss=loss, grad_norm=norm, tflops=1 / time))
    if facts:
        for name, value in {"trainable parameters": trainable, "total parameters": 1_000_000, "bitfit": 1,
                            "ranks": 4, "FLOP per sample (formula of the log line)": 2_000_000_000,
                            "peak memory bytes (max over ranks)": 3 * 2**20,
                            "optimizer state bytes (all ranks)": 12 * trainable,
                            "memory bytes: weights (max over ranks)": 5 * 2**19,
                            summed: 4 * trainable,
                            "a fact of tomorrow": 2 * trainable}.items():
            lines.append(format_run_fact(name, value))
    return write(path, *(tee + text for text in lines))


@pytest.fixture
def logs(tmp_path):
    return (write_log(tmp_path / "a.log", seconds=[9.0, 8.0, 1.0, 3.0, 2.0], losses=[6.0, 5.0, 4.0, 3.5, 3.0],
                      norms=[4.0, 3.0, 2.0, 1.0, 5.0], trainable=1_000_000),
            write_log(tmp_path / "b.log", seconds=[9.0, 8.0, 1.0, 1.0, 1.5], losses=[6.0, 5.5, 5.0, 4.8, 4.5],
                      norms=[1.0, 0.5, 0.25, 1.5, 2.0], trainable=2_500, tee="[default3]:", summed=FORMERLY))


def cells(text, separator="  "):
    table = [[cell.strip() for cell in row.strip("| ").split(separator) if cell.strip()] for row in text.splitlines()]
    return {row[0]: row[1:] for row in table if len(row) > 1}


# --- figures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("markdown", [False, True])
def test_figures_and_ratios(tool, logs, markdown):
    out = tool(*logs, "--names", "full", "bitfit", *(["--markdown"] if markdown else []))
    table = cells(out, "|" if markdown else "  ")
    assert out.splitlines()[0].replace("|", " ").split() == ["full", "bitfit", "bitfit", "/", "full"]
    expected = {
        "trainable parameters": ["1,000,000", "2,500", "0.0025"],
        "share of all parameters": ["100.0000 %", "0.2500 %", "-"],
        "total parameters": ["1,000,000", "1,000,000", "1"],
        "training lines": ["5", "5", "-"], "last iteration": ["5", "5", "-"],
        "lm loss, first line": ["6.000000", "6.000000", "1"], "lm loss, last line": ["3.000000", "4.500000", "1.5"],
        "lm loss, median": ["3.500000", "4.800000", "1.37"],
        "gradient norm, first line": ["4.000", "1.000", "0.25"], "gradient norm, last line": ["5.000", "2.000", "0.4"],
        "gradient norm, median": ["2.000", "1.500", "0.75"],
        "seconds per iteration, median": ["2", "1", "0.5"], "seconds per iteration, least": ["1", "1", "1"],
        "seconds per iteration, most": ["3", "1.5", "0.5"], "samples per second, median": ["4.000", "8.000", "2"],
        "TFLOPs per rank (formula of the log line)": ["0.002", "0.004", "2"],  # 2e9 * 8 / seconds / 4 ranks
        "skipped iterations": ["0", "0", "-"], "nan iterations": ["0", "0", "-"],
        "lines without a finite loss": ["0", "0", "-"],
        "peak memory (max over ranks)": ["3.00 MiB", "3.00 MiB", "1"],
        "optimizer state (all ranks)": ["11.44 MiB", "29.30 KiB", "0.0025"],
        "memory: weights (max over ranks)": ["2.50 MiB", "2.50 MiB", "1"],
        "gradients per step, to be summed over DP (all ranks)": ["3.81 MiB", "9.77 KiB", "0.0025"],
        "a fact of tomorrow": ["2,000,000", "5,000", "0.0025"],
        "lm loss, iteration 2": ["5.000000", "5.500000", "1.1"], "gradient norm, iteration 4": ["1.000", "1.500", "1.5"],
        "seconds per iteration, iteration 4": ["3", "1", "0.333"]}
    assert {name: table[name] for name in expected} == expected
    assert FORMERLY not in table, "the name of older logs is read, not shown"
    assert not any(name.startswith(("skipped iterations, ", "nan iterations, ")) for name in table), "all are zero"


def test_a_gradient_norm_that_sinks_while_the_time_stays(tool, tmp_path):
    """12.62 over 12.63 s and a norm of 0.062 over 0.309 in iteration 3; all other figures are made up."""
    full = write(tmp_path / "full.log", *("[default7]:" + line(
        i, seconds_per_iteration=12.63, samples_per_second=20.269, global_batch_size=256, grad_norm=norm)
        for i, norm in enumerate((0.5, 0.4, 0.309), start=1)))
    biases = write(tmp_path / "bitfit.log", *("[default7]:" + line(
        i, seconds_per_iteration=12.62, samples_per_second=20.285, global_batch_size=256, grad_norm=norm)
        for i, norm in enumerate((0.1, 0.08, 0.062), start=1)))
    assert "elapsed time per iteration (s): 12.62 |" in biases.read_text()
    table = cells(tool(full, biases, "--at", "3"))
    assert table["gradient norm, iteration 3"] == ["0.309", "0.062", "0.201"]
    assert table["seconds per iteration, iteration 3"] == ["12.63", "12.62", "0.999"]
    ratios = {row["figure"]: row["ratios"] for row in json.loads(tool(full, biases, "--at", "3", "--json"))["figures"]}
    assert ratios["gradient norm, iteration 3"] == [pytest.approx(0.062 / 0.309, rel=1e-12)]
    assert ratios["seconds per iteration, median"] == [pytest.approx(12.62 / 12.63, abs=5e-5)]


def test_warmup_decides_which_lines_are_timed(tool, logs):
    for warmup, median in (("0", ["3", "1.5", "0.5"]), ("4", ["2", "1.5", "0.75"])):
        assert cells(tool(*logs, "--warmup", warmup))["seconds per iteration, median"] == median


def test_times_come_from_the_more_exact_of_time_and_rate(tool, tmp_path):
    fast = write_log(tmp_path / "fast.log", seconds=[0.0123] * 3, losses=[1.0] * 3, norms=[1.0] * 3, trainable=1)
    slow = write_log(tmp_path / "slow.log", seconds=[4321.98] * 3, losses=[1.0] * 3, norms=[1.0] * 3, trainable=1)
    assert cells(tool(fast, slow))["seconds per iteration, median"][:2] == ["0.0123", "4322"]


def test_logs_without_facts_or_losses_show_dashes_not_zeros(tool, logs, tmp_path):
    bare = write_log(tmp_path / "bare.log", seconds=[1.0] * 3, losses=[None] * 3, norms=[None] * 3, trainable=1,
                     facts=False)
    out = tool(logs[0], bare)
    table = cells(out)
    assert "bare / a" in out
    assert table["TFLOPs per rank (formula of the log line)"][1] == "1", "as logged, without better"
    assert table["lines without a finite loss"] == ["0", "3", "-"]
    for name in ("trainable parameters", "share of all parameters", "lm loss, last line", "gradient norm, median",
                 "optimizer state (all ranks)"):
        assert table[name][1:] == ["-", "-"], name


def test_several_runs_are_aligned_by_iteration(tool, tmp_path):
    """Runs of other lengths and log intervals: medians and first rows are of what all of them report."""
    every = write(tmp_path / "every.log", *(line(i, loss=10.0 - i, grad_norm=i) for i in range(1, 9)))
    second = write(tmp_path / "second.log", *(line(i, loss=20.0 - i, grad_norm=3 * i) for i in (2, 4, 6)))
    other = write(tmp_path / "other.log", *(line(i, loss=5.0, grad_norm=10.0) for i in (4, 6, 7, 8)))
    out = tool(every, second, other, "--warmup", "0")
    table = cells(out)
    assert re.split(r" {2,}", out.splitlines()[0].strip()) == ["every", "second", "other", "second / every",
                                                               "other / every"]
    assert table["gradient norm, median"] == ["5.000", "15.000", "10.000", "3", "2"], "of 4 and 6"
    assert table["lm loss, last line"] == ["2.000000", "14.000000", "5.000000", "-", "-"], "of 8, 6 and 8"
    assert [name for name in table if name.startswith("lm loss, it")] == ["lm loss, iteration 4", "lm loss, iteration 6"]
    assert table["lm loss, iteration 6"] == ["4.000000", "14.000000", "5.000000", "3.5", "1.25"]
    assert cells(tool(every, second, "--warmup", "0", "--at", "3"))["lm loss, iteration 3"] == ["7.000000", "-", "-"]
    late = write(tmp_path / "late.log", *(line(i, grad_norm=2.0, seconds_per_iteration=4.0) for i in range(50, 55)))
    table = cells(tool(every, late))
    assert "no iteration after warm-up is reported by all of every, late" in tool.notes
    assert table["gradient norm, median"] == ["5.500", "2.000", "-"], "apart: not the same stage of a run"
    assert table["seconds per iteration, median"] == ["1", "4", "4"]


def test_nan_and_infinity_stay_out_of_medians_and_are_counted(tool, logs, tmp_path):
    norms, losses = [1.0, math.nan, math.inf, 3.0, 7.0], [2.0, math.nan, 1.0, 1.0, 1.0]
    odd = write(tmp_path / "odd.log", *(line(i, grad_norm=norm, loss=loss, nan_iterations=int(math.isnan(loss)),
                                             skipped_iterations=i) for i, (norm, loss) in
                                        enumerate(zip(norms, losses, strict=True), start=1)))
    table = cells(tool(logs[0], odd, "--warmup", "0"))
    assert table["gradient norm, median"] == ["3.000", "3.000", "1"]
    assert table["lines without a finite gradient norm"] == ["0", "2", "-"]
    assert table["lines without a finite loss"] == ["0", "1", "-"]
    assert table["nan iterations"] == ["0", "1", "-"] and table["skipped iterations"] == ["0", "15", "-"]
    assert table["gradient norm, iteration 2"] == ["3.000", "nan", "-"]
    assert table["gradient norm, iteration 3"] == ["2.000", "inf", "-"]
    assert table["nan iterations, iteration 2"] == ["0", "1", "-"]
    figures = {row["figure"]: row["values"] for row in json.loads(tool(odd, odd, "--json"))["figures"]}
    assert figures["gradient norm, iteration 2"] == ["nan", "nan"]
    assert figures["gradient norm, iteration 3"] == ["inf", "inf"]


@pytest.mark.parametrize("count", [2, 3])
def test_json_equals_the_table(tool, logs, count):
    args = [*logs, logs[1]][:count]
    names = ["--names", *("one", "two", "three")[:count]]
    table, heard = cells(tool(*args, *names)), json.loads(tool(*args, *names, "--json"))
    assert [row["figure"] for row in heard["figures"]] == [name for name in table if name and name != "one"]
    assert [run["name"] for run in heard["runs"]] == names[1:]
    assert heard["medians_over"] == {"iterations": 3, "first": 3, "last": 5}
    unit = {"KiB": 2**10, "MiB": 2**20}
    for row in heard["figures"]:
        shown = table[row["figure"]]
        assert len(row["values"]) == count and len(row["ratios"]) == count - 1 and len(shown) == 2 * count - 1
        for text, value in zip(shown, row["values"] + row["ratios"], strict=True):
            number, _, name = text.replace(",", "").partition(" ")
            assert (text == "-") == (value is None)
            if value is not None:
                assert float(number) * unit.get(name, 1) == pytest.approx(value, rel=5e-3)


# --- logs as they are -------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [
    "[default3]:", "2026-01-02 03:04:05,678 ", "\x1b[32m", "\x1b[1;31m[default0]:\x1b[0m", "  7: ",
    "Downloading: 100%|####| 5/5\r", "[2026-01-02T03:04:05] [default12]:"])
def test_whatever_stands_in_front(tmp_path, prefix):
    log = write(tmp_path / "x.log", *(prefix + line(i, grad_norm=i / 4) + "\x1b[0m" * ("\x1b" in prefix)
                                      for i in (1, 2, 3)),
                prefix + format_run_fact("trainable parameters", 77))
    run = read_run(str(log))
    assert [(point.iteration, point.grad_norm) for point in run.points] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.facts == {"trainable parameters": 77}


def test_colours_around_a_value_are_no_part_of_it(tmp_path):
    log = write(tmp_path / "x.log", line(1, grad_norm=0.309).replace("0.309", "\x1b[31m0.309\x1b[0m"))
    assert read_run(str(log)).points[0].grad_norm == 0.309


def test_a_line_cut_anywhere_gives_whole_values_or_none(tmp_path):
    whole = line(2, grad_norm=0.309, loss=2.5, seconds_per_iteration=12.62, nan_iterations=12)
    truth = read_run(str(write(tmp_path / "x.log", whole))).points[0]._asdict()
    truth["seconds"] = [truth["seconds"], 12.62]  # the printed one as long as the rate is missing
    lengths = set()
    for cut in range(len(whole) + 1):
        points = read_run(str(write(tmp_path / "x.log", line(1), whole[:cut]))).points[1:]
        lengths.add(len(points))
        for name, value in (points[0]._asdict() if points else {}).items():
            right = truth[name] if name == "seconds" else [truth[name]]
            assert value is None or name == "age" or value in right, (name, whole[:cut])
    assert lengths == {0, 1}


def test_lines_that_lost_their_break_or_are_torn_by_another_rank(tmp_path):
    two = line(1, grad_norm=0.25) + line(2, grad_norm=0.5)
    cut_then_next = line(3).partition(" grad norm")[0] + " grad norm: 0.1[default3]:" + line(4, grad_norm=0.75)
    torn = line(5, grad_norm=0.125).replace("0.125", "0.1[default1]:a warning")
    points = read_run(str(write(tmp_path / "x.log", two, cut_then_next, torn, "x" * 2 * LONGEST_LINE,
                                line(6)))).points
    assert [(point.iteration, point.grad_norm) for point in points] == [
        (1, 0.25), (2, 0.5), (3, None), (4, 0.75), (5, None), (6, 1.0)]


def test_binary_rubbish_between_lines_does_no_harm(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b"\x00\xff\xfe\n" + line(1).encode() + b"\r\n\xc3\n" + line(2).encode())
    assert [point.iteration for point in read_run(str(log)).points] == [1, 2]


def test_memory_does_not_grow_with_the_size_of_the_log(tmp_path):
    import tracemalloc
    log = tmp_path / "x.log"
    noise = ("[default1]: a warning that comes again and again, with an iteration | and a bar\n" * 1000).encode()
    with log.open("wb") as file:
        for i in range(1, 21):
            file.write(noise + line(i).encode() + b"\n")
    assert log.stat().st_size > 1.4e6
    tracemalloc.start()
    assert len(read_run(str(log)).points) == 20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e5


# --- several starts in one file ---------------------------------------------------------------

BEGIN = world_size_line(type("P", (), dict(world_size=4, data_parallel_size=1, tensor_model_parallel_size=2,
                                           pipeline_model_parallel_size=2)))


def losses_of(name):
    return {point.iteration: point.loss for point in read_run(str(name)).points}


@pytest.mark.parametrize("marked", [True, False])
def test_a_resumed_run_replaces_the_iterations_that_were_given_up(tool, tmp_path, marked):
    """Stopped in iteration 6, resumed from a checkpoint of iteration 3, stopped again in iteration 5."""
    begin = ["[default0]:" + BEGIN] * marked
    log = write(tmp_path / "x.log", *begin, *(line(i, loss=1.0, seconds_per_iteration=9.0 if i < 3 else 2.0)
                                              for i in range(1, 7)),
                *begin, *(line(i, loss=2.0, seconds_per_iteration=9.0 if i < 5 else 4.0) for i in range(4, 6)))
    assert losses_of(log) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0}, "6 belongs to what was given up"
    assert losses_of(f"{log}#1") == dict.fromkeys(range(1, 7), 1.0)
    assert losses_of(f"{log}#2") == {4: 2.0, 5: 2.0}
    table = cells(tool(f"{log}#1", log, "--warmup", "1", "--names", "a", "b"))
    assert "x.log holds 2 starts (iterations 1 to 6, 4 to 5), read as one resumed run" in tool.notes
    assert table["seconds per iteration, median"] == ["2", "4", "2"], "of 2, 3, 5: the second start warms up too"
    assert table["last iteration"] == ["6", "5", "-"]


def test_a_second_run_from_the_first_iteration_replaces_the_first_run_and_its_facts(tool, tmp_path):
    log = write(tmp_path / "x.log", BEGIN, *(line(i, loss=1.0) for i in range(1, 6)),
                format_run_fact("trainable parameters", 1000), BEGIN,
                *(line(i, loss=2.0) for i in range(1, 4)), format_run_fact("bitfit", 1))
    assert losses_of(log) == {1: 2.0, 2: 2.0, 3: 2.0}
    assert read_run(str(log)).facts == {"bitfit": 1}
    table = cells(tool(f"{log}#1", f"{log}#2", "--warmup", "0"))
    assert table["trainable parameters"] == ["1,000", "-", "-"] and tool.notes == ""
    assert table["lm loss, median"] == ["1.000000", "2.000000", "2"]


def test_a_start_that_continues_without_overlap_warms_up_by_its_marker(tmp_path):
    log = write(tmp_path / "x.log", BEGIN, line(1), line(2), BEGIN, line(3), line(4), BEGIN, BEGIN)
    run = read_run(str(log))
    assert run.starts == [(1, 2), (3, 4)] and [point.age for point in run.points] == [0, 1, 0, 1]


def test_one_line_logged_twice_is_one_line(tmp_path):
    log = write(tmp_path / "x.log", *(prefix + line(i, grad_norm=math.nan) for i in (1, 2) for prefix in ("", "[r3]: ")))
    assert read_run(str(log)).starts == [(1, 2)] and len(read_run(str(log)).points) == 2


def test_a_file_whose_name_ends_like_a_start_is_that_file(tmp_path):
    assert losses_of(write(tmp_path / "x#7", line(1, loss=3.0))) == {1: 3.0}
    with pytest.raises(RunError, match=r"x#7 holds 1 start\(s\); #N takes 1 to 1"):
        read_run(f"{tmp_path / 'x#7'}#2")


# --- TensorBoard ------------------------------------------------------------------------------


def test_a_tensorboard_folder_of_the_trainer(tool, logs, tmp_path):
    """Written by the trainer's writer in two starts: exact where the log rounds."""
    from megatron.config import LoggingConfig
    from megatron.tensorboard import TensorBoardWriter
    folder = tmp_path / "board.v1"
    for first, last, loss in ((1, 5, 3.25), (4, 6, 1.5)):
        writer = TensorBoardWriter(LoggingConfig(tensorboard_dir=str(folder), log_timers_to_tensorboard=True,
                                                 log_batch_size_to_tensorboard=True), True)
        for i in range(first, last + 1):
            writer.log_training(TrainingFacts(
                iteration=i, train_iters=9, consumed_samples=8 * i, consumed_tokens=64 * i, seconds_per_iteration=0.0625,
                learning_rate=1e-3, global_batch_size=8, loss=loss, grad_norm=math.nan if i == 2 else i / 1024,
                samples_per_second=128.0, tflops=2.0**-12), gigaflos=1.0)
        writer.close()
        if first == 1:  # the second file of one process and second has the same name but for a counter
            for file in folder.iterdir():
                file.rename(folder / file.name.replace("tfevents.", "tfevents.0"))
    run = read_run(str(folder))
    assert [(p.iteration, p.age, p.loss) for p in run.points] == [
        (1, 0, 3.25), (2, 1, 3.25), (3, 2, 3.25), (4, 0, 1.5), (5, 1, 1.5), (6, 2, 1.5)]
    assert run.starts == [(1, 5), (4, 6)] and run.points[3].batch == 8.0
    table = cells(tool(logs[0], f"{folder}#1"))
    assert table["gradient norm, median"] == ["2.000", "0.004", "0.00195"], "4 / 1024 over 2"
    assert table["seconds per iteration, median"] == ["2", "0.0625", "0.0312"]
    assert table["TFLOPs per rank (formula of the log line)"] == ["0.002", "0.000244", "0.122"]
    assert table["lines without a finite gradient norm"] == ["0", "1", "-"]
    assert table["skipped iterations"] == ["0", "-", "-"], "no curve of them"


def test_folders_without_training_curves_are_named(tmp_path):
    with pytest.raises(RunError, match=f"{tmp_path} is a folder without TensorBoard event files"):
        read_run(str(tmp_path))
    (tmp_path / "events.out.tfevents.1.x").write_bytes(b"no event file at all")
    with pytest.raises(RunError, match=f"{tmp_path} holds no scalar of a training iteration"):
        read_run(str(tmp_path))


# --- exit status ------------------------------------------------------------------------------


def test_unusable_runs_are_named_and_the_status_is_2(logs, tmp_path, capsys):
    write(tmp_path / "empty.log", "error: no data", " iteration 5/ 10 | consumed sam")
    for args, said in (((logs[0], tmp_path / "empty.log"), "empty.log holds no training line"),
                       ((tmp_path / "gone.log", logs[0]), "gone.log: No such file"),
                       ((logs[0], logs[1] / "x"), "b.log/x: Not a directory"),
                       ((*logs, "--warmup", "5"), "a.log holds 5 training lines, --warmup 5 leaves none"),
                       ((*logs, "--at", "77"), "--at 77 is an iteration that no run reports"),
                       ((*logs, "--json", "--html", tmp_path / "no" / "x.html"), "x.html cannot be written: No such")):
        status = compare_runs.main(list(map(str, args)))
        out, error = capsys.readouterr()
        assert status == 2 and out == "" and said in error and error.count("\n") == 1, error
    result = run_tool(logs[0], tmp_path / "empty.log")
    assert result.returncode == 2 and result.stdout == "" and result.stderr.startswith(f"error: {tmp_path}/empty.log")


def test_a_wrong_command_line_is_status_2_and_touches_no_log(logs, capsys):
    before = logs[1].read_bytes()
    for args, said in (((*logs, "--warmup", "-1"), "-1 is negative"), ((logs[0],), "required: RUN"),
                       ((*logs, "--names", "one"), "--names gives 1 names for 2 runs"),
                       ((*logs, "--html", logs[1]), "would be overwritten"),
                       ((logs[0], f"{logs[1]}#1", "--html", logs[1]), "would be overwritten")):
        with pytest.raises(SystemExit) as left:
            compare_runs.main(list(map(str, args)))
        out, error = capsys.readouterr()
        assert left.value.code == 2 and out == "" and said in error
    assert logs[1].read_bytes() == before


def test_json_is_all_of_standard_output(logs, tmp_path):
    result = run_tool(*logs, "--json", "--html", tmp_path / "x.html")
    assert result.returncode == 0 and json.loads(result.stdout)["warmup"] == 2 and (tmp_path / "x.html").exists()


# --- the page ---------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks that tags are balanced; collects elements."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.declaration = [], [], None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_decl(self, decl):
        self.declaration = decl

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.elements.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def points_of(figure):
    return {polyline.get("class"): [tuple(map(float, pair.split(","))) for pair in polyline.get("points").split()]
            for polyline in figure.iter("polyline")}


def test_the_page_draws_every_iteration_of_every_run(tool, logs, tmp_path):
    page = tmp_path / "curves.html"
    names = ["full", 'bit<fit> & "co"', "again"]
    table = cells(tool(*logs, logs[1], "--names", *names, "--html", page))
    text = page.read_text(encoding="utf-8")
    assert Page(text).declaration == "DOCTYPE html"
    root = ElementTree.fromstring(text)
    figures = {figure.find("figcaption").text: figure for figure in root.iter("figure")}
    assert list(figures) == ["lm loss", "gradient norm", "seconds per iteration",
                             "TFLOPs per rank (formula of the log line)"]
    for figure in figures.values():
        assert {name: len(points) for name, points in points_of(figure).items()} == {"r0": 5, "r1": 5, "r2": 5}
    assert [item.find("svg").find("polyline").get("class") for item in root.iter("li")] == ["r0", "r1", "r2"]
    assert ["".join(item.itertext()) for item in root.iter("li")] == names
    rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    assert {row[0]: row[1:] for row in rows[1:]} == {name: row for name, row in table.items() if name != "full"}
    assert list(tmp_path.glob(".*")) == [], "no part of a file is left"

    # a straight axis: positions are proportional to values 4, 3, 2, 1, 5, one step apart
    norms = points_of(figures["gradient norm"])["r0"]
    unit = norms[1][1] - norms[0][1]
    for i, (x, y) in enumerate(norms):
        assert x - norms[0][0] == pytest.approx(i * (norms[1][0] - norms[0][0]), abs=0.2)
        assert y - norms[0][1] == pytest.approx((4 - [4, 3, 2, 1, 5][i]) * unit, abs=0.3) and unit > 10


def test_the_page_needs_nothing_from_elsewhere(tool, logs, tmp_path):
    tool(*logs, "--html", tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "//" not in text and "url(" not in text and "@import" not in text and "<script" not in text
    for tag, attributes in Page(text).elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "use", "image")
        assert not {"src", "href", "xlink:href", "data", "style"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "prefers-color-scheme: dark" in text and "color-scheme: light dark" in text


def test_axes_have_ticks_at_round_numbers_in_the_right_places(tool, logs, tmp_path):
    tool(*logs, "--html", tmp_path / "x.html")
    root = ElementTree.fromstring((tmp_path / "x.html").read_text(encoding="utf-8"))
    figure = next(figure for figure in root.iter("figure") if figure.find("figcaption").text == "gradient norm")
    marks = {cls: [(float(text.get("x")), float(text.get("y")), text.text) for text in figure.iter("text")
                   if text.get("class") == cls] for cls in "xy"}
    assert [text for _, _, text in marks["y"]] == ["1", "2", "3", "4", "5"]
    assert [text for _, _, text in marks["x"]] == ["1", "2", "3", "4", "5", "iteration"]
    values = dict(zip([4, 3, 2, 1, 5], points_of(figure)["r0"], strict=True))
    for _, y, text in marks["y"]:
        assert y - 4 == pytest.approx(values[int(text)][1], abs=0.15)
    assert [x for x, _, _ in marks["x"][:5]] == [x for x, _ in points_of(figure)["r0"]]
