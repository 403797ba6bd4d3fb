"""Wrong command lines, files and configurations: one sentence that says what to do, and nothing written."""

import dataclasses
import os
import shlex
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from command_lines import TINY, world
from forked import warm_context
from launching import launch, run_alone
from tiny_data import VOCAB_SIZE, small_model_flags, write_documents, write_tokenizer

import finetune_t0
import pretrain_gpt
from megatron.argument_table import USED, amount, count, positive, share, whole
from megatron.arguments import parse_arguments
from megatron.config import TokenizerConfig
from megatron.data.indexed_dataset import HEADER, IndexedDatasetWriter
from megatron.data.mtf_dataset import side_prefix
from megatron.errors import RunError
from megatron.tokenizer import build_tokenizer

ROOT = Path(__file__).parent.parent
LINE = TINY.split()


def contents(folder):
    """Every path below ``folder`` with its bytes and the time it was written."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
            for path in sorted(folder.rglob("*"))}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """The working folder, with a --save folder in it; both must stay as they are."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text("global_step5")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, folder, flags, words, *, without=(), size=1, entry="pretrain_gpt"):
    """Parse on every rank of a world: all exit with 2, rank 0 says one sentence with ``words``, nothing is written."""
    line = list(LINE)
    for flag in without:
        at = line.index(flag)
        del line[at:at + 2]
    line += ["--save", str(folder / "run"), "--save-interval", "5", *flags]
    before = contents(folder)
    for rank in range(size):
        with pytest.raises(SystemExit) as exit:
            parse_arguments(line, entry=entry, environ=world(size, rank) if size > 1 else {})
        said = capsys.readouterr()
        assert exit.value.code == 2 and said.out == ""
        sentence = said.err
        if rank == 0:
            assert sentence.startswith(f"{entry}.py: error: ") and sentence.count("\n") == 1, sentence
            assert all(word in sentence for word in words), f"{words} not all in: {sentence}"
    assert contents(folder) == before


# --- numbers: wrong type and range, flag by flag ----------------------------------------------

COUNT, WHOLE = "a whole number from 1", "a whole number from 0"
POSITIVE, AMOUNT, SHARE = "a number above 0", "a number from 0", "a number from 0 to below 1"
WRONG = {COUNT: ("0", "-2", "1.5", "", "٣"), WHOLE: ("-1", "0.5", "none", ""),
         POSITIVE: ("0", "-1e-5", "nan", "big"), AMOUNT: ("-0.1", "inf", "1,5"), SHARE: ("1", "-0.1", "nan", "10%")}
NUMBERS = {
    COUNT: """num-layers hidden-size num-attention-heads ffn-hidden-size kv-channels max-position-embeddings
        make-vocab-size-divisible-by pad-vocab-size-to micro-batch-size global-batch-size rampup-batch-size train-iters
        train-samples seed checkpoint-num-layers exit-interval exit-duration-in-mins lr-decay-iters lr-decay-samples
        lr-decay-tokens save-interval keep-last loss-scale-window hysteresis tensor-model-parallel-size
        pipeline-model-parallel-size check-tp-duplicated-parameters eval-interval log-interval tensorboard-log-interval
        tensorboard-queue-size seq-length encoder-seq-length""",
    WHOLE: """lr-warmup-iters lr-warmup-samples local_rank zero-stage eval-iters num-workers valid-num-workers
        vocab-extra-ids""",
    POSITIVE: "layernorm-epsilon adam-eps init-method-std loss-scale initial-loss-scale min-loss-scale",
    AMOUNT: "weight-decay clip-grad lr min-lr",
    SHARE: "attention-dropout hidden-dropout adam-beta1 adam-beta2 sgd-momentum lr-warmup-fraction",
}
CHOICES = {
    "position-embedding-type": "absolute rotary alibi", "glu-activation": "liglu geglu reglu swiglu",
    "optimizer": "adam sgd", "lr-decay-style": "constant linear cosine", "distributed-backend": "nccl gloo",
    "log-level": "debug info warning error critical", "log-level-replica": "debug info warning error critical",
    "data-impl": "lazy cached mmap infer", "dataloader-type": "single cyclic",
    "tokenizer-type": "GPT2BPETokenizer PretrainedFromHF",
    "loss-normalization": "micro-batch global-tokens global-targets", "mtf-overlong": "drop truncate-inputs error",
}
WORDS = ("onnx-safe", "eval-only")
TEXTS = ("kill-switch-path skip-train-iteration-range save load pp-partition-method deepspeed_config tensorboard-dir "
         "log-path data-path split train-weighted-split-paths valid-weighted-split-paths test-weighted-split-paths "
         "train-weighted-split-paths-path valid-weighted-split-paths-path test-weighted-split-paths-path "
         "tokenizer-name-or-path vocab-file merge-file").split()


