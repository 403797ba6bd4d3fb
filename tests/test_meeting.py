"""Ranks that meet, and those that cannot: each ends soon, with one sentence and no traceback."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from forked import run_ranks
from launching import ROOT, _environment, free_port, training_lines
from tiny_data import small_model_flags

from megatron.errors import RunError
from megatron.initialize import choose_device

SCRIPT = ROOT / "tests" / "meeting_script.py"
#: seconds, on a machine that is busy with other things; torch alone would take half an hour, or for ever
SOON = 60
#: of other launchers, which a session that runs the tests may have
FOREIGN = re.compile("SLURM_|OMPI_|PMI_|PMIX_|MV2_|MPI_LOCAL|TORCHELASTIC_|CROSS_|GROUP_")


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory):
    """What is measured below is no import: the server of warm processes is there before."""
    assert meet([clean()], tmp_path_factory.mktemp("warm"), timeout=180)[0] == [0]


def clean(**more: str) -> dict[str, str]:
    return {name: value for name, value in _environment(DS_ACCELERATOR="cpu").items() if not FOREIGN.match(name)} | more


def exported(ranks: int, port: int, addr: str = "127.0.0.1", only: tuple[int, ...] | None = None) -> list[dict[str, str]]:
    """As torchrun's, without its store; ``only`` these ranks."""
    return [clean(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR=addr, MASTER_PORT=str(port))
            for rank in (range(ranks) if only is None else only)]


def meet(environments, folder, *flags: str, timeout: float = 120) -> tuple[list[int], str, float]:
    """Exit codes, all that was printed, seconds."""
    started = time.monotonic()
    codes, text = run_ranks(SCRIPT, list(flags), environments, folder, timeout)
    assert "Traceback" not in text, text
    return codes, text, time.monotonic() - started


def sentences(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"all: |rank \d+: |usage: ", line)]


def by_slurm(rank: int) -> dict[str, str]:
    return clean(SLURM_JOB_ID=str(free_port()), SLURM_STEP_ID="0", SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank),
                 SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS="2", SLURM_STEP_NODELIST="a-node-of-ours")


def by_open_mpi(rank: int) -> dict[str, str]:
    return clean(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
                 OMPI_COMM_WORLD_LOCAL_SIZE="2", PMIX_NAMESPACE=f"test-{free_port()}")


@pytest.mark.parametrize("of_rank", [by_slurm, by_open_mpi], ids=["srun alone", "mpirun"])
def test_the_variables_of_one_launcher_are_enough_to_meet(of_rank, tmp_path):
    """EleutherAI/gpt-neox#849: srun or mpirun on one node, with no variable of torchrun's, address or port."""
    first = of_rank(0)
    second = of_rank(1) | {name: first[name] for name in ("SLURM_JOB_ID", "PMIX_NAMESPACE") if name in first}
    codes, text, _ = meet([first, second], tmp_path)
    assert codes == [0, 0] and text.count("sum 2") == 2, text
    assert text.count("2 ranks meet at 127.0.0.1:") == 1


