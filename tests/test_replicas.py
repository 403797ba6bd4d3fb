"""Copies that differ over TP are found, named and repaired; without a fault none differ."""

import contextlib
import dataclasses
import io
import math

import pytest
import torch
from launching import launch, training_lines
from small_runs import Case, build_run, train_steps, write_base
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_data import small_model_flags

from megatron.replicas import SYNC, Difference, Replicas, checkpoint_name, fingerprint, format_differences

#: small steps of Adam, clipped so that every step is
CASE = Case(tp=2, layers=1, optimizer="adam", lr=1e-2, clip=0.05, steps=2, dropout=0.1)
NORM, ROW = "3.input_layernorm.bias", "3.mlp.dense_4h_to_h.bias"
#: with DP 2 the first shard of the vectors ends after its sixth element:
#: 48 of the embedding's norm + 48 + 36 (QKV) + 24 (dense) + 6 = (324 in all) / 2
CUT = "3.post_attention_layernorm.weight"
NORM_WEIGHT = "tied_modules.embed.word_embeddings.norm.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_base(str(folder), CASE)
    return str(folder)


# --- jobs -------------------------------------------------------------------------------------


def _replicas(engine, context, settings, *, sync, every=0, writer=None):
    parallel = dataclasses.replace(settings.parallel, sync_tp_duplicated_parameters=sync,
                                   check_tp_duplicated_parameters=every)
    return Replicas(engine, context, dataclasses.replace(settings, parallel=parallel), writer)


def _optimizer_tensors(engine):
    """All masters and moments of this rank, shard by shard, as the optimizer holds them."""
    inner = engine.optimizer.optimizer
    for group in inner.param_groups:
        for flat in group["params"]:
            yield flat.detach()
            yield from (value for value in inner.state[flat].values() if value.shape == flat.shape)


def _everything(engine):
    """A copy of every parameter, master and moment of this rank, as integers: NaN equals itself."""
    tensors = [*(param.detach() for param in engine.module.parameters()), *_optimizer_tensors(engine)]
    return [tensor.clone().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]) for tensor in tensors]


def _corrupt(engine, context, faults):
    """Add ``delta`` to one element, found by counting: groups are laid end to end and cut evenly over DP."""
    inner = engine.optimizer.optimizer
    groups = getattr(engine.optimizer, "bf16_groups", None) or engine.optimizer.bit16_groups
    for name, part, at, delta in faults:
        param = engine.module.get_parameter(name)
        if part == "parameter":
            param.data.view(-1)[at] += delta
            continue
        for index, group in enumerate(groups):
            flat = inner.param_groups[index]["params"][0]
            place = at - context.dp_rank * flat.numel()
            for member in group:
                if member is param and 0 <= place < flat.numel():
                    (flat.data if part == "fp32 master" else inner.state[flat][part])[place] += delta
                place += member.numel()


def faulty_run(case: Case, base: str, faults: list) -> dict:
    """Job: train, spoil copies of TP rank 1, check with and without repair, train on."""
    settings, context, _, engine, _ = build_run(case, base)
    watch = _replicas(engine, context, settings, sync=False, every=2)
    repairs = _replicas(engine, context, settings, sync=True)
    before_training = watch.check(0)
    train_steps(engine, case, context, 0, case.steps)
    clean = watch.check(case.steps)
    good = _everything(engine)
    if context.tp_rank == 1:
        _corrupt(engine, context, faults)
    changed = sum(not torch.equal(a, b) for a, b in zip(good, _everything(engine)))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        seen, again = watch.check(10), watch.check(11)
        repaired, after = repairs.check(12), repairs.check(13)
    restored = all(torch.equal(a, b) for a, b in zip(good, _everything(engine)))
    losses, norms = train_steps(engine, case, context, case.steps, case.steps)
    return {"quiet": [before_training, clean, after], "seen": [seen, again, repaired], "said": said.getvalue(),
            "changed": changed, "restored": restored,
            "losses": losses, "norms": norms, "end": _everything(engine),
            "at_end": watch.check(20), "place": (context.dp_rank, context.tp_rank)}


def undisturbed_run(case: Case, base: str) -> dict:
    """Job: the same training without fault, check or repair."""
    _, context, _, engine, _ = build_run(case, base)
    losses, norms = train_steps(engine, case, context, 0, 2 * case.steps)
    return {"losses": losses[case.steps:], "norms": norms[case.steps:], "end": _everything(engine)}


