"""Checkpoints written again: any TP degree to any other and back, bit for bit, a layer at a time."""

import subprocess
import sys

import pytest
import torch
from foreign_folders import bigscience_state, cut, layers_of, write_foreign
from launching import ROOT
from small_model import ALONE, absolute, batch, build, config
from small_runs import Case, settings_of

sys.path.insert(0, str(ROOT / "tools"))
import convert_checkpoint

from megatron.checkpoint import files, manifest
from megatron.checkpoint.convert import write_layer_folder
from megatron.checkpoint.layer_tags import layer_tags
from megatron.checkpoint.sources import open_source
from megatron.checkpoint.weights import fill_layer
from megatron.enums import PositionEmbeddingType
from megatron.errors import RunError
from megatron.model.pipe import GPTModel
from megatron.mpu.random import seed_everything
from megatron.mpu.tags import tag_of

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def reshape(load, save, tp, *more):
    assert convert_checkpoint.main(["reshape", "--load", str(load), "--save", str(save), "--target-tp", str(tp), *more]) == 0
    return save / "global_step12"


def by_file(folder):
    return {path.name: files.read(path) for path in sorted(folder.glob("layer_*"))}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert list(one[name]) == list(other[name]), name
        for key, value in one[name].items():
            assert value.dtype == other[name][key].dtype and torch.equal(value, other[name][key]), (name, key)


@pytest.mark.parametrize("settings", [config(), absolute(), config(activation="geglu")], ids=["bloom", "gpt2", "gated"])
def test_tags_without_a_model_are_those_of_a_model(settings):
    model = build(settings)
    tags = layer_tags(settings.gated, settings.position_embedding_type == "absolute", settings.embed_layernorm)
    for kind, index in (("embedding", "1"), ("block", "3"), ("block", "4"), ("final", "6")):
        assert tags[kind] == {name: tag_of(param) for name, param in model.layers[index].named_parameters()}


