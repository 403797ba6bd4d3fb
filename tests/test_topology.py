"""A run saved at some TP, PP, DP and precision goes on at others as if it had not been broken."""

import argparse
import dataclasses
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from resume_jobs import refusal
from small_runs import VOCAB, Case, settings_of, write_base
from topology_jobs import digest, go_on, pass_on, save_and_go_on, streams_after, streams_of_a_start, weights_alone
from worker_group import JobFailed

from megatron.checkpoint import files, manifest, resume
from megatron.checkpoint.load_plan import LoadPlan
from megatron.checkpoint.optimizer_shards import MASTER, OptimizerShards, load_optimizer
from megatron.errors import RunError
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import seed_everything
from megatron.mpu.tags import ParamTag, tag_parameter, unshard
from megatron.tokenizer.padding import padded_vocab_size

SAVED = Case(tp=2, pp=2, optimizer="adam", lr=1e-2, decay="linear", weight_decay=0.1, hidden=48, heads=12, micro=4)
TERMS = ("query", "value", "mlp_intermediate", "layernorm")
KINDS = {"full": {}, "bitfit": {"bitfit": True}, "terms": {"bitfit": True, "bias_terms": TERMS},
         # two replicas otherwise meet between two of the four blocks, and cut no parameter
         "uneven terms": {"bitfit": True, "bias_terms": TERMS, "embed_layernorm": False}}
GRIDS = {"TP1": (1, 1, 1), "TP4": (4, 1, 1), "PP4": (1, 4, 1), "DP2": (1, 1, 2), "TP2DP2": (2, 1, 2), "PP2DP2": (1, 2, 2),
         "DP4": (1, 1, 4)}
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
#: greatest relative distance of losses and norms from the unbroken run
TOLERANCE = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 2e-2}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, worker_group):
    """``unbroken(case)``: folder with a save after five steps, and what each rank saw from there on."""
    root, known = tmp_path_factory.mktemp("topology"), {}

    def run(case: Case) -> tuple[str, list[dict]]:
        if case not in known:
            base = root / f"base{case.embed_layernorm}{case.layers}{case.vocab}"
            if not base.exists():
                write_base(str(base), case)
            folder = str(root / f"run{len(known)}")
            known[case] = folder, worker_group(case.world).run(save_and_go_on, case, str(base), folder, 5, 3)
        return known[case]

    return run


def whole(ranks: list[dict], dp_rank: int = 0, vocab: int = VOCAB) -> dict[tuple[str, str], torch.Tensor]:
    """Tensors by (parameter, part), TP shares of one replica put together; copies must be equal."""
    shares: dict[tuple[str, str], dict] = {}
    tags = {}
    for rank in ranks:
        _, dp, tp = rank["place"]
        for name, (values, tag, copy) in rank["state"].items():
            for part, value in values.items() if dp == dp_rank and not copy else ():
                shares.setdefault((name, part), {})[tp] = value
                tags[name] = tag
    merged = {}
    for (name, part), by_tp in shares.items():
        pieces = [by_tp[tp] for tp in sorted(by_tp)]
        if tags[name].dim is None:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{part} of {name} differs over TP"
        tensor = unshard(pieces, tags[name])
        merged[name, part] = tensor[:vocab] if tags[name].tied else tensor
    return merged


def check(saved: Case, now: Case, unbroken, group) -> None:
    """State bit for bit right after the resume, losses and norms to the dtype's tolerance after it."""
    folder, truth = unbroken(saved)
    ranks = group.run(go_on, now, folder, 3)
    wanted = whole(truth, vocab=saved.vocab)
    for dp_rank in range(now.dp):
        found = whole(ranks, dp_rank, now.vocab)
        assert found.keys() == wanted.keys() and {part for _, part in found} == {"weight", "master", *MOMENTS[now.optimizer]}
        for (name, part), value in found.items():
            # a weight is its fp32 master, rounded as this run rounds, however the saved run did
            expected = wanted[name, part] if part != "weight" else rounded(wanted[name, "master"], now.dtype)
            assert torch.equal(value, expected), f"{part} of {name}"
    tolerance = max(TOLERANCE[saved.dtype], TOLERANCE[now.dtype])
    for rank in ranks:
        assert rank["eval"] == pytest.approx(truth[0]["eval"], rel=tolerance)
        assert rank["losses"] == pytest.approx(truth[0]["losses"], rel=tolerance)
        assert rank["norms"] == pytest.approx(truth[0]["norms"], rel=tolerance)
        for key in ("progress", "schedule", "counters", *(["scale"] if saved.dtype == now.dtype else [])):
            assert rank[key] == truth[0][key], key


