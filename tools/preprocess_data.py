"""Turn JSON Lines text into the token files (.bin and .idx) that training reads.

Each line of --input is one JSON object; the text under each of --json-keys becomes one
document of the dataset <output-prefix>_<key>_document (_sentence with --split-sentences).
Documents keep their order, and the files are the same bytes for any number of workers.

A line is kept or dropped as a whole, so datasets of several keys stay in step. Lines with
an empty text under a key, also with --append-eod, and blank lines are skipped and counted.
A line that is no JSON object with a string under each key ends the job with its file and
line number, or is skipped and counted with --skip-invalid. Without a single document the
job fails. When it fails, no file is written.

Pairs for finetune_t0.py: --json-keys inputs targets makes both sides in one pass, and
--append-eod, --append-bos and --prepend-space then apply to the targets only. One pass per
side (--json-key inputs, then --json-key targets with its own flags and the same
--output-prefix) gives the same files. Either way a line with an empty or missing side
(absent or null) is left out of both and counted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config import TokenizerConfig
from megatron.data.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    best_dtype,
    dataset_exists,
    publish_together,
)
from megatron.errors import RunError
from megatron.tokenizer import TYPES, UNSUPPORTED_TYPES, Tokenizer, build_tokenizer
from megatron.tokenizer.encode import INVALID, PAIR, EncodeOptions, Skipped, encode_line, holds_pairs, open_jsonl
from megatron.tokenizer.padding import padded_vocab_size

CHUNK_LINES = 25
CHUNK_BYTES = 1 << 20
CHUNKS_PER_WORKER = 4
BYTES_IN_FLIGHT = 64 << 20
LOCATIONS_SHOWN = 10
PAIR_SEARCH_LINES = 1000


def parser() -> argparse.ArgumentParser:
    """The command line; flags and defaults are those of the trainers whose data format this is."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument_group("text").add_argument
    add("--input", required=True, metavar="FILE", help="JSON Lines file, UTF-8, not compressed")
    add("--json-keys", "--json-key", nargs="+", default=["text"], metavar="KEY",
        help="keys whose text is encoded, one dataset each (default: text)")
    add("--split-sentences", action="store_true",
        help="one sequence per sentence; a small splitter by rules on Unicode properties, not NLTK's punkt, "
             "so sentences can differ from files made with that")
    add("--keep-newlines", action="store_true",
        help="with --split-sentences: keep the line breaks behind a sentence at its end")
    add("--prepend-space", action="store_true", help="put one space before the text of every document")
    add("--skip-invalid", action="store_true",
        help="skip and count lines that are broken or lack a key, instead of ending at the first one")
    add = p.add_argument_group("tokenizer").add_argument
    add("--tokenizer-type", required=True, choices=TYPES + UNSUPPORTED_TYPES, metavar="TYPE",
        help=f"{' or '.join(TYPES)} ({', '.join(UNSUPPORTED_TYPES)} are refused)")
    add("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    add("--tokenizer-name-or-path", metavar="NAME",
        help="PretrainedFromHF: folder with tokenizer files, tokenizer.json or hub name")
    add("--vocab-extra-ids", type=int, default=0, metavar="N", help="PretrainedFromHF: add <extra_id_0> .. (default: 0)")
    add("--append-eod", action="store_true", help="end every document with the end-of-document id")
    add("--append-bos", action="store_true",
        help="put the bos id at the END of every document; without effect beside --append-eod")
    add("--make-vocab-size-divisible-by", type=int, default=128, metavar="N",
        help="changes only the padded size that is printed (default: 128)")
    add("--pad-vocab-size-to", type=int, metavar="N", help="changes only the padded size that is printed")
    add = p.add_argument_group("output").add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="the files begin with this path")
    add("--dataset-impl", default="mmap", choices=("mmap", "lazy", "cached"),
        help="only mmap is written (default: mmap)")
    add("--workers", type=int, default=1, metavar="N",
        help="processes that encode; 0 encodes in this one (default: 1)")
    add("--log-interval", type=int, default=100, metavar="N", help="documents between progress lines (default: 100)")
    return p


