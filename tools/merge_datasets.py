"""Join token datasets into one: python tools/merge_datasets.py --datasets A B --output-prefix C"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter


def merge(prefixes: Sequence[str], output_prefix: str) -> int:
    """Write the documents of all ``prefixes``, in that order, as one dataset; return their number.

    The result equals preprocessing the joined texts. Tokens are copied in pieces
    and never held in memory; the output appears whole or not at all. Raises
    ValueError for different token dtypes or an output that is an input too, and
    what IndexedDataset raises for data that are missing or damaged.
    """
    output = os.path.realpath(output_prefix + ".bin")
    for prefix in prefixes:
        if os.path.realpath(prefix + ".bin") == output:
            raise ValueError(f"--output-prefix {output_prefix} is one of --datasets; choose another name")
    # all are opened, and so checked, before the first byte is written
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    first = datasets[0]
    for other in datasets[1:]:
        if other.dtype != first.dtype:
            raise ValueError(f"--datasets: {first.prefix} holds {first.dtype} tokens, {other.prefix} "
                             f"{other.dtype}; encode both with the same tokenizer")
    with IndexedDatasetWriter(output_prefix, first.dtype) as writer:
        for dataset in datasets:
            writer.add_dataset(dataset)
    return sum(len(dataset.doc_idx) - 1 for dataset in datasets)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Join token datasets (pairs of .bin and .idx files) into one, document by document, "
                    "in the order given. All must hold tokens of one dtype. The output appears only when "
                    "complete.",
        epilog="example: python tools/merge_datasets.py --datasets d/en_text_document d/fr_text_document "
               "--output-prefix d/both_text_document")
    parser.add_argument("--datasets", nargs="+", required=True, metavar="PREFIX",
                        help="prefixes of the datasets, that is, paths without .bin or .idx")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX",
                        help="prefix of the dataset to write; one that exists is replaced")
    options = parser.parse_args(arguments)
    try:
        documents = merge(options.datasets, options.output_prefix)
    except (OSError, ValueError) as error:
        print(f"merge_datasets: {error}", file=sys.stderr)
        return 1
    print(f"{options.output_prefix}: {documents} documents of {len(options.datasets)} datasets")
    return 0


if __name__ == "__main__":
    sys.exit(main())
