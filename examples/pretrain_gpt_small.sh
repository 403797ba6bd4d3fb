#!/usr/bin/env bash
# Pretrain a 125M GPT in BLOOM's layout, or train its biases: a launch script to copy and edit.
#
#   DATA=d/text_document TOKENIZER=d/tokenizer.json bash examples/pretrain_gpt_small.sh
#   ... SAVE=checkpoints/biases bash examples/pretrain_gpt_small.sh --load checkpoints/base --bitfit \
#       --lr 1e-3 --lr-decay-style constant
#
# Further arguments are flags of pretrain_gpt.py; a flag given twice has its last value. The same
# line starts and resumes: a --save folder that holds this run's checkpoint is continued from.
#
#   DATA        prefix of the token files made by tools/preprocess_data.py (required)
#   TOKENIZER   folder, tokenizer.json or hub name they were made with (required)
#   SAVE        folder of the checkpoints and curves (checkpoints/base)
#   GPUS        processes on this node (the accelerators that are visible, else 1)
#   NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for more nodes than one (1, 0, 127.0.0.1, 6000)
#   TP, PP      tensor and pipeline degree (1, 1); the rest of the processes is data parallel
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${DATA:?is not set: the prefix of the token files, without .bin and .idx}"
: "${TOKENIZER:?is not set: the tokenizer that the token files were made with}"
GPUS="${GPUS:-$(python -c 'import torch; print(max(1, torch.accelerator.device_count()))')}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

GPT_ARGS=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12
    --seq-length 2048 --max-position-embeddings 2048
    --position-embedding-type alibi --embed-layernorm --init-method-std 0.0048
    --micro-batch-size 4 --global-batch-size 256 --train-samples 2_560_000
    --bf16 --checkpoint-activations
)
OPTIMIZER_ARGS=(
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
    # BitFit wants far more: about 1e-3, constant (--lr 1e-3 --lr-decay-style constant)
    --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-samples 25_600
)
OUTPUT_ARGS=(
    --log-interval 10 --save-interval 500 --eval-interval 500 --eval-iters 10
    --tensorboard-dir "${SAVE:-checkpoints/base}/tensorboard"
)

exec python -m torch.distributed.run --nproc_per_node "$GPUS" --nnodes "${NODES:-1}" \
    --node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-127.0.0.1}" \
    --master_port "${MASTER_PORT:-6000}" --max_restarts 0 \
    pretrain_gpt.py \
    --tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-1}" \
    "${GPT_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${OUTPUT_ARGS[@]}" \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --data-path "$DATA" --split 949,50,1 --save "${SAVE:-checkpoints/base}" "$@"