def rounded(master: torch.Tensor, dtype: str) -> torch.Tensor:
    return master.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).float()


def at(case: Case, grid: str, **changes) -> Case:
    tp, pp, dp = GRIDS[grid]
    return dataclasses.replace(case, tp=tp, pp=pp, dp=dp, micro=min(case.micro, case.global_batch // dp), **changes)


@pytest.mark.parametrize("kind, dtype, start, grid, changes", [
    ("full", "fp32", None, "TP1", {"padded": 128}),  # the number of padded rows follows the degree
    ("full", "fp32", None, "PP4", {}),
    ("full", "fp32", None, "DP2", {"dtype": "bf16"}),
    ("bitfit", "bf16", None, "TP4", {"dtype": "fp32"}),
    ("uneven terms", "fp32", "DP2", "TP1", {}),  # put together over replicas first
    ("uneven terms", "fp32", "DP2", "DP4", {}),
    pytest.param("terms", "fp32", "TP2DP2", "TP1", {}, marks=pytest.mark.slow),
    pytest.param("terms", "fp32", "PP2DP2", "TP4", {}, marks=pytest.mark.slow),
    pytest.param("full", "bf16", "TP2DP2", "PP4", {}, marks=pytest.mark.slow),
])
def test_a_run_goes_on_at_other_degrees_and_precision(kind, dtype, start, grid, changes, unbroken, worker_group):
    """deepspeedai/DeepSpeed#2898: another number of replicas at a resume was refused, at times on some ranks alone."""
    saved = dataclasses.replace(SAVED, dtype=dtype, **KINDS[kind])
    saved = at(saved, start) if start else saved
    now = at(saved, grid, **changes)
    check(saved, now, unbroken, worker_group(now.world))


def test_degrees_change_twice_with_and_without_the_optimizer(unbroken, tmp_path, worker_group):
    """bigscience-workshop/Megatron-DeepSpeed#343: other degrees at a load; #350: folders without a file ``latest``."""
    folder, truth = unbroken(SAVED)
    alone, four = at(SAVED, "TP1"), at(SAVED, "TP4")
    known = pytest.approx(truth[0]["eval"], rel=1e-5)

    def unnamed(name: str) -> str:
        """The folder without ``latest``: its only tag is taken."""
        (tmp_path / name / "latest").unlink()
        return str(tmp_path / name)

    shutil.copytree(folder, tmp_path / "first")
    first = unnamed("first")
    assert worker_group(1).run(pass_on, alone, first, str(tmp_path / "second")) == [known]
    (said, loss), = worker_group(1).run(weights_alone, alone, first, str(tmp_path / "weights"))
    assert loss == known and "has no file 'latest'; its only tag global_step5 is read" in said
    for rank in worker_group(4).run(go_on, four, unnamed("second"), 3):
        assert rank["eval"] == known and rank["losses"] == pytest.approx(truth[0]["losses"], rel=2e-5)
    for said, loss in worker_group(4).run(weights_alone, four, unnamed("weights")):
        assert loss == known and "its only tag global_step0" in said


@pytest.mark.parametrize("start, grid", [("TP1", "TP4"), ("TP4", "TP1")])
def test_padding_follows_the_degree_and_the_true_vocabulary(start, grid, unbroken, worker_group):
    """NVIDIA-NeMo/Megatron-Bridge#469: the padded size depends on TP, and checkpoints of other degrees did not fit."""
    saved, now = (at(SAVED, name, layers=2, vocab=201, padded=padded_vocab_size(201, divisible_by=128, tp=GRIDS[name][0], pad_to=None))
                  for name in (start, grid))
    assert {saved.padded, now.padded} == {256, 512}
    check(saved, now, unbroken, worker_group(now.world))
    folder, _ = unbroken(saved)
    for resumes in (True, False):  # a base, too, is not taken for one of another vocabulary
        with pytest.raises(RunError, match="holds a model with vocab_size 201, this run has 202 .the tokenizer's vocabulary"):
            resume.check_stored(LoadPlan(folder, "global_step5", resume=resumes), settings_of(dataclasses.replace(now, vocab=202)),
                                ParallelContext())


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["full", "bitfit", "terms"])
def test_every_kind_goes_on_at_every_grid(kind, dtype, grid, unbroken, worker_group):
    saved = dataclasses.replace(SAVED, dtype=dtype, **KINDS[kind])
    now = at(saved, grid)
    check(saved, now, unbroken, worker_group(now.world))


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["TP1", "PP4"])
@pytest.mark.parametrize("dtypes", ["fp32 bf16", "bf16 fp32", "fp16 fp16", "fp16 fp32", "fp32 fp16", "bf16 fp16"])
@pytest.mark.parametrize("kind", ["full", "bitfit"])
def test_every_precision_goes_on_in_every_other(kind, dtypes, grid, unbroken, worker_group):
    before, after = dtypes.split()
    saved = dataclasses.replace(SAVED, dtype=before, **KINDS[kind])
    now = at(saved, grid, dtype=after)
    check(saved, now, unbroken, worker_group(now.world))


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["TP1", "PP4", "DP2"])
@pytest.mark.parametrize("kind", ["full", "bitfit"])
def test_momentum_of_sgd_goes_along(kind, grid, unbroken, worker_group):
    saved = dataclasses.replace(SAVED, optimizer="sgd", lr=0.2, **KINDS[kind])
    now = at(saved, grid)
    check(saved, now, unbroken, worker_group(now.world))


