"""Deltas on Hugging Face models: as files and in memory; averages and how far biases moved."""

import copy
import dataclasses
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import transformers
from launching import ROOT
from safetensors.torch import load_file, save_file

from megatron.bitfit import is_bias
from megatron.checkpoint import delta_copy
from megatron.checkpoint.delta import extract
from megatron.checkpoint.delta_file import Delta, DeltaFacts, average, read_delta, to_bytes, write_delta
from megatron.checkpoint.fingerprint import as_text, tensor_print
from megatron.checkpoint.hugging_face_export import from_folder, to_folder
from megatron.config import BIAS_TERMS
from megatron.delta_report import heat_map, movement, table
from megatron.deltas import apply_delta, check_base, delta_applied, load_delta
from megatron.errors import RunError
from megatron.mpu.tags import ParamTag, shard

LAYERS, HEADS, HIDDEN = 2, 6, 36


def random_model(kind: str, dtype=torch.float32):
    """Six heads, and values no term can hide behind."""
    torch.manual_seed(5)
    if kind == "bloom":
        config = transformers.BloomConfig(vocab_size=70, n_layer=LAYERS, n_head=HEADS, hidden_size=HIDDEN, bos_token_id=1,
                                          eos_token_id=2, pad_token_id=3)
        model = transformers.BloomForCausalLM(config)
    else:
        config = transformers.GPT2Config(vocab_size=70, n_layer=LAYERS, n_head=HEADS, n_embd=HIDDEN, n_positions=32,
                                         bos_token_id=1, eos_token_id=2, pad_token_id=3)
        model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.3)
    return model.to(dtype).eval()


def tuned(model, seed: int):
    """A copy with other biases."""
    generator, other = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for name, param in other.named_parameters():
            if is_bias(name):
                param.add_(torch.randn(param.shape, generator=generator).to(param.dtype) * 0.5)
    return other


