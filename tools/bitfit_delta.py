"""What a --bitfit run trained, as one small file: take it, put it onto a copy of its base, take it off, look at it, average.

    python tools/bitfit_delta.py extract --checkpoint RUN --output delta.safetensors
    python tools/bitfit_delta.py apply --base BASE --delta delta.safetensors --output MERGED
    python tools/bitfit_delta.py remove --checkpoint MERGED --output BASE_AGAIN
    python tools/bitfit_delta.py show --delta delta.safetensors --plot delta.svg
    python tools/bitfit_delta.py average --delta a.safetensors --delta b.safetensors --weights 3 1 --output c.safetensors

Checkpoints may be of Megatron-DeepSpeed or of Hugging Face; see docs/deltas.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CHECKPOINT = "folder given with --save, a tag in it, or a Hugging Face folder"


def parse(argv=None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, help: str, *flags: tuple[str, str, str]) -> argparse.ArgumentParser:
        its = commands.add_parser(name, help=help, allow_abbrev=False)
        for flag, metavar, text in flags:
            its.add_argument(flag, required=not text.startswith("optional"), metavar=metavar, help=text)
        return its

    command("extract", "checkpoint -> delta file", ("--checkpoint", "FOLDER", f"what was trained: {CHECKPOINT}"),
            ("--base", "FOLDER", "optional: what it was trained from; all that was frozen is compared with it"),
            ("--output", "FILE", "safetensors file to write"))
    command("apply", "base + delta -> a copy of the base with the biases of the delta", ("--base", "FOLDER", CHECKPOINT),
            ("--delta", "FILE", "file that extract or --save-delta-only wrote"),
            ("--output", "FOLDER", "new folder, fit for --load or from_pretrained"))
    command("remove", "what apply wrote -> the base, bit for bit", ("--checkpoint", "FOLDER", "folder that apply wrote"),
            ("--base", "FOLDER", "optional: the base, where the folder holds no bitfit_undo.safetensors"),
            ("--output", "FOLDER", "new folder"))
    command("show", "mean |change| per kind of bias and layer", ("--delta", "FILE", "a delta"),
            ("--base", "FOLDER", "optional: the base, or a bitfit_undo.safetensors of it; by default where the delta says it is"),
            ("--plot", "FILE", "optional: an SVG of the table to write"))
    several = command("average", "several deltas of one base -> their mean", ("--output", "FILE", "safetensors file to write"))
    several.add_argument("--delta", action="append", required=True, metavar="FILE", help="a delta; give it several times")
    several.add_argument("--weights", type=float, nargs="+", metavar="W", help="one per delta, any sum; equal if not given")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> str:
    """Do what ``options`` ask for; returns what there is to say."""
    from megatron.checkpoint import delta, delta_copy, files
    from megatron.checkpoint.delta_file import average, read_delta, write_delta
    from megatron.config import BIAS_TERMS
    from megatron.delta_report import heat_map, movement, table
    from megatron.errors import RunError

    if options.command == "extract":
        taken = delta.extract(options.checkpoint, options.base)
        write_delta(options.output, taken)
        some = "" if set(taken.facts.terms) == set(BIAS_TERMS) else f", of {' '.join(taken.facts.terms)} alone"
        return (f"{options.output}: {len(taken.tensors)} biases, {taken.elements:,} elements{some}, "
                f"{Path(options.output).stat().st_size:,} bytes, from iteration {taken.facts.step}")
    if options.command == "apply":
        count = delta_copy.apply(options.base, read_delta(options.delta), options.output, options.delta)
        return f"{options.output}: {count} biases set"
    if options.command == "remove":
        before = delta.biases_of(options.base) if options.base else delta_copy.undo_of(options.checkpoint)
        count = delta_copy.apply(options.checkpoint, before, options.output, options.base or options.checkpoint, undo=False)
        return f"{options.output}: {count} biases set back"
    if options.command == "average":
        mean = average([read_delta(path) for path in options.delta], options.weights)
        write_delta(options.output, mean)
        return f"{options.output}: mean of {len(options.delta)} deltas, {mean.elements:,} elements"
    shown = read_delta(options.delta)
    base = options.base or shown.facts.base
    if not base:
        raise RunError(f"{options.delta} does not say where its base is; give --base")
    moved = movement(shown, read_delta(base) if Path(base).is_file() else delta.biases_of(base))
    said = table(moved)
    if options.plot:
        files.write_text(Path(options.plot), heat_map(moved, f"{options.delta}, iteration {shown.facts.step}"))
        said += f"\n{options.plot} written"
    return said


def main(argv=None) -> int:
    """0 when done, 1 with one sentence otherwise."""
    options = parse(argv)
    from megatron.errors import RunError, print_answer

    try:
        print_answer(run(options))
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