@dataclass
class Chunk:
    """Consecutive lines of the input; ``first`` is the number of the first one, from 1."""

    first: int
    lines: list[bytes] = field(default_factory=list)
    size: int = 0
    """bytes"""


def chunks(lines: Iterable[bytes]) -> Iterator[Chunk]:
    """Group lines into chunks of CHUNK_LINES lines, or fewer when they are long."""
    chunk = Chunk(1)
    for line in lines:
        chunk.lines.append(line)
        chunk.size += len(line)
        if len(chunk.lines) == CHUNK_LINES or chunk.size >= CHUNK_BYTES:
            yield chunk
            chunk = Chunk(chunk.first + len(chunk.lines))
    if chunk.lines:
        yield chunk


Result = list[list] | Skipped


def encode_chunk(lines: list[bytes], tokenizer: Tokenizer, options: EncodeOptions) -> list[Result]:
    """One result of encode_line per line."""
    return [encode_line(line, tokenizer, options) for line in lines]


_worker_state: tuple = ()


def _start_worker(tokenizer: Tokenizer, options: EncodeOptions) -> None:
    global _worker_state
    _worker_state = (tokenizer, options)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in workers only"

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(lines: list[bytes]) -> list[Result]:
    return encode_chunk(lines, *_worker_state)


def encode_in_order(source: Iterable[Chunk], tokenizer: Tokenizer, options: EncodeOptions,
                    workers: int) -> Generator[tuple[Chunk, list[Result]], None, None]:
    """Encode chunks in ``workers`` processes (0: in this one) and yield them in order.

    At most CHUNKS_PER_WORKER chunks per worker and about BYTES_IN_FLIGHT bytes of text
    are under way. Raises RunError when a worker dies.
    """
    if workers == 0:
        for chunk in source:
            yield chunk, encode_chunk(chunk.lines, tokenizer, options)
        return
    # fork spares every worker from loading the tokenizer again
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin" else "spawn"
    executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context(method),
                                   initializer=_start_worker, initargs=(tokenizer, options))
    others = multiprocessing.active_children()
    waiting: collections.deque = collections.deque()
    bytes_waiting, chunk = 0, Chunk(1)
    source = iter(source)
    following = next(source, None)
    abandoned = True
    try:
        while waiting or following:
            while following and (not waiting or (len(waiting) < workers * CHUNKS_PER_WORKER
                                                 and bytes_waiting + following.size <= BYTES_IN_FLIGHT)):
                waiting.append((following, executor.submit(_work, following.lines)))
                bytes_waiting += following.size
                following = next(source, None)
            chunk, future = waiting.popleft()
            yield chunk, future.result()
            bytes_waiting -= chunk.size
        abandoned = False
    except BrokenProcessPool:
        raise RunError("a worker process died (killed, or out of memory) while the lines from "
                       f"{chunk.first} on were encoded; no file was written") from None
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        if abandoned:  # do not wait for chunks that nobody will read
            for worker in multiprocessing.active_children():
                if worker not in others:
                    worker.terminate()
        executor.shutdown(wait=True)


