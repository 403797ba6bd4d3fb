"""Which rank a process is, and where ranks meet: from the variables of each launcher alone."""

from __future__ import annotations

import itertools

import pytest
from command_lines import TINY, parse, refusal, world

from megatron.arguments_check import UsageError
from megatron.world import World, expand_hosts, rank_text, read_world, slurm_port

MEET = {"MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
#: a task of a step of 8 tasks on two nodes
SRUN = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "r1n[0-9]", "SLURM_STEP_NODELIST": "jean-zay-iam[01-03,07],n5"}
#: the script of that job: the first node's batch step, no task
BATCH = {name: value for name, value in SRUN.items() if "STEP" not in name} | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
#: the shell of an allocation with an interactive step
SHELL = SRUN | {"SLURM_STEP_ID": str(0xFFFF_FFFA), "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-n0-1234@1"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
           "MV2_COMM_WORLD_LOCAL_SIZE": "2"}
TORCHRUN = {**world(16, 9), "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}


def exported(size: int, rank: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), **MEET, **more}


@pytest.mark.parametrize("environ, flags, place", [
    ({}, "", ("none", 0, 1, 0)),
    ({}, "--local_rank 3", ("none", 0, 1, 3)),
    ({"RANK": "", "WORLD_SIZE": " "}, "", ("none", 0, 1, 0)),
    ({"WORLD_SIZE": "1"}, "", ("none", 0, 1, 0)),
    (world(4, 2), "", ("variables", 2, 4, 2)),
    (world(4, 2), "--local_rank 2", ("variables", 2, 4, 2)),
    (exported(4, 3), "--local-rank=1", ("variables", 3, 4, 1)),
    (TORCHRUN, "", ("torchrun", 9, 16, 1)),
    ({**world(4, 1), "CROSS_RANK": "0", "CROSS_SIZE": "1"}, "--local_rank=1", ("deepspeed", 1, 4, 1)),
    (SRUN, "", ("srun", 5, 8, 1)),
    (SRUN, "--local_rank 1", ("srun", 5, 8, 1)),
    ({**SRUN, "SLURM_NTASKS": "64"}, "", ("srun", 5, 8, 1)),  # the allocation has more tasks than the step
    (OPEN_MPI, "", ("Open MPI", 3, 4, 3)),
    ({**HYDRA, **MEET}, "", ("MPICH or Intel MPI", 3, 4, 1)),
    ({**MVAPICH, **MEET}, "", ("MVAPICH2", 3, 4, 1)),
    # no task, however many the allocation has
    (BATCH, "", ("none", 0, 1, 0)),
    (SHELL, "", ("none", 0, 1, 0)),
    ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, "", ("none", 0, 1, 0)),
    ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}, "", ("srun", 0, 1, 0)),
    # one in the other: a launcher for each node, or the daemons of an mpirun
    ({**TORCHRUN, **SRUN}, "", ("torchrun", 9, 16, 1)),
    ({**world(8, 2), **SRUN, "TORCHELASTIC_RUN_ID": "none"}, "", ("torchrun", 2, 8, 2)),
    ({**exported(1, 0), **SRUN, "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"}, "", ("torchrun", 0, 1, 0)),
    ({**exported(16, 9), **SRUN, "LOCAL_RANK": "1"}, "", ("variables", 9, 16, 1)),
    ({**OPEN_MPI, **SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "", ("Open MPI", 3, 4, 3)),
    ({**HYDRA, **MEET, **BATCH}, "", ("MPICH or Intel MPI", 3, 4, 1)),
    # two that agree
    (exported(8, 5, **SRUN), "", ("variables", 5, 8, 1)),
    ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, "", ("MPICH or Intel MPI", 5, 8, 1)),  # srun --mpi=pmi2
    ({**SRUN, "WORLD_SIZE": "8"}, "", ("srun", 5, 8, 1)),
    ({**SRUN, "RANK": "5"}, "", ("srun", 5, 8, 1)),
    ({**OPEN_MPI, **MVAPICH}, "", ("Open MPI", 3, 4, 3)),
])
def test_the_launcher_is_believed_in_a_fixed_order(environ, flags, place):
    """EleutherAI/gpt-neox#849: started by srun or mpirun alone, by torchrun in them, and all of these at once.

    deepspeed-course#20: the environment comes before the default of ``--local_rank``.
    """
    parallel = parse(f"{TINY} {flags}", environ=environ).parallel
    assert (parallel.launcher, parallel.rank, parallel.world_size, parallel.local_rank) == place


