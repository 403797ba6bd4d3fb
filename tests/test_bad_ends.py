"""The way out of a run that is stopped or fails: what comes in between, and last words that nobody takes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from command_lines import TINY, parse
from launching import ROOT
from test_bad_days import PIPELINE, SOON, Jobs, stopped

from megatron.checkpoint.manifest import usable_tag
from megatron.launch import _line
from megatron.peers import _Bell
from megatron.stopping import REQUEUE, Stopping


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return Jobs(tmp_path_factory.mktemp("jobs"))


def test_a_signal_that_is_handed_on_after_the_save_does_not_change_the_code(jobs, tmp_path):
    """A scheduler signals rank 0 and the launcher, and that one rank 1, which has saved and is about to end."""
    codes, lines, _ = jobs.run(*PIPELINE, "--exit-signal-handler", save=tmp_path / "run",
                               days={0: {"at": "forward", "signals": ["SIGTERM"]}, 1: {"at": "end", "signals": ["SIGTERM"]}})
    assert codes == [REQUEUE, REQUEUE] and stopped(lines) == [("2", "SIGTERM")], "\n".join(lines)[-3000:]


def test_a_signal_during_the_last_save_ends_the_run_before_its_final_evaluation(jobs, tmp_path):
    flags = (*PIPELINE, "--exit-signal-handler", "--train-iters", "2", "--eval-interval", "100", "--save-interval", "100")
    codes, lines, _ = jobs.run(*flags, save=tmp_path / "run", days={1: {"at": "save", "signals": ["SIGUSR1"]}})
    text = "\n".join(lines)
    assert codes == [REQUEUE, REQUEUE] and stopped(lines) == [("2", "SIGUSR1")], text[-3000:]
    assert usable_tag(tmp_path / "run", verify=True) == ("global_step2", None) and "loss at the end" not in text
    codes, lines, _ = jobs.run(*flags, save=tmp_path / "run", days={})
    text = "\n".join(lines)
    assert codes == [0, 0] and "loss at the end" in text and not stopped(lines), text[-3000:]


def test_more_than_one_interrupt_is_one(jobs, tmp_path):
    """Who presses Ctrl-C again while the ranks are on their way out."""
    day = {"at": "forward", "signals": ["SIGCONT", *["SIGINT"] * 4], "gap": 0.15, "sleep": 5}
    codes, lines, seconds = jobs.run(*PIPELINE, save=tmp_path / "run", days={0: day, 1: day})
    assert codes == [128 + signal.SIGINT] * 2 and max(seconds) < SOON, "\n".join(lines)[-3000:]
    assert re.fullmatch(r"rank \d ends too: the first error was on rank \d: interrupted \(SIGINT\)", lines[-1])
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("how, rank", [("kill", 1), ("raise", 1), ("kill", 0)])
def test_a_rank_that_ends_when_all_have_just_met_ends_the_others(how, rank, jobs, tmp_path):
    """Making torch's groups would wait for it as long as --distributed-timeout-minutes says."""
    codes, lines, seconds = jobs.run(*PIPELINE, days={rank: {"at": "group", "how": how}})
    assert codes[1 - rank] == 1 and max(seconds) < SOON, (codes, lines[-5:])
    if rank == 1:
        said = "is gone without a word" if how == "kill" else "the first error was on rank 1: KeyError: 'a bad day at group'"
        assert lines[-1].startswith("rank 0 ends too: ") and said in lines[-1]
    else:  # the store is gone, too
        assert re.match("(rank 1 ends too|error on rank 1): .*rank 0", lines[-1]), lines[-5:]


#: what standard output, and for some standard error, are; one thread that Python would wait for
LAST_WORDS = """
import os, sys, threading, time
how = sys.argv[1]
threading.Thread(target=time.sleep, args=(600,)).start()
from megatron import peers
peers.PATIENCE = 0.5
if how == "none":
    sys.stdout = sys.stderr = None
if how == "full":
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
if how == "head":
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
if how == "stuck":
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
        os.dup2(writer, 2)
if how != "none":
    sys.stdout.write("not flushed yet")
peers.end("the last line", 7)
"""


@pytest.mark.parametrize("how", ["none", "full", "head", "stuck"])
def test_output_that_nobody_takes_keeps_no_rank(how, tmp_path):
    error = tmp_path / "error.json"
    done = subprocess.run([sys.executable, "-c", LAST_WORDS, how], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(error), "PYTHONUNBUFFERED": ""}, check=False)
    assert done.returncode == 7
    if how in ("full", "head"):  # the other one works
        assert done.stderr == "the last line\n"
    if how != "stuck":
        assert json.loads(error.read_text())["message"]["message"] == "the last line"


def test_strangers_who_call_do_not_keep_rank_0_from_hearing():
    bell = _Bell()
    bell.start()
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"[" * 60_000 + b"\n", b"\xff\n", b'{"token": "", "rank": 1}\n', b"7\n", b""):
        with socket.create_connection(("127.0.0.1", bell.port), timeout=10) as stranger:
            stranger.sendall(words)
    with socket.create_connection(("127.0.0.1", bell.port), timeout=10) as member:
        for message in ({"token": bell.token, "rank": 1, "where": "here"},
                        {"line": "é\ud800\n" * 300, "exit_code": 3, "at_once": True, "second_hand": False}):
            member.sendall(json.dumps(message).encode() + b"\n")
        answer = b""
        while b"\n" not in answer:
            assert (part := member.recv(4096)), "rank 0 hung up"
            answer += part
        assert json.loads(answer)["exit_code"] == 3


def test_an_error_that_cannot_be_shown_has_a_line_all_the_same():
    class Wrong(Exception):
        def __str__(self):
            raise ValueError("no")

    assert _line(Wrong()) == "Wrong: (its message cannot be shown)"
    assert _line(KeyError("a\nb")) == r"KeyError: 'a\nb'" and _line(OSError()) == "OSError"


def test_a_kill_switch_that_cannot_be_looked_at_does_not_end_the_run():
    settings = parse(TINY)
    train = replace(settings.train, kill_switch_path="x" * 300)  # too long for any file system

    class Alone:
        world_size = 1

    assert Stopping(train, Alone(), time.monotonic(), None).after(1, torch.device("cpu")) is None
