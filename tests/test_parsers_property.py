"""Whatever is typed, a parser returns what was meant or refuses it in one sentence; indices hold for any sizes."""

import contextlib
import io
import itertools
import json
import math
import re
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from command_lines import TINY
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.arguments import parse_arguments
from megatron.arguments_check import skip_ranges
from megatron.config import ModelConfig, SplitGroup
from megatron.data.blending import normalised, samples_per_dataset
from megatron.data.index_arrays import (
    build_blending_indices,
    build_doc_idx,
    build_sample_idx,
    build_shuffle_idx,
    plan_epochs,
)
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.data.packing import pack
from megatron.data.splits import (
    parse_data_path,
    parse_split,
    parse_weighted_groups,
    read_weighted_groups_file,
    split_boundaries,
)
from megatron.log_lines import TrainingFacts, format_run_fact, parse_run_facts, parse_training_line, training_line
from megatron.planning.shape import stages

few = settings(max_examples=30, deadline=None, derandomize=True, database=None)
FLAG = "--valid-weighted-split-paths"

weights = st.floats(0, 1e6, allow_subnormal=False)
blanks = st.text(" \t", max_size=2)
names = st.text(st.characters(exclude_characters=':"\n\r', exclude_categories=["Cs", "Zl", "Zp", "Cc"]), min_size=1,
                max_size=8).map(str.strip).filter(bool)
paths = st.text(st.sampled_from("abcXYZ019./_-:"), min_size=1, max_size=12)
#: pieces of what belongs into these flags, in any order
typed = st.lists(st.sampled_from(["train", ":", "1", "0.5", "-1", "0", "nan", "1e999", ",", "/", " ", "/d/a", "0:1", "1_0", "٣",
                                  '"', "A", "-", "\n"]), max_size=9).map("".join)


def refused_in_a_sentence(parse, *args):
    """The result, or None when the input was refused with a ValueError of one line."""
    try:
        return parse(*args)
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
        return None


# --- splits and blends ------------------------------------------------------------------------


@few
@given(st.lists(weights, min_size=1, max_size=3).filter(lambda parts: sum(parts) > 1e-3), st.sampled_from(",/"), blanks)
def test_a_split_keeps_the_proportions_of_its_parts(parts, separator, blank):
    found = parse_split((blank + separator + blank).join(map(repr, parts)))
    assert math.isclose(sum(found), 1, rel_tol=1e-12)
    for share, part in itertools.zip_longest(found, parts, fillvalue=0.0):
        assert math.isclose(share * sum(parts), part, rel_tol=1e-9, abs_tol=1e-9)


@few
@given(typed)
@example("٣,1")
def test_any_text_is_a_split_or_is_refused(text):
    found = refused_in_a_sentence(parse_split, text)
    if found is not None:
        assert text.isascii() and len(found) == 3 and min(found) >= 0 and math.isclose(sum(found), 1, rel_tol=1e-9)


@few
@given(st.lists(weights, min_size=3, max_size=3).filter(lambda parts: sum(parts) > 1e-3), st.integers(0, 2000))
def test_splits_share_out_every_document_once(parts, documents):
    shares = [part / sum(parts) for part in parts]
    bounds = split_boundaries(shares, documents)
    assert bounds[0] == 0 and bounds[-1] == documents and bounds == sorted(bounds)
    for share, first, last in zip(shares, bounds, bounds[1:]):
        assert abs((last - first) - share * documents) <= 2.5  # half by rounding, up to two handed on


ranges = st.tuples(st.integers(0, 99), st.integers(1, 100)).filter(lambda ends: ends[0] < ends[1]).map(
    lambda ends: (ends[0] / 100, ends[1] / 100))
groups = st.builds(lambda name, parts: SplitGroup(name=name, weights=tuple(part[0] for part in parts),
                                                  splits=tuple(part[1] for part in parts),
                                                  paths=tuple(part[2] for part in parts)),
                   names, st.lists(st.tuples(st.floats(0.001, 1e6), ranges, paths), min_size=1, max_size=3))


def spelt(group, blank):
    parts = (f"{weight!r} {start!r}:{end!r}{blank} {path}" for weight, (start, end), path in
             zip(group.weights, group.splits, group.paths))
    return f"{blank}{group.name}{blank}:{blank}" + f"{blank},{blank}".join(parts)


@few
@given(st.lists(groups, min_size=1, max_size=3, unique_by=lambda group: group.name), blanks)
def test_groups_are_read_as_they_were_spelt_from_flags_and_from_a_file(wanted, blank):
    arguments = [spelt(group, blank) for group in wanted]
    assert parse_weighted_groups(FLAG, arguments) == tuple(wanted)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "groups"
        file.write_text(" ".join(f'"{argument}"' for argument in arguments) + "\n", encoding="utf-8")
        assert read_weighted_groups_file(FLAG + "-path", str(file)) == tuple(wanted)


