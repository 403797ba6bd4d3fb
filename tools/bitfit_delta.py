"""Take the biases of a --bitfit checkpoint into one small file, or put them onto a copy of the base.

    python tools/bitfit_delta.py extract --checkpoint RUN --output delta.safetensors
    python tools/bitfit_delta.py apply --base BASE --delta delta.safetensors --output MERGED
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def parse(argv=None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    take = commands.add_parser("extract", help="checkpoint -> delta file")
    take.add_argument("--checkpoint", required=True, metavar="FOLDER", help="folder given with --save, or a tag in it")
    take.add_argument("--output", required=True, metavar="FILE", help="safetensors file to write")
    put = commands.add_parser("apply", help="base + delta -> checkpoint with the base's files and the delta's biases")
    put.add_argument("--base", required=True, metavar="FOLDER", help="checkpoint folder, or a tag in it")
    put.add_argument("--delta", required=True, metavar="FILE", help="file that extract wrote")
    put.add_argument("--output", required=True, metavar="FOLDER", help="new folder, fit for --load")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    """0 when done, 1 with one sentence otherwise."""
    options = parse(argv)
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save

    from megatron.checkpoint import delta, files
    from megatron.config import BIAS_TERMS
    from megatron.errors import RunError

    try:
        if options.command == "extract":
            tensors, metadata = delta.extract(options.checkpoint)
            terms = delta.terms_trained(options.checkpoint) or BIAS_TERMS
            files.write_bytes(Path(options.output), save(tensors, metadata=metadata))
            elements = sum(tensor.numel() for tensor in tensors.values())
            print(f"{options.output}: {len(tensors)} biases, {elements:,} elements, "
                  f"{Path(options.output).stat().st_size:,} bytes, from {metadata['tag']}"
                  + ("" if set(terms) == set(BIAS_TERMS) else
                     f"; all biases are in it, although only these trained: {' '.join(terms)}"))
        else:
            tensors = load_file(options.delta)
            count = delta.apply(options.base, tensors, options.output)
            print(f"{options.output}: {count} biases set")
    except (RunError, OSError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