def frozen_run(case: Case, base: str) -> dict:
    """Job: a frozen copy differs from the start; NaN in all copies; SGD's one moment; a DP rank of its own."""
    settings, context, _, engine, _ = build_run(case, base)
    by_name = dict(engine.module.named_parameters())
    watch = _replicas(engine, context, settings, sync=False, every=2)
    repairs = _replicas(engine, context, settings, sync=True)
    frozen = by_name[NORM_WEIGHT].data.view(-1)
    by_name[NORM].data.view(-1)[2] = math.nan  # the same bits everywhere: no difference
    healthy = repairs.check(0)
    if context.rank == 3:
        frozen[3] += 0.5
    unseen = repairs.check(1)  # not looked at again
    seen = [watch.check(0), watch.check(2)]
    fresh = _replicas(engine, context, settings, sync=True)
    fixed = [fresh.check(0), fresh.check(1), watch.check(4), watch.check(6)]
    if context.rank == 1:
        by_name[NORM].data.view(-1)[2] = 1.0
        by_name[ROW].data.view(-1)[0] = -0.0
    elif context.rank == 0:
        by_name[ROW].data.view(-1)[0] = 0.0
    return {"healthy": healthy, "unseen": unseen, "seen": seen, "fixed": fixed, "odd": watch.check(8)}


def due_run(case: Case, base: str) -> dict:
    """Job: which iterations are checked under which flags, and whether a check leaves the random streams alone."""
    settings, context, _, engine, _ = build_run(case, base)
    streams = torch.get_rng_state()
    checked = {}
    for sync, every in ((False, 0), (False, 3), (True, 0), (True, 2)):
        curve = _Curve()
        replicas = _replicas(engine, context, settings, sync=sync, every=every, writer=curve)
        replicas.start(0)
        for iteration in range(1, 7):
            replicas.after(iteration)
        checked[sync, every] = curve.iterations
    return {"checked": checked, "drawn": not torch.equal(streams, torch.get_rng_state())}


class _Curve:
    """Stands where TensorBoard would and keeps the x axis."""

    def __init__(self):
        self.iterations = []

    def log_differing_copies(self, count, iteration):
        self.iterations.append(iteration)


# --- faults -----------------------------------------------------------------------------------


FAULTS = [  # a power of two, so that it is exact; 16-bit parameters are spoiled visibly too
    (NORM, "parameter", 5, 2.0**-3), (ROW, "fp32 master", 7, 2.0**-3), (NORM_WEIGHT, "exp_avg_sq", 0, 2.0**-6),
    (ROW, "exp_avg", 23, -2.0**-3), (CUT, "fp32 master", 5, 0.25), (CUT, "exp_avg_sq", 6, 0.25)]
#: rank that holds the spoiled shard with DP 2; a parameter is whole, and spoiled, on both
OWNERS = {"parameter": (1, 3), (ROW, "fp32 master"): (3,), (NORM_WEIGHT, "exp_avg_sq"): (1,), (ROW, "exp_avg"): (3,),
          (CUT, "fp32 master"): (1,), (CUT, "exp_avg_sq"): (3,)}


@pytest.mark.parametrize("dtype, dp", [("fp32", 1), ("bf16", 2)])
def test_each_spoiled_element_is_named_and_repaired_bit_for_bit(worker_group, base, dtype, dp):
    """PaddlePaddle/Paddle#50676: copies that are equal by logic alone drift where a kernel is not exact."""
    case = dataclasses.replace(CASE, dtype=dtype, dp=dp)
    results = worker_group(case.world).run(faulty_run, case, base, FAULTS)
    truth = worker_group(case.world).run(undisturbed_run, case, base)
    for result, true in zip(results, truth):
        assert result["quiet"] == [[], [], []] and result["at_end"] == []
        for seen in result["seen"]:
            by_name = {(each.name, each.part): each for each in seen}
            assert len(seen) == len(by_name)
            assert by_name.keys() == {(checkpoint_name(name), part) for name, part, _, _ in FAULTS}
            for name, part, _, delta in FAULTS:
                found = by_name[checkpoint_name(name), part]
                assert found.greatest == pytest.approx(abs(delta), rel=0.01 if part == "parameter" else 1e-4)
                assert found.ranks == (OWNERS.get((name, part), OWNERS["parameter"]) if dp == 2 else (1,))
        assert result["restored"]
        warnings = [line for line in result["said"].splitlines() if line.startswith("WARNING")]
        if result is results[0]:  # once per job and check
            assert [f"iteration {each}: {len(FAULTS)} tensors" in line
                    for each, line in zip((10, 11, 12), warnings, strict=True)] == [True] * 3
            assert "repaired" not in warnings[1].split(";")[1].split(SYNC)[0] and "repaired from" in warnings[2]
            assert len(result["said"].splitlines()) == 3 * (1 + len(FAULTS))
        else:
            assert result["said"] == ""
        assert bool(result["changed"]) == (result["place"][1] == 1)
        assert result["losses"] == true["losses"] and result["norms"] == true["norms"]
        assert all(torch.equal(a, b) for a, b in zip(result["end"], true["end"], strict=True))