def test_zero_stage_0_and_1_are_one(unbroken, worker_group):
    """Optimizer state is sharded in either case, so the unbroken run goes on bit for bit."""
    folder, truth = unbroken(SAVED)
    for rank, wanted in zip(worker_group(4).run(go_on, dataclasses.replace(SAVED, zero_stage=0), folder, 1), truth):
        for key in ("digest", "eval", "counters"):
            assert rank[key] == wanted[key], key
        assert rank["losses"] == wanted["losses"][:1] and rank["norms"] == wanted["norms"][:1]


def test_random_streams_start_anew_where_no_saved_one_belongs(unbroken, worker_group):
    folder, _ = unbroken(SAVED)
    now = at(SAVED, "TP2DP2")
    anew = worker_group(4).run(streams_after, now, folder)
    by_place = {rank["place"]: rank for rank in anew}
    for dp in (0, 1):  # as at any start: replicas draw alike, the private streams differ over TP
        assert by_place[0, dp, 0]["default"] == by_place[0, dp, 1]["default"] == by_place[0, 0, 0]["default"]
        assert by_place[0, dp, 0]["private"] != by_place[0, dp, 1]["private"]
        assert by_place[0, dp, 1]["private"] == by_place[0, 0, 1]["private"]
    at_start = worker_group(4).run(streams_of_a_start, now, 0)
    # the rule: a start with another seed, made of the seed of the resume and the iteration of the save
    assert anew == worker_group(4).run(streams_of_a_start, now, 5)
    saved = [hash_of(files.read(files.mp_rank_file(Path(folder) / "global_step5", rank))) for rank in range(4)]
    for stream in ("default", "private"):
        assert not {rank[stream] for rank in anew} & {rank[stream] for rank in [*at_start, *saved]}


def hash_of(state: dict) -> dict[str, str]:
    return {"default": digest(state["torch_rng_state"].numpy().tobytes()),
            "private": digest(state["rng_tracker_states"]["model-parallel-rng"].numpy().tobytes())}


# --- what is read, and what is refused --------------------------------------------------------


@pytest.fixture
def copy_of(unbroken, tmp_path):
    """A copy of the tag of the fully trained run, to be spoiled."""
    folder, _ = unbroken(SAVED)
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "global_step5" / manifest.NAME).unlink()
    return tmp_path / "run" / "global_step5"


def optimizer_file(tag: Path, mp_rank: int) -> Path:
    return tag / f"zero_pp_rank_0_mp_rank_{mp_rank:02d}_optim_states.pt"


def changed(path: Path, change) -> None:
    state = files.read(path)
    change(state)
    torch.save(state, path)


def vector(size: int) -> torch.nn.Parameter:
    return tag_parameter(torch.nn.Parameter(torch.zeros(size)), ParamTag())


def their_number(number: int) -> int:
    return {1: 1, 8: 6}.get(number, number - 1)


def their_name(name: str) -> str:
    layer, _, rest = name.partition(".")
    return f"{their_number(int(layer))}.{rest.removeprefix('self_')}" if layer.isdigit() else name


