#!/usr/bin/env bash
# From text to a bias-only run, on a laptop or on GPUs:  bash examples/quickstart.sh
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash examples/quickstart.sh [options] [-- further flags of pretrain_gpt.py]

Makes a corpus of 25 languages, trains a tokenizer, pretrains a small GPT in BLOOM's layout,
then trains on from that checkpoint twice with one launch line, without and with --bitfit,
and shows the two runs side by side.

  --iters N   iterations of each of the three runs   (QUICKSTART_ITERS, 40)
  --tp N      tensor-parallel degree                 (QUICKSTART_TP, 2; on a single GPU 1)
  --pp N      pipeline-parallel degree               (QUICKSTART_PP, 2; on 1 to 3 GPUs 1)
  --dp N      data-parallel degree                   (QUICKSTART_DP, 1)
  --out DIR   where all files go                     (QUICKSTART_OUT, quickstart-out)
  --help      this text

TP x PP x DP processes are started: on GPUs with NCCL where as many are visible, else on CPU
cores with gloo. Every start makes a new folder below --out and deletes nothing.
TEXT
}

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# tp and pp stay empty until the accelerators are counted, unless they are given
iters="${QUICKSTART_ITERS:-40}" tp="${QUICKSTART_TP:-}" pp="${QUICKSTART_PP:-}" dp="${QUICKSTART_DP:-1}"
out="${QUICKSTART_OUT:-$root/quickstart-out}"
further=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --) shift; further=("$@"); break ;;
        --iters | --tp | --pp | --dp | --out)
            [ $# -ge 2 ] || die "$1 needs a value"
            declare "${1#--}=$2"
            shift 2 ;;
        *) die "$1 is no option; see bash examples/quickstart.sh --help" ;;
    esac
done
for name in iters dp ${tp:+tp} ${pp:+pp}; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || die "--$name ${!name} is not a whole number from 1"
done
[ "$iters" -ge 4 ] || die "--iters $iters is too few: the first 2 are not timed; give at least 4"
[ "${pp:-1}" -le 4 ] || die "--pp $pp is more than the model's 4 layers"
case "${tp:-1}" in 1 | 2 | 4 | 8) ;; *) die "--tp $tp is not 1, 2, 4 or 8: it must divide the model's 8 heads" ;; esac
mkdir -p "$out"
out="$(cd "$out" && pwd)/$(date +%Y%m%d-%H%M%S)"
mkdir "$out" || die "$out exists already; start again"

step=0
begin() {
    step=$((step + 1))
    printf '\n[%d/7] %s  (%d s so far)\n' "$step" "$1" "$SECONDS"
}
at_exit() {
    local status=$?
    [ "$status" -eq 0 ] || printf 'error: step %d of 7 failed (exit status %d); its files and logs are in %s\n' \
        "$step" "$status" "$out" >&2
}
trap at_exit EXIT

begin "environment"
# shellcheck disable=SC1091
. "$root/tools/setup_env.sh"
setup_env quickstart
installed=$SECONDS
cd "$root"
export PYTHONUNBUFFERED=1

begin "corpus: Django's translations"
python examples/make_corpus.py --output-dir "$out/corpus"

begin "tokenizer: byte-level BPE, 4096 ids"
python tools/train_tokenizer.py --input "$out/corpus/corpus.jsonl" --vocab-size 4096 \
    --output-dir "$out/tokenizer"
tokenizer=(--tokenizer-type GPT2BPETokenizer --vocab-file "$out/tokenizer/vocab.json"
    --merge-file "$out/tokenizer/merges.txt")

begin "token files"
for part in corpus valid; do
    python tools/preprocess_data.py --input "$out/corpus/$part.jsonl" --output-prefix "$out/data/$part" \
        "${tokenizer[@]}" --append-eod --workers 2 --log-interval 2000
done

# --- the three runs -----------------------------------------------------------------------------

devices="$(python -c 'import torch; print(torch.accelerator.device_count())')"
if [ -z "$tp$pp" ] && [ "$devices" -ge "$dp" ] && [ "$devices" -lt $((4 * dp)) ]; then
    # too few for TP=2 PP=2, but no reason to leave them idle
    tp=$((devices >= 2 * dp ? 2 : 1)) pp=1
