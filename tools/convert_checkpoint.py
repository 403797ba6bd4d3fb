"""Write a checkpoint in another form: at another TP degree, or from and to other programs' layouts.

    python tools/convert_checkpoint.py reshape --load RUN --save NEW --target-tp 2
    python tools/convert_checkpoint.py from-hf --load HF_FOLDER --save NEW
    python tools/convert_checkpoint.py to-hf --load RUN --save HF_FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def add_reshape(commands) -> None:
    """The subcommand that changes degree, dtype or numbering of layer files."""
    parser = commands.add_parser(
        "reshape", help="Megatron-DeepSpeed checkpoint -> the same at another TP degree",
        description="Writes the weights of a checkpoint at another TP degree, one layer in memory at a time. Any run "
                    "loads any degree without this; it is for other programs, and to save the merging at each start. "
                    "Weights only: a resume reads optimizer state at any degrees from the original folder.")
    parser.add_argument("--load", required=True, metavar="FOLDER", help="checkpoint folder, or a tag in it")
    parser.add_argument("--save", required=True, metavar="FOLDER", help="new folder, fit for --load")
    parser.add_argument("--target-tp", type=int, required=True, metavar="N", help="TP degree of the files to write")
    parser.add_argument("--target-pp", type=int, metavar="N", help="changes nothing: layer files fit any PP degree")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: that of each tensor")
    parser.add_argument("--layout", choices=("bigscience", "deepspeedai"), default="bigscience",
                        help="numbering of the files: blocks from 03 as here, or from 02")
    parser.add_argument("--num-attention-heads", type=int, metavar="N", help="where the state file does not tell it")
    parser.add_argument("--vocab-size", type=int, metavar="N",
                        help="true number of token ids, where the state file does not tell it")
    parser.add_argument("--trust-checkpoint", action="store_true",
                        help="read files that need more than tensors and plain values; they can run code")
    parser.add_argument("--average-duplicated-parameters", action="store_true",
                        help="average copies that differ over TP ranks instead of refusing them")
    parser.set_defaults(run=run_reshape)


def run_reshape(options: argparse.Namespace) -> list[str]:
    """Convert; lines for the console."""
    from megatron.checkpoint.reshape import reshape

    lines = reshape(options.load, options.save, tp=options.target_tp, dtype=options.dtype, layout=options.layout,
                    heads=options.num_attention_heads, vocab_size=options.vocab_size, trust=options.trust_checkpoint,
                    average=options.average_duplicated_parameters)
    if options.target_pp:
        lines.append(f"  --target-pp {options.target_pp} changes nothing: layer files fit any PP degree")
    return lines


def parse(argv=None) -> argparse.Namespace:
    """The command line; ``run`` of the result is the function to call with it."""
    from megatron.checkpoint import hugging_face_commands

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (add_reshape, hugging_face_commands.add_from_hf, hugging_face_commands.add_to_hf):
        add(commands)
    return parser.parse_args(argv)


def main(argv=None) -> int:
    """0 when done, 1 with one sentence otherwise."""
    options = parse(argv)
    from megatron.errors import RunError

    try:
        for line in options.run(options):
            print(line)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
