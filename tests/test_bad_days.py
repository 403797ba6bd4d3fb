"""One rank that fails or dies, anywhere, ends all of them at once, and the last words are about the first error."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import _run_script, warm_context
from launching import ROOT, _environment, rank_environments, training_lines
from tiny_data import small_model_flags

from megatron.checkpoint.manifest import usable_tag
from megatron.stopping import REQUEUE

PLACES = ("data", "model", "forward", "backward", "update", "evaluation", "save", "loader")
PIPELINE = ("--pipeline-model-parallel-size", "2")
TENSOR = ("--tensor-model-parallel-size", "2")
#: seconds from what happens to the end of the last process; 60 are allowed
SOON = 20
#: seconds that a launcher gives the others when one has failed
LAUNCHER = 5


class Jobs:
    """Jobs of two ranks that write into one log, as a launcher shows it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self._number = scratch, 0
        self.flags = [*small_model_flags(scratch), "--train-iters", "4", "--eval-interval", "2", "--save-interval", "1",
                       "--global-batch-size", "4", "--num-layers", "2"]

    def run(self, *more: str, days: dict[int, dict], save: Path | None = None, patience: float = 60,
            ranks: int = 2) -> tuple[list[int], list[str], list[float]]:
        """Exit codes, lines of the log, and the seconds after the first end at which each process ended.

        ``patience``: seconds after the first end at which a launcher kills the others.
        """
        self._number += 1
        log = self.scratch / f"job{self._number}.log"
        flags = [*self.flags, *(("--save", str(save)) if save else ()), *more]
        environments = rank_environments(ranks, {rank: {"BAD_DAY": json.dumps(day)} for rank, day in days.items()})
        processes = [warm_context().Process(target=_run_script, args=(
            str(ROOT / "tests" / "bad_day_script.py"), flags, each, str(log))) for each in environments]
        for process in processes:
            process.start()
        ends, deadline = {}, time.monotonic() + 120
        while len(ends) < ranks:
            time.sleep(0.02)
            for process in processes:
                if process not in ends and process.exitcode is not None:
                    ends[process] = time.monotonic()
            if time.monotonic() > min([deadline, *(end + patience for end in ends.values())]):
                for process in processes:
                    process.kill()
        first = min(ends.values())
        return ([process.exitcode for process in processes], log.read_text(errors="replace").strip().splitlines(),
                [ends[process] - first for process in processes])


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return Jobs(tmp_path_factory.mktemp("jobs"))


def check(where: str, how: str, rank: int, outcome: tuple[list[int], list[str], list[float]]) -> None:
    """All ended soon, none with 0, and the last line is about the first error, which nothing buries."""
    codes, lines, seconds = outcome
    text, other = "\n".join(lines), 1 - rank
    killed = how == "kill" and where != "loader"
    assert codes[rank] == (-signal.SIGKILL if killed else 1), (codes, text[-3000:])
    assert max(seconds) < SOON, seconds
    if where == "arguments":  # the ranks have not met: only the launcher knows
        assert codes[other] == -signal.SIGKILL and (killed or "a bad day at arguments" in text)
        return
    assert codes[other] == 1, (codes, text[-3000:])
    said = "DataLoader worker (pid" if how == "kill" else f"a bad day at {where}"
    if killed:
        assert re.fullmatch(rf"rank {other} ends too: rank {rank} \(\S+, process \d+\) is gone without a word: .*", lines[-1])
        assert "Traceback" not in text, text[-3000:]
    elif lines[-1].startswith("error: "):  # all agreed on it, and rank 0 speaks for them
        assert said in lines[-1] and "Traceback" not in text, text[-3000:]
    else:
        first = f"the first error was on rank {rank}: "
        assert lines[-1].startswith(f"rank {other} ends too: {first}") and said in lines[-1], text[-3000:]
        assert re.findall("^error on rank (.)", text, re.M) == [str(rank)], text[-3000:]


