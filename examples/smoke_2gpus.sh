#!/usr/bin/env bash
# Do two GPUs of this machine train together? Some minutes, no downloads, nothing to edit:
#
#   bash examples/smoke_2gpus.sh [FOLDER]          (SLURM: sbatch examples/smoke_2gpus.slurm)
#
# Makes a text, a tokenizer and token files; trains a tiny model at TP=2; then the biases alone (--bitfit) from that
# checkpoint, at TP=2 and at PP=2; and looks at the logs. Exit code 0 and "smoke test passed", or not 0 and the reason.
# FOLDER (a new temporary one) keeps all files. "python" must be one that this project is installed for.
#
#   DEVICES       gpu (must be there), cpu (gloo, two processes), or auto: GPUs where two are visible (auto)
#   MASTER_PORT   a free port of this machine (29517)
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

out="${1:-$(mktemp -d)}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
[ ! -e "$out/base" ] || die "$out holds an earlier smoke test; give a new folder"
cd "$repo"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

visible="$(python -c 'import torch; print(torch.accelerator.device_count())')"
case "${DEVICES:-auto}" in
    gpu) [ "$visible" -ge 2 ] || die "DEVICES=gpu needs two GPUs, but torch sees $visible: nvidia-smi, and is this torch built for them?" ;;
    cpu) export DS_ACCELERATOR=cpu ;;
    auto) [ "$visible" -ge 2 ] || export DS_ACCELERATOR=cpu ;;
    *) die "DEVICES=$DEVICES is none of auto, gpu and cpu" ;;
esac
echo "smoke test: accelerators visible: $visible, training on ${DS_ACCELERATOR:-them}; files in $out"

for number in {0..400}; do
    printf '{"text": "%d, %d and %d are numbers in a row, and so are %d and %d."}\n' \
        "$number" $((number + 1)) $((number + 2)) $((number + 3)) $((number + 4))
done > "$out/text.jsonl"
python tools/train_tokenizer.py --input "$out/text.jsonl" --vocab-size 400 --output-dir "$out/tokenizer"
tokenizer=(--tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$out/tokenizer")
python tools/preprocess_data.py --input "$out/text.jsonl" --output-prefix "$out/data" "${tokenizer[@]}" --append-eod

flags=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --position-embedding-type alibi --embed-layernorm "${tokenizer[@]}"
    --micro-batch-size 4 --global-batch-size 8 --lr 1e-2 --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0
    --data-path "$out/data_text_document" --split "90,10,0" --eval-iters 1 --eval-interval 100 --log-interval 1
)

# launch NAME FLAGS...
launch() {
    local name="$1"
    shift
    echo "-- $name"
    python -m torch.distributed.run --nproc_per_node 2 --master_addr 127.0.0.1 --master_port "${MASTER_PORT:-29517}" \
        --max_restarts 0 --log_dir "$out/ranks" --tee 3 pretrain_gpt.py "${flags[@]}" "$@" > "$out/$name.log" 2>&1 || {
        tail -n 40 "$out/$name.log" >&2
        die "$name failed; its whole output is in $out/$name.log, that of each rank in $out/ranks"
    }
}

launch base --tensor-model-parallel-size 2 --train-iters 6 --save "$out/base" --save-interval 6
launch tp2 --tensor-model-parallel-size 2 --train-iters 4 --load "$out/base" --bitfit
launch pp2 --pipeline-model-parallel-size 2 --train-iters 4 --load "$out/base" --bitfit

python - "$out" <<'PYTHON'
import math
import sys
from pathlib import Path

from megatron.log_lines import parse_training_line

folder = Path(sys.argv[1])
losses = {}
for name, wanted in (("base", 6), ("tp2", 4), ("pp2", 4)):
    text = (folder / f"{name}.log").read_text(errors="replace")
    lines = [values for line in text.splitlines() if (values := parse_training_line(line.partition("]:")[2] or line))]
    losses[name] = [values["loss"] for values in lines]
    print(f"{name}: losses {losses[name]}, gradient norms {[values['grad_norm'] for values in lines]}")
    if [values["iteration"] for values in lines] != list(range(1, wanted + 1)):
        sys.exit(f"error: {name} should have printed {wanted} training lines")
    if not all(math.isfinite(values["loss"]) and values["grad_norm"] > 0 for values in lines):
        sys.exit(f"error: {name} has a loss that is no number, or a gradient of zero")
if losses["base"][-1] > losses["base"][0] - 0.5:
    sys.exit("error: six iterations at TP=2 did not lower the loss by a half")
for number, (tp2, pp2) in enumerate(zip(losses["tp2"], losses["pp2"]), start=1):
    if abs(tp2 - pp2) > 1e-3 * tp2:
        sys.exit(f"error: iteration {number} from one checkpoint has the loss {tp2} at TP=2 and {pp2} at PP=2")
if losses["tp2"][0] > losses["base"][0] - 0.5:
    sys.exit("error: --bitfit did not start from the weights of the checkpoint")
PYTHON
echo "smoke test passed"