class Tally:
    """Counts of a run, its progress lines and its summary."""

    def __init__(self, path: str, interval: int) -> None:
        self.path, self.interval, self.began = path, interval, time.monotonic()
        self.documents = self.bytes = self.lines = 0
        self.tokens: collections.Counter = collections.Counter()
        self.sequences: collections.Counter = collections.Counter()
        self.skipped: dict[str, list] = {}
        self.total = os.path.getsize(path) if os.path.isfile(path) else 0

    def skip(self, number: int, skipped: Skipped) -> None:
        """Count a line without a document."""
        count_and_lines = self.skipped.setdefault(skipped.reason, [0, []])
        count_and_lines[0] += 1
        if len(count_and_lines[1]) < LOCATIONS_SHOWN:
            count_and_lines[1].append(number)
            if skipped.reason == INVALID:
                print(f"skipped {self.path}:{number}: {skipped.detail}", file=sys.stderr, flush=True)

    def keep(self, key: str, sequences: list) -> None:
        """Count what one document adds to the dataset of ``key``."""
        self.sequences[key] += len(sequences)
        self.tokens[key] += sum(map(len, sequences))

    def progress(self) -> None:
        """Print a line when another ``interval`` documents are done."""
        if self.documents % self.interval == 0:
            seconds = max(time.monotonic() - self.began, 1e-9)
            share = f", {100 * self.bytes / self.total:.1f} % of the file" if self.total else ""
            print(f"processed {self.documents} documents: {self.documents / seconds:.1f} documents/s, "
                  f"{self.bytes / 1e6 / seconds:.2f} MB/s{share}", flush=True)

    def skip_lines(self) -> list[str]:
        """One line per reason: how many lines and the first places."""
        lines = []
        for reason, (count, numbers) in self.skipped.items():
            more = ", ..." if count > len(numbers) else ""
            places = ", ".join(f"{self.path}:{number}" for number in numbers)
            lines.append(f"skipped {count} ({reason}): {places}{more}")
        return lines

    def summary(self, prefixes: dict[str, str]) -> str:
        """What was written and what was not."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        out = [(f"{self.documents} documents from {self.lines} lines, {self.bytes} bytes of input, "
                f"{sum(self.tokens.values())} tokens in {seconds:.2f} s "
                f"({self.documents / seconds:.1f} documents/s, {self.bytes / 1e6 / seconds:.2f} MB/s)")]
        out += self.skip_lines() or ["skipped 0"]
        for key, prefix in prefixes.items():
            written = sum(os.path.getsize(prefix + end) for end in (".bin", ".idx"))
            out.append(f"{prefix}.bin, .idx: {self.documents} documents, {self.sequences[key]} sequences, "
                       f"{self.tokens[key]} tokens, {written} bytes")
        return "\n".join(out)


def _check(args: argparse.Namespace) -> None:
    if args.dataset_impl != "mmap":
        raise RunError(f"--dataset-impl {args.dataset_impl} is a format that is only read here; write mmap")
    for flag, value, least in (("--workers", args.workers, 0), ("--log-interval", args.log_interval, 1)):
        if value < least:
            raise RunError(f"{flag} {value} must be at least {least}")
    if len(set(args.json_keys)) < len(args.json_keys):
        raise RunError(f"--json-keys {' '.join(args.json_keys)} names a key twice")
    for key in args.json_keys:
        if os.path.basename(key) != key or not key:
            raise RunError(f"--json-keys {key!r} cannot be part of a file name")
    if args.keep_newlines and not args.split_sentences:
        raise RunError("--keep-newlines has a meaning only with --split-sentences; "
                       "without it documents keep their line breaks anyway")


def _tokenizer(args: argparse.Namespace) -> Tokenizer:
    tokenizer = build_tokenizer(TokenizerConfig(
        tokenizer_type=args.tokenizer_type, tokenizer_name_or_path=args.tokenizer_name_or_path,
        vocab_file=args.vocab_file, merge_file=args.merge_file, vocab_extra_ids=args.vocab_extra_ids))
    padded = padded_vocab_size(tokenizer.vocab_size, tp=1, divisible_by=args.make_vocab_size_divisible_by,
                               pad_to=args.pad_vocab_size_to)
    for flag, wanted, role in (("--append-eod", args.append_eod, "eod"), ("--append-bos", args.append_bos, "bos")):
        if wanted and not tokenizer.has(role):
            raise RunError(f"{flag}: the tokenizer has no {role} token ({tokenizer.describe()})")
    print(tokenizer.describe())
    print(f" > padded vocab (size: {tokenizer.vocab_size}) with {padded - tokenizer.vocab_size} dummy tokens "
          f"(new size: {padded})", flush=True)
    if args.append_eod and args.append_bos:
        print("--append-bos has no effect beside --append-eod")
    return tokenizer


def preprocess(args: argparse.Namespace) -> Tally:
    """Do what the parsed command line says. Raises RunError, OSError or ValueError; no file is written then."""
    _check(args)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_jsonl(args.input))
        options, lines = _options(args, file)
        tokenizer = _tokenizer(args)
        if options.pairs:
            _explain_pairs(options)
        level = "sentence" if args.split_sentences else "document"
        prefixes = {key: f"{args.output_prefix}_{key}_{level}" for key in options.keys}
        os.makedirs(os.path.dirname(os.path.abspath(args.output_prefix)), exist_ok=True)
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, best_dtype(tokenizer.vocab_size)))
                   for prefix in prefixes.values()]
        tally = Tally(args.input, args.log_interval)
        results = encode_in_order(chunks(lines), tokenizer, options, args.workers)
        with contextlib.closing(results):
            _write(results, writers, options, tally, args.skip_invalid)
        if not tally.documents:
            raise RunError("; ".join([f"--input {args.input} gave no document ({tally.lines} lines)",
                                      *tally.skip_lines()]))
        publish_together(writers)
    print(tally.summary(prefixes), flush=True)
    if options.pairs:
        _compare_sides(args.output_prefix)
    return tally


def _options(args: argparse.Namespace, file: Iterable[bytes]) -> tuple[EncodeOptions, Iterable[bytes]]:
    """How to encode, and the lines of ``file``: with one side of a pair asked for, they say whether there are pairs."""
    keys, lines = tuple(args.json_keys), file
    both = set(keys) == set(PAIR)
    if both and args.split_sentences:
        raise RunError("--split-sentences does not go with --json-keys inputs targets: each side of a pair is one "
                       "sequence")
    pairs = both
    if len(keys) == 1 and keys[0] in PAIR and not args.split_sentences:
        # not the first line alone: it may be one that is left out
        head = list(itertools.islice(file, PAIR_SEARCH_LINES))
        lines, pairs = itertools.chain(head, file), holds_pairs(head)
    return EncodeOptions(keys=keys, split_sentences=args.split_sentences, keep_newlines=args.keep_newlines,
                         append_eod=args.append_eod, append_bos=args.append_bos, prepend_space=args.prepend_space,
                         dressed=("targets",) if both else None, pairs=pairs), lines


def _explain_pairs(options: EncodeOptions) -> None:
    print("pairs of inputs and targets: a line with an empty or missing side is left out of both")
    given = [f"--{name.replace('_', '-')}" for name in ("append_eod", "append_bos", "prepend_space")
             if getattr(options, name)]
    if options.dressed and given:
        print(f"{', '.join(given)}: on targets only (one pass per side takes other flags for each)")


def _compare_sides(output_prefix: str) -> None:
    """Read both sides of the pairs back, where they exist, and warn when they do not match."""
    prefixes = [f"{output_prefix}_{side}_document" for side in PAIR]
    if all(map(dataset_exists, prefixes)):
        inputs, targets = (len(IndexedDataset(prefix)) for prefix in prefixes)
        if inputs == targets:
            print(f"{inputs} pairs: both sides are in step", flush=True)
        else:
            print(f"warning: {prefixes[0]} has {inputs} documents and {prefixes[1]} {targets}; "
                  "make the side that is older again, from the same --input", file=sys.stderr, flush=True)


def _write(results: Iterator[tuple[Chunk, list[Result]]], writers: list[IndexedDatasetWriter],
           options: EncodeOptions, tally: Tally, skip_invalid: bool) -> None:
    for chunk, encoded in results:
        for number, line, result in zip(itertools.count(chunk.first), chunk.lines, encoded):
            tally.lines += 1
            tally.bytes += len(line)
            if isinstance(result, Skipped):
                if result.reason == INVALID and not skip_invalid:
                    raise RunError(f"{tally.path}:{number} {result.detail} (--skip-invalid skips such lines)")
                tally.skip(number, result)
                continue
            for key, writer, sequences in zip(options.keys, writers, result):
                writer.add_document(sequences)
                tally.keep(key, sequences)
            tally.documents += 1
            tally.progress()


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 after one sentence on stderr."""
    args = parser().parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
    try:
        preprocess(args)
    except (RunError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; no file was written", file=sys.stderr)
        return 130
    return 0


def on_sigterm(do: Callable[[], int]) -> int:
    """Run ``do`` so that SIGTERM unwinds it like an exception and nothing half-written stays."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return do()


if __name__ == "__main__":
    sys.exit(on_sigterm(main))