@pytest.mark.parametrize("environ, flags, words", [
    ({"RANK": "1"}, "", "RANK; 1; WORLD_SIZE is not"),
    ({"WORLD_SIZE": "2"}, "", "WORLD_SIZE; 2; RANK is not"),
    ({"OMPI_COMM_WORLD_RANK": "1"}, "", "OMPI_COMM_WORLD_RANK; 1; OMPI_COMM_WORLD_SIZE is not"),
    ({"PMI_SIZE": "2"}, "", "PMI_SIZE; 2; PMI_RANK is not"),
    ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, "", "SLURM_PROCID=5; SLURM_STEP_ID; SLURM_STEP_NUM_TASKS"),
    ({"SLURM_PROCID": "5", "SLURM_STEP_ID": "0"}, "", "SLURM_PROCID; 5; SLURM_STEP_NUM_TASKS is not"),
    ({"PMIX_RANK": "1"}, "", "PMIX_RANK=1; number of ranks; WORLD_SIZE"),
    (exported(2, 2, LOCAL_RANK="0"), "", "RANK=2; WORLD_SIZE=2; 0 to 1"),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "", "OMPI_COMM_WORLD_RANK=4; OMPI_COMM_WORLD_SIZE=4; 0 to 3"),
    (exported(0, 0), "", "WORLD_SIZE=0"),
    ({"RANK": "x", "WORLD_SIZE": "2"}, "", "RANK='x'; whole number"),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "", "RANK='-1'; whole number"),
    ({"RANK": "٣", "WORLD_SIZE": "4"}, "", "whole number"),
    # two that contradict each other
    ({**world(8, 2), **SRUN}, "", "RANK=2 of WORLD_SIZE=8; SLURM_PROCID=5 of SLURM_STEP_NUM_TASKS=8"),
    ({**exported(1, 0), **SRUN}, "", "RANK=0 of WORLD_SIZE=1; SLURM_PROCID=5 of SLURM_STEP_NUM_TASKS=8; worlds of their own"),
    ({**SRUN, "WORLD_SIZE": "16"}, "", "WORLD_SIZE=16; SLURM_STEP_NUM_TASKS=8; unset WORLD_SIZE"),
    ({**SRUN, "RANK": "0"}, "", "RANK=0; SLURM_PROCID=5; unset RANK"),
    ({**exported(4, 1), **OPEN_MPI}, "", "RANK=1 of WORLD_SIZE=4; OMPI_COMM_WORLD_RANK=3 of OMPI_COMM_WORLD_SIZE=4"),
    ({**OPEN_MPI, "PMI_RANK": "1", "PMI_SIZE": "4"}, "", "OMPI_COMM_WORLD_RANK=3; PMI_RANK=1 of PMI_SIZE=4"),
    ({**SRUN, **HYDRA, **MEET}, "", "PMI_RANK=3 of PMI_SIZE=4; SLURM_PROCID=5 of SLURM_STEP_NUM_TASKS=8"),
    # the local rank
    (exported(2, 1), "", "LOCAL_RANK is not set for rank 1 of 2"),
    (world(2, 1), "--local_rank 0", "--local_rank 0; LOCAL_RANK=1"),
    (SRUN, "--local_rank 0", "--local_rank 0; SLURM_LOCALID=1"),
    ({**SRUN, "LOCAL_RANK": "0"}, "", "LOCAL_RANK=0; SLURM_LOCALID=1; unset LOCAL_RANK"),
    ({**OPEN_MPI, "LOCAL_RANK": "0"}, "", "LOCAL_RANK=0; OMPI_COMM_WORLD_LOCAL_RANK=3"),
    # where to meet
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "", "MASTER_ADDR and MASTER_PORT not set; RANK=1 of WORLD_SIZE=2"),
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n0"}, "", "variable MASTER_PORT not set"),
    (exported(2, 1, LOCAL_RANK="1", MASTER_PORT="70000"), "", "MASTER_PORT=70000; 1 to 65535"),
    (exported(2, 1, LOCAL_RANK="1", MASTER_PORT="auto"), "", "MASTER_PORT='auto'; whole number"),
    (HYDRA, "", "MASTER_ADDR not set; PMI_RANK=3 of PMI_SIZE=4; mpirun -x MASTER_ADDR; -genv MASTER_ADDR; host; rank 0"),
    ({**SRUN, "SLURM_STEP_NODELIST": "n[3-1]"}, "", "SLURM_STEP_NODELIST='n[3-1]'; [A-B,C]; MASTER_ADDR"),
])
def test_a_contradiction_names_both_variables_and_ends_with_code_2(capsys, environ, flags, words):
    """EleutherAI/gpt-neox#849: on every rank that sees it, in one sentence."""
    sentence = refusal(capsys, f"{TINY} {flags}", environ=environ)
    assert all(word.lower() in sentence.lower() for word in words.split("; ")), sentence
    assert rank_text(environ) == "0" or f"rank {rank_text(environ)}: " in sentence, sentence


