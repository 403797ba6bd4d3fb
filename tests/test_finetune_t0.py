"""finetune_t0: pairs that do not see each other, one gradient however rows are dealt out, starts and stops, whole jobs."""

import dataclasses
import json
import sys

import pytest
import small_model
import torch
from finetune_jobs import (
    CASE,
    EOS,
    FIRST_WORD,
    base_flags,
    draw_pairs,
    pair_by_pair,
    runs,
    write_pairs,
    write_tokenizer,
)
from launching import ROOT, facts, launch, training_lines
from resume_jobs import first_half, refusal
from small_runs import merge, write_base
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import finetune_t0
from megatron.arguments import parse_arguments
from megatron.checkpoint import files
from megatron.checkpoint.load_plan import plan_load
from megatron.config import CheckpointConfig, DataConfig
from megatron.data.mtf_batch import mtf_batch
from megatron.errors import SharedRunError
from megatron.model.pipe import loss_function
from megatron.tokenizer import build_tokenizer

sys.path.insert(0, str(ROOT / "tools"))

import preprocess_data

# --- pairs do not see each other ---

#: (inputs, targets) of the pairs of a row of 16 + 1 entries, the last of which is padding
SPANS = [(3, 2), (4, 3), (2, 2)]
A, B = slice(0, 5), slice(5, 12)


def packed_row(changed=None):
    """Entries [1, 17] of SPANS, every token drawn, those of the slice ``changed`` replaced by others."""
    tokens = torch.randint(4, small_model.VOCAB, (17,), generator=torch.Generator().manual_seed(2))
    marks, at = torch.zeros(17, dtype=torch.int64), 0
    for segment, (inputs, targets) in enumerate(SPANS, 1):
        marks[at:at + inputs], marks[at + inputs:at + inputs + targets] = 2 * segment + 1, 2 * segment
        at += inputs + targets
    if changed is not None:
        tokens[changed] = small_model.VOCAB + 3 - tokens[changed]
    tokens[at:] = 0
    return (tokens + (marks << 32))[None]


def model_of(kind, prefix, explicit):
    return small_model.build(small_model.config(
        position_embedding_type=kind, max_position_embeddings=20, reset_attention_mask=True, prefix_lm=prefix,
        masked_softmax_fusion=not explicit)).eval()


def logits_of(model, row):
    part = mtf_batch(row, DataConfig(prefixlm=model.config.prefix_lm))
    return model(part.tokens, part.position_ids, part.segment_ids)


@pytest.mark.parametrize("explicit", [False, True], ids=["blocked", "explicit"])
@pytest.mark.parametrize("prefix", [False, True], ids=["causal", "prefixlm"])
@pytest.mark.parametrize("kind", ["alibi", "rotary", "absolute"])
@torch.no_grad()
def test_changing_every_token_of_one_pair_leaves_the_others_bit_equal(kind, prefix, explicit):
    """NVIDIA/Megatron-LM#2357: the mask of packed rows was ignored; and bigcode's, whose inputs saw other pairs."""
    model = model_of(kind, prefix, explicit)
    before, row = logits_of(model, packed_row()), packed_row(A)
    after = logits_of(model, row)
    assert (row != packed_row())[0, A].all() and torch.equal(row[0, B], packed_row()[0, B])
    assert torch.equal(before[:, 5:], after[:, 5:]) and before[:, A].ne(after[:, A]).any(-1).all()
    backwards = logits_of(model, packed_row(B))  # the later pair does not reach the earlier one, prefix or not
    assert torch.equal(before[:, A], backwards[:, A]) and torch.equal(before[:, 12:], backwards[:, 12:])
    # and B is what it would be in a row of its own, from position 0 on
    alone = logits_of(model, torch.cat([packed_row()[:, B], torch.zeros(1, 1, dtype=torch.int64)], 1))
    torch.testing.assert_close(before[:, B], alone, rtol=1e-4, atol=1e-5)
    # inputs see later inputs of their pair if, and only if, they are a prefix
    last_input = logits_of(model, packed_row(slice(8, 9)))
    assert bool(before[:, 5:8].ne(last_input[:, 5:8]).any()) == prefix