def test_a_checkpoint_without_our_own_records_is_resumed(copy_of, unbroken, worker_group):
    """Other DeepSpeed-based trainers keep counters in args and no list of what trains; some have blocks from 02."""
    for path in sorted(copy_of.glob("layer_*")):
        number = int(path.name.split("_")[1].split("-")[0])
        path.rename(path.with_name(path.name.replace(f"_{number:02d}-", f"_{their_number(number):02d}-", 1)))
    for rank in range(4):
        changed(optimizer_file(copy_of, rank), lambda state: state["optimizer_state_dict"].update(param_slice_mappings=[
            {their_name(name): address for name, address in group.items()}
            for group in state["optimizer_state_dict"]["param_slice_mappings"]]))
        changed(files.mp_rank_file(copy_of, rank), lambda state: [state.pop(key) for key in (
            "progress", "architecture", "trainable_parameters", "bitfit", "bitfit_bias_terms",
            "checkpoint_parallel_dimensions")])
    seen, = worker_group(1).run(go_on, at(SAVED, "TP1"), str(copy_of.parent), 1)
    truth = unbroken(SAVED)[1][0]
    for key in ("progress", "counters", "schedule"):
        assert seen[key] == truth[key]
    assert seen["losses"] == pytest.approx(truth["losses"][:1], rel=1e-5)


def test_reading_holds_no_more_than_one_tensor(tmp_path):
    """Files are mapped: memory of the process's own grows by one tensor and its shares."""
    elements, names = 2**18, [f"{layer}.mlp.dense_h_to_4h.weight" for layer in range(3, 27)]
    for mp_rank in range(2):
        flats = [torch.full((elements * len(names),), float(part)) for part in range(3)]
        torch.save({"optimizer_state_dict": {
            "param_slice_mappings": [{name: fragment_address(elements, at * elements) for at, name in enumerate(names)}],
            "single_partition_of_fp32_groups": [flats[0]],
            "base_optimizer_state": {"param_groups": [{"params": [0]}], "state": {0: {
                "step": torch.tensor(5.0), "exp_avg": flats[1], "exp_avg_sq": flats[2]}}}}}, optimizer_file(tmp_path, mp_rank))
    del flats
    param = tag_parameter(torch.nn.Parameter(torch.empty(2, elements)), ParamTag(dim=0))
    before, most = own_memory(), 0
    shards = OptimizerShards(tmp_path, 2, 1)
    for name in names:
        for part, key in enumerate((MASTER, "exp_avg", "exp_avg_sq")):
            assert shards.share(name, key, param, ParallelContext())[1, 5] == part
            most = max(most, own_memory() - before)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 144 * 2**20 and most < 16 * 2**20


def own_memory() -> int:
    """Bytes of this process that belong to no file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def turned_round(state: dict) -> None:
    """The same state with its parameters in the opposite order."""
    inner = state["optimizer_state_dict"]
    for group, places in enumerate(inner["param_slice_mappings"]):
        kept = inner["base_optimizer_state"]["state"][group]
        at, moved = 0, {}
        flats = [flat.detach() for flat in (inner["single_partition_of_fp32_groups"][group], kept["exp_avg"], kept["exp_avg_sq"])]
        before = [flat.clone() for flat in flats]
        for name, place in reversed(places.items()):
            for flat, old in zip(flats, before):
                flat[at:at + place.numel] = old[place.start:place.start + place.numel]
            moved[name] = fragment_address(place.numel, at)
            at += place.numel
        inner["param_slice_mappings"][group] = moved


def test_optimizer_state_goes_by_names_and_not_by_places(copy_of, unbroken, worker_group):
    """unslothai/unsloth#3108: as many parameters in another order, whose state would fit everywhere."""
    for rank in range(4):
        before = files.read(optimizer_file(copy_of, rank))
        changed(optimizer_file(copy_of, rank), turned_round)
        after = files.read(optimizer_file(copy_of, rank))
        assert [list(group) for group in before["optimizer_state_dict"]["param_slice_mappings"]] != [
            list(group) for group in after["optimizer_state_dict"]["param_slice_mappings"]]
    check(SAVED, at(SAVED, "TP1"), lambda case: (str(copy_of.parent), unbroken(case)[1]), worker_group(1))