@pytest.mark.parametrize("degrees, dtype, changes", [
    ((2, 4, 1), "fp32", {"num_attention_heads": 12, "hidden_size": 48}),
    ((3, 2, 1), "bf16", {"num_attention_heads": 6}),
    ((2, 3, 1), "fp16", {"num_attention_heads": 6, "activation": "swiglu"}),
    ((3, 1), "fp32", {"num_attention_heads": 6, "position_embedding_type": "rotary", "embed_layernorm": False}),
    ((2, 1), "bf16", {"num_attention_heads": 12, "position_embedding_type": "absolute", "max_position_embeddings": 20,
                      "embed_layernorm": False}),
], ids=["fp32-1-2-4-1", "bf16-1-3-2-1", "fp16-gated", "rotary", "absolute"])
def test_there_and_back_is_bit_equal_and_each_share_is_right(degrees, dtype, changes, tmp_path):
    # the table's rows follow the degree: multiples of 4 * tp above 59
    settings = config(vocab_size=59, padded_vocab_size=60, **changes)
    wanted = build(settings)
    layers = {index: {name: value.to(TORCH[dtype]) for name, value in tensors.items()}
              for index, tensors in layers_of(wanted).items()}
    state = bigscience_state(settings, 1, glu_activation=settings.activation if settings.gated else None,
                             bias_gelu_fusion=not settings.gated)
    last = write_foreign(tmp_path / "base" / "global_step12", layers, state=state)
    first = by_file(last)
    for tp in degrees:
        last = reshape(last, tmp_path / f"tp{tp}", tp)
        rows = -(-59 // (4 * tp)) * 4 * tp
        for index, tensors in layers.items():
            for rank in range(tp):
                share = files.read(last / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
                for name, whole in tensors.items():
                    if name == "word_embeddings.weight":
                        whole = torch.cat([whole, whole.new_zeros(rows - 60, whole.shape[1])])
                    assert torch.equal(share[name], cut(name, whole, rank, tp, settings.gated)), (name, tp)
        stored = files.read(last / f"mp_rank_{tp - 1:02d}_model_states.pt")
        assert stored["checkpoint_info"] == {"padded_vocab_size": rows, "original_vocab_size": 59}
        assert stored["args"].padded_vocab_size == rows and stored["args"].tensor_model_parallel_size == tp
        assert manifest.damage(last, verify=True) is None and manifest.read(last).degrees["tp"] == tp
        assert not list(tmp_path.rglob("*.part"))
    assert_same(first, by_file(last))


def test_the_state_file_says_what_other_trainers_look_for(tmp_path):
    settings = config(num_attention_heads=6, padded_vocab_size=60)
    base = write_foreign(tmp_path / "base" / "global_step12", layers_of(build(settings)), tp=3, state=bigscience_state(settings, 3))
    stored = files.read(reshape(base, tmp_path / "out", 2, "--target-pp", "4") / "mp_rank_01_model_states.pt")
    said = stored["args"]
    assert (tmp_path / "out" / "latest").read_text() == "global_step12"
    assert said.position_embedding_type is PositionEmbeddingType.alibi and said.num_attention_heads == 6
    assert (stored["iteration"], stored["tokens"], said.consumed_train_samples) == (12, 65536, 4096)
    assert stored["checkpoint_version"] == 3.0 and stored["module"] is None and stored["mp_world_size"] == 2
    assert stored["architecture"]["kv_channels"] == 6 and stored["architecture"]["vocab_size"] == 50
    assert said.make_vocab_size_divisible_by == 4 and said.max_position_embeddings is None


def test_logits_after_a_round_over_another_numbering(tmp_path, capsys):
    settings = config(num_attention_heads=6, padded_vocab_size=60)
    wanted = build(settings)
    base = write_foreign(tmp_path / "base" / "global_step12", layers_of(wanted), state=bigscience_state(settings, 1))
    there = reshape(base, tmp_path / "there", 3, "--layout", "deepspeedai")
    assert {path.name[:8] for path in there.glob("layer_*")} == {"layer_01", "layer_02", "layer_03", "layer_04"}
    said = files.read(there / "mp_rank_00_model_states.pt")["args"]
    assert said.position_embedding_type == "alibi"  # that trainer has no such class
    source = open_source(reshape(there, tmp_path / "back", 2))
    model = GPTModel(settings, ALONE, seed_everything(99, ALONE))
    for index, layer in model.layers.items():
        fill_layer(layer, int(index), source, ALONE)
    assert torch.equal(model(batch()[0])[..., :50], wanted(batch()[0])[..., :50])


@pytest.mark.parametrize("changes, rows", [
    ({}, 60), ({"make_vocab_size_divisible_by": 128}, 384), ({"pad_vocab_size_to": 72}, 72), ({"pad_vocab_size_to": 64}, 60),
], ids=["unit-12", "unit-384", "fixed", "fixed-does-not-divide"])
def test_padding_follows_the_true_size_and_the_rule_of_the_source(changes, rows, tmp_path):
    settings = config(num_attention_heads=6, padded_vocab_size=64)
    model = build(settings)
    base = write_foreign(tmp_path / "base" / "global_step12", layers_of(model), state=bigscience_state(settings, 1, **changes))
    table = torch.cat([files.read(path)["word_embeddings.weight"]
                       for path in sorted(reshape(base, tmp_path / "out", 3).glob("layer_01*"))])
    whole = model.layers["1"].word_embeddings.weight
    assert table.shape[0] == rows and torch.equal(table[:50], whole[:50])
    assert torch.equal(table[50:64], whole[50:rows][:14])  # padding that was there stays as far as it fits
    assert not table[64:].any()


def test_a_folder_without_state_file_needs_the_heads_and_keeps_all_rows(tmp_path, capsys):
    settings = config(num_attention_heads=6, padded_vocab_size=60)
    base = write_foreign(tmp_path / "base" / "global_step12", layers_of(build(settings)))
    assert convert_checkpoint.main(["reshape", "--load", str(base), "--save", str(tmp_path / "out"), "--target-tp", "3"]) == 1
    assert "give --num-attention-heads" in capsys.readouterr().err and not (tmp_path / "out").exists()
    folder = reshape(base, tmp_path / "out", 3, "--num-attention-heads", "6")
    stored = files.read(folder / "mp_rank_00_model_states.pt")
    assert stored["checkpoint_info"] == {"padded_vocab_size": 60, "original_vocab_size": None}
    assert stored["architecture"] == {"num_layers": 2, "hidden_size": 36, "num_attention_heads": 6, "kv_channels": 6,
                                      "ffn_hidden_size": 144, "embed_layernorm": True}
    assert not hasattr(stored["args"], "position_embedding_type") and not hasattr(stored["args"], "bias_gelu_fusion")
    said = capsys.readouterr().out
    assert "not recorded" in said and "vocab_size" in said


@pytest.mark.parametrize("more, words", [
    (["--target-tp", "4"], "--target-tp 4 does not divide the 6 attention heads"),
    (["--target-tp", "0"], "--target-tp 0 must be at least 1"),
    (["--target-tp", "2", "--num-attention-heads", "5"], "heads of 5 do not divide a projection of 36"),
    (["--target-tp", "2", "--vocab-size", "61"], "vocabulary of 61 does not fit into 60 rows"),
    (["--target-tp", "2", "--dtype", "fp16"], "which fp16 cannot hold"),
    (["--target-tp", "2", "--save", "base"], "exists already"),
    (["--target-tp", "2", "--load", "away"], "--load away holds no checkpoint (there is no such folder); give the folder that "
                                             "was used with --save, a tag in it"),
])
def test_what_cannot_be_written_is_said_and_leaves_nothing(more, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = config(num_attention_heads=6, padded_vocab_size=60)
    layers = layers_of(build(settings))
    layers[6]["weight"][0] = 1e6
    write_foreign(tmp_path / "base" / "global_step12", layers, state=bigscience_state(settings, 1))
    (tmp_path / "base" / "latest").write_text("global_step12")
    assert convert_checkpoint.main(["reshape", "--load", "base", "--save", "out", *more]) == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["base"] and len(list((tmp_path / "base").iterdir())) == 2


def test_contradictions_of_state_and_layer_files_are_named(tmp_path, capsys):
    settings = config(num_attention_heads=6, padded_vocab_size=60)
    for number, (changes, words) in enumerate([({"ffn_hidden_size": 100}, "ffn_hidden_size is 100 in the state file, but 144"),
                                               ({"glu_activation": "geglu"}, "activation geglu"),
                                               ({"num_layers": 7}, "num_layers is 7 in the state file, but 2")]):
        base = write_foreign(tmp_path / f"base{number}" / "global_step12", layers_of(build(settings)),
                             state=bigscience_state(settings, 1, **changes))
        assert convert_checkpoint.main(["reshape", "--load", str(base), "--save", str(tmp_path / "out"), "--target-tp", "2"]) == 1
        assert words in capsys.readouterr().err


CONVERSIONS = {"reshape": ["--target-tp", "1"], "to-hf": []}


def written(folder) -> dict:
    """All tensors below ``folder``, by file and name."""
    from safetensors.torch import load_file

    found = {path.name: load_file(path) for path in folder.glob("*.safetensors")} | {
        path.name: files.read(path) for path in folder.rglob("layer_*")}
    return {f"{file} {name}": value for file, tensors in found.items() for name, value in tensors.items()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_a_converter_stops_at_copies_that_differ_and_at_unknown_names(kind, dtype, tmp_path, capsys):
    """NVIDIA/Megatron-LM#383, EleutherAI/gpt-neox#615, huggingface/transformers#18593: the first copy was taken, whatever the others held."""
    settings = config(num_attention_heads=6, padded_vocab_size=60)
    layers = {index: {name: value.to(TORCH[dtype]) for name, value in tensors.items()}
              for index, tensors in layers_of(build(settings)).items()}
    base = write_foreign(tmp_path / "base" / "global_step12", layers, tp=3, state=bigscience_state(settings, 3))

    def run(name, *more):
        return convert_checkpoint.main([kind, "--load", str(base), "--save", str(tmp_path / name), *CONVERSIONS[kind], *more])

    stray = base / "layer_09-model_00-model_states.pt"
    torch.save({"weight": torch.ones(36)}, stray)
    assert run("sound") == 0 and f"{stray.name} ignored: the state file tells of 2 blocks" in capsys.readouterr().out
    sound = written(tmp_path / "sound")
    assert sound and {value.dtype for value in sound.values()} == {TORCH[dtype]}  # no --dtype: that of the source
    changed = base / "layer_04-model_01-model_states.pt"
    share = files.read(changed)
    share["self_attention.dense.bias"][5] += 3.0
    torch.save(share, changed)
    capsys.readouterr()
    assert run("out") == 1 and not (tmp_path / "out").exists()
    said = capsys.readouterr().err
    for word in ("self_attention.dense.bias", changed.name, "layer_04-model_00-model_states.pt", "by up to 3", "--average-duplicated-parameters"):
        assert word in said
    assert run("averaged", "--average-duplicated-parameters") == 0
    assert "layers.1.self_attention.dense.bias: by up to 3" in capsys.readouterr().out
    averaged = written(tmp_path / "averaged")
    moved = {name: (averaged[name].float() - value.float()) for name, value in sound.items() if not torch.equal(averaged[name], value)}
    (name, change), = moved.items()
    assert "dense.bias" in name and change[5] == pytest.approx(1.0, rel=0.01) and change.count_nonzero() == 1
    share["self_attention.dense.bias"] = layers[4]["self_attention.dense.bias"].clone()
    for ranks in ([1], [0, 1, 2]):  # names of one rank alone, then of all
        for rank in ranks:
            path = base / f"layer_04-model_{rank:02d}-model_states.pt"
            sound_share = share if rank == 1 else files.read(path)
            torch.save({**sound_share, "a_stranger": torch.ones(2), "another": torch.ones(3)}, path)
        assert run("out") == 1 and not (tmp_path / "out").exists()
        assert "a_stranger, another" in capsys.readouterr().err


def test_a_failing_disk_leaves_nothing(tmp_path, monkeypatch):
    from megatron.checkpoint import convert

    settings = config(num_attention_heads=6, padded_vocab_size=60)
    base = write_foreign(tmp_path / "base" / "global_step12", layers_of(build(settings)))
    write, count = convert._write, []

    def full(path, content):
        count.append(path)
        if len(count) == 5:
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(convert, "_write", full)
    with pytest.raises(RunError, match="out cannot be written.*No space left"):
        write_layer_folder(tmp_path / "out", "global_step12", open_source(base), settings, tp=2)
    assert len(count) == 5 and [path.name for path in tmp_path.iterdir()] == ["base"]


def deepspeed_load(case, folder):
    """Job: what DeepSpeed's own loader, with its own file reader, puts into this rank's stage."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from small_runs import build_run

    _, context, _, engine, _ = build_run(case, None)
    engine.checkpoint_engine = TorchCheckpointEngine()
    path, client = engine.load_checkpoint(folder, load_module_only=True)
    return ({name: param.detach().clone() for name, param in engine.module.named_parameters()}, context.tp_rank,
            path, client["iteration"], client["args"].num_layers)


def test_deepspeed_reads_what_is_written(tmp_path, worker_group):
    case = Case(tp=2, hidden=24, heads=6, layers=2)
    model = build(settings_of(case).model)
    layers = layers_of(model)
    base = write_foreign(tmp_path / "base" / "global_step12", layers, tp=3, state=bigscience_state(settings_of(case).model, 3))
    reshape(base, tmp_path / "out", 2)
    for tensors, rank, path, iteration, depth in worker_group(2).run(deepspeed_load, case, str(tmp_path / "out")):
        assert path and iteration == 12 and depth == 2
        for name, mine in tensors.items():
            index, local = (1, name.removeprefix("tied_modules.embed.")) if name.startswith("tied") else (
                int(name.split(".")[0]), name.split(".", 1)[1])
            assert torch.equal(mine, cut(local, layers[index][local], rank, 2)), name


# ru_maxrss of a child starts with what its parent held; this high-water mark is its own
PEAK = """
import sys
sys.path[:0] = [{root!r}, {tools!r}]
import convert_checkpoint
assert convert_checkpoint.main(["reshape", "--load", {load!r}, "--save", {save!r}, "--target-tp", "2"]) == 0
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_blocks(tmp_path):
    peaks, block_bytes = {}, 12 * 768**2 * 4
    settings = config(num_attention_heads=12, hidden_size=768, padded_vocab_size=60)
    layers = layers_of(build(settings))
    for depth in (2, 16):
        deep = {1: layers[1], **{3 + block: layers[3] for block in range(depth)}, depth + 4: layers[6]}
        base = write_foreign(tmp_path / f"base{depth}" / "global_step12", deep,
                             state=bigscience_state(settings, 1, num_layers=depth))
        code = PEAK.format(root=str(ROOT), tools=str(ROOT / "tools"), load=str(base), save=str(tmp_path / f"out{depth}"))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks[depth] = int(done.stdout.split()[-1]) * 1024
    assert peaks[16] - peaks[2] < block_bytes, {depth: peak / block_bytes for depth, peak in peaks.items()}