#: place, what happens there, on which rank, flags of the grid
DAYS = [("data", "kill", 0, TENSOR), ("model", "raise", 1, PIPELINE), ("forward", "kill", 1, PIPELINE),
        ("backward", "raise", 1, PIPELINE), ("update", "kill", 1, ()), ("evaluation", "raise", 0, TENSOR),
        ("save", "kill", 0, PIPELINE), ("save", "raise", 1, PIPELINE), ("loader", "refuse", 0, TENSOR),
        ("loader", "kill", 1, ()), ("arguments", "raise", 1, PIPELINE)]
MORE_DAYS = [(where, how, 1, PIPELINE) for where in PLACES for how in ("raise", "refuse", "kill")]


@pytest.mark.parametrize("where, how, rank, grid", [
    *DAYS, *(pytest.param(*day, marks=pytest.mark.slow) for day in MORE_DAYS if day not in DAYS)])
def test_whatever_happens_to_one_rank_all_end_at_once_and_the_first_error_is_last(where, how, rank, grid, jobs, tmp_path):
    day = {"at": where, "how": how, "hang": how != "kill" and where != "arguments"}
    workers = where == "loader" or (where, how) == ("update", "kill")
    if workers and where != "loader":
        day |= {"children": str(tmp_path / "children"), "start": "forkserver"}  # not children of their rank
    outcome = jobs.run(*grid, *(("--num-workers", "1") if workers else ()), days={rank: day}, save=tmp_path / "run",
                       patience=LAUNCHER if where == "arguments" else 60)
    check(where, how, rank, outcome)
    trained = where in ("forward", "backward", "update", "evaluation", "save")
    assert usable_tag(tmp_path / "run", verify=True) == ("global_step1" if trained else None, None)
    if where in ("arguments", "data"):
        assert not (tmp_path / "run").exists(), "a run that cannot begin leaves no folder"
    if "children" in day:
        alive = json.loads((tmp_path / "children").read_text())
        assert alive
        end = time.monotonic() + SOON
        while any(Path(f"/proc/{pid}/cmdline").exists() for pid in alive):
            assert time.monotonic() < end, "a process of the data loader outlives its rank"
            time.sleep(0.1)


def stopped(lines: list[str]) -> list[str]:
    return re.findall(r"exiting program at iteration (\d+): (\S+)", "\n".join(lines))


@pytest.mark.parametrize("where, rank", [("forward", 1), ("evaluation", 0)])
def test_a_signal_during_a_step_or_an_evaluation_saves_that_iteration_everywhere(where, rank, jobs, tmp_path):
    """goodfire-ai/spd#741, kyutai-labs/pocket-tts#277: one rank alone is told, and not between two steps."""
    codes, lines, _ = jobs.run(*PIPELINE, "--exit-signal-handler", "--save-interval", "100", save=tmp_path / "run",
                               days={rank: {"at": where, "signals": ["SIGTERM"]}})
    text = "\n".join(lines)
    assert codes == [REQUEUE, REQUEUE] and stopped(lines) == [("2", "SIGTERM")], text[-3000:]
    assert text.count("successfully saved checkpoint") == 1 and len(re.findall("^valid.* loss at iteration 2 ", text, re.M)) == 1
    assert [path.name for path in (tmp_path / "run").glob("global_step*")] == ["global_step2"]
    assert usable_tag(tmp_path / "run", verify=True) == ("global_step2", None)


def test_a_signal_during_the_start_ends_it_before_anything_is_trained(jobs, tmp_path):
    """goodfire-ai/spd#741: a signal before the first step is not forgotten."""
    codes, lines, _ = jobs.run(*PIPELINE, "--exit-signal-handler", save=tmp_path / "run",
                               days={1: {"at": "meeting", "signals": ["SIGTERM"]}})
    assert codes == [REQUEUE, REQUEUE] and stopped(lines) == [("0", "SIGTERM")], "\n".join(lines)[-3000:]
    assert not training_lines("\n".join(lines)) and not list((tmp_path / "run").iterdir())