VALUED = {flag.name.removeprefix("--"): flag for table in USED.values() for flag in table if flag.kind is not None}
BY_KIND = {count: COUNT, whole: WHOLE, positive: POSITIVE, amount: AMOUNT, share: SHARE}
#: a flag that the table above does not know yet is held to what its kind promises
LIMITS = {name: BY_KIND[flag.kind] for name, flag in VALUED.items() if flag.kind in BY_KIND} | {
    name: wanted for wanted, names in NUMBERS.items() for name in names.split()}


@pytest.mark.parametrize("name, wanted", LIMITS.items())
def test_a_number_of_the_wrong_type_or_range(capsys, workplace, name, wanted):
    for value in WRONG[wanted]:
        refused(capsys, workplace, [f"--{name}={value}"], [f"--{name}", repr(value), f"is not {wanted}"])


@pytest.mark.parametrize("name", CHOICES)
def test_a_word_that_is_not_offered(capsys, workplace, name):
    for value in ("", "Other"):
        refused(capsys, workplace, [f"--{name}", value], [f"--{name}", repr(value), *CHOICES[name].split()],
                entry=VALUED[name].entry or "pretrain_gpt")


@pytest.mark.parametrize("name", WORDS)
def test_what_is_neither_true_nor_false(capsys, workplace, name):
    for value in ("", "maybe", "2"):
        refused(capsys, workplace, [f"--{name}", value], [f"--{name}", repr(value), "true, false"])


@pytest.mark.parametrize("name", TEXTS)
def test_a_value_that_an_unset_variable_left_empty(capsys, workplace, name):
    for value in ("", " "):
        refused(capsys, workplace, [f"--{name}", value], [f"--{name}", repr(value), "empty", "leave the flag out"])


def test_these_tables_hold_every_flag_that_takes_a_value():
    assert set(VALUED) == {*LIMITS, *CHOICES, *WORDS, *TEXTS, "bitfit-bias-terms"}


def test_a_flag_without_its_value(capsys, workplace):
    for name in ("num-layers", "seed", "lr", "split", "save", "eval-only"):
        refused(capsys, workplace, [f"--{name}", "--bitfit"], [f"--{name}", "expected one argument"])
    for name in ("data-path", "rampup-batch-size", "train-weighted-split-paths"):
        refused(capsys, workplace, [f"--{name}", "--bitfit"], [f"--{name}", "expected at least one argument"])


# --- rules between flags, splits and blends ---------------------------------------------------

TRAIN = "--train-weighted-split-paths"
RULES = [  # flags, size of the world, words
    ("--num-layer 2", 1, "--num-layer 2; did you mean --num-layers?"),
    ("--micro_batch_size 2", 1, "--micro_batch_size; did you mean --micro-batch-size?"),
    ("--zzzz", 1, "--zzzz; --help"),
    ("stray", 1, "stray; --help"),
    ("--bitfit=true", 1, "--bitfit; takes no value; leave out 'true'"),
    ("--bitfit --bitfit-bias-terms query,,key", 1, "--bitfit-bias-terms query,,key; comma; allowed are all"),
    ("--bitfit --bitfit-bias-terms query,", 1, "--bitfit-bias-terms query,; comma; allowed are all"),
    ("--bitfit --bitfit-bias-terms ,query key", 1, "--bitfit-bias-terms ,query key; comma; allowed are all"),
    ("--bitfit --bitfit-bias-terms 'query, ,key'", 1, "--bitfit-bias-terms query, ,key; comma; allowed are all"),
    ("--global-batch-size 1", 1, "--global-batch-size 1; --micro-batch-size 2; try 2\n"),
    ("--global-batch-size 9", 2, "--global-batch-size 9; data parallel size 2 = 4; try 8 or 12"),
    ("--tensor-model-parallel-size 3", 2, "--tensor-model-parallel-size 3; world size 2"),
    ("--tensor-model-parallel-size 2 --num-attention-heads 1", 2, "--num-attention-heads 1; --tensor-model-parallel-size 2"),
    ("--pipeline-model-parallel-size 4", 4, "--num-layers 2; --pipeline-model-parallel-size 4"),
    ("--tensor-model-parallel-size 2 --ffn-hidden-size 5", 2, "--ffn-hidden-size 5; --tensor-model-parallel-size 2"),
    ("--seed 4294967296", 1, "--seed 4294967296; 4294967295 is the largest"),
    ("--hidden-size 33", 1, "--hidden-size 33; --num-attention-heads 4; --kv-channels"),
    ("--save-delta-only", 1, "--save-delta-only; --bitfit; give both"),
    ("--fp16 --initial-loss-scale 3", 1, "--initial-loss-scale 3; power of two"),
    ("--loss-normalization global-targets", 1, "--loss-normalization global-targets; allows micro-batch and global-tokens"),
    ("--prefixlm", 1, "--prefixlm; finetune_t0.py; leave it out"),
    ("--skip-train-iteration-range 3-2", 1, "--skip-train-iteration-range '3-2'; A-B"),
    ("--skip-train-iteration-range 1-2-3", 1, "--skip-train-iteration-range '1-2-3'; A-B"),
    ("--skip-train-iteration-range 1:2", 1, "--skip-train-iteration-range '1:2'; A-B"),
    ("--split 90,10,0,", 1, "--split; ''; finite number"),
    ("--split 90;10;0", 1, "--split; '90;10;0'; finite number"),
    ("--split 90,-10,20", 1, "--split '90,-10,20'; zero or more"),
    ("--split 0,0,0", 1, "--split '0,0,0'; positive"),
    ("--split 90/x", 1, "--split; 'x'; finite number"),
    ("--split 1,1,1,1", 1, "--split '1,1,1,1'; 4 parts; three"),
    ("--data-path a b", 1, "--data-path; 'a'; finite number"),
    ("--data-path 0.5 a 0.5", 1, "--data-path; '0.5 a 0.5'; weight and prefix in turn"),
    ("--data-path a 0.5 b 0.5", 1, "--data-path; 'a'; finite number"),
    ("--data-path 1 a -1 b", 1, "--data-path; -1; zero or more"),
    ("--data-path 0 a 0 b", 1, "--data-path; 0.0; positive"),
    ("--data-path 1 '' 1 b", 1, "--data-path; ''; empty"),
    (f"{TRAIN} 'train: 1 0:1 /d'", 1, f"--data-path d; {TRAIN}"),
]
GROUPS = [  # value of the flag, words
    ("train 1 0-1 /d", "no name; NAME: WEIGHT START:END PATH"),
    ("train: 0:1 /d", "'0:1 /d'; 2 fields; WEIGHT START:END PATH"),
    ("train: 1 0:1 /d /e", "'1 0:1 /d /e'; 4 fields; WEIGHT START:END PATH"),
    ("train: 1 0:1 /d; 1 0:1 /e", "fields; WEIGHT START:END PATH"),
    ("train: 1 0:1 /d,", "''; 0 fields; WEIGHT START:END PATH"),
    ("train: half 0:1 /d", "'half'; finite number"),
    ("train: -1 0:1 /d", "-1; zero or more"),
    ("train: 0 0:1 /d, 0 0:1 /e", "'train'; 0.0; positive"),
    ("train: 1 0-1 /d", "'0-1'; START:END"),
    ("train: 1 0:95 /d", "'0:95'; 0 <= START < END <= 1"),
    ("train: 1 0.5:0.5 /d", "'0.5:0.5'; 0 <= START < END <= 1"),
    ("train: 1 :1 /d", "''; finite number"),
]
LISTS = [  # content of a file of groups, words
    (b"", "0 lines; exactly one"),
    (b'"a: 1 0:1 /d"\n"b: 1 0:1 /d"\n', "2 lines; exactly one"),
    (b"a: 1 0:1 /d\n", "double quote"),
    (b'"a: 1 0:1 /d"  "b: 1 0:1 /d"\n', "quote, one space, quote"),
    (b'"a: 1 0:1.1 /d"\n', "'0:1.1'; 0 <= START < END <= 1"),
    (b"\xff\xfe\n", "cannot be read"),
    (None, "cannot be read; No such file"),
]


@pytest.mark.parametrize("flags, size, words", RULES)
def test_flags_that_do_not_go_together(capsys, workplace, flags, size, words):
    refused(capsys, workplace, shlex.split(flags), words.split("; "), size=size)


@pytest.mark.parametrize("text, words", GROUPS)
def test_a_mistyped_group(capsys, workplace, text, words):
    refused(capsys, workplace, [TRAIN, text], [TRAIN, *words.split("; ")], without=["--data-path"])


@pytest.mark.parametrize("content, words", LISTS)
def test_a_mistyped_file_of_groups(capsys, workplace, content, words):
    if content is not None:
        (workplace / "groups").write_bytes(content)
    refused(capsys, workplace, [f"{TRAIN}-path", "groups"], [f"{TRAIN}-path", "'groups'", *words.split("; ")],
            without=["--data-path"])


# --- the DeepSpeed JSON and the launcher's environment ----------------------------------------

JSONS = [  # content, further flags, words
    ("", "", "cannot be read as JSON"),
    ("{", "", "cannot be read as JSON; line 1"),
    ("{'train_batch_size': 2}", "", "cannot be read as JSON; double quotes"),
    ('{"fp16": {}, "fp16": {}}', "", "'fp16'; twice"),
    ("[" * 50_000, "", "too deep"),
    ("null", "", "holds null; JSON object"),
    ("3", "", "holds a number; JSON object"),
    ('"x"', "", "holds a text; JSON object"),
    ('{"fp16": true}', "", "fp16; true; object"),
    ('{"fp16": {"enabled": "yes"}}', "", 'fp16.enabled "yes"; --fp16; agree or remove'),
    ('{"train_batch_size": "2"}', "", 'train_batch_size; "2"; whole number from 1'),
    ('{"train_batch_size": 1e999}', "", "train_batch_size; Infinity; whole number from 1"),
    ('{"gradient_accumulation_steps": 0}', "", "gradient_accumulation_steps; 0; whole number from 1"),
    ('{"gradient_clipping": NaN}', "", "gradient_clipping; NaN; number from 0"),
    ('{"zero_optimization": {"stage": "1"}}', "", 'stage; "1"; whole number from 0'),
    ('{"zero_optimization": {"stage": 3}}', "", "stage 3; allowed are 0 and 1"),
    ('{"zero_optimization": {"reduce_bucket_size": "5e8"}}', "", 'reduce_bucket_size; "5e8"; number from 1'),
    ('{"fp16": {"enabled": true, "loss_scale": "dynamic"}}', "--fp16", 'loss_scale; "dynamic"; number from 0'),
    ('{"fp16": {"enabled": true, "loss_scale_window": 0}}', "--fp16", "loss_scale_window; 0; whole number from 1"),
    ('{"steps_per_print": "often"}', "", 'steps_per_print; "often"; whole number from 1'),
    ('{"wall_clock_breakdown": "yes"}', "", 'wall_clock_breakdown; "yes"; true and false'),
    ('{"tensorboard": "folder"}', "", 'tensorboard; "folder"; object'),
    ('{"flops_profiler": {"enabled": 1}}', "", "flops_profiler.enabled; 1; true and false"),
    ('{"train_batch_sise": 2}', "", "train_batch_sise; remove it; train_batch_size"),
]
ENVIRONMENTS = [
    ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK; 'one'; whole number"),
    ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2; WORLD_SIZE=2; 0 to 1"),
    ({"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE=0; from 1"),
    ({"RANK": "0", "WORLD_SIZE": "-2", "LOCAL_RANK": "0"}, "WORLD_SIZE; '-2'; whole number"),
    ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK; rank 1 of 2; set it"),
]


@pytest.mark.parametrize("content, flags, words", JSONS)
def test_a_wrong_json(capsys, workplace, content, flags, words):
    (workplace / "ds.json").write_text(content)
    refused(capsys, workplace, [*flags.split(), "--deepspeed_config", "ds.json"],
            ["--deepspeed_config ds.json", *words.split("; ")])


def test_a_json_that_is_no_text_and_a_json_that_is_a_folder(capsys, workplace):
    (workplace / "ds.json").write_bytes(b"\xff\xfe{}")
    refused(capsys, workplace, ["--deepspeed_config", "ds.json"], ["--deepspeed_config ds.json", "utf-8"])
    refused(capsys, workplace, ["--deepspeed_config", "run"], ["--deepspeed_config run", "Is a directory"])


@pytest.mark.parametrize("environ, words", ENVIRONMENTS)
def test_a_wrong_environment(capsys, environ, words):
    with pytest.raises(SystemExit) as exit:
        parse_arguments(LINE, environ=environ)
    sentence = capsys.readouterr().err
    assert exit.value.code == 2 and sentence.count("\n") == 1
    assert all(word in sentence for word in words.split("; ")), sentence


# --- token files ------------------------------------------------------------------------------

def patched(path, at, form, *values):
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, at if at >= 0 else len(data) + at, *values)
    path.write_bytes(data)


def cut(path, by):
    path.write_bytes(path.read_bytes()[:-by])


SPOILED = {  # what is done to d.idx and d.bin -> words
    "no index": (lambda f: (f / "d.idx").unlink(), "d.idx; does not exist; tools/preprocess_data.py"),
    "no tokens": (lambda f: (f / "d.bin").unlink(), "d.bin; does not exist; without .idx and .bin"),
    "empty index": (lambda f: (f / "d.idx").write_bytes(b""), "d.idx; b''; make it again"),
    "a text": (lambda f: (f / "d.idx").write_text("Once upon a time " * 9), "d.idx; b'Once upon'; make it again"),
    "header cut": (lambda f: cut(f / "d.idx", (f / "d.idx").stat().st_size - 20), "d.idx; 20 bytes; header; again"),
    "index cut": (lambda f: cut(f / "d.idx", 1), "d.idx; 10 sequences; make it again"),
    "index of another version": (lambda f: patched(f / "d.idx", 9, "<Q", 2), "d.idx; version 2; version 1"),
    "unknown dtype": (lambda f: patched(f / "d.idx", 17, "<B", 99), "d.idx; 99; 1 .. 8"),
    "counts too large": (lambda f: patched(f / "d.idx", 18, "<Q", 2**62), "d.idx; 4611686018427387904; make it again"),
    "negative size": (lambda f: patched(f / "d.idx", HEADER.size, "<i", -3), "d.idx; negative; make it again"),
    "offsets": (lambda f: patched(f / "d.idx", HEADER.size + 48, "<q", 1), "d.idx; offsets; make it again"),
    "document marks": (lambda f: patched(f / "d.idx", -8, "<q", 7), "d.idx; document marks; 10 sequences; again"),
    "tokens cut": (lambda f: cut(f / "d.bin", 3), "d.bin; bytes; make both again"),
    "tokens of another set": (lambda f: (f / "d.bin").write_bytes(b"\1\0" * 5), "d.bin; 10 bytes; make both again"),
    "wrong vocabulary": (lambda f: patched(f / "d.bin", 40, "<H", 300), "d; token id 300; 257 ids; --tokenizer-type"),
    "float values": (lambda f: patched(f / "d.idx", 17, "<B", 6), "d.bin; make both again"),
}


@pytest.fixture
def made(workplace):
    """Ten documents d, and flags of a run that reads them."""
    write_documents(workplace / "d", 10)
    flags = [*LINE[:LINE.index("--tokenizer-type")], *write_tokenizer(workplace), "--split", "8,1,1",
             "--save", str(workplace / "run"), "--save-interval", "5"]
    return workplace, flags


def datasets(flags, script=pretrain_gpt, vocab_size=VOCAB_SIZE):
    """What the entry script makes of these flags, once the tokenizer is known."""
    settings = parse_arguments(flags, entry=script.__name__, environ={})
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, vocab_size=vocab_size))
    return script.datasets(settings, (20, 2, 2))


def fails(folder, words, do, *args):
    """``do`` raises what the loop turns into one sentence for all ranks; nothing is written."""
    before = contents(folder)
    with pytest.raises((OSError, ValueError, RunError)) as error:  # those that training._datasets tells every rank
        do(*args)
    sentence = str(error.value)
    assert "\n" not in sentence and "Errno" not in sentence, sentence
    assert all(word in sentence for word in words), f"{words} not all in: {sentence}"
    assert contents(folder) == before


@pytest.mark.parametrize("what", SPOILED)
def test_a_damaged_dataset(made, what):
    folder, flags = made
    spoil, words = SPOILED[what]
    spoil(folder)
    fails(folder, ["--data-path d: ", *words.split("; ")], datasets, flags)
    at = flags.index("--data-path")
    grouped = [*flags[:at], *flags[at + 2:flags.index("--split")], TRAIN, "train: 1 0:1 d"]
    fails(folder, [f"{TRAIN} d: ", *words.split("; ")], datasets, grouped)


def test_the_kind_of_file_and_ranges_without_documents(made):
    folder, flags = made
    fails(folder, ["--data-impl lazy", "d.idx", "mmap", "use infer"], datasets, [*flags, "--data-impl", "lazy"])
    at = flags.index("--data-path")
    grouped = [*flags[:at], *flags[at + 2:flags.index("--split")], TRAIN, "train: 1 0:0.01 d"]
    fails(folder, [TRAIN, "'train'", "0:0.01 of d", "10 documents", "widen"], datasets, grouped)
    (folder / "d.idx").unlink()
    shutil.copy(folder / "d.bin", folder / "d.idx.bin")
    fails(folder, ["--data-path d.idx: ", "d.idx.idx", "without .idx"], datasets, [*flags, "--data-path", "d.idx"])


def test_an_index_cache_that_cannot_be_written(made):
    folder, flags = made
    long = "d" * 230  # .idx still fits into a file name, the names of the cache do not
    for ending in (".idx", ".bin"):
        (folder / f"d{ending}").rename(folder / f"{long}{ending}")
    fails(folder, ["index cache", long, "cannot be written", "too long", "writable"], datasets,
          [*flags, "--data-path", long])


def test_an_id_beyond_the_vocabulary_far_into_the_data(workplace, tmp_path):
    with IndexedDatasetWriter("far", np.uint16) as writer:
        for k in range(80):
            writer.add_document([k if k < 70 else 900] * 40)
    flags = [*LINE[:LINE.index("--tokenizer-type")], *write_tokenizer(workplace), "--data-path", "far", "--split", "1"]
    train = datasets(flags).train
    with pytest.raises(ValueError, match=r"^far holds the token id 900, .* 257 ids .*--tokenizer-type"):
        [train[k] for k in range(len(train))]


def test_pairs_that_are_no_pairs(workplace):
    flags = [*LINE[:LINE.index("--data-path")], "--data-path", "p", "--tokenizer-type", "PretrainedFromHF",
             "--tokenizer-name-or-path", "t", "--split", "1"]
    write_documents(workplace / side_prefix("p", "inputs"), 5)
    fails(workplace, ["--data-path p: ", "p_targets_document.idx", "does not exist"], datasets, flags, finetune_t0)
    write_documents(workplace / side_prefix("p", "targets"), 4)
    fails(workplace, ["--data-path p: ", "holds 5", "4;", "make both again"], datasets, flags, finetune_t0)


TOKENIZERS = [  # vocab.json, merges.txt, words
    (b"[" * 50_000, b"#\n", "--vocab-file; too deep"),
    (b'{"a": true, "<|endoftext|>": 1}', b"#\n", "--vocab-file; token -> id"),
    (b'{"<|endoftext|>": 1e3}', b"#\n", "--vocab-file; token -> id"),
    (b'\xff', b"#\n", "--vocab-file; not JSON"),
    (b'{"<|endoftext|>": 1}', b"#\n\xff \xfe\n", "--merge-file; not UTF-8"),
    (b'{"<|endoftext|>": 1}', b"#\na\tb\n", r"--merge-file; line 2; 'a\tb'; two pieces with a space"),
]