@few
@given(st.lists(typed, max_size=3))
def test_any_words_are_groups_or_are_refused(arguments):
    found = refused_in_a_sentence(parse_weighted_groups, FLAG, arguments)
    for group in found or ():
        assert len(group.paths) == len(group.weights) == len(group.splits) > 0 and group.name
        assert all(0 <= start < end <= 1 for start, end in group.splits)
        assert all(weight >= 0 and math.isfinite(weight) for weight in group.weights)


ends = st.sampled_from(["0", "0.0", "0.5", ".5", "1", "1.0", "1.001", "-0.1", "5e-1", "nan", "x"])


@few
@given(st.sampled_from(["1", "0", "-1", "0.5", "inf", "1,5", "w"]), ends, ends)
@example("1", "0.5", ".5")
def test_a_group_is_accepted_exactly_when_weight_and_range_make_sense(weight, start, end):
    found = refused_in_a_sentence(parse_weighted_groups, FLAG, [f"v: {weight} {start}:{end} /d"])
    good = weight in ("1", "0", "0.5") and not {start, end} & {"1.001", "-0.1", "nan", "x"} and float(start) < float(end)
    assert (found is not None) == good


@few
@given(st.lists(st.tuples(weights, paths), min_size=1, max_size=5).filter(lambda parts: sum(w for w, _ in parts) > 0))
def test_a_blend_is_read_as_it_was_spelt(parts):
    words = [word for weight, path in parts for word in (repr(weight), path)]
    assert parse_data_path(words) == ([path for _, path in parts], [weight for weight, _ in parts])


@few
@given(st.lists(typed, max_size=5))
def test_any_words_are_a_blend_or_are_refused(words):
    found = refused_in_a_sentence(parse_data_path, words)
    if found is not None and len(words) > 1:
        assert len(found[0]) == len(found[1]) == len(words) / 2 and 0 < sum(found[1]) < math.inf


@few
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=6))
def test_ranges_hold_exactly_the_iterations_that_were_named(spans):
    found = skip_ranges([f"{first}-{first + more}" for first, more in spans])
    held = [k for first, last in found for k in range(first, last + 1)]
    assert held == sorted({k for first, more in spans for k in range(first, first + more + 1)})


@few
@given(st.text("0123_- ٣", max_size=6))
def test_any_text_is_a_range_or_is_refused(text):
    found = refused_in_a_sentence(skip_ranges, [text])
    assert found is None or (len(found) == 1 and 1 <= found[0][0] <= found[0][1])


# --- command line, JSON and partition ---------------------------------------------------------


