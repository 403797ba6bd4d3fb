"""The commands from-hf and to-hf of ``tools/convert_checkpoint.py``. Imports nothing heavy until one runs."""

from __future__ import annotations

import argparse
import re

DTYPES = ("keep", "fp32", "bf16", "fp16")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def shard_size(text: str) -> int:
    """Bytes from ``5GB``, ``500MB``, ``2GiB`` or a number of bytes; argparse's error otherwise."""
    match = re.fullmatch(r"(\d+)\s*([KMG]I?B)?", text.strip().upper())
    size = int(match[1]) * UNITS[match[2] or ""] if match else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MB, 2GiB or a number of bytes")
    return size


def add_from_hf(commands) -> None:
    """Hugging Face BLOOM or GPT-2 -> checkpoint."""
    take = commands.add_parser("from-hf", help="Hugging Face BLOOM or GPT-2 -> checkpoint",
                               description="Runs load such a folder as it is; a conversion is for other programs, and to "
                                           "pad the word table or cast once. Config and tokenizer go to FOLDER/hf.")
    take.add_argument("--load", required=True, metavar="HF_FOLDER", help="folder with config.json and weights")
    take.add_argument("--save", required=True, metavar="FOLDER", help="new folder, fit for --load of a run")
    take.add_argument("--target-tp", type=int, default=1, metavar="N", help="TP degree of the files; runs load them at any (1)")
    take.add_argument("--dtype", choices=DTYPES, default="keep", help="type of the weights written (keep)")
    take.add_argument("--make-vocab-size-divisible-by", type=int, default=128, metavar="N",
                      help="zero rows are added to the word table up to a multiple of N * TP (128)")
    take.add_argument("--pad-vocab-size-to", type=int, metavar="N", help="rows of the word table, exactly")
    take.set_defaults(run=run_from_hf)


def run_from_hf(options: argparse.Namespace) -> list[str]:
    """Convert; lines for the console. Raises RunError."""
    from megatron.checkpoint.hugging_face_export import from_folder

    flags = from_folder(options.load, options.save, tp=options.target_tp, dtype=options.dtype,
                        divisible_by=options.make_vocab_size_divisible_by, pad_to=options.pad_vocab_size_to)
    return [f"{options.save}: written; a run that starts from it takes these flags:", " ".join(flags)]


def add_to_hf(commands) -> None:
    """Checkpoint -> Hugging Face folder."""
    give = commands.add_parser("to-hf", help="checkpoint -> Hugging Face folder in safetensors shards")
    give.add_argument("--load", required=True, metavar="FOLDER", help="folder given with --save, or a tag in it")
    give.add_argument("--save", required=True, metavar="HF_FOLDER", help="new folder")
    give.add_argument("--base", metavar="HF_FOLDER", help="where config, generation settings and tokenizer are copied from; "
                      "without it from-hf's copy of them beside the tag, else what the checkpoint says of itself")
    give.add_argument("--max-shard-size", type=shard_size, default=5 * 10**9, metavar="SIZE", help="of one file (5GB)")
    give.add_argument("--keep-padding", action="store_true", help="keep rows of the word table past the true vocabulary")
    give.add_argument("--dtype", choices=DTYPES, default="keep", help="type of the weights written (keep)")
    give.add_argument("--trust-checkpoint", action="store_true", help="unpickle files that hold more than tensors")
    give.add_argument("--average-duplicated-parameters", action="store_true",
                      help="average copies over TP that differ instead of refusing them")
    give.set_defaults(run=run_to_hf)


def run_to_hf(options: argparse.Namespace) -> list[str]:
    """Convert; lines for the console. Raises RunError."""
    from megatron.checkpoint.hugging_face_export import to_folder
    from megatron.config import CheckpointConfig

    config = CheckpointConfig(trust_checkpoint=options.trust_checkpoint,
                              average_duplicated_parameters=options.average_duplicated_parameters)
    done = to_folder(options.load, options.save, base=options.base, max_shard_bytes=options.max_shard_size,
                     keep_padding=options.keep_padding, dtype=options.dtype, config=config)
    count = f"{len(done.files)} file{'s' * (len(done.files) > 1)}"
    lines = [f"{options.save}: {done.kind}, {done.parameters:,} parameters, {done.bytes:,} bytes of weights in {count}; "
             f"beside them {', '.join(['config.json', *done.carried])}"]
    if done.dropped_rows:
        lines.append(f"{done.dropped_rows} rows of padding dropped from the word table, which keeps {done.rows} "
                     "(--keep-padding keeps all)")
    if "tokenizer.json" not in done.carried and "vocab.json" not in done.carried:
        lines.append("no tokenizer is known: copy its files there, or name a folder that has them with --base")
    return lines + list(done.notes)
