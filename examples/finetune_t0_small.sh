#!/usr/bin/env bash
# Fine-tune the biases of a 125M model on prompted tasks: a launch script to copy and edit.
#
#   DATA=d/tasks TOKENIZER=d/tokenizer BASE=checkpoints/base bash examples/finetune_t0_small.sh
#
# DATA is made from lines like {"inputs": "Is this positive? Great film.", "targets": "Yes"}:
#
#   python tools/preprocess_data.py --input tasks.jsonl --output-prefix d/tasks \
#       --json-keys inputs targets --append-eod --prepend-space --workers 8 \
#       --tokenizer-type PretrainedFromHF --tokenizer-name-or-path d/tokenizer
#
# Further arguments are flags of finetune_t0.py; a flag given twice has its last value. The same
# line starts and resumes: a --save folder that holds this run's checkpoint is continued from.
#
#   DATA        prefix of the pairs, without _inputs_document (required)
#   TOKENIZER   folder, tokenizer.json or hub name they were made with (required)
#   BASE        folder of the checkpoint to start from, weights only (required)
#   SAVE        folder of the checkpoints (checkpoints/tasks)
#   GPUS        processes on this node (the accelerators that are visible, else 1)
#   NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for more nodes than one (1, 0, 127.0.0.1, 6000)
#   TP, PP      tensor and pipeline degree (1, 1); the rest of the processes is data parallel
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${DATA:?is not set: the prefix of the pairs, without _inputs_document}"
: "${TOKENIZER:?is not set: the tokenizer that the pairs were made with}"
: "${BASE:?is not set: the checkpoint to start from}"
SAVE="${SAVE:-checkpoints/tasks}"
GPUS="${GPUS:-$(python -c 'import torch; print(max(1, torch.accelerator.device_count()))')}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# the architecture is that of the base (examples/pretrain_gpt_small.sh)
GPT_ARGS=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12
    --seq-length 2048 --max-position-embeddings 2048
    --position-embedding-type alibi --embed-layernorm
    --micro-batch-size 4 --global-batch-size 256 --train-samples 128_000
    --hidden-dropout 0 --attention-dropout 0 --bf16 --checkpoint-activations
)
OPTIMIZER_ARGS=(
    # full fine-tuning instead: leave out --bitfit and take an --lr near 2e-5
    --bitfit --lr 1e-3 --lr-decay-style constant --lr-warmup-samples 2_560
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0
)
TASK_ARGS=(
    # each target token counts alike; global-targets: each target. With --prefixlm, inputs see each other
    --loss-normalization global-tokens
    --train-weighted-split-paths "train: 1 0:0.95 $DATA"
    --valid-weighted-split-paths "held-out: 1 0.95:1 $DATA" "trained-on: 1 0:0.05 $DATA"
)
OUTPUT_ARGS=(
    --log-interval 10 --save-interval 100 --eval-interval 100 --eval-iters 2
    --tensorboard-dir "$SAVE/tensorboard"
)

exec python -m torch.distributed.run --nproc_per_node "$GPUS" --nnodes "${NODES:-1}" \
    --node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-127.0.0.1}" \
    --master_port "${MASTER_PORT:-6000}" --max_restarts 0 \
    finetune_t0.py \
    --tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-1}" \
    "${GPT_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${TASK_ARGS[@]}" "${OUTPUT_ARGS[@]}" \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --load "$BASE" --save "$SAVE" "$@"