def parsed_quietly(*flags):
    """Settings, or what was said when the line was refused."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse_arguments([*TINY.split(), *flags], environ={})
    except SystemExit as exit:
        assert exit.code == 2 and said.getvalue().count("\n") == 1, said.getvalue()
        return said.getvalue()


pieces = st.lists(st.sampled_from(["type", ":", "transformer", "|", "embedding", "layernorm", "(", ")", "?", "?:", "\\S", "\\Z",
                                   ".*", "[", "Block", "^", "$", "norm"]), max_size=6).map("".join)


@few
@given(pieces, st.integers(1, 4))
@example("(?:transformer)", 1)
@example("transformer\\Z", 1)
@example("\\Stransformer|.*", 1)
def test_a_partition_that_is_accepted_is_one_that_deepspeed_reads(pattern, layers):
    method = f"type:{pattern}"
    found = parsed_quietly(f"--num-layers={layers}", f"--pp-partition-method={method}")
    if isinstance(found, str):
        assert "--pp-partition-method" in found
        return
    kinds = ["EmbeddingPipe", *["ParallelTransformerLayerPipe"] * layers, "LayerNorm", "EmbeddingHead"]
    assert found.parallel.pp_partition_method == method
    # its reading: lower case, between the first two colons
    assert sum(bool(re.search(method.lower().split(":")[1], kind.lower())) for kind in kinds) >= 1


@few
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from(["transformer", "transformer|embedding", "layernorm|transformer"]))
def test_the_stages_of_a_partition_differ_as_little_as_any_do(layers, pp, pattern):
    model = ModelConfig(num_layers=layers, hidden_size=8, num_attention_heads=2, ffn_hidden_size=32, kv_channels=4,
                        seq_length=4, max_position_embeddings=4, vocab_size=8, padded_vocab_size=8)
    kinds = ["", "EmbeddingPipe", "", *["ParallelTransformerLayerPipe"] * layers, "", "LayerNorm", "EmbeddingHead", ""]
    marks = [int(bool(re.search(pattern, kind.lower()))) for kind in kinds]
    found = refused_in_a_sentence(stages, model, pp, f"type:{pattern}")
    assert (found is None) == (pp > sum(marks))
    if found is None:
        return

    def spread(cuts):
        sizes = [sum(marks[a:b]) for a, b in zip((0, *cuts), (*cuts, len(marks)))]
        return max(sizes) - min(sizes)

    assert found[0].start == 0 and found[-1].stop == len(kinds)
    assert all(one.stop == other.start for one, other in zip(found, found[1:]))
    best = min(spread(cuts) for cuts in itertools.combinations(range(1, len(marks)), pp - 1))
    assert spread([stage.start for stage in found[1:]]) == best


KEYS = ["train_batch_size", "gradient_accumulation_steps", "gradient_clipping", "zero_optimization", "fp16", "bf16", "stage",
        "enabled", "loss_scale", "steps_per_print", "wall_clock_breakdown", "tensorboard", "timers", "scheduler"]
values = st.recursive(st.sampled_from([None, True, False, 0, 1, 2, -1, 2.5, 1e300, math.nan, math.inf, "auto", "", 10**400]),
                      lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=2),
                      max_leaves=4)


@few
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=3), st.sampled_from([[], ["--fp16"], ["--bf16"]]))
@example({"train_batch_size": 10**400}, [])
def test_any_json_is_a_configuration_or_is_refused(config, flags):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ds.json"
        file.write_text(json.dumps(config))
        found = parsed_quietly("--deepspeed_config", str(file), *flags)
        assert not isinstance(found, str) or f"--deepspeed_config {file}" in found


@few
@given(st.sampled_from("num-layers lr seed split save data-path hidden-dropout eval-only kv-channels bitfit-bias-terms "
                       "skip-train-iteration-range pp-partition-method global-batch-size train-samples".split()),
       typed | st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.integers().map(str) | st.floats().map(str))
def test_any_value_of_a_flag_is_taken_or_refused_by_its_name(name, value):
    found = parsed_quietly(f"--{name}={value}")
    assert not isinstance(found, str) or f"--{name}" in found


# --- log lines --------------------------------------------------------------------------------

numbers, sizes = st.floats(-1e12, 1e12) | st.sampled_from([math.inf, math.nan]), st.integers(0, 2**62)
maybe = st.none() | numbers
training = st.builds(TrainingFacts, iteration=sizes, train_iters=sizes, consumed_samples=sizes, consumed_tokens=sizes,
                     seconds_per_iteration=numbers, learning_rate=numbers, global_batch_size=sizes, loss=maybe, loss_scale=maybe,
                     grad_norm=maybe, num_zeros=maybe, params_norm=maybe, skipped_iterations=sizes, nan_iterations=sizes,
                     samples_per_second=numbers, tflops=numbers)


@few
@given(training, st.sampled_from(["", "[default3]:", "2026-01-02 03:04:05 ", "x | iteration 7 | "]))
def test_a_training_line_says_again_what_was_read_from_it(facts, ahead):
    line = training_line(facts)
    heard = parse_training_line(ahead + line)
    assert training_line(TrainingFacts(**{"loss": None, **heard})) == line
    for name, value in vars(facts).items():
        if isinstance(value, int):
            assert heard[name] == value
    for label, value in (("grad norm", facts.grad_norm), ("params norm", facts.params_norm)):
        assert value is None or f" {label}: {value:.3f} |" in line


@few
@given(st.lists(st.sampled_from([" iteration ", "12/", " 34 |", "iteration 1/ 2 |", " lm loss: ", "1E+00", "|", "nan", "x", " ", ":",
                                 "run fact | ", "٣"]) | st.text(max_size=5), max_size=9).map("".join))
@example(f" iteration {'9' * 5000}/ 1 | lm loss: 1 |")
@example(f" iteration 1/ 2 | consumed samples: {'9' * 5000} |")
@example(f"run fact | x | {'9' * 5000}")
def test_any_line_is_read_without_an_exception(text):
    found = parse_training_line(text)
    assert found is None or {"iteration", "train_iters"} <= set(found)
    assert isinstance(parse_run_facts([text]), dict)


@few
@given(st.text(max_size=8), st.integers() | st.floats(allow_nan=False) | st.text(max_size=8), st.sampled_from(["", "bytes", "a|b"]))
def test_a_run_fact_comes_back_or_is_refused(name, value, unit):
    line = refused_in_a_sentence(lambda: format_run_fact(name, value, unit))
    if line is None:
        parts = [name, str(value), *([unit] if unit else [])]
        assert any("|" in part or part != part.strip() or len(part.splitlines()) != 1 for part in parts)
        return
    (heard_name, heard), = parse_run_facts(["noise", "[default1]:" + line]).items()
    assert heard_name == name and (heard == value or (isinstance(value, str) and str(heard).lower() == str(float(value)).lower()
                                                       or heard == float(value)))


# --- index arrays -----------------------------------------------------------------------------

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


@few
@given(lengths, st.integers(1, 24), st.integers(1, 60), st.integers(0, 9), st.booleans())
def test_samples_are_the_stream_cut_at_every_step(lengths, seq_length, wanted, seed, force_numpy):
    documents = np.arange(len(lengths), dtype=np.int32)
    plan = plan_epochs(sum(lengths), seq_length, wanted)
    epochs = plan.num_epochs
    assert plan.num_samples >= wanted and plan.num_samples == (epochs * sum(lengths) - 1) // seq_length
    assert epochs == 1 or ((epochs - 1) * sum(lengths) - 1) // seq_length < wanted, "an epoch too many"
    rng = np.random.RandomState(seed)
    order = build_doc_idx(documents, plan, rng)
    rows = build_sample_idx(np.array(lengths, np.int32), order, seq_length, plan.num_samples, force_numpy=force_numpy)
    shuffled = build_shuffle_idx(plan, rng)
    assert Counter(order.tolist()) == dict.fromkeys(range(len(lengths)), epochs)
    assert sorted(shuffled.tolist()) == list(range(plan.num_samples))
    assert sorted(shuffled[:plan.full_samples].tolist()) == list(range(plan.full_samples))
    stream = [[position, offset] for position, number in enumerate(order) for offset in range(lengths[number])]
    assert rows.tolist() == [stream[k * seq_length] for k in range(plan.num_samples + 1)]


@few
@given(st.lists(st.floats(0, 1) | st.sampled_from([1e-12, 1e9]), min_size=1, max_size=6).filter(lambda w: sum(w) > 1e-9),
       st.integers(1, 300), st.booleans())
@example([1e9, 1e-3, 1e-3], 300, True)
def test_a_blend_follows_its_weights_and_never_runs_past_an_end(weights, length, force_numpy):
    shares = normalised(weights)
    which, local = build_blending_indices(np.array(shares), length, force_numpy=force_numpy)
    drawn = Counter()
    assert which[0] == shares.index(max(shares)), "the heaviest comes first"
    for dataset, index in zip(which.tolist(), local.tolist()):
        assert index == drawn[dataset] and shares[dataset] > 0
        drawn[dataset] += 1
    for k, (share, built) in enumerate(zip(shares, samples_per_dataset(shares, length))):
        assert abs(drawn[k] - share * length) <= len(shares)
        assert drawn[k] <= built + 1, "more samples drawn than the dataset was built with"


@few
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(4, 20), st.integers(1, 20), st.integers(0, 9))
def test_packed_rows_are_those_of_a_slow_packer(lengths, row_length, wanted, seed):
    found = refused_in_a_sentence(pack, np.array(lengths, np.int64), row_length, wanted, seed)
    assert (found is None) == (min(lengths) > row_length)
    if found is None:
        return
    order, rows = found
    slow, row = [], []
    for place, number in enumerate(order.tolist()):
        if row and sum(lengths[order[k]] for k in row) + lengths[number] > row_length:
            slow.append(row)
            row = []
        if lengths[number] <= row_length:
            row.append(place)
    assert [list(range(first, last)) for first, last in rows.tolist()] == slow and len(slow) > wanted
    assert len(set(Counter(order.tolist()).values())) == 1, "whole epochs"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("tokens") / "d"
    with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
        for size in (3, 1, 5, 2):
            writer.add_document(list(range(size)))
    return prefix


@few
@given(st.sampled_from([".idx", ".bin"]), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=2),
       st.integers(-12, 12))
def test_a_damaged_file_is_refused_or_harmless(dataset, ending, bytes_changed, longer):
    with tempfile.TemporaryDirectory() as folder:
        for each in (".idx", ".bin"):
            data = bytearray(Path(f"{dataset}{each}").read_bytes())
            if each == ending:
                for place, value in bytes_changed:
                    data[place % len(data)] = value
                data = data + b"\0" * longer if longer >= 0 else data[:longer]
            (Path(folder) / f"d{each}").write_bytes(data)
        indexed = refused_in_a_sentence(IndexedDataset, f"{folder}/d")
        if indexed is not None:
            assert sum(len(indexed[k]) for k in range(len(indexed))) == int(indexed.sizes.sum())
            assert indexed.doc_idx[-1] == len(indexed)