fi
tp="${tp:-2}" pp="${pp:-2}"
ranks=$((tp * pp * dp))
if [ "$devices" -ge "$ranks" ]; then
    place="$ranks accelerators"
else
    place="CPU (accelerators visible: $devices)"
    export DS_ACCELERATOR=cpu
fi

# 5e-3 suits a model this small, and biases. At billions of parameters BitFit wants about 1e-3, and full
# fine-tuning some hundred times less.
flags=(
    --tensor-model-parallel-size "$tp" --pipeline-model-parallel-size "$pp"
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128
    --position-embedding-type alibi --embed-layernorm --init-method-std 0.02
    --micro-batch-size 8 --global-batch-size $((32 * dp)) --train-iters "$iters"
    --hidden-dropout 0 --attention-dropout 0 --lr 5e-3 --lr-decay-style constant --clip-grad 1.0 --adam-beta2 0.95
    --train-weighted-split-paths "train: 1 0:1 $out/data/corpus_text_document"
    --valid-weighted-split-paths "valid: 1 0:1 $out/data/valid_text_document"
    --eval-iters 3 --eval-interval "$iters" --log-interval 1 --num-workers 0 --valid-num-workers 0
    --distributed-backend nccl "${tokenizer[@]}" ${further[@]+"${further[@]}"}
)

free_port() {
    python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# What a person wants to watch, shortened to a screen's width; the log has all of it.
watch() {
    sed -unE -e '/ iteration +[0-9]+\/ /{s/\| consumed samples.*(\| elapsed time[^|]*).*(\| lm loss[^|]*).*(\| grad norm:[^|]*).*/\1\2\3/p;d}' \
        -e '/^(starting from|resuming|trainable )| loss at /p'
}

# launch NAME FLAGS...: one run, its whole output in NAME.log
launch() {
    local log="$out/$1.log" command
    shift
    command=(python -m torch.distributed.run --nproc_per_node "$ranks" --master_addr 127.0.0.1
        --master_port "$(free_port)" --max_restarts 0 pretrain_gpt.py "$@")
    printf '%q ' "${command[@]}" > "$log"
    printf '\n' >> "$log"
    if ! "${command[@]}" 2>&1 | tee -a "$log" | watch; then
        # the trainer's own words, before the launcher's summary; a killed process leaves only that
        if grep -qE '(^|: )error' "$log"; then
            sed -nE '/(^|: )error/,/failed \(exitcode/p' "$log" | sed '/failed (exitcode/d' | sed -n 1,30p >&2
        else
            tail -n 20 "$log" >&2
        fi
        die "the run failed; its whole output is in $log"
    fi
}

begin "pretraining on $place: TP=$tp PP=$pp DP=$dp, $iters iterations"
launch pretrain "${flags[@]}" --save "$out/base" --save-interval "$iters"

# One launch line, starting from the checkpoint (weights only), and the same plus --bitfit.
begin "from that checkpoint, first all parameters, then the biases only"
flags+=(--load "$out/base")
echo "-- full"
launch full "${flags[@]}" --save "$out/full" --save-interval "$iters"
echo "-- bitfit: the same launch line plus --bitfit"
launch bitfit "${flags[@]}" --save "$out/bitfit" --save-interval "$iters" --bitfit

begin "the two runs side by side"
python tools/compare_runs.py "$out/full.log" "$out/bitfit.log" --names full bitfit | tee "$out/comparison.txt"
echo
for run in pretrain full bitfit; do
    printf '%-10s' "$run"
    grep -m 1 -oE 'valid loss at iteration.*PPL: [^ ]+' "$out/$run.log" || echo "no validation line in its log"
done | tee -a "$out/comparison.txt"
printf '\nDone in %d s after %d s of set-up. Logs, checkpoints and this table are in %s\n' \
    "$((SECONDS - installed))" "$installed" "$out"
[ "${VIRTUAL_ENV:-}" != "$root/.venv" ] || echo "For commands of your own, such as those of README.md: . $root/.venv/bin/activate"