@pytest.mark.parametrize("tp", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_the_timeout_is_that_of_all_groups_and_ends_a_wait_for_a_rank_that_sleeps(tp, tmp_path):
    codes, text, seconds = meet(exported(2, free_port()), tmp_path, "--minutes", "0.1", "--day", "sleep", "--tp", tp)
    assert text.count("'world': 6.0, 'ours': 6.0, \"DeepSpeed's\": 6.0") == 2, text
    assert codes[0] == 1 and 6 <= seconds < SOON, (codes, seconds)
    said, = [line for line in sentences(text) if line.startswith("rank 0")]
    assert "waited 0.1 minutes (--distributed-timeout-minutes)" in said and "stuck" in said


def test_a_rank_that_is_gone_is_told_apart_from_one_that_is_slow(tmp_path):
    codes, text, seconds = meet(exported(2, free_port()), tmp_path, "--day", "gone")
    assert codes == [1, 9] and seconds < SOON
    said, = sentences(text)
    assert "lost its connection to another rank" in said, text


def test_a_job_waits_for_a_rank_that_sleeps_as_long_as_the_flag_says(tmp_path):
    environments = exported(2, free_port())
    environments[1]["BAD_DAY"] = json.dumps({"after": 1, "sleep": 120})
    flags = [*small_model_flags(tmp_path), "--train-iters", "3", "--pipeline-model-parallel-size", "2",
             "--distributed-timeout-minutes", "0.2"]
    started = time.monotonic()
    codes, text = run_ranks(ROOT / "tests" / "stop_script.py", flags, environments, tmp_path, 120)
    assert codes == [1, 1] and time.monotonic() - started < SOON + 30, text
    assert "Traceback" not in text
    said, = [line for line in text.splitlines() if line.startswith("error on rank 0")]
    assert "waited 0.2 minutes (--distributed-timeout-minutes)" in said
    assert text.strip().splitlines()[-1].startswith("rank 1 ends too: the first error was on rank 0"), text


def test_a_missing_rank_is_named_on_all_others(tmp_path):
    """EleutherAI/gpt-neox#849"""
    port = free_port()
    codes, text, seconds = meet(exported(4, port, only=(0, 1, 3)), tmp_path, "--minutes", "0.1")
    assert codes == [1, 1, 1] and 6 <= seconds < SOON, (codes, seconds)
    said, = sentences(text)  # rank 0 speaks for all
    for words in ("waited 0.1 minutes", "--distributed-timeout-minutes", f"127.0.0.1:{port}", "3 of 4 came", "missing: rank 2;"):
        assert words in said, said


def test_rank_zero_is_missing(tmp_path):
    port = free_port()
    codes, text, seconds = meet(exported(3, port, only=(1, 2)), tmp_path, "--minutes", "0.03")
    assert codes == [1, 1] and seconds < SOON
    assert len(sentences(text)) == 2
    for said in sentences(text):
        assert f"127.0.0.1:{port}" in said and "0.03 minutes" in said and "rank 0 is missing" in said


@pytest.fixture
def taken():
    """A port on which another program listens, takes connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(16)
        kept = []
        threading.Thread(target=lambda: kept.extend(iter(lambda: listener.accept()[0], None)), daemon=True).start()
        yield listener.getsockname()[1]
        for connection in kept:
            connection.close()


def test_a_busy_port_is_named_with_the_remedy_on_all_ranks(taken, tmp_path):
    """EleutherAI/gpt-neox#849, NVIDIA/mlperf-common#9: torch alone would have rank 1 wait for ever."""
    codes, text, seconds = meet(exported(2, taken), tmp_path, "--minutes", "0.1")
    assert codes == [1, 1] and seconds < SOON
    first, second = sentences(text)
    assert f"listens on port {taken} of this host" in first and "set MASTER_PORT to a free port" in first
    assert f"127.0.0.1:{taken} is not rank 0 of this job" in second and "set MASTER_PORT to a free port" in second


def test_every_rank_takes_itself_for_rank_zero(tmp_path):
    """EleutherAI/gpt-neox#849: "every rank tries to be master"."""
    port = free_port()
    codes, text, _ = meet(exported(2, port, only=(0, 0)), tmp_path, "--minutes", "0.1")
    assert codes == [1, 1]
    busy = [line for line in sentences(text) if f"another rank 0 listens on port {port}" in line]
    missing = [line for line in sentences(text) if "missing: rank 1" in line]
    assert len(busy) == len(missing) == 1, text


def test_two_processes_of_one_number_and_two_jobs_of_one_port(tmp_path):
    port = free_port()
    environments = exported(3, port, only=(0, 1, 1)) + exported(4, port, only=(2,))
    codes, text, _ = meet(environments, tmp_path, "--minutes", "0.1")
    assert codes == [1] * 4
    said = sentences(text)
    assert sum(f"rank 1 has come to 127.0.0.1:{port} already" in line for line in said) == 1, text
    assert sum("another job meets (3 ranks; this one: 4 ranks)" in line for line in said) == 1, text


def test_a_host_that_nobody_knows(tmp_path):
    codes, text, seconds = meet(exported(2, 29500, addr="no-such-host.invalid"), tmp_path, "--minutes", "0.01")
    assert codes == [1, 1] and seconds < SOON
    assert len(sentences(text)) == 2
    for said in sentences(text):
        assert "name no-such-host.invalid" in said and "no-such-host.invalid:29500" in said and "MASTER_ADDR" in said


def test_an_address_that_is_not_that_of_rank_zero(tmp_path):
    """A documentation address (RFC 5737) leads nowhere."""
    codes, text, seconds = meet(exported(2, free_port(), addr="192.0.2.1"), tmp_path, "--minutes", "0.02")
    assert codes == [1, 1] and seconds < SOON
    assert "does not reach itself by the name 192.0.2.1" in text and "MASTER_ADDR to the host of rank 0" in text


def test_alone_the_variables_of_other_jobs_do_not_matter(taken, tmp_path):
    codes, text, _ = meet([clean(MASTER_ADDR="no-such-host.invalid", MASTER_PORT=str(taken))], tmp_path)
    assert codes == [0], text


# --- which accelerator ------------------------------------------------------------------------

class Visible(CPU_Accelerator):
    """``count`` accelerators, as far as counting goes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def device_count(self) -> int:
        return self.count


def test_a_rank_takes_the_accelerator_of_its_local_rank_or_the_only_one_it_sees():
    assert [choose_device(local, Visible(4)) for local in range(4)] == [0, 1, 2, 3]
    assert [choose_device(local, Visible(1)) for local in range(4)] == [0, 0, 0, 0]  # srun --gpus-per-task=1
    with pytest.raises(RunError, match="local rank 4 .* sees 4 .* start at most 4 ranks"):
        choose_device(4, Visible(4))


def test_ranks_that_would_share_an_accelerator_are_refused_and_others_are_not(tmp_path):
    codes, text, _ = meet(exported(3, free_port()), tmp_path, "--device", "GPU-1 of n0")
    assert codes == [1, 1, 1]
    said, = sentences(text)
    assert "ranks 0 and 1 see the same single accelerator (GPU-1 of n0)" in said
    other = tmp_path / "other"
    other.mkdir()
    codes, text, _ = meet(exported(3, free_port()), other, "--device", "GPU-RANK of n0")
    assert codes == [0, 0, 0] and text.count("goes on") == 3


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_the_launchers_themselves(launcher, tmp_path):
    """Two ranks train for two iterations, and a port that is taken is named."""
    port, command = free_port(), {
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--max_restarts", "0"],
        # without the number it starts one rank on a CPU; it adds --local_rank=R to the flags
        "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", "--hostfile", str(tmp_path / "none")]}[launcher]
    command = [sys.executable, "-m", *command, "--master_port", str(port), str(ROOT / "pretrain_gpt.py"),
               *small_model_flags(tmp_path), "--train-iters", "2"]
    ran = subprocess.run(command, env=clean(), cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert [line["iteration"] for line in training_lines(ran.stdout)] == [1, 2]
    assert f"launched by {launcher}: 2 ranks meet at 127.0.0.1:{port}" in ran.stdout
    if launcher == "deepspeed":
        with socket.create_server(("", port)):  # at once, though the job before has just left it
            ran = subprocess.run(command, env=clean(), cwd=ROOT, capture_output=True, text=True, timeout=240)
        said, = [line for line in ran.stderr.splitlines() if line.startswith("error")]
        assert ran.returncode == 1 and f"listens on port {port}" in said and "--master_port" in said
        assert "Traceback" not in ran.stderr
