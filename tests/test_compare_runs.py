"""The comparison of two logs, against figures worked out by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.log_lines import TrainingFacts, evaluation_lines, format_run_fact, training_line

ROOT = Path(__file__).parent.parent


def run_tool(*args):
    return subprocess.run([sys.executable, str(ROOT / "tools" / "compare_runs.py"), *map(str, args)], text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)


def write_log(path, *, seconds, losses, norms, trainable, tee="", facts=True):
    lines = ["using world size: 4, ...", *evaluation_lines("valid", "iteration 2", 5.0)]
    for i, (time, loss, norm) in enumerate(zip(seconds, losses, norms, strict=True), start=1):
        lines.append(training_line(TrainingFacts(
            iteration=i, train_iters=100, consumed_samples=8 * i, consumed_tokens=64 * i, seconds_per_iteration=time,
            learning_rate=1e-3, global_batch_size=8, loss=loss, grad_norm=norm, num_zeros=0.0,
            samples_per_second=8 / time, tflops=1 / time)))
    if facts:
        for name, value in {"trainable parameters": trainable, "total parameters": 1_000_000, "bitfit": 1,
                            "ranks": 4, "FLOP per sample (formula of the log line)": 2_000_000_000,
                            "peak memory bytes (max over ranks)": 3 * 2**20,
                            "optimizer state bytes (all ranks)": 12 * trainable,
                            "gradient bytes reduced per step (all ranks)": 4 * trainable}.items():
            lines.append(format_run_fact(name, value))
    path.write_text("".join(tee + line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def logs(tmp_path):
    return (write_log(tmp_path / "a.log", seconds=[9.0, 8.0, 1.0, 3.0, 2.0], losses=[6.0, 5.0, 4.0, 3.5, 3.0],
                      norms=[4.0, 3.0, 2.0, 1.0, 5.0], trainable=1_000_000),
            write_log(tmp_path / "b.log", seconds=[9.0, 8.0, 1.0, 1.0, 1.5], losses=[6.0, 5.5, 5.0, 4.8, 4.5],
                      norms=[1.0, 0.5, 0.25, 1.5, 2.0], trainable=2_500, tee="[default3]:"))


def cells(text, separator):
    table = [[cell.strip() for cell in line.strip("| ").split(separator) if cell.strip()]
             for line in text.splitlines()]
    return {row[0]: row[1:] for row in table if len(row) > 1}


@pytest.mark.parametrize("markdown", [False, True])
def test_figures_and_ratios(logs, markdown):
    result = run_tool(*logs, "--names", "full", "bitfit", *(["--markdown"] if markdown else []))
    assert result.returncode == 0, result.stderr
    table = cells(result.stdout, "|" if markdown else "  ")
    heading = result.stdout.splitlines()[0]
    assert heading.replace("|", " ").split() == ["full", "bitfit", "bitfit", "/", "full"]
    expected = {
        "trainable parameters": ["1,000,000", "2,500", "0.0025"],
        "share of all parameters": ["100.0000 %", "0.2500 %", "-"],
        "total parameters": ["1,000,000", "1,000,000", "1"],
        "last iteration": ["5", "5", "-"],
        "lm loss, first line": ["6.000000", "6.000000", "1"], "lm loss, last line": ["3.000000", "4.500000", "1.5"],
        "gradient norm, first line": ["4.000", "1.000", "0.25"],
        "gradient norm, median": ["3.000", "1.000", "0.333"],
        "seconds per iteration, median": ["2", "1", "0.5"], "seconds per iteration, least": ["1", "1", "1"],
        "seconds per iteration, most": ["3", "1.5", "0.5"],
        "TFLOPs per rank (formula of the log line)": ["0.002", "0.004", "2"],  # 2e9 * 8 / seconds / 4 ranks
        "peak memory (max over ranks)": ["3.00 MiB", "3.00 MiB", "1"],
        "optimizer state (all ranks)": ["11.44 MiB", "29.30 KiB", "0.0025"],
        "gradients reduced per step (all ranks)": ["3.81 MiB", "9.77 KiB", "0.0025"]}
    assert {name: table[name] for name in expected} == expected


def test_skip_decides_which_lines_are_timed(logs):
    assert cells(run_tool(*logs, "--skip", "0").stdout, "  ")["seconds per iteration, median"] == ["3", "1.5", "0.5"]


def test_times_come_from_the_more_exact_of_time_and_rate(tmp_path):
    fast = write_log(tmp_path / "fast.log", seconds=[0.0123] * 3, losses=[1.0] * 3, norms=[1.0] * 3, trainable=1)
    slow = write_log(tmp_path / "slow.log", seconds=[4321.98] * 3, losses=[1.0] * 3, norms=[1.0] * 3, trainable=1)
    assert cells(run_tool(fast, slow).stdout, "  ")["seconds per iteration, median"][:2] == ["0.0123", "4322"]


def test_logs_without_facts_or_losses_show_dashes_not_zeros(logs, tmp_path):
    bare = write_log(tmp_path / "bare.log", seconds=[1.0] * 3, losses=[None] * 3, norms=[None] * 3, trainable=1,
                     facts=False)
    result = run_tool(logs[0], bare)
    table = cells(result.stdout, "  ")
    assert result.returncode == 0 and "bare / a" in result.stdout
    assert table["TFLOPs per rank (formula of the log line)"][1] == "1", "as logged, without better"
    for name in ("trainable parameters", "share of all parameters", "lm loss, last line", "gradient norm, median",
                 "optimizer state (all ranks)"):
        assert table[name][1:] == ["-", "-"], name


def test_unusable_logs_are_named(logs, tmp_path):
    (tmp_path / "empty.log").write_text("error: no data\n")
    for args, said in (((logs[0], tmp_path / "empty.log"), "empty.log holds no training line"),
                       ((logs[0], tmp_path / "gone.log"), "gone.log: No such file"),
                       ((*logs, "--skip", "5"), "a.log holds 5 training lines, --skip 5 leaves none")):
        result = run_tool(*args)
        assert result.returncode == 1 and result.stdout == ""
        assert said in result.stderr and result.stderr.count("\n") == 1
    assert run_tool(*logs, "--skip", "-1").returncode == 2
