"""A cluster without SLURM: submits the scripts of examples/ to the stand-ins in fake_slurm/ and looks at what they did."""

from __future__ import annotations

import json
import os
import random
import shlex
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Listener
from pathlib import Path

from command_lines import world
from finetune_jobs import base_flags, draw_pairs, write_pairs
from forked import _run_script, warm_context
from launching import ROOT

from megatron.arguments import parse_arguments

EXAMPLES = ROOT / "examples"
FAKES = ROOT / "tests" / "fake_slurm"
#: variables that the shell of a user would not have
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
        "HF_DATASETS_OFFLINE", "PYTHONPATH")
#: a launch of a tiny model, whatever the script's own is: three iterations of 8 rows
TINY_MODEL = shlex.split(
    "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--make-vocab-size-divisible-by 1 --pad-vocab-size-to 96 --micro-batch-size 1 --global-batch-size 8 "
    "--eval-iters 1 --eval-interval 100 --save-interval 100 --num-workers 0 --valid-num-workers 0")
THREE_STEPS = shlex.split("--train-samples 24 --lr-warmup-samples 8")


@dataclass(frozen=True)
class Step:
    """One call of srun: its options, the command, and the variables of the job."""

    options: dict
    environ: dict

    @property
    def entry(self) -> str:
        return next(Path(word).stem for word in self.options["command"] if word in ("finetune_t0.py", "pretrain_gpt.py"))

    @property
    def flags(self) -> list[str]:
        command = self.options["command"]
        return command[command.index(f"{self.entry}.py") + 1:]

    @property
    def launchers(self) -> int:
        return self.options["ntasks"]

    def settings(self, ranks: int):
        """What a rank of the step reads from the flags; a fault of theirs ends the test."""
        return parse_arguments(self.flags, entry=self.entry, environ=world(ranks))


@dataclass(frozen=True)
class Job:
    """How a submitted script ended: exit code, what it printed, its steps."""

    code: int
    text: str
    steps: list[Step] = field(default_factory=list)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_job() -> int:
    """A job number whose first two ports nobody listens on."""
    while True:
        job = random.SystemRandom().randrange(1, 2500)  # other runs of the tests draw too
        if all(_free(10000 + job * 8 + step) for step in range(2)):
            return job


class Cluster:
    """Its files are below ``folder``; jobs are submitted from the repository, as users do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fakes = folder / "slurm"
        self.fakes.mkdir()
        self.output = folder / "job.out"
        self.setup = folder / "setup.sh"
        # modules and conda read what is not set, and often fail to find something
        self.setup.write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"; : "$SURELY_NOT_SET"\n')
        self.printed = folder / "printed"
        self.printed.write_text("what the step prints\n")
        (folder / "paths.txt").write_text('"train: 0.6 0:0.95 /data/en, 0.4 0:0.95 /data/code"\n')
        self.values = {"DATA": "/data/tasks", "BASE": "/data/base", "RUN": str(folder / "run"), "RUNS": str(folder / "runs"),
                       "TRAIN_PATHS": str(folder / "paths.txt"), "VALID_PATHS": str(folder / "paths.txt"),
                       "ENV_SETUP": str(self.setup)}

    def environ(self, job: int, **more: str) -> dict[str, str]:
        given = {name: value for name, value in os.environ.items()
                 if name not in OURS and not name.startswith(("SLURM_", "FAKE_SLURM"))}
        return {**given, **self.values, "PATH": f"{FAKES}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "FAKE_SLURM": str(self.fakes), "FAKE_SLURM_JOB": str(job), "FAKE_SLURM_TEXT": str(self.printed), **more}

    def start(self, script: str, *arguments: str, options: tuple[str, ...] = (), job: int = 4242,
              **environ: str) -> subprocess.Popen:
        """The process of sbatch."""
        return subprocess.Popen(["sbatch", *options, "--output", str(self.output), str(EXAMPLES / script), *arguments],
                                cwd=ROOT, env=self.environ(job, **environ))

    def submit(self, script: str, *arguments: str, timeout: float = 500, **more) -> Job:
        """Run a script to its end. ``FAKE_SLURM_CODE`` says with which codes its steps end, if they are not to run."""
        process = self.start(script, *arguments, **more)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Job(code, self.output.read_text(), self.steps())

    def steps(self) -> list[Step]:
        return [Step(**json.loads(path.read_text())) for path in sorted(self.fakes.glob("job*/step*.json"))]

    def pids(self, step: Path) -> list[int]:
        return [int(line) for line in step.read_text().split()]


def small_data(folder: Path) -> dict[str, str]:
    """Base, tokenizer and pairs of a tiny model: the values that scripts ask for."""
    base_flags(folder)
    return {"BASE": str(folder / "base"), "TOKENIZER": str(folder / "tokenizer"),
            "DATA": write_pairs(folder / "pairs", draw_pairs(60, seed=4)), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@contextmanager
def warm_ranks(folder: Path):
    """Address (FAKE_SLURM_WARM) at which python scripts are started from the warm server instead of anew."""
    address = str(folder / "warm.socket")
    processes = []

    def serve(listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:  # closed
                return
            (python, unbuffered, script, *flags), environments, outputs = connection.recv()
            assert (python, unbuffered) == ("python", "-u")
            mine = [warm_context().Process(target=_run_script, args=(str(ROOT / script), flags, environ, output))
                    for environ, output in zip(environments, outputs)]
            processes.extend(mine)
            for process in mine:
                process.start()
            connection.send([process.pid for process in mine])
            for process in mine:
                process.join()
            connection.send([process.exitcode for process in mine])

    with Listener(address) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        try:
            yield address
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()


def wait_until(condition, process: subprocess.Popen, timeout: float = 400) -> None:
    """Until ``condition()``; fails when the process ends or the time is up before."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, f"the job ended with {process.returncode}"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
