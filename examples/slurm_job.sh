# shellcheck shell=bash
# Sourced by the *.slurm scripts after their block of values: what is the same in all of them.
#
# It needs REPO, RUN, ENV_SETUP and GPUS_PER_NODE, goes to REPO, makes "python" the right one,
# and gives MASTER_ADDR, MASTER_PORT and ways to start a script in the job:
#
#   on_each_node NAME SCRIPT FLAGS...   srun + torchrun, one launcher per node. Signals do not reach
#                                       the ranks, so end long runs with --exit-duration-in-mins.
#   on_each_gpu NAME SCRIPT FLAGS...    srun alone, one task per GPU. Signals do reach the ranks, and
#                                       their exit code comes back (75: saved, start me again).
#   on_one_node NAME SCRIPT ARGUMENTS...   a shell script, once.
#
# They return the exit code of srun. What is printed goes to
#
#   RUN/logs/NAME.log                    all of it; later starts add to it (tools/compare_runs.py reads it)
#   RUN/logs/job7.0/NAME/...             job 7, restarts 0: one file per rank, for "which rank failed first?"

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

[ -n "${SLURM_JOB_ID:-}" ] || die "this is no SLURM job: start the script with sbatch"
[ -f "$REPO/pretrain_gpt.py" ] || die "REPO=$REPO does not hold pretrain_gpt.py; sbatch from the repository, or set REPO"
[ -f "$ENV_SETUP" ] || die "ENV_SETUP=$ENV_SETUP is no file; see 'Once, on the login node' in examples/README.md"
cd "$REPO" || exit 1
# scripts of modules and conda read variables that are not set
set +u
# shellcheck disable=SC1090
. "$ENV_SETUP"
set -u

# sbatch hands on the variables of the shell it was typed in; a launcher's would be taken for this job's
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK TORCHELASTIC_RUN_ID

# the first node of the job is where all ranks meet
_hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export MASTER_ADDR="${_hosts%%$'\n'*}"
[ -n "$MASTER_ADDR" ] || die "scontrol names no host for SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST"

# Ports 10000 to 29999: eight for each job, one for each run it starts, so that jobs which share a
# node do not meet. Every task of an array has a SLURM_JOB_ID of its own, and so its own ports.
_next_port=0
_take_port() {
    export MASTER_PORT="$((10000 + SLURM_JOB_ID % 2500 * 8 + _next_port % 8))"
    _next_port=$((_next_port + 1))
}

# compute nodes often have no internet: a missing file is then an error at once, not minutes of retries
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1
export PYTHONUNBUFFERED=1
# threads of each rank on the CPU; its data loaders need cores too
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"

_srun=(srun --export=ALL)
# srun does not take this from sbatch by itself
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || _srun+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")

# _begin NAME SCRIPT FLAGS...: port, log and folder for the files of the ranks
_begin() {
    _take_port
    _log="$RUN/logs/$1.log"
    _ranks="$RUN/logs/job$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}/$1"
    mkdir -p "$_ranks"
    {
        printf 'job %s on %s, %s GPUs each, %s:%s\n' "$SLURM_JOB_ID" "${_hosts//$'\n'/ }" "$GPUS_PER_NODE" \
            "$MASTER_ADDR" "$MASTER_PORT"
        printf '%q ' "${@:2}"
        printf '\n'
    } | tee -a "$_log"
}

on_each_node() {
    _begin "$@"
    # one failed launcher ends the others at once; a launcher that outlives the first by a minute hangs
    "${_srun[@]}" --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=60 \
        bash examples/slurm_node.sh "$_ranks" "$GPUS_PER_NODE" "${@:2}" 2>&1 | tee -a "$_log"
    return "${PIPESTATUS[0]}"
}

on_one_node() {
    _begin "$@"
    "${_srun[@]}" --nodes=1 --ntasks=1 bash "${@:2}" 2>&1 | tee -a "$_log"
    return "${PIPESTATUS[0]}"
}

on_each_gpu() {
    local code=0
    _begin "$@"
    echo "follow it with:  tail -F $_ranks/rank-$(printf %04d $((SLURM_NNODES * GPUS_PER_NODE - 1))).log"
    # kill-on-bad-exit must be off: 75 counts as a bad exit, and the first rank that leaves with it would
    # have the others killed on their way out. A rank that fails takes the others with it after a minute.
    "${_srun[@]}" --nodes="$SLURM_NNODES" --ntasks="$((SLURM_NNODES * GPUS_PER_NODE))" --ntasks-per-node="$GPUS_PER_NODE" \
        --kill-on-bad-exit=0 --wait=60 --output="$_ranks/rank-%4t.log" python -u "${@:2}" || code=$?
    cat "$_ranks"/rank-*.log | tee -a "$_log"
    return "$code"
}