def test_frozen_copies_are_checked_at_the_start_and_kept_in_view_while_they_differ(worker_group, base):
    case = dataclasses.replace(CASE, dp=2, bitfit=True, optimizer="sgd", dropout=0.0)
    wrong = [Difference(checkpoint_name(NORM_WEIGHT), "parameter", 0.5, (3,))]
    for result in worker_group(4).run(frozen_run, case, base):
        assert result["healthy"] == result["unseen"] == []
        assert [[dataclasses.replace(each, greatest=round(each.greatest, 5)) for each in seen]
                for seen in (*result["seen"], result["fixed"][0])] == [wrong, wrong, wrong]
        assert result["fixed"][1:] == [[], [], []]
        nan, zero = result["odd"]
        assert (nan.name, nan.part, nan.ranks) == ("layers.0.input_layernorm.bias", "parameter", (1,))
        assert math.isnan(nan.greatest)
        assert zero == Difference("layers.0.mlp.dense_4h_to_h.bias", "parameter", 0.0, (1,))


def test_flags_choose_the_iterations_and_checks_draw_no_random_number(worker_group, base):
    for result in worker_group(2).run(due_run, CASE, base):
        assert result["checked"] == {(False, 0): [], (False, 3): [0, 3, 6], (True, 0): [0, 1, 2, 3, 4, 5, 6],
                                     (True, 2): [0, 2, 4, 6]}
        assert not result["drawn"]


# --- alone ------------------------------------------------------------------------------------


def test_fingerprints_of_pieces_add_up_and_every_single_bit_counts():
    size = 2**18 + 1000  # more than one block
    values = torch.randn(size, generator=torch.Generator().manual_seed(1))
    for tensor in (values, values.bfloat16()):
        whole = fingerprint(tensor)
        for cut in (0, 1, 500, 2**18 - 1, 2**18, 2**18 + 7, size):
            assert fingerprint(tensor[:cut]) + fingerprint(tensor[cut:], cut) == whole
        for at in (0, 77, 2**18, size - 1):
            for bit in range(8 * tensor.element_size()):
                other = tensor.clone()
                bits = other.view(torch.int32 if other.element_size() == 4 else torch.int16)
                flip = 1 << bit
                bits[at] ^= flip - (2 << bit) if bit == 8 * tensor.element_size() - 1 else flip
                assert fingerprint(other) != whole, (at, bit)
        swapped = tensor.clone()
        swapped[[3, 2**18 + 3]] = tensor[[2**18 + 3, 3]]
        assert fingerprint(swapped) != whole


def test_the_warning_names_twenty_and_counts_the_rest():
    many = [Difference(f"layers.{i}.input_layernorm.bias", "exp_avg", 0.5, (1, 3)) for i in range(25)]
    lines = format_differences(many, 7, repaired=False).splitlines()
    assert len(lines) == 22 and "iteration 7: 25 tensors" in lines[0] and "goes on" in lines[0]
    assert lines[1].strip() == "layers.0.input_layernorm.bias (exp_avg): greatest difference 0.5, ranks 1, 3"
    assert lines[-1].strip() == "... and 5 more"
    one = format_differences(many[:1], 7, repaired=True).splitlines()
    assert len(one) == 2 and "1 tensor " in one[0] and "repaired" in one[0]


def test_names_know_no_pipeline():
    assert checkpoint_name("tied_modules.embed.word_embeddings.norm.bias") == "embedding.word_embeddings.norm.bias"
    assert checkpoint_name("tied_modules.embed.position_embeddings.weight") == "embedding.position_embeddings.weight"
    assert checkpoint_name("12.mlp.dense_4h_to_h.bias") == "layers.9.mlp.dense_4h_to_h.bias"
    assert checkpoint_name("6.bias") == "final_layernorm.bias"


# --- launched ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], ["--bitfit"]], ids=["full", "bitfit"])
def test_nothing_drifts_in_500_clipped_bf16_steps_with_dropout_and_loader_workers(tmp_path, kind):
    """PaddlePaddle/Paddle#50676: a long run is checked every 50 steps."""
    flags = [*small_model_flags(tmp_path), *kind, "--bf16", "--train-iters", "500", "--log-interval", "50",
             "--clip-grad", "1e-3", "--global-batch-size", "4", "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--num-workers", "2",
             "--tensor-model-parallel-size", "2", "--check-tp-duplicated-parameters", "50",
             "--tensorboard-dir", str(tmp_path / "curves")]
    log = launch(flags, ranks=2, timeout=1500)
    lines = training_lines(log)
    assert [line["iteration"] for line in lines] == list(range(50, 501, 50))
    assert all(line["grad_norm"] > 1e-3 for line in lines)
    assert "replicated over TP" not in log
    counted = EventAccumulator(str(tmp_path / "curves")).Reload().Scalars("replicas/tensors that differ over TP")
    assert [(event.step, event.value) for event in counted] == [(step, 0.0) for step in range(0, 501, 50)]