@pytest.fixture(scope="module", params=["bloom", "gpt2"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def models(kind, tmp_path_factory):
    """A base, two models tuned from it, and the deltas of these, taken from folders of two shards."""
    folder = tmp_path_factory.mktemp(kind)
    base = random_model(kind)
    others = [tuned(base, seed) for seed in (1, 2)]
    for name, model in zip(("base", "one", "two"), (base, *others)):
        model.save_pretrained(folder / name, max_shard_size="40KB")
    for name in ("one", "two"):
        write_delta(folder / f"{name}.safetensors", extract(folder / name, folder / "base"))
    return folder, base, others


def state(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def continued(model, **how) -> list[int]:
    """A greedy text of ten tokens."""
    prompt = torch.tensor([[5, 17, 40, 8]])
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, min_new_tokens=10,
                          do_sample=False)[0].tolist()


def test_two_deltas_in_turn_speak_as_the_models_they_came_from(models):
    folder, base, (one, two) = models
    before, own = state(base), continued(base)
    first, second = load_delta(folder / "one.safetensors"), load_delta(folder / "two.safetensors")
    texts = [continued(one), continued(two)]
    assert texts[0] != texts[1] and own not in texts
    for _ in range(2):
        for delta, model, text in ((first, one, texts[0]), (second, two, texts[1])):
            with delta_applied(base, delta):
                assert continued(base) == text and same(state(base), state(model))
            assert same(state(base), before) and continued(base) == own
    kept = apply_delta(base, first)
    swapped = apply_delta(base, second)  # one for the other, without the base between
    assert continued(base) == texts[1] and swapped.tensors.keys() == kept.tensors.keys()
    apply_delta(base, kept)
    assert same(state(base), before)


def test_an_error_inside_takes_the_delta_off_too(models):
    folder, base, _ = models
    before = state(base)
    with pytest.raises(ZeroDivisionError), delta_applied(base, load_delta(folder / "one.safetensors")):
        1 / 0  # noqa: B018
    assert same(state(base), before)


def test_the_base_is_told_from_another(models):
    folder, base, (one, _) = models
    delta = load_delta(folder / "one.safetensors")
    check_base(base, delta)
    check_base(one, delta)  # what is frozen is the same
    other = tuned(base, 9)
    with torch.no_grad():
        next(param for name, param in other.named_parameters() if "h.1." in name and param.dim() == 2)[0, 0] += 1e-3
    with pytest.raises(RunError, match=r"their layers\.1\.self_attention\.query_key_value\.weight differs"):
        check_base(other, delta)


def test_files_patched_are_the_tuned_model_and_back_to_the_byte(models, tmp_path):
    folder, base, (one, _) = models
    delta = read_delta(folder / "one.safetensors")
    count = delta_copy.apply(folder / "base", delta, tmp_path / "merged")
    assert count == 6 * LAYERS + (2 if "bloom" in str(folder) else 1)
    assert same(state(type(base).from_pretrained(tmp_path / "merged")), state(one))
    delta_copy.apply(tmp_path / "merged", delta_copy.undo_of(tmp_path / "merged"), tmp_path / "again", undo=False)
    files = sorted(path.name for path in (folder / "base").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir()) and len(files) > 4
    for name in files:
        assert (folder / "base" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_layer_files_of_from_hf_with_a_delta_go_home_as_the_tuned_model(models, tmp_path):
    folder, _, _ = models
    from_folder(folder / "base", tmp_path / "ours", tp=2)
    delta_copy.apply(tmp_path / "ours", read_delta(folder / "one.safetensors"), tmp_path / "merged")
    to_folder(tmp_path / "merged", tmp_path / "home")
    home, tuned = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "home", folder / "one"))
    assert home.config.vocab_size == tuned.config.vocab_size
    assert same(dict(home.state_dict()), dict(tuned.state_dict()))


def test_pickled_shards_are_written_anew(models, tmp_path):
    folder, base, (one, _) = models
    (tmp_path / "bin").mkdir()
    shutil.copyfile(folder / "base" / "config.json", tmp_path / "bin" / "config.json")
    torch.save({name: value for name, value in base.state_dict().items() if name != "lm_head.weight"},
               tmp_path / "bin" / "pytorch_model.bin")
    delta_copy.apply(tmp_path / "bin", read_delta(folder / "one.safetensors"), tmp_path / "merged")
    stored = torch.load(tmp_path / "merged" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(stored[name], value) for name, value in one.state_dict().items() if name in stored)


def test_another_base_leaves_no_folder(models, tmp_path):
    folder, base, _ = models
    shutil.copytree(folder / "base", tmp_path / "other")
    shard_path = next(path for path in sorted((tmp_path / "other").glob("*.safetensors"))
                      if any("h.0.mlp" in name for name in load_file(path)))
    values = load_file(shard_path)
    name = next(name for name in values if "h.0.mlp" in name and name.endswith("weight"))
    values[name][0, 0] += 1
    save_file(values, shard_path, metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"is not the base of the delta, their layers\.0\.mlp.*weight differs"):
        delta_copy.apply(tmp_path / "other", read_delta(folder / "one.safetensors"), tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    with pytest.raises(RunError, match="is not the base"):
        extract(folder / "one", tmp_path / "other")


def test_an_average_is_the_mean_and_needs_one_base(models):
    folder, _, _ = models
    one, two = (read_delta(folder / f"{name}.safetensors") for name in ("one", "two"))
    mean = average([one, two], [3, 1])
    for name, value in mean.tensors.items():
        torch.testing.assert_close(value, 0.75 * one.tensors[name] + 0.25 * two.tensors[name], rtol=1e-6, atol=1e-7)
    assert same(average([one, one, one]).tensors, one.tensors)
    foreign = dataclasses.replace(two, facts=dataclasses.replace(two.facts, prints={**two.facts.prints, "final_layernorm.weight": "0" * 16}))
    with pytest.raises(RunError, match="different bases.*final_layernorm.weight"):
        average([one, foreign])
    for weights in ([1], [1, -1], [0, 0], [float("nan"), 1]):
        with pytest.raises(RunError, match="weights"):
            average([one, two], weights)


def test_movement_is_the_mean_change_of_each_kind_and_layer(models, tmp_path):
    folder, base, (one, _) = models
    delta, before = read_delta(folder / "one.safetensors"), extract(folder / "base")
    moved = movement(delta, before)
    names = {"bloom": ("h.1.self_attention.dense.bias", "h.0.input_layernorm.bias", "h.0.post_attention_layernorm.bias"),
             "gpt2": ("h.1.attn.c_proj.bias", "h.0.ln_1.bias", "h.0.ln_2.bias")}["bloom" if "bloom" in str(folder) else "gpt2"]
    a, b = (model.transformer.state_dict() for model in (base, one))
    changes = [(a[name] - b[name]).abs() for name in names]
    assert moved.cells["1", "attention_output"] == pytest.approx(float(changes[0].mean()), rel=1e-5)
    assert moved.cells["0", "layernorm"] == pytest.approx(float(torch.cat(changes[1:]).mean()), rel=1e-5)
    assert moved.terms == BIAS_TERMS and moved.rows[-3:] == ("0", "1", "final")
    said = table(moved).splitlines()
    assert len(said) == 1 + len(moved.rows) and f"{moved.cells['1', 'attention_output']:.3e}" in said[-2]
    root = ElementTree.fromstring(heat_map(moved, "a < b"))
    cells = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if len(each)]
    assert len(cells) == len(moved.cells)
    greatest = max(moved.cells, key=moved.cells.get)
    dark = [each for each in cells if each.get("fill") == "#08306b"]
    assert len(dark) == 1 and dark[0][0].text.startswith(f"{greatest[0]} {greatest[1]}: ")


def test_half_precision_and_slices_of_query_and_value(tmp_path):
    model = random_model("bloom", torch.bfloat16)
    before = state(model)
    facts = DeltaFacts(num_layers=LAYERS, num_attention_heads=HEADS, dtype="bf16", terms=("query", "value"))
    tensors = {f"layers.{block}.self_attention.query_key_value.{term}.bias":
               torch.full((HIDDEN,), float(block + 1)).bfloat16() for block in range(LAYERS) for term in ("query", "value")}
    write_delta(tmp_path / "d.safetensors", Delta(tensors, facts))
    assert (tmp_path / "d.safetensors").stat().st_size < 2 * 4 * HIDDEN * LAYERS + 2**16
    with delta_applied(model, load_delta(tmp_path / "d.safetensors")):
        fused = model.transformer.h[1].self_attention.query_key_value.bias.view(HEADS, 3, -1)
        old = before["transformer.h.1.self_attention.query_key_value.bias"].view(HEADS, 3, -1)
        assert (fused[:, [0, 2]] == 2).all() and torch.equal(fused[:, 1], old[:, 1])
    assert same(state(model), before)


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    model = random_model("bloom")
    before = state(model)
    facts = DeltaFacts(num_layers=LAYERS, num_attention_heads=HEADS, dtype="fp32")
    first = {"final_layernorm.bias": torch.ones(HIDDEN)}
    for more, told in (({"layers.7.mlp.dense_4h_to_h.bias": torch.ones(HIDDEN)}, "layers.7"),
                       ({"embedding.word_embeddings.norm.bias": torch.ones(7)}, "does not fit")):
        with pytest.raises(RunError, match=told):
            apply_delta(model, Delta(first | more, facts))
        assert same(state(model), before)
    with pytest.raises(RunError, match="BLOOM or GPT-2"):
        apply_delta(torch.nn.Linear(2, 2), Delta(first, facts))
    for content, told in ((b"", "no bias delta"), (b"x" * 100, "no bias delta")):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(RunError, match=told):
            read_delta(tmp_path / "file")
    with pytest.raises(RunError, match="there is no file"):
        read_delta(tmp_path / "none")


def test_the_header_stays_under_64_kib_at_70_layers():
    """BLOOM-176B by names and depth; the values are of one element each."""
    per_layer = ["input_layernorm", "self_attention.dense", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
                 "self_attention.query_key_value.query", "self_attention.query_key_value.value"]
    frozen = ["input_layernorm.weight", "self_attention.query_key_value.weight", "self_attention.query_key_value.bias",
              "self_attention.dense.weight", "post_attention_layernorm.weight", "mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight"]
    facts = DeltaFacts(num_layers=70, num_attention_heads=112, dtype="bf16", vocab_size=250680, step=10**6,
                       base="/" + "x" * 200, arguments={f"argument_{number:03}": "/some/longer/path" * 3 for number in range(250)} | {"data_path": ["0.1", "/data/some_text_document"] * 5000},
                       prints={f"layers.{block}.{name}": f"{block:016x}" for block in range(70) for name in frozen})
    data = to_bytes(Delta({f"layers.{block}.{name}.bias": torch.zeros(1) for block in range(70) for name in per_layer}, facts))
    assert int.from_bytes(data[:8], "little") < 2**16


def test_plain_transformers_users_need_no_deepspeed():
    code = "import sys, megatron.deltas; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# --- fingerprints -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tag", [ParamTag(dim=0), ParamTag(dim=1), ParamTag(dim=0, blocks=2), ParamTag(dim=0, tied="x")])
