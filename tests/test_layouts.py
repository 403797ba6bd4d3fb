"""Folders of other trainers: read as they are, incomplete ones named, nothing run that they contain."""

import os
import pickletools
import sys
import types
import zipfile

import pytest
import torch
from foreign_folders import bigscience_state, cut, layers_of, write_foreign
from small_model import ALONE, absolute, batch, build, config
from small_runs import Case, settings_of

from megatron.checkpoint import files
from megatron.checkpoint.layouts import LayerFolder
from megatron.checkpoint.load_plan import plan_load
from megatron.checkpoint.progress import stored_architecture
from megatron.checkpoint.resume import check_stored
from megatron.checkpoint.sources import open_source
from megatron.checkpoint.weights import fill_layer
from megatron.config import CheckpointConfig
from megatron.errors import RunError
from megatron.model.pipe import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import seed_everything

SIX = {"num_attention_heads": 6, "padded_vocab_size": 60}
TWELVE = {"num_attention_heads": 12, "hidden_size": 24, "padded_vocab_size": 60}


def filled(settings, source):
    """A model of other random values, filled from ``source``."""
    model = GPTModel(settings, ALONE, seed_everything(99, ALONE))
    for index, layer in model.layers.items():
        fill_layer(layer, int(index), source, ALONE)
    return model


