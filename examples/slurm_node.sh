#!/usr/bin/env bash
# Started by srun, once on each node (on_each_node in slurm_job.sh): torchrun with this node's number.
#
#   bash examples/slurm_node.sh FOLDER GPUS SCRIPT FLAGS...
#
# FOLDER/node0/*/attempt_0/3/stderr.log is what the rank on GPU 3 of the first node had to say. error.json
# appears beside the folder where a rank leaves one.
set -euo pipefail
logs="$1/node$SLURM_PROCID"
gpus="$2"
shift 2
mkdir -p "$logs"
export TORCHELASTIC_ERROR_FILE="$logs/error.json"
# A fixed number for each node, not one that depends on who came first: node 0 is the one that MASTER_ADDR names.
exec python -u -m torch.distributed.run \
    --nnodes "$SLURM_NTASKS" --node_rank "$SLURM_PROCID" --nproc_per_node "$gpus" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --rdzv_id "$SLURM_JOB_ID" \
    --max_restarts 0 --log_dir "$logs" --tee 3 "$@"
