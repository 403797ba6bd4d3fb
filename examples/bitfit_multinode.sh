#!/usr/bin/env bash
# BitFit of BLOOM-1B1 on running text, on several machines without SLURM: start it on each of them, within 15 minutes.
#
#   on host0:  DATA=d/text_document BASE=bloom-1b1 bash examples/bitfit_multinode.sh 0 2 host0
#   on host1:  DATA=d/text_document BASE=bloom-1b1 bash examples/bitfit_multinode.sh 1 2 host0
#
# that is NODE_RANK NNODES MASTER_ADDR, which may also come from variables of these names; without any it is
# one machine. What follows these three are flags of
# pretrain_gpt.py, a flag given twice has its last value. The same lines start the run and go on with it.
#
#   DATA, BASE, RUN must name the same files on all machines (a shared disk); RUN is written to.
#   MASTER_PORT   a port of MASTER_ADDR that the others can reach (29500)
#   IFACE         network interface to use, if the machines have several: eth0, ib0 (NCCL's and gloo's choice)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NODE_RANK="${1:-${NODE_RANK:-0}}"
NNODES="${2:-${NNODES:-1}}"
MASTER_ADDR="${3:-${MASTER_ADDR:-127.0.0.1}}"
shift "$(($# < 3 ? $# : 3))"
for name in NODE_RANK NNODES; do
    [[ ${!name} =~ ^[0-9]+$ ]] || { echo "error: $name=${!name} is not a whole number" >&2; exit 2; }
done
[ "$NODE_RANK" -lt "$NNODES" ] || { echo "error: NODE_RANK=$NODE_RANK must be below NNODES=$NNODES" >&2; exit 2; }
[ "$NNODES" -eq 1 ] || [ "$MASTER_ADDR" != 127.0.0.1 ] || {
    echo "error: MASTER_ADDR=127.0.0.1 is every machine's own; give the name of the first of the $NNODES" >&2
    exit 2
}

# --- edit here ------------------------------------------------------------------------------------
BASE="${BASE:?is not set: folder of bloom-1b1, as downloaded from Hugging Face}"
TOKENIZER="${TOKENIZER:-$BASE}"
DATA="${DATA:?is not set: the prefix of the token files, without .bin and .idx}"
RUN="${RUN:-runs/bitfit-1b1}"                            # checkpoints, logs and curves go here
GPUS="${GPUS:-$(python -c 'import torch; print(max(1, torch.accelerator.device_count()))')}"    # of each machine
MASTER_PORT="${MASTER_PORT:-29500}"
LR="${LR:-1e-3}"                                         # biases want far more than the 2e-5 of full fine-tuning
# ---------------------------------------------------------------------------------------------------

if [ -n "${IFACE:-}" ]; then
    export NCCL_SOCKET_IFNAME="$IFACE" GLOO_SOCKET_IFNAME="$IFACE"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1
# a variable of another launcher must not be taken for this one's
unset RANK WORLD_SIZE LOCAL_RANK

logs="$RUN/logs/node$NODE_RANK"
mkdir -p "$logs"
export TORCHELASTIC_ERROR_FILE="$logs/error.json"

FLAGS=(
    --num-layers 24 --hidden-size 1536 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
    --position-embedding-type alibi --embed-layernorm --pad-vocab-size-to 250880
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER"
    --bitfit --lr "$LR" --lr-decay-style constant --lr-warmup-samples 5_120
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --micro-batch-size 4 --global-batch-size 512 --train-samples 512_000
    --hidden-dropout 0 --attention-dropout 0 --seed 42 --bf16 --checkpoint-activations
    --data-path "$DATA" --split "949,50,1"
    --load "$BASE" --save "$RUN/checkpoints" --save-interval 100 --keep-last 3 --save-delta-only
    --log-interval 1 --eval-interval 250 --eval-iters 10 --tensorboard-dir "$RUN/tensorboard"
    # to stop it softly: touch RUN/stop (and remove that file before the next start)
    --kill-switch-path "$RUN/stop"
)

# the output of all ranks of this machine, and one folder per start with two files per rank below it
python -u -m torch.distributed.run --nnodes "$NNODES" --node_rank "$NODE_RANK" --nproc_per_node "$GPUS" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --max_restarts 0 --log_dir "$logs" --tee 3 \
    pretrain_gpt.py "${FLAGS[@]}" "$@" 2>&1 | tee -a "$logs/train.log"