def test_a_second_signal_during_the_start_quits_at_once_and_ends_the_other_rank(jobs, tmp_path):
    """goodfire-ai/spd#741: nobody is caught between two signals."""
    codes, lines, seconds = jobs.run(
        *PIPELINE, "--exit-signal-handler", save=tmp_path / "run",
        days={1: {"at": "model", "signals": ["SIGTERM"] * 2, "gap": 1.2, "sleep": 60}})
    assert codes == [128 + signal.SIGTERM] * 2 and max(seconds) < SOON, "\n".join(lines)[-3000:]
    assert lines[-1].endswith("the first error was on rank 1: second signal, SIGTERM: quitting at once")


def test_a_kill_switch_that_appears_during_a_run_stops_all_ranks(jobs, tmp_path):
    switch = tmp_path / "stop"
    codes, lines, _ = jobs.run(*PIPELINE, "--kill-switch-path", str(switch), save=tmp_path / "run",
                               days={0: {"at": "forward", "how": "touch", "file": str(switch)}})
    assert codes == [0, 0] and stopped(lines) == [("2", "--kill-switch-path")], "\n".join(lines)[-3000:]
    assert usable_tag(tmp_path / "run", verify=True) == ("global_step2", None)


def test_absurd_lengths_are_refused_in_one_sentence_that_leaves_no_folder(jobs, tmp_path):
    """Before the model is built."""
    for flag, length in (("--train-iters", 10**13), ("--eval-iters", 10**15)):
        codes, lines, _ = jobs.run(flag, str(length), days={}, save=tmp_path / "run", ranks=1)
        assert codes == [1] and lines[-1].startswith("error: an index of ") and flag in lines[-1], lines[-5:]
        assert "does not fit into memory" in lines[-1] and not (tmp_path / "run").exists()
        assert not any("memory per rank" in line for line in lines)


# --- under torchrun -----------------------------------------------------------------------------


def torchrun(jobs: Jobs, day: dict, *flags: str, terminate_after: str | None = None) -> tuple[int, str, float]:
    """Exit code, output, and seconds from the first iteration, or from a SIGTERM to torchrun when it prints a text, to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               str(ROOT / "tests" / "bad_day_script.py"), *jobs.flags, *flags]
    with subprocess.Popen(command, env=_environment(BAD_DAY=json.dumps(day)), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, cwd=ROOT) as agent:
        lines, since = [], time.monotonic()
        for line in agent.stdout:
            lines.append(line)
            if " iteration        1/" in line:
                since = time.monotonic()
            if terminate_after and terminate_after in line:
                agent.terminate()
                since, terminate_after = time.monotonic(), None
        return agent.wait(), "".join(lines), time.monotonic() - since


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_torchrun_names_the_rank_that_failed_first_and_why(how, jobs, tmp_path):
    code, text, seconds = torchrun(jobs, {"rank": "1", "at": "backward", "how": how}, *PIPELINE, "--exit-signal-handler",
                                   "--save", str(tmp_path / "run"))
    ours, table = re.split("(?m)^=+$", text, maxsplit=1)
    cause = table[table.index("Root Cause"):]
    assert code == 1 and seconds < 60 and re.search(r"rank +: 1 ", cause), text[-5000:]
    if how == "raise":
        assert "KeyError: 'a bad day at backward'" in cause and "N/A" not in cause
        assert re.findall("^error on rank (.)", ours, re.M) == ["1"]
    else:
        assert "Signal 9 (SIGKILL)" in cause
        assert ours.count("Traceback") == 1, "torchrun's own"


@pytest.mark.slow
def test_sigterm_to_torchrun_itself_saves(jobs, tmp_path):
    code, text, seconds = torchrun(jobs, {"rank": "none"}, *PIPELINE, "--exit-signal-handler", "--train-iters", "100000",
                                   "--save", str(tmp_path / "run"), "--save-interval", "100000", "--eval-iters", "0",
                                   terminate_after=" iteration        2/")
    assert seconds < 30, "torchrun kills ranks then"
    (iteration, name), = stopped(text.splitlines())
    assert code and name == "SIGTERM" and usable_tag(tmp_path / "run", verify=True) == (f"global_step{iteration}", None)
