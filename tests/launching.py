"""Start whole jobs the way users do, and read their logs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from megatron.log_lines import parse_run_facts, parse_training_line

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(flags: list[str], *, ranks: int = 4, nodes: int = 1, timeout: float = 240,
           script: str = "pretrain_gpt.py", expect: int = 0, accelerators: bool = False) -> str:
    """Run a script under torchrun on ``nodes`` agents on loopback; returns all they printed.

    On the CPU, unless ``accelerators`` are asked for and each rank can have one.
    Fails with that text when the exit code of any agent is not ``expect`` (0, or 1 for "not 0").
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    if accelerators:
        import torch
        if torch.accelerator.device_count() >= ranks:
            environ.pop("DS_ACCELERATOR", None)
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes),
               "--nproc_per_node", str(ranks // nodes), "--master_addr", "127.0.0.1",
               "--master_port", str(port), "--max_restarts", "0"]
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
    """One process without a launcher; returns stdout and stderr together."""
    environ = {name: value for name, value in os.environ.items()
               if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, str(ROOT / script), *flags], cwd=ROOT, text=True, timeout=timeout,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**environ, "OMP_NUM_THREADS": "1"})
    assert min(done.returncode, 1) == expect, f"exit code {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout
