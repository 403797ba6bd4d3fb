"""Command lines for the tests of the parser."""

import shlex

import pytest

from megatron.arguments import parse_arguments

TINY = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
        "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --data-path d --tokenizer-type PretrainedFromHF "
        "--tokenizer-name-or-path t")


def world(size, rank=0):
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}


def parse(line=TINY, *, without=(), environ=None, entry="pretrain_gpt"):
    words = shlex.split(line)
    for flag in without:
        at = words.index(flag)
        del words[at:at + 2]
    return parse_arguments(words, entry=entry, environ=environ or {})


def refusal(capsys, *args, **more):
    """The one sentence on stderr of a refused command line."""
    with pytest.raises(SystemExit) as exit:
        parse(*args, **more)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == ""
    assert err.count("\n") <= 1
    return err