@pytest.mark.parametrize("environ, addr, port", [
    (world(4, 2), "n0", 29500),
    (SRUN, "jean-zay-iam01", slurm_port(4711, 2)),
    ({**SRUN, **MEET}, "n0", 29500),
    ({**SRUN, "MASTER_PORT": "1234"}, "jean-zay-iam01", 1234),
    ({**SRUN, "SLURM_STEP_NODELIST": "n7"}, "127.0.0.1", slurm_port(4711, 2)),
    ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"}, "r1n0", slurm_port(4711, 2)),
    ({"RANK": "5", "WORLD_SIZE": "8", **SRUN}, "jean-zay-iam01", slurm_port(4711, 2)),
    ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}, "jean-zay-iam01", slurm_port(4711, 2)),
    ({**HYDRA, "MASTER_ADDR": "head"}, "head", 29500),
    # nobody to meet: what the shell has exported for other jobs does not matter
    (MEET, "127.0.0.1", 0),
    ({**BATCH, **MEET}, "127.0.0.1", 0),
    (exported(1, 0), "127.0.0.1", 0),
    (exported(1, 0, TORCHELASTIC_RUN_ID="x"), "n0", 29500),
])
def test_where_the_ranks_meet(environ, addr, port):
    found = read_world(environ)
    assert (found.master_addr, found.master_port) == (addr, port)


def test_an_mpirun_on_one_node_needs_no_address_and_two_of_them_have_two_ports():
    first = read_world(OPEN_MPI)
    second = read_world({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-n0-1235@1"})
    assert first.master_addr == second.master_addr == "127.0.0.1" and first.master_port != second.master_port
    # ... of which all ranks think alike
    assert {read_world({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}).master_port
            for rank in "0123"} == {first.master_port}
    with pytest.raises(UsageError, match="mpirun -x MASTER_ADDR"):
        read_world({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})


def test_jobs_and_steps_that_may_share_a_node_have_ports_of_their_own():
    """NVIDIA/mlperf-common#9: two jobs that draw the same port at random."""
    ports = [slurm_port(job, step) for job in range(9_999_000, 10_000_200) for step in range(16)]
    assert len(set(ports)) == len(ports) and min(ports) >= 12_000 and max(ports) < 32_000


@pytest.mark.parametrize("text, hosts", [
    ("n5", ["n5"]),
    ("jean-zay-iam[01-03,07],n5", ["jean-zay-iam01", "jean-zay-iam02", "jean-zay-iam03", "jean-zay-iam07", "n5"]),
    ("r[1-2]c[08-10]", [f"r{row}c{column}" for row in "12" for column in ("08", "09", "10")]),
    ("a.b-1,a.b-2", ["a.b-1", "a.b-2"]),
    ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
])
def test_a_compact_node_list(text, hosts):
    assert list(expand_hosts(text)) == hosts


def test_a_node_list_is_as_long_as_it_is_read():
    assert list(itertools.islice(expand_hosts("n[0-99999999999]x[0-99999999999]"), 2)) == ["n0x0", "n0x1"]


@pytest.mark.parametrize("text", ["", ",", "a,,b", "n[1-", "n]1[", "n[]", "n[a-b]", "n[3-1]", "n[1-2-3]", "n[[1]]"])
def test_what_is_no_node_list(text):
    with pytest.raises(ValueError):
        list(expand_hosts(text))


def test_nothing_of_a_launcher_is_a_world_of_one():
    assert read_world({}) == World() == World(launcher="none", rank=0, world_size=1, local_rank=0)


# --- who speaks -------------------------------------------------------------------------------

@pytest.mark.parametrize("environ", [world(2, 1), SRUN, OPEN_MPI, {**HYDRA, **MEET}])
def test_a_fault_of_the_command_line_is_printed_by_rank_zero_only(capsys, environ):
    assert "--seed" in refusal(capsys, f"{TINY} --seed 0", environ=world(2, 0))
    assert refusal(capsys, f"{TINY} --seed 0", environ=environ) == ""
    assert refusal(capsys, f"{TINY} --global-batch-size 5", environ=environ) == ""


def test_a_missing_file_is_printed_by_every_rank(capsys):
    message = refusal(capsys, f"{TINY} --deepspeed_config /nowhere", environ=world(2, 1))
    assert "rank 1" in message and "/nowhere" in message