def test_fingerprints_of_shares_add_up_to_that_of_the_whole(tag, dtype):
    whole = torch.randn(24, 40, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows = 21 if tag.tied else None
    wanted = as_text(tensor_print(whole, tag, true_rows=rows))
    for ranks in (2, 4):
        parts = [int(tensor_print(shard(whole, tag, rank, ranks), tag, rank, ranks, rows)) for rank in range(ranks)]
        assert as_text(sum(parts)) == wanted
    if tag.tied:
        assert as_text(tensor_print(torch.cat([whole[:21], whole[:7]]), tag, true_rows=rows)) == wanted
        assert as_text(tensor_print(whole[:21].contiguous(), tag)) == wanted


def test_a_fingerprint_is_the_sum_of_its_formula_and_notices_what_happens_to_files():
    whole = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    mask, golden, first, second = 2**64 - 1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

    def weight(position: int, seed: int) -> int:  # splitmix64, by Python's own integers
        x = (position + 1 + (seed << 32)) * golden & mask
        x = (x ^ x >> 30) * first & mask
        x = (x ^ x >> 27) * second & mask
        return (x ^ x >> 31) | 1

    def mixed(bits: int) -> int:
        x = bits * first & mask
        signed = x - 2**64 if x >= 2**63 else x
        return (x ^ signed >> 32) & mask

    bits = whole.view(torch.int32).tolist()
    truth = sum(weight(i, 1) * weight(j, 2) * mixed(bits[i][j]) for i in range(5) for j in range(7))
    told = as_text(tensor_print(whole, ParamTag()))
    assert told == f"{truth & mask:016x}"
    flipped = whole.clone()
    flipped[0, 0], flipped[3, 4] = -flipped[0, 0], -flipped[3, 4]
    for changed in (whole.flip(0), whole.flip(1), flipped, whole[[1, 0, 2, 3, 4]], whole.t().contiguous()):
        assert as_text(tensor_print(changed.contiguous(), ParamTag())) != told

