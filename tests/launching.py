"""Start whole jobs the way users do, and read their logs."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from forked import run_ranks

from megatron.log_lines import parse_run_facts, parse_training_line

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    """A TCP port nobody listens on just now, and none that the system gives to connections by itself."""
    for port in random.SystemRandom().sample(range(15000, 30000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("a hundred ports in a row are taken")


def _environment(**more: str) -> dict[str, str]:
    """That of this process without a rank in it, and one thread each."""
    given = {name: value for name, value in os.environ.items()
             if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    return {**given, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def rank_environments(ranks: int, more: dict[int, dict[str, str]] | None = None) -> list[dict[str, str]]:
    """What a launcher on this machine sets for each rank, with ``more`` by rank."""
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [_environment(RANK=str(rank), LOCAL_RANK=str(rank), **world, **(more or {}).get(rank, {})) for rank in range(ranks)]


def launch(flags: list[str], *, ranks: int = 4, timeout: float = 240, script: str = "pretrain_gpt.py",
           expect: int = 0) -> str:
    """Run a script on ``ranks`` warm processes with a launcher's environment; returns all they printed.

    Fails with that text when the exit code of any rank is not ``expect`` (0, or 1 for "not 0").
    """
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        codes, text = run_ranks(ROOT / script, flags, rank_environments(ranks), Path(folder), timeout)
    assert [min(abs(code), 1) for code in codes] == [expect] * ranks, f"exit codes {codes}\n{text[-6000:]}"
    return text


def torchrun(flags: list[str], *, ranks: int = 4, nodes: int = 1, timeout: float = 240,
             script: str = "pretrain_gpt.py", expect: int = 0, accelerators: bool = False) -> str:
    """Run a script the way users do, under torchrun, on ``nodes`` agents on loopback; returns all they printed.

    On the CPU, unless ``accelerators`` are asked for and each rank can have one.
    Fails with that text when the exit code of any agent is not ``expect`` (0, or 1 for "not 0").
    """
    environ = _environment()
    if accelerators:
        import torch
        if torch.accelerator.device_count() >= ranks:
            environ.pop("DS_ACCELERATOR", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes),
               "--nproc_per_node", str(ranks // nodes), "--master_addr", "127.0.0.1",
               "--master_port", str(free_port()), "--max_restarts", "0"]
    agents = [subprocess.Popen([*command, "--node_rank", str(node), str(ROOT / script), *flags], cwd=ROOT,
                               env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
              for node in range(nodes)]
    said, codes = [], []
    for agent in agents:
        try:
            said.append(agent.communicate(timeout=timeout)[0])
        except subprocess.TimeoutExpired:
            agent.kill()
            said.append("TIMED OUT\n" + agent.communicate()[0])
        codes.append(min(abs(agent.returncode), 1))
    text = "\n".join(said)
    assert codes == [expect] * nodes, f"exit codes {codes}\n{text[-6000:]}"
    return text


def training_lines(log: str) -> list[dict]:
    """Values of every training line, in order."""
    return [values for line in log.splitlines() if (values := parse_training_line(line))]


def facts(log: str) -> dict:
    """The run facts at the end of a log."""
    return parse_run_facts(log.splitlines())


def run_alone(flags: list[str], *, timeout: float = 240, expect: int = 0, script: str = "pretrain_gpt.py") -> str:
    """One warm process without a launcher's environment; returns all it printed."""
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        codes, text = run_ranks(ROOT / script, flags, [_environment()], Path(folder), timeout)
    assert min(abs(codes[0]), 1) == expect, f"exit code {codes[0]}\n{text[-6000:]}"
    return text