def assert_equal(model, wanted):
    for (name, mine), theirs in zip(model.state_dict().items(), wanted.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("settings, options", [
    (config(**SIX), {"tp": 3}),
    (config(**TWELVE), {"tp": 2, "first": 2, "gap": 0}),
    (config(**SIX), {"tp": 2, "digits": 3, "pp": 2}),
    (config(**TWELVE, position_embedding_type="rotary", embed_layernorm=False), {"tp": 3}),
    (absolute(**SIX), {"tp": 2, "first": 2, "gap": 0, "digits": 3,
                       "rename": lambda name: name.replace("self_attention.", "attention.")}),
    (config(**SIX, activation="swiglu"), {"tp": 3, "gated": True}),
], ids=["bigscience", "deepspeedai", "three-digits", "rotary", "old-names", "gated"])
def test_every_numbering_and_degree_fills_the_model_bit_for_bit(settings, options, tmp_path):
    wanted = build(settings)
    write_foreign(tmp_path / "global_step12", layers_of(wanted), **options)
    source = open_source(tmp_path / "global_step12")
    assert source.num_layers == 2 and source.degree == options["tp"]
    model = filled(settings, source)
    assert_equal(model, wanted)
    tokens, _, _ = batch()
    assert torch.equal(model(tokens), wanted(tokens))


def test_numbers_of_a_hundred_blocks_have_three_digits(tmp_path):
    """deepspeedai/DeepSpeed#1377: layer numbers of three digits were not found."""
    for number in (1, *range(3, 103), 104):
        (tmp_path / f"layer_{number:02d}-model_00-model_states.pt").touch()
    assert LayerFolder(tmp_path).num_layers == 100


def test_a_rotary_model_may_lack_its_buffers_and_another_may_not_have_them(tmp_path):
    settings = config(**SIX, position_embedding_type="rotary", embed_layernorm=False)
    wanted = build(settings)
    layers = layers_of(wanted)
    write_foreign(tmp_path / "with", layers, tp=2)
    without = {index: {name: value for name, value in tensors.items() if "inv_freq" not in name}
               for index, tensors in layers.items()}
    write_foreign(tmp_path / "without", without, tp=2)
    assert_equal(filled(settings, open_source(tmp_path / "without")), wanted)
    with pytest.raises(RunError, match="rotary_emb.inv_freq, which this model does not have"):
        filled(config(**SIX, embed_layernorm=False), open_source(tmp_path / "with"))


@pytest.mark.parametrize("options, missing, words", [
    ({}, "layer_04-model_01-model_states.pt", ["layer 4", "layer_04-model_01-model_states.pt"]),
    ({}, "layer_04-model_0?-model_states.pt", ["layer 4 (layer_04-model_00"]),
    ({}, "layer_06-model_0?-model_states.pt", ["1, 3-4", "no complete model"]),
    ({"state": True}, "layer_06-model_0?-model_states.pt", ["layer 6 (layer_06-model_00"]),
    ({"state": True}, "layer_0?-model_01-model_states.pt", ["layer_01-model_01-model_states.pt", "3 more"]),
    ({"first": 2, "gap": 0}, "layer_03-model_0?-model_states.pt", ["layer 3 (layer_03-model_00"]),
    ({}, "layer_*", ["no layer files"]),
], ids=["one-share", "a-block", "final-norm", "final-norm-by-arguments", "a-rank", "deepspeedai", "all"])
def test_an_incomplete_folder_is_named_before_anything_is_read(options, missing, words, tmp_path):
    """deepspeedai/DeepSpeed#1377: layer files counted or matched wrongly."""
    settings = config(**SIX)
    if options.pop("state", None):
        options["state"] = bigscience_state(settings, 2)
    folder = write_foreign(tmp_path / "global_step12", layers_of(build(settings)), tp=2, **options)
    for path in folder.glob(missing):
        path.unlink()
    with pytest.raises(RunError) as caught:
        open_source(folder)
    assert all(word in str(caught.value) for word in [str(folder), *words]), caught.value


@pytest.mark.parametrize("options", [{}, {"first": 2, "gap": 0}], ids=["bigscience", "deepspeedai"])
@pytest.mark.parametrize("stray, named", [(["layer_09-model_00"], True), (["layer_09-model_01", "layer_44-model_07"], True),
                                          (["layer_03-model_02"], True), (["layer_03-model_00-copy", "notes"], False)])
def test_stray_files_are_left_out_with_a_warning(stray, named, options, tmp_path):
    """deepspeedai/DeepSpeed#1377: layer files counted or matched wrongly. The state file tells which belong together."""
    settings = config(**SIX)
    wanted = build(settings)
    folder = write_foreign(tmp_path / "t", layers_of(wanted), tp=2, state=bigscience_state(settings, 2), **options)
    for name in stray:
        torch.save({"weight": torch.zeros(3)}, folder / f"{name}-model_states.pt")
    source = open_source(folder)
    assert_equal(filled(settings, source), wanted)
    assert (source.num_layers, source.degree) == (2, 2)
    for note in source.notes:
        assert all(f"{name}-model_states.pt" in note for name in stray) and "ignored: the state file tells of 2 blocks at TP 2" in note
    assert len(source.notes) == named
    for hole in ("layer_01-model_01", "layer_04-model_0?" if "first" not in options else "layer_03-model_0?"):
        for path in folder.glob(f"{hole}-model_states.pt"):
            path.unlink()  # a hole stays a hole
        with pytest.raises(RunError, match=f"no file for pipeline layer {int(hole[6:8])} .{hole[:-1]}"):
            open_source(folder)


def test_without_a_state_file_nobody_knows_which_file_is_the_stray_one(tmp_path):
    folder = write_foreign(tmp_path / "t", layers_of(build(config(**SIX))), tp=2)
    torch.save({}, folder / "layer_09-model_00-model_states.pt")
    with pytest.raises(RunError, match="numbers 1, 3-4, 6, 9, which is no complete model|no file for pipeline layer 5"):
        open_source(folder)


def test_two_files_of_one_share_are_refused(tmp_path):
    folder = write_foreign(tmp_path / "t", layers_of(build(config(**SIX))))
    (folder / "layer_003-model_00-model_states.pt").write_bytes((folder / "layer_03-model_00-model_states.pt").read_bytes())
    with pytest.raises(RunError, match="layer_003-.* and layer_03-.*mean the same"):
        open_source(folder)


def test_a_file_that_holds_no_tensors_by_name_is_refused(tmp_path):
    folder = write_foreign(tmp_path / "t", layers_of(build(config(**SIX))))
    torch.save({"module": {}}, folder / "layer_03-model_00-model_states.pt")
    with pytest.raises(RunError, match="layer_03-model_00.* is no layer file"):
        open_source(folder).layer(3, {})


def test_a_table_of_fewer_rows_than_the_tokenizer_has_ids_is_refused(tmp_path):
    write_foreign(tmp_path / "t", layers_of(build(config(**SIX))), tp=3)
    larger = {**SIX, "vocab_size": 61, "padded_vocab_size": 64}
    with pytest.raises(RunError, match="word_embeddings.weight in .* has 60 rows, the tokenizer 61 token ids"):
        filled(config(**larger), open_source(tmp_path / "t"))
    filled(config(**{**larger, "vocab_size": 60}), open_source(tmp_path / "t"))


# --- state files ----------------------------------------------------------------------------------


def foreign_run(tmp_path, **changes):
    """A bigscience folder with a state file, no ``latest``, and the settings of a run that loads it."""
    import dataclasses

    settings = settings_of(Case(hidden=24, heads=6, layers=2))
    settings = dataclasses.replace(settings, checkpoint=CheckpointConfig(load=str(tmp_path)))
    wanted = build(settings.model)
    write_foreign(tmp_path / "global_step12", layers_of(wanted), tp=2, state=bigscience_state(settings.model, 2, **changes))
    return settings, wanted


def test_arguments_with_an_enum_are_read_safely_and_compared(tmp_path):
    """ROCm/Megatron-LM#56: torch 2.6 refused the arguments in a checkpoint."""
    settings, wanted = foreign_run(tmp_path)
    path = tmp_path / "global_step12" / "mp_rank_00_model_states.pt"
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    assert "megatron.enums PositionEmbeddingType" in {arg for code, arg, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}
    plan = plan_load(settings.checkpoint)
    assert plan.tag == "global_step12" and plan.weights_only
    stored = check_stored(plan, settings, ParallelContext())
    assert stored_architecture(stored)["position_embedding_type"] == "alibi"
    assert stored_architecture(stored)["activation"] == "gelu_tanh" and stored["np_rng_state"][1].shape == (624,)
    assert_equal(filled(settings.model, open_source(plan.path, settings.checkpoint)), wanted)


@pytest.mark.parametrize("changes, words", [
    ({"num_attention_heads": 4}, "num_attention_heads 4, this run has 6"),
    ({"position_embedding_type": "rope"}, "position_embedding_type rotary, this run has alibi"),
    ({"glu_activation": "geglu", "bias_gelu_fusion": False}, "activation geglu, this run has gelu_tanh"),
    ({"bias_gelu_fusion": False}, "activation gelu_erf, this run has gelu_tanh"),
    ({"layernorm_epsilon": 1e-6}, "layernorm_epsilon 1e-06, this run has 1e-05"),
])
def test_another_architecture_in_foreign_arguments_is_refused(changes, words, tmp_path):
    settings, _ = foreign_run(tmp_path, **changes)
    with pytest.raises(Exception, match=words):
        check_stored(plan_load(settings.checkpoint), settings, ParallelContext())


# --- pickles that are programs --------------------------------------------------------------------


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
def test_a_malicious_pickle_is_refused_and_not_run(zipped, tmp_path, capfd):
    path, mark = tmp_path / "evil.pt", tmp_path / "pwned"
    torch.save({"weight": torch.ones(2), "x": Malicious(mark)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(RunError, match=r"evil.pt cannot be read safely: it holds (posix|nt)\.system; .*--trust-checkpoint"):
        files.read(path)
    assert not mark.exists() and capfd.readouterr().err == ""
    files.read(path, trust=True)  # what the flag says it does
    assert mark.exists() and "warning: --trust-checkpoint" in capfd.readouterr().err


def test_an_unlisted_class_needs_trust_and_says_which(tmp_path, capfd, monkeypatch):
    """ROCm/Megatron-LM#56, allenai/open-instruct#673: a sentence with the class and the flag, not a trace of unpickling."""
    module = types.ModuleType("megatron_of_others")
    module.Timers = type("Timers", (), {"__module__": "megatron_of_others"})
    monkeypatch.setitem(sys.modules, "megatron_of_others", module)
    settings, wanted = foreign_run(tmp_path, timers=module.Timers())
    plan = plan_load(settings.checkpoint)
    assert check_stored(plan, settings, ParallelContext()) == {}  # a base is its layer files
    assert "megatron_of_others.Timers" in capfd.readouterr().out
    assert_equal(filled(settings.model, open_source(plan.path, settings.checkpoint)), wanted)

    import dataclasses
    trusting = dataclasses.replace(settings, checkpoint=CheckpointConfig(load=str(tmp_path), trust_checkpoint=True))
    assert check_stored(plan, trusting, ParallelContext())["iteration"] == 12
    assert "warning: --trust-checkpoint" in capfd.readouterr().err
    monkeypatch.delitem(sys.modules, "megatron_of_others")
    with pytest.raises(RunError, match="needs the Python module megatron_of_others, which is not here"):
        files.read(plan.path / "mp_rank_00_model_states.pt", trust=True)


# --- copies over TP -------------------------------------------------------------------------------


def drifted(tmp_path, dtype=torch.float32):
    """A folder of TP 3 whose copies of one LayerNorm and one bias drifted apart, and the copies."""
    layers = {index: {name: value.to(dtype) for name, value in tensors.items()}
              for index, tensors in layers_of(build(config(**SIX))).items()}
    folder = write_foreign(tmp_path / "global_step12", layers, tp=3)
    copies = {}
    for number, name, by in ((3, "input_layernorm.weight", 0.25), (4, "mlp.dense_4h_to_h.bias", 0.5)):
        for rank in range(3):
            path = folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
            share = torch.load(path, weights_only=True)
            share[name][5] += by * rank
            copies.setdefault((number, name), []).append(share[name])
            torch.save(share, path)
    return folder, copies


def test_copies_that_differ_are_named_with_the_difference(tmp_path):
    folder, _ = drifted(tmp_path)
    with pytest.raises(RunError, match=r"input_layernorm.weight should be .* layer_03-model_01.* differ by up to 0.5; "
                                       "--average-duplicated-parameters"):
        filled(config(**SIX), open_source(folder))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_copies_are_averaged_on_request_and_listed(dtype, tmp_path, capsys):
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    folder, copies = drifted(tmp_path, kind)
    source = open_source(folder, CheckpointConfig(average_duplicated_parameters=True))
    model = filled(config(**SIX, params_dtype=dtype), source)
    for (number, name), parts in copies.items():
        mean = (sum(part.double() for part in parts) / 3).to(kind)
        assert torch.equal(model.layers[str(number)].state_dict()[name], mean)
    assert set(source.averaged) == {"layers.0.input_layernorm.weight", "layers.1.mlp.dense_4h_to_h.bias"}
    assert source.averaged["layers.0.input_layernorm.weight"] == pytest.approx(0.5, rel=0.02)


def test_copies_that_are_no_numbers_are_never_averaged(tmp_path):
    folder, _ = drifted(tmp_path)
    path = folder / "layer_06-model_02-model_states.pt"
    share = torch.load(path, weights_only=True)
    share["bias"][0] = float("nan")
    torch.save(share, path)
    with pytest.raises(RunError, match="bias should be .* no numbers"):
        filled(config(**SIX), open_source(folder, CheckpointConfig(average_duplicated_parameters=True)))


# --- through a run --------------------------------------------------------------------------------


def load_run(case, base):
    """Job: this rank's tensors after a start from ``base``, what it printed, and its place."""
    import contextlib
    import dataclasses
    import io

    import torch.distributed as dist

    from megatron.checkpoint.load_plan import LoadPlan
    from megatron.engine import build_model
    from megatron.mpu.context import build_context

    settings = settings_of(case, dist.get_rank())
    settings = dataclasses.replace(settings, checkpoint=CheckpointConfig(load=base, average_duplicated_parameters=True))
    context = build_context(case.tp, case.pp, dist.get_world_size(), dist.get_rank())
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        model = build_model(settings, context, seed_everything(case.seed, context), LoadPlan(base, "global_step12"))
    return {name: param.detach().clone() for name, param in model.named_parameters()}, said.getvalue(), context.pp_rank, context.tp_rank


@pytest.mark.parametrize("grid", [(1, 2), (2, 1)], ids=["PP2", "TP2"])
def test_a_pipeline_starts_from_a_foreign_folder_of_other_degrees(grid, tmp_path, worker_group):
    case = Case(tp=grid[0], pp=grid[1], hidden=24, heads=6, layers=2)
    model = build(settings_of(case).model)
    layers = layers_of(model)
    folder = write_foreign(tmp_path / "global_step12", layers, tp=3, first=2, gap=0)
    path = folder / "layer_03-model_02-model_states.pt"  # block 1
    share = torch.load(path, weights_only=True)
    share["self_attention.dense.bias"] += 0.375
    torch.save(share, path)
    layers[4]["self_attention.dense.bias"] += 0.125
    ranks = worker_group(2).run(load_run, case, str(tmp_path))
    for tensors, said, stage, tp_rank in ranks:
        for name, mine in tensors.items():
            index, local = (1, name.removeprefix("tied_modules.embed.")) if name.startswith("tied") else (
                int(name.split(".")[0]), name.split(".", 1)[1])
            torch.testing.assert_close(mine, cut(local, layers[index][local], tp_rank, case.tp), rtol=0, atol=1e-7)
        owns = (stage == case.pp - 1) and tp_rank == 0
        assert ("layers.1.self_attention.dense.bias: by up to 0.375" in said) == owns, said
    assert {name for tensors, *_ in ranks for name in tensors} >= {"3.mlp.dense_h_to_4h.weight", "6.bias"}