def test_the_older_list_form_of_optimizer_state_is_the_same(copy_of):
    name, param = "5.self_attention.dense.bias", vector(48)
    before = OptimizerShards(copy_of, 2, 2)
    wanted = {key: before.share(name, key, param, ParallelContext()).clone() for key in (MASTER, *before.moments)}

    def as_list(state):
        inner = state["optimizer_state_dict"]
        base = inner["base_optimizer_state"]
        inner["base_optimizer_state"] = [{key: value for key, value in base["state"][group].items() if key != "step"}
                                         for group in base["state"]]
        inner["base_optimizer_state_step"] = 5

    for mp_rank in range(4):
        changed(optimizer_file(copy_of, mp_rank), as_list)
    after = OptimizerShards(copy_of, 2, 2)
    assert after.step == before.step == 5 and after.moments == before.moments == ("exp_avg", "exp_avg_sq")
    for key, value in wanted.items():
        assert value.any() and torch.equal(after.share(name, key, param, ParallelContext()), value)


def test_copies_that_differ_over_tp_are_named_and_averaged_on_request(copy_of):
    name, param = "5.self_attention.dense.bias", vector(48)

    def spoil(state):
        inner = state["optimizer_state_dict"]
        at = inner["param_slice_mappings"][1][name].start
        inner["base_optimizer_state"]["state"][1]["exp_avg"][at + 7] += 0.5

    spoiled = OptimizerShards(copy_of, 2, 2)
    good = spoiled.share(name, "exp_avg", param, ParallelContext()).clone()
    changed(optimizer_file(copy_of, 3), spoil)  # TP rank 1 of the second stage
    with pytest.raises(RunError, match=rf"exp_avg of {name}.*differ by up to 0.5.*--average-duplicated-parameters"):
        OptimizerShards(copy_of, 2, 2).share(name, "exp_avg", param, ParallelContext())
    averaging = OptimizerShards(copy_of, 2, 2, average=True)
    mean = averaging.share(name, "exp_avg", param, ParallelContext())
    assert mean[7] == pytest.approx(float(good[7]) + 0.25) and averaging.averaged.keys() == {f"exp_avg of {name}"}
    # at the TP degree of the save every rank has its own copy back, drifted or not
    kept = OptimizerShards(copy_of, 2, 2).share(name, "exp_avg", param, ParallelContext(tp_size=2, tp_rank=1))
    assert kept[7] == pytest.approx(float(good[7]) + 0.5)


class CountsPerGroup(torch.optim.Optimizer):
    """Like apex's FusedAdam, whose step stands in the group."""

    def __init__(self, params, **constants):
        super().__init__(params, constants)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, CountsPerGroup])
def test_steps_stand_where_the_optimizer_looks_for_them(kind, copy_of):
    name, model = "5.self_attention.dense.bias", torch.nn.Module()
    for part in name.split(".")[:-1]:
        inside = model.get_submodule(name[:name.index(part)].rstrip("."))
        inside.add_module(part, torch.nn.Module())
    param = vector(48)
    model.get_submodule(name.rpartition(".")[0]).register_parameter("bias", param)
    # the second of two replicas: elements 20 to 47 of the parameter, behind four of another one
    flat = torch.nn.Parameter(torch.zeros(40))
    param._hp_mapping = SimpleNamespace(param_group_index=0, lp_fragment_address=fragment_address(28, 20),
                                        hp_fragment_address=fragment_address(28, 4))
    inner = kind([flat], lr=0.5, weight_decay=0.25)
    shards = OptimizerShards(copy_of, 2, 2)
    load_optimizer(SimpleNamespace(optimizer=inner), model, shards, ParallelContext())
    for key, values in {MASTER: flat, **inner.state[flat]}.items():
        if key != "step":
            assert torch.equal(values[4:32], shards.share(name, key, param, ParallelContext())[20:])
            assert not values[:4].any() and not values[32:].any()
    group, = inner.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert (group.get("step"), inner.state[flat].get("step")) == ((None, 5) if kind is torch.optim.AdamW else (5, None))


@pytest.mark.parametrize("spoil, words", [
    (lambda path: path.unlink(), "lacks the optimizer state of DP rank 0, model-parallel rank 2"),
    (lambda path: path.write_bytes(path.read_bytes()[:1000]), "mp_rank_02_optim_states.pt cannot be read safely"),
    (lambda path: changed(path, lambda state: state["optimizer_state_dict"].pop("param_slice_mappings")),
     "mp_rank_02_optim_states.pt is no optimizer state that can be regrouped .*param_slice_mappings"),
    (lambda path: changed(path, lambda state: [kept["step"].add_(1) for kept in
                                               state["optimizer_state_dict"]["base_optimizer_state"]["state"].values()]),
     "after 6.0 updates, other files of this tag exp_avg, exp_avg_sq after 5.0"),
], ids=["missing", "cut", "no map", "other step"])
def test_a_spoiled_optimizer_file_is_named(spoil, words, copy_of):
    spoil(optimizer_file(copy_of, 2))
    with pytest.raises(RunError, match=words):
        OptimizerShards(copy_of, 2, 2)


