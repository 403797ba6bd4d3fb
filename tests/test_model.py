"""The model against Hugging Face, torch and hand-written formulas; two TP ranks against one."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
import tp_world
from small_model import (
    ALONE,
    LENGTH,
    SEGMENTS,
    VOCAB,
    absolute,
    batch,
    build,
    config,
    freeze_weights,
    grads,
    loss_of,
    randomize,
)

from megatron.config import ModelConfig
from megatron.model import attention, block, hf_names
from megatron.model.pipe import GPTModel, build_specs
from megatron.mpu.random import seed_everything
from megatron.mpu.tags import shard, tag_of

# --- Hugging Face -----------------------------------------------------------------------------


def hugging_face(architecture, settings):
    import transformers

    shape = {"n_layer": settings.num_layers, "n_head": settings.num_attention_heads, "vocab_size": VOCAB}
    if architecture == "bloom":
        return transformers.BloomForCausalLM(transformers.BloomConfig(
            hidden_size=settings.hidden_size, hidden_dropout=0.0, attention_dropout=0.0,
            apply_residual_connection_post_layernorm=settings.apply_residual_connection_post_layernorm,
            **shape)), hf_names.bloom_names(settings)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=settings.hidden_size, n_positions=settings.max_position_embeddings, **shape)
    ), hf_names.gpt2_names(settings)


HF_CASES = {
    "bloom, 4 heads": ("bloom", config()),
    "bloom, 6 heads": ("bloom", config(num_attention_heads=6)),
    "bloom, post-layernorm residual": ("bloom", config(apply_residual_connection_post_layernorm=True)),
    "gpt2, 4 heads": ("gpt2", absolute()),
    "gpt2, 6 heads": ("gpt2", absolute(num_attention_heads=6)),
}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("case", HF_CASES)
def test_logits_are_those_of_hugging_face(case, explicit):
    architecture, settings = HF_CASES[case]
    settings = ModelConfig(**{**vars(settings), "masked_softmax_fusion": not explicit})
    theirs, pairs = hugging_face(architecture, settings)
    randomize(theirs.eval())
    state = theirs.state_dict()
    model = GPTModel(settings, ALONE, seed_everything(1, ALONE)).eval()
    params = dict(model.named_parameters())
    assert {f"layers.{pair.index}.{pair.name}" for pair in pairs} == set(params)
    assert {pair.hf_name for pair in pairs} | {"lm_head.weight"} == set(state)
    with torch.no_grad():
        for pair in pairs:
            params[f"layers.{pair.index}.{pair.name}"].copy_(
                hf_names.from_hugging_face(pair, state[pair.hf_name], settings))
        tokens, _, _ = batch()
        torch.testing.assert_close(model(tokens)[..., :VOCAB], theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    for pair in pairs:
        back = hf_names.to_hugging_face(pair, params[f"layers.{pair.index}.{pair.name}"], settings)
        assert torch.equal(back, state[pair.hf_name]), pair.hf_name


def test_padding_rows_are_kept_on_request_and_too_many_rows_refused():
    settings = config()
    pair = hf_names.bloom_names(settings)[0]
    table = torch.randn(64, 24)
    assert torch.equal(hf_names.to_hugging_face(pair, table, settings, keep_padding=True), table)
    with pytest.raises(ValueError, match="word_embeddings.weight has 65 rows, the padded vocabulary 64"):
        hf_names.from_hugging_face(pair, torch.zeros(65, 24), settings)


def test_models_hugging_face_cannot_express_are_refused():
    with pytest.raises(ValueError, match="BLOOM needs position_embedding_type = alibi, the model has rotary"):
        hf_names.bloom_names(config(position_embedding_type="rotary"))
    with pytest.raises(ValueError, match="GPT-2 needs activation = gelu_tanh"):
        hf_names.gpt2_names(absolute(activation="gelu_erf"))


# --- names, counts, pipeline entries ----------------------------------------------------------


BLOCK_NAMES = [f"{module}.{kind}" for module in (
    "input_layernorm", "self_attention.query_key_value", "self_attention.dense",
    "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h") for kind in ("weight", "bias")]


def test_parameter_names_and_order_are_those_of_existing_layer_files():
    names = [name for name, _ in build(config()).named_parameters()]
    assert names == (["layers.1.word_embeddings.weight", "layers.1.word_embeddings.norm.weight",
                      "layers.1.word_embeddings.norm.bias"]
                     + [f"layers.{index}.{name}" for index in (3, 4) for name in BLOCK_NAMES]
                     + ["layers.6.weight", "layers.6.bias"])
    assert "layers.1.position_embeddings.weight" in dict(build(absolute()).named_parameters())


def test_rotary_blocks_carry_the_buffer_existing_layer_files_have():
    state = build(config(position_embedding_type="rotary")).layers["3"].state_dict()
    assert set(state) == {*BLOCK_NAMES, "self_attention.rotary_emb.inv_freq"}
    assert state["self_attention.rotary_emb.inv_freq"].shape == (3,)


def test_parameter_count_is_the_closed_formula():
    model = build(config(num_layers=3, hidden_size=24))
    h, layers = 24, 3
    assert sum(p.numel() for p in model.parameters()) == 64 * h + 4 * h + layers * (12 * h * h + 13 * h)
    biases = sum(p.numel() for name, p in model.named_parameters() if name.endswith("bias"))
    assert biases == 11 * h * layers + 2 * h


def test_every_parameter_is_tagged_and_sharded_as_documented():
    dims = {name.removeprefix("layers."): tag_of(param).dim for name, param in build(config()).named_parameters()}
    for name, dim in dims.items():
        sharded_rows = "query_key_value" in name or "dense_h_to_4h" in name or name == "1.word_embeddings.weight"
        sharded_columns = name.endswith(("dense.weight", "dense_4h_to_h.weight"))
        assert dim == (0 if sharded_rows else 1 if sharded_columns else None), name


@pytest.mark.parametrize("layers", [1, 5])
def test_partition_patterns_match_the_blocks_and_the_two_embedding_entries_only(layers):
    specs = build_specs(config(num_layers=layers), ALONE, seed_everything(1, ALONE))
    names = [getattr(getattr(spec, "typename", spec), "__name__", "") for spec in specs]
    found = {pattern: [i for i, name in enumerate(names) if re.search(pattern, name, re.IGNORECASE)]
             for pattern in ("transformer", "transformer|embedding")}
    blocks = list(range(3, 3 + layers))
    assert found == {"transformer": blocks, "transformer|embedding": [1, *blocks, layers + 5]}
    assert len(specs) == layers + 7


def test_head_entry_of_the_last_stage_owns_the_word_table_and_nothing_else():
    specs = build_specs(absolute(), ALONE, seed_everything(1, ALONE))
    head = specs[-2].build()
    assert [name for name, _ in head.named_parameters()] == ["word_embeddings.weight"]
    assert specs[-2].key == specs[1].key
    x = torch.randn(1, 2, 24)
    torch.nn.init.normal_(head.word_embeddings.weight)
    assert torch.equal(specs[-2].forward_fn(head, x), x @ head.word_embeddings.weight.T)


def test_initial_spread_is_std_and_for_residual_outputs_std_over_root_2l():
    settings = config(num_layers=8, hidden_size=256, num_attention_heads=4, init_method_std=0.05)
    model = GPTModel(settings, ALONE, seed_everything(1, ALONE))
    for name, param in model.named_parameters():
        spread = float(param.detach().std())
        if name.endswith("bias"):
            assert param.eq(0).all()
        elif param.dim() == 1:
            assert param.eq(1).all()
        elif name.endswith(("dense.weight", "dense_4h_to_h.weight")):
            assert spread == pytest.approx(0.05 / 4, rel=0.02), name
        elif "word_embeddings" not in name:
            assert spread == pytest.approx(0.05, rel=0.02), name


@pytest.mark.parametrize("inputs", [2, 3])
def test_first_stage_refuses_what_does_not_fit_the_flag(inputs):
    settings = config(reset_attention_mask=inputs == 2)
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"--reset-attention-mask.*got a tuple of {inputs}"):
        build(settings)(ids, segment_ids=None if inputs == 2 else ids)


@pytest.mark.parametrize("changes, message", [
    ({"position_embedding_type": "learned"}, "'learned' is not one of absolute, rotary, alibi"),
    ({"position_embedding_type": "rotary", "kv_channels": 5}, "even head width, got kv_channels 5"),
    ({"position_embedding_type": "absolute", "max_position_embeddings": 8}, "--max-position-embeddings 8"),
    ({"activation": "tanh"}, "'tanh' is not one of gelu_tanh"),
])
def test_impossible_settings_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        build(config(**changes))


# --- blocks -----------------------------------------------------------------------------------


def gate_by_hand(kind, x):
    return {"liglu": x, "geglu": x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), "reglu": x.clamp(min=0),
            "swiglu": x / (1 + torch.exp(-x))}[kind]


@pytest.mark.parametrize("kind", ["liglu", "geglu", "reglu", "swiglu"])
def test_gated_mlp_is_first_half_times_gate_of_second(kind):
    mlp = build(config(activation=kind, ffn_hidden_size=32)).layers["3"].mlp
    x = torch.randn(2, 3, 24)
    (w1, b1), (w2, b2) = mlp.dense_h_to_4h.parameters(), mlp.dense_4h_to_h.parameters()
    assert w1.shape == (64, 24)
    y = (x @ w1[:32].T + b1[:32]) * gate_by_hand(kind, x @ w1[32:].T + b1[32:])
    torch.testing.assert_close(mlp(x), y @ w2.T + b2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["gelu_tanh", "gelu_erf"])
def test_plain_mlp_is_the_written_gelu(kind):
    mlp = build(config(activation=kind)).layers["3"].mlp
    x = torch.randn(2, 3, 24)
    (w1, b1), (w2, b2) = mlp.dense_h_to_4h.parameters(), mlp.dense_4h_to_h.parameters()
    y = x @ w1.T + b1
    inner = 0.79788456 * y * (1 + 0.044715 * y * y)
    y = 0.5 * y * (1 + (torch.tanh(inner) if kind == "gelu_tanh" else torch.erf(y / math.sqrt(2))))
    torch.testing.assert_close(mlp(x), y @ w2.T + b2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("post_layernorm", [False, True])
def test_fp32_residual_stream_stays_fp32_and_equals_the_plain_one_in_fp32(post_layernorm):
    changes = {"apply_residual_connection_post_layernorm": post_layernorm}
    block = build(config(params_dtype="bf16", fp32_residual_connection=True, **changes)).layers["3"]
    assert block(torch.randn(2, LENGTH, 24)).dtype == torch.float32
    plain = build(config(**changes))
    wide = build(config(fp32_residual_connection=True, **changes))
    tokens, _, _ = batch()
    assert torch.equal(plain(tokens), wide(tokens))
    settings = config(params_dtype="bf16", fp32_residual_connection=True, **changes)
    narrow = build(settings)
    loss_of(narrow, settings).backward()
    assert all(grad.isfinite().all() for grad in grads(narrow).values())
    torch.testing.assert_close(narrow(tokens), plain(tokens), rtol=0.1, atol=0.5)


def test_embedding_norm_keeps_its_own_epsilon_and_comes_before_positions():
    settings = config(position_embedding_type="absolute", max_position_embeddings=20, layernorm_epsilon=0.5)
    layer = build(settings).layers["1"]
    tokens, _, _ = batch()
    ids = torch.arange(LENGTH).expand_as(tokens)
    words = layer.word_embeddings
    expected = F.layer_norm(words.weight[tokens], (24,), words.norm.weight, words.norm.bias, 1e-5)
    expected = expected + layer.position_embeddings.weight[ids]
    torch.testing.assert_close(layer((tokens, ids)), expected)
    assert build(settings).layers["3"].input_layernorm.eps == 0.5


# --- two ranks against one --------------------------------------------------------------------


def equals_one_rank(context, settings, segments=None, frozen=False):
    whole, share = build(settings), build(settings, context)
    if frozen:
        freeze_weights(whole)
        freeze_weights(share)
    tokens, _, _ = batch()
    logits, mine = whole(tokens, segment_ids=segments), share(tokens, segment_ids=segments)
    torch.testing.assert_close(mine, logits.chunk(context.tp_size, -1)[context.tp_rank], rtol=1e-5, atol=1e-5)
    loss = loss_of(whole, settings, segments=segments)
    torch.testing.assert_close(loss_of(share, settings, context, segments), loss, rtol=1e-5, atol=1e-6)
    loss.backward()
    loss_of(share, settings, context, segments).backward()
    theirs, ours = dict(whole.named_parameters()), grads(share)
    assert ours.keys() == grads(whole).keys()
    for name, grad in ours.items():
        expected = shard(theirs[name].grad, tag_of(theirs[name]), context.tp_rank, context.tp_size)
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def tp_alibi(context):
    equals_one_rank(context, config())


def tp_alibi_six_heads_explicit_swiglu(context):
    equals_one_rank(context, config(num_attention_heads=6, masked_softmax_fusion=False, activation="swiglu"))


def tp_rotary_segments(context):
    equals_one_rank(context, config(position_embedding_type="rotary", reset_attention_mask=True,
                                    kv_channels=8), SEGMENTS)


def tp_absolute(context):
    equals_one_rank(context, absolute())


def tp_frozen_recomputed(context):
    equals_one_rank(context, config(checkpoint_activations=True, embed_layernorm=False), frozen=True)


def tp_dropout(context):
    """Hidden dropout is the same on both ranks, that of attention weights is not."""
    for which, equal in (("hidden_dropout", True), ("attention_dropout", False)):
        settings = config(num_layers=1, **{which: 0.5})
        model = build(settings, context)
        masks = []
        owner, name = (block, "dropout") if equal else (attention, "blocked_attention")
        plain = getattr(owner, name)

        def record(*args, plain=plain, masks=masks, **given):
            before = torch.get_rng_state()
            result = plain(*args, **given)
            if not torch.equal(before, torch.get_rng_state()):
                masks.append(before)
            return result

        setattr(owner, name, record)
        model(batch()[0])
        setattr(owner, name, plain)
        drawn = torch.cat(masks)
        both = [torch.empty_like(drawn) for _ in range(2)]
        torch.distributed.all_gather(both, drawn)
        assert torch.equal(*both) == equal


def tp_cpu_initialization(context):
    settings = config(use_cpu_initialization=True)
    whole = GPTModel(settings, ALONE, seed_everything(1, ALONE))
    share = GPTModel(settings, context, seed_everything(1, context))
    for full, mine in zip(whole.parameters(), share.parameters(), strict=True):
        assert torch.equal(mine, shard(full, tag_of(full), context.tp_rank, context.tp_size))


CHECKS = {check.__name__: check for check in (
    tp_alibi, tp_alibi_six_heads_explicit_swiglu, tp_rotary_segments, tp_absolute, tp_frozen_recomputed,
    tp_dropout, tp_cpu_initialization)}


@pytest.fixture(scope="module")
def failures():
    return tp_world.run_checks(CHECKS)


# bigscience-workshop/Megatron-DeepSpeed#276: tp_dropout looks at the streams that dropout draws from
@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks_equal_one(failures, check):
    assert check not in failures, failures[check]