@pytest.mark.parametrize("explicit", [False, True], ids=["blocked", "explicit"])
@pytest.mark.parametrize("prefix", [False, True], ids=["causal", "prefixlm"])
@pytest.mark.parametrize("kind", ["alibi", "absolute"])
def test_bias_gradients_of_one_pair_know_nothing_of_the_others(kind, prefix, explicit):
    """NVIDIA/Megatron-LM#2357, in the gradients: bit-equal when the pair before is another, and those of the pair alone."""
    found = []
    for row in (packed_row(), packed_row(A), torch.cat([packed_row()[:, B], torch.zeros(1, 1, dtype=torch.int64)], 1)):
        model = model_of(kind, prefix, explicit)
        small_model.freeze_weights(model)
        part = mtf_batch(row, DataConfig(prefixlm=prefix))
        of_b = (part.segment_ids >> 1 if prefix else part.segment_ids) == 2
        loss_function(model.config, small_model.ALONE)(logits_of(model, row), (part.labels, part.loss_mask * of_b)).backward()
        found.append(small_model.grads(model))
    assert int((part.loss_mask * of_b).sum()) == SPANS[1][1] and len(found[0]) == 2 * 6 + 2
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name
        torch.testing.assert_close(gradient, found[2][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("prefix", [False, True], ids=["causal", "prefixlm"])
@pytest.mark.parametrize("kind", ["alibi", "rotary", "absolute"])
def test_the_explicit_path_agrees_with_the_blocked_one(kind, prefix):
    logits, gradients = [], []
    for explicit in (False, True):
        model = model_of(kind, prefix, explicit)
        logits.append(logits_of(model, packed_row()))
        logits[-1].square().mean().backward()
        gradients.append(small_model.grads(model))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients[0].items():
        scale = max(float(gradient.abs().max()), 1e-3)
        assert float((gradients[1][name] - gradient).abs().max()) < 1e-4 * scale, name


@pytest.mark.parametrize("prefix", [False, True], ids=["causal", "prefixlm"])
def test_between_layers_travel_segment_ids_and_no_square_mask(prefix):
    model = model_of("alibi", prefix, False)
    part = mtf_batch(packed_row(), DataConfig(prefixlm=prefix))
    sent = []
    for index, layer in model.layers.items():
        if int(index) < 5:
            layer.register_forward_hook(lambda _, __, output: sent.append(output))
    model(part.tokens, part.position_ids, part.segment_ids)
    assert [[tuple(each.shape) for each in output] for output in sent] == [[(1, 16, 24), (1, 16)]] * 3
    assert all(torch.equal(ids, part.segment_ids) for _, ids in sent)


def test_eod_mask_loss_without_an_end_token_is_refused_before_training(tmp_path):
    flags = [*write_tokenizer(tmp_path), "--num-layers", "2", "--hidden-size", "24", "--num-attention-heads", "4",
             "--seq-length", "16", "--max-position-embeddings", "16", "--micro-batch-size", "1", "--train-iters", "1",
             "--lr", "1e-3", "--data-path", "unread", "--eod-mask-loss"]
    settings = parse_arguments(flags, entry="finetune_t0", environ={})
    finetune_t0.batch(settings, build_tokenizer(settings.tokenizer))
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()  # which says what tokens stand for
    bare = dataclasses.replace(settings.tokenizer, tokenizer_name_or_path=str(tmp_path / "tokenizer" / "tokenizer.json"))
    with pytest.raises(SharedRunError, match="--eod-mask-loss needs a tokenizer with an end token.*93 token ids"):
        finetune_t0.batch(settings, build_tokenizer(bare))


# --- the gradient of the global batch ---


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Base, tokenizer and pairs on disk: (folder, flags less data, batch and length)."""
    folder = tmp_path_factory.mktemp("t0")
    return folder, base_flags(folder)


def words(count, first=10):
    return list(range(first, first + count))


#: one row each, for no two of them fit into 17 tokens: targets of 15, 8, 2 and, under --eod-mask-loss, 0 tokens that count
UNEQUAL = [(words(2), [*words(14, 20), EOS]), (words(4, 40), [*words(7, 30), EOS]), (words(15, 50), [FIRST_WORD, EOS]),
           ([*words(7, 60), EOS], [70])]
STEPS, LR = 2, 0.5
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]


@pytest.fixture(scope="module")
def unequal(job):
    """Flags of two steps of plain gradient descent on the global batch of all UNEQUAL pairs."""
    folder, flags = job
    return [*flags, "--data-path", write_pairs(folder / "unequal", UNEQUAL), "--split", "1,0,0", "--eod-mask-loss",
            "--global-batch-size", "4", "--train-iters", str(STEPS), "--optimizer", "sgd", "--sgd-momentum", "0",
            "--lr", str(LR), "--clip-grad", "0", "--eval-iters", "0", *NO_DROPOUT]


def dealt(flags, normalization, **degrees):
    """``flags`` with a loss normalization, a micro-batch size and degrees."""
    names = {"micro": "--micro-batch-size", "pp": "--pipeline-model-parallel-size", "tp": "--tensor-model-parallel-size"}
    more = [text for name, value in degrees.items() for text in (names[name], str(value))]
    return [*flags, "--loss-normalization", normalization, *more]


def check(per_rank, expected):
    """Logged losses, and of every tensor the way it went, which is the sum of its gradients times the rate."""
    lines = next(run["lines"] for run in reversed(per_rank) if run["lines"])
    assert {run["consumed"] for run in per_rank} == {lines[-1]["consumed_samples"]}, "all ranks have counted alike"
    assert [line["loss"] for line in lines] == pytest.approx(expected["losses"], rel=1e-5)
    tensors = merge(per_rank)
    assert tensors.keys() == expected["tensors"].keys()
    for name, wanted in expected["tensors"].items():
        way = float((wanted - expected["before"][name]).abs().max())
        error = float((tensors[name] - wanted).abs().max())
        assert error < 5e-5 * way + 2e-6, f"{name} is off by {error:.2e} after a way of {way:.2e}"


@pytest.mark.parametrize("normalization", ["global-tokens", "global-targets"])
def test_one_gradient_however_rows_are_dealt_out(normalization, job, unequal, worker_group):
    """Micro-batches 4x1, 2x2, 1x4, DP 1, 2 and 4, PP 1 and 2; some ranks then have no target at all.

    bigscience-workshop/Megatron-DeepSpeed#169
    """
    folder, _ = job
    truth = pair_by_pair(folder, [UNEQUAL], normalization, steps=STEPS, lr=LR)
    deals = {1: [dict(micro=4), dict(micro=1)],
             2: [dict(pp=2, micro=2), dict(pp=2, micro=1), dict(micro=2), dict(micro=1)],
             4: [dict(micro=1), dict(pp=2, micro=1)]}
    for world, each in deals.items():
        results = worker_group(world).run(runs, *(dealt(unequal, normalization, **degrees) for degrees in each))
        for per_rank in zip(*results, strict=True):
            check(per_rank, truth)


#: targets of 1 and of 9 tokens, in a row each
SHORT_AND_LONG = [(words(4), [70]), (words(8, 40), words(9, 60))]


def test_a_short_and_a_long_target_weigh_as_documented_in_every_deal(job, tmp_path, worker_group):
    """bigscience-workshop/Megatron-DeepSpeed#169: means of micro-batches gave the short target as much weight as the long one.

    They still do under the rule of that name, the default for old scripts, with PP and without; under the other
    rules micro-batches of 1 and 2, PP=2 and DP=2 have one gradient.

    NVIDIA-NeMo/Megatron-Bridge#4565: replicas and stages count the same samples.
    """
    folder, flags = job
    flags = [*flags, "--data-path", write_pairs(tmp_path / "pairs", SHORT_AND_LONG), "--split", "1,0,0", "--global-batch-size",
             "2", "--train-iters", str(STEPS), "--optimizer", "sgd", "--sgd-momentum", "0", "--lr", str(LR), "--clip-grad", "0",
             "--eval-iters", "0", *NO_DROPOUT]
    apart, together = [[pair] for pair in SHORT_AND_LONG], [SHORT_AND_LONG]
    truth = {(rule, micro): pair_by_pair(folder, groups, rule, steps=STEPS, lr=LR)
             for rule in ("micro-batch", "global-tokens") for micro, groups in ((1, apart), (2, together))}
    assert truth["global-tokens", 1]["losses"] == pytest.approx(truth["global-tokens", 2]["losses"], rel=1e-6)
    assert abs(truth["micro-batch", 1]["losses"][0] - truth["micro-batch", 2]["losses"][0]) > 0.01
    deals = {1: [{}], 2: [{"pp": 2}]}  # and at micro-batch 1 two replicas
    for world, grids in deals.items():
        lines = [(rule, micro, grid) for rule, micro in truth for grid in [*grids, *([{}] if world > micro else [])]]
        results = worker_group(world).run(runs, *(dealt(flags, rule, micro=micro, **grid) for rule, micro, grid in lines))
        for per_rank, (rule, micro, _) in zip(zip(*results, strict=True), lines, strict=True):
            check(per_rank, truth[rule, micro])


def test_a_micro_batch_without_target_adds_nothing_to_the_mean_of_micro_batches(job, unequal, worker_group):
    folder, _ = job
    results = worker_group(4).run(runs, dealt(unequal, "micro-batch", micro=1))
    per_row = pair_by_pair(folder, [[pair] for pair in UNEQUAL], "micro-batch", steps=STEPS, lr=LR)
    check([run for run, in results], per_row)
    together = pair_by_pair(folder, [UNEQUAL], "micro-batch", steps=STEPS, lr=LR)
    assert abs(together["losses"][0] - per_row["losses"][0]) > 0.1, "this mean does depend on how rows are dealt out"


# --- evaluations, stops and starts ---


def weights_in(folder):
    """Every tensor of the layer files of a tag folder, TP shares by their file."""
    return {(path.name, name): tensor for path in sorted(folder.glob("layer_*"))
            for name, tensor in files.read(path).items()}


OLD_FLAGS = ["--finetune", "--no-load-optim", "--reset-progress"]


@pytest.mark.parametrize("normalization, old", [("micro-batch", []), ("global-tokens", OLD_FLAGS)],
                         ids=["micro-batch", "global-tokens with old flags"])
def test_evaluations_and_a_stop_within_an_epoch_change_nothing(normalization, old, job, worker_group, tmp_path):
    """One run in one go without evaluation; one evaluated on two sets, stopped, and started again by the same line.

    NVIDIA-NeMo/Megatron-Bridge#4565: what the loop itself reads behind a stop within an epoch.
    """
    _, flags = job
    pairs = draw_pairs(24, seed=1)
    data, other = write_pairs(tmp_path / "data", pairs), write_pairs(tmp_path / "other", draw_pairs(12, seed=2))
    flags = dealt([*flags, "--train-weighted-split-paths", f"train: 1 0:1 {data}", "--bitfit", "--lr", "1e-2",
                   "--global-batch-size", "4", "--train-iters", "8", "--save-interval", "100"], normalization, micro=2)
    evaluated = [*flags, "--valid-weighted-split-paths", f"near: 1 0.5:1 {data}", f"far: 1 0:1 {other}",
                 "--eval-iters", "2", "--eval-interval", "1", "--tensorboard-dir", str(tmp_path / "curves"),
                 "--log-validation-ppl-to-tensorboard", "--save", str(tmp_path / "parts"), *old]
    (whole, first, later), = worker_group(1).run(
        runs, [*flags, "--eval-iters", "0", "--save", str(tmp_path / "whole")], [*evaluated, "--exit-interval", "3"], evaluated)
    assert "starting from the base" in first["log"] and "weights only" in first["log"]
    assert f"resuming: --save {tmp_path / 'parts'} holds this run's global_step3" in later["log"]
    assert all(flag in later["log"].split("holds this run's")[1].splitlines()[0] for flag in old)
    parts = first["lines"] + later["lines"]
    assert [line["iteration"] for line in parts] == list(range(1, 9))
    for one, two in zip(whole["lines"], parts, strict=True):
        assert {key: one[key] for key in ("loss", "grad_norm", "learning_rate", "consumed_samples")} == {
            key: two[key] for key in ("loss", "grad_norm", "learning_rate", "consumed_samples")}
    ours, theirs = (weights_in(tmp_path / run / "global_step8") for run in ("whole", "parts"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    # what was read: the stop falls into an epoch, and every epoch still has each pair once
    read = first["read"] + later["read"]
    assert read == whole["read"] and 0 < len(first["read"]) % len(pairs) and len(read) > 2 * len(pairs)
    all_of_them = sorted(inputs + targets for inputs, targets in pairs)
    for epoch in range(len(read) // len(pairs)):
        assert sorted(read[epoch * len(pairs):(epoch + 1) * len(pairs)]) == all_of_them
    curves = EventAccumulator(str(tmp_path / "curves")).Reload()
    for group in ("near", "far"):
        for iteration in (1, 2, 3):
            assert first["log"].count(f"{group} loss at iteration {iteration} | lm loss value: ") == 1
        assert later["log"].count(f"{group} loss at the end of training for val data | lm loss value: ") == 1
        for curve in ("lm loss validation", "lm loss validation ppl"):
            # one point for every iteration; the last of them again at the end of training
            steps = [event.step for event in curves.Scalars(f"lm-loss-validation/{group}/{curve}")]
            assert steps == [*range(1, 9), 8]
    values = [[event.value for event in curves.Scalars(f"lm-loss-validation/{group}/lm loss validation")]
              for group in ("near", "far")]
    assert all(one != two for one, two in zip(*values))


def test_the_ways_out_of_another_trainable_set_start_from_weights_alone(tmp_path, worker_group):
    """The error of a resume names them, whichever --load it was planned from; they lead out."""
    write_base(str(tmp_path / "base"), CASE)
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    worker_group(1).run(first_half, CASE, str(tmp_path / "base"), 1, run)
    said, = worker_group(1).run(refusal, dataclasses.replace(CASE, bitfit=True), run)
    assert f"--load {run} and save to another --save folder" in said and "add --finetune --no-load-optim" in said
    assert plan_load(CheckpointConfig(load=run, save=other)).weights_only
    assert plan_load(CheckpointConfig(load=run, save=run, finetune=True, load_optim=False)).weights_only
    # without making it --load too these flags concerned the first start, and the run resumes
    for load in (None, str(tmp_path / "base")):
        plan = plan_load(CheckpointConfig(load=load, save=run, finetune=True, load_optim=False))
        assert plan.resume and plan.progress and "--finetune, --no-load-optim concerned the first start" in plan.reason


# --- whole jobs ---


def test_a_bitfit_job_at_tp2_pp2_is_the_job_of_one_process(tmp_path, worker_group, capsys):
    """JSON Lines -> pairs -> finetune_t0.py under torchrun, and its loop in one rank with one micro-batch."""
    texts = [{side: " ".join(f"w{token}" for token in part if token != EOS)
              for side, part in zip(("inputs", "targets"), pair)} for pair in draw_pairs(40, seed=3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts))
    flags = [*base_flags(tmp_path), *NO_DROPOUT]
    assert preprocess_data.main(["--input", str(tmp_path / "pairs.jsonl"), "--json-keys", "inputs", "targets", "--append-eod",
                                 "--output-prefix", str(tmp_path / "pairs"), "--workers", "0", *flags[:4]]) == 0
    assert "40 pairs: both sides are in step" in capsys.readouterr().out
    flags = [*flags, "--train-weighted-split-paths", f"train: 1 0:0.8 {tmp_path / 'pairs'}",
             "--valid-weighted-split-paths", f"first: 1 0:0.5 {tmp_path / 'pairs'}", f"last: 1 0.8:1 {tmp_path / 'pairs'}",
             "--bitfit", "--prefixlm", "--optimizer", "sgd", "--lr", "0.5", "--global-batch-size", "4", "--train-iters", "3", "--eval-iters", "1",
             "--eval-interval", "2", "--save-interval", "3"]
    grid = launch([*dealt(flags, "global-targets", micro=1, tp=2, pp=2), "--save", str(tmp_path / "grid")],
                  script="finetune_t0.py")
    (of_one,), = worker_group(1).run(runs, [*dealt(flags, "global-targets", micro=4), "--save", str(tmp_path / "alone")])
    alone = of_one["log"]
    ours, truth = training_lines(grid), training_lines(alone)
    assert len(truth) == 3 and truth[-1]["loss"] < truth[0]["loss"]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in truth], rel=1e-5)
    assert facts(grid)["trainable parameters"] == facts(alone)["trainable parameters"] == 11 * 24 * 2 + 2 * 24
    evaluations = [[float(line.split("lm loss value: ")[1].split()[0]) for line in log.splitlines() if "lm loss value" in line]
                   for log in (grid, alone)]
    assert len(evaluations[0]) == 4 and evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    before = weights_in(tmp_path / "base" / "global_step1")
    whole = weights_in(tmp_path / "alone" / "global_step3")
    shares = weights_in(tmp_path / "grid" / "global_step3")
    assert len(whole) * 2 == len(shares)
    for (file, name), wanted in whole.items():
        pair = [shares[file.replace("model_00", f"model_0{tp}"), name] for tp in (0, 1)]
        # sharded along its first dimension, along its second, or a copy; no tensor fits two of these
        dim = next((dim for dim in range(wanted.dim()) if pair[0].shape[dim] != wanted.shape[dim]), None)
        merged = pair[0] if dim is None else torch.cat(pair, dim)
        assert dim is not None or torch.equal(*pair), f"{name} in {file} differs over TP"
        assert torch.equal(merged, wanted) or float((merged - wanted).abs().max() / wanted.abs().max()) < 1e-5, (file, name)
        if not name.endswith("bias"):
            assert torch.equal(merged, before[file, name]), f"{name} in {file} is frozen but moved"
        elif name != "self_attention.query_key_value.bias":
            assert not torch.equal(merged, before[file, name]), f"{name} in {file} did not train"