@pytest.mark.parametrize("vocab, merges, words", TOKENIZERS)
def test_a_damaged_vocabulary(workplace, vocab, merges, words):
    Path("v").write_bytes(vocab)
    Path("m").write_bytes(merges)
    fails(workplace, words.split("; "), build_tokenizer, TokenizerConfig(vocab_file="v", merge_file="m"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": {"type": "None"}}', b"\xff"])
def test_a_damaged_tokenizer_json(workplace, content):
    Path("tokenizer.json").write_bytes(content)
    fails(workplace, ["--tokenizer-name-or-path tokenizer.json", "allowed: a folder with tokenizer files"],
          build_tokenizer, TokenizerConfig(tokenizer_type="PretrainedFromHF", tokenizer_name_or_path="tokenizer.json"))


# --- the whole program ------------------------------------------------------------------------

def ends(run, flags, folder, words, *, times=1, **more):
    """Every rank ends within 20 s of a machine of its own, one sentence has ``words``, there is no traceback."""
    limit = 20 * max(1, os.getloadavg()[0] / os.cpu_count())
    (folder / "run").mkdir(exist_ok=True)
    before, started = contents(folder / "run"), time.monotonic()
    said = run([*flags, "--train-iters", "3", "--save", str(folder / "run"), "--save-interval", "2"], expect=1,
               timeout=10 * limit, **more)
    took = time.monotonic() - started
    errors = [line for line in said.splitlines() if line.startswith("error")]
    assert len(errors) == times and "Traceback" not in said, said[-4000:]
    for line in errors:
        assert all(word in line for word in words), line
    assert contents(folder / "run") == before
    assert took < limit, f"{took:.0f} s\n{said[-4000:]}"


@pytest.fixture(scope="module")
def warm_server():
    """Starts the server that whole programs are forked from, so that no test is charged for its imports."""
    process = warm_context().Process(target=int)
    process.start()
    process.join()


def test_one_rank_ends_in_one_sentence(warm_server, tmp_path):
    flags = small_model_flags(tmp_path)
    ends(run_alone, [*flags, "--load", str(tmp_path / "nowhere")], tmp_path,
         [f"--load {tmp_path / 'nowhere'}", "--allow-fresh-start"])
    ends(run_alone, [*flags, "--pad-vocab-size-to", "128"], tmp_path, ["--pad-vocab-size-to 128", "257 token ids"])


@pytest.mark.parametrize("grid", [[], ["--tensor-model-parallel-size", "2"]], ids=["DP2", "TP2"])
def test_two_ranks_end_together_in_one_sentence(warm_server, tmp_path, grid):
    """Both read under DP, one of the two under TP."""
    flags = small_model_flags(tmp_path)
    if grid:
        patched(tmp_path / "train.bin", 40, "<H", 999)
        words = [f"--data-path {tmp_path}/train: ", "token id 999", "--tokenizer-type"]
    else:
        cut(tmp_path / "train.bin", 2)
        words = [f"--data-path {tmp_path}/train: ", "train.bin has", "make both again"]
    ends(launch, [*flags, *grid], tmp_path, words, ranks=2)


@pytest.mark.parametrize("tool, arguments", [
    ("plan_run.py", ["--preset", "bloom-560m", "--bitfit"]), ("compare_runs.py", ["one.log", "one.log"])])
def test_a_tool_whose_answer_finds_no_room(tmp_path, tool, arguments):
    (tmp_path / "one.log").write_text("".join(f" iteration {k:8d}/       9 | lm loss: 2.0E+00 |\n" for k in range(1, 6)))
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, str(ROOT / "tools" / tool), *arguments], stdout=full, text=True, cwd=tmp_path,
                              stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert done.returncode == 1 and len(errors) == 1, done.stderr
    assert "standard output cannot be written: No space left on device" in errors[0]