def test_optimizer_files_of_as_many_replicas_as_saved(copy_of):
    for path in copy_of.glob("zero_*"):  # left behind by a save at DP 2
        shutil.copy(path, path.with_name(path.name.replace("rank_0_mp", "rank_1_mp")))
    with pytest.raises(RunError, match="optimizer state of 2 DP ranks and was saved by 1"):
        OptimizerShards(copy_of, 2, 2, dp_size=1)


def test_plain_sgd_is_not_taken_for_adam_before_its_first_step(copy_of):
    for rank in range(4):
        changed(optimizer_file(copy_of, rank), lambda state: state["optimizer_state_dict"]["base_optimizer_state"].update(
            state={}, param_groups=[{"momentum": 0, "params": [0]}, {"momentum": 0, "params": [1]}]))
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))])
    with pytest.raises(RunError, match="saved with --optimizer sgd, this run has --optimizer adam.*--no-load-optim"):
        load_optimizer(SimpleNamespace(optimizer=inner), torch.nn.Module(), OptimizerShards(copy_of, 2, 2), ParallelContext())


@pytest.mark.parametrize("rank, words", [(0, "mp_rank_00.* is of iteration 4, manifest.json says 5"),
                                         (3, "mp_rank_03.* is of iteration 4, that of rank 0 says 5")])
def test_a_state_file_of_another_save_is_found_without_checksums(rank, words, copy_of):
    if rank == 0:
        manifest.write(copy_of, manifest.Manifest(5, "run", 1, {}, "fp32", ()))
    changed(files.mp_rank_file(copy_of, rank), lambda state: state.update(iteration=4))
    plan = LoadPlan(str(copy_of.parent), copy_of.name, resume=True, progress=True, rng=True)
    first, stored = (files.read(files.mp_rank_file(copy_of, each)) for each in (0, rank))
    assert re.search(words, resume._other_iteration(stored, first, plan, rank))
    if rank == 0:
        with pytest.raises(RunError, match=words):
            resume.check_stored(plan, settings_of(dataclasses.replace(SAVED, tp=1, pp=1)), ParallelContext())


def test_a_resume_says_which_flags_differ_and_that_random_states_are_missing(copy_of, capsys):
    stored = files.read(files.mp_rank_file(copy_of, 0))
    stored["args"] = argparse.Namespace(seed=7, adam_beta2=0.999, clip_grad=1.0, split="1,1,1", lr=1.0)
    del stored["torch_rng_state"]
    settings = dataclasses.replace(settings_of(SAVED), flags={"seed": 7, "adam_beta2": 0.95, "clip_grad": 0.5, "lr": 2.0})
    plan, context = LoadPlan(str(copy_of.parent), copy_of.name, progress=True, rng=True), ParallelContext(tp_size=1)
    streams = seed_everything(1, context)
    assert resume.resume(None, plan, stored, streams, settings, context).iteration == 5
    said = capsys.readouterr().out
    assert "changed since the save: --clip-grad 1.0 -> 0.5, --adam-beta2 0.999 -> 0.95\n" in said
    assert "random streams start anew from --seed 7 and iteration 5" in said
    drawn = torch.rand(3)
    seed_everything(settings.train.seed, context)
    assert not torch.equal(drawn, torch.rand(3))  # not the masks of the first iterations again


def test_another_optimizer_or_trainable_set_is_refused_at_any_degrees(unbroken, worker_group):
    folder, _ = unbroken(SAVED)
    alone = at(SAVED, "TP1")
    said, = worker_group(1).run(refusal, dataclasses.replace(alone, bitfit=True), folder)
    assert "full training" in said and "--bitfit" in said and "3.input_layernorm.weight trained there alone" in said
    with pytest.raises(JobFailed, match="exp_avg, exp_avg_sq of each parameter, --optimizer sgd needs momentum_buffer"):
        worker_group(1).run(go_on, dataclasses.replace(alone, optimizer="sgd"), folder, 1)
