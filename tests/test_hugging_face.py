"""Logits over stages and TP ranks are those of Hugging Face's models with the same weights."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import SEQ, VOCAB, Case, build_run, settings_of

CASES = {
    "BLOOM": Case(hidden=24, heads=6, clip=0.0),
    "GPT-2": Case(hidden=24, heads=6, clip=0.0, positions="absolute", embed_layernorm=False),
}


def hugging_face_model(name: str):
    """A random model with biases and norms far from 0 and 1."""
    import transformers

    torch.manual_seed(11)
    shape = dict(vocab_size=VOCAB, n_layer=4, n_head=6)
    if name == "BLOOM":
        model = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=24, **shape))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=24, n_positions=SEQ, **shape))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model.eval()


def write_layer_files(folder: Path, name: str, model) -> None:
    """Its weights as a checkpoint of one TP rank."""
    from megatron.model import hf_names

    config = settings_of(CASES[name]).model
    pairs = hf_names.bloom_names(config) if name == "BLOOM" else hf_names.gpt2_names(config)
    layers: dict[int, dict] = {}
    for pair in pairs:
        layers.setdefault(pair.index, {})[pair.name] = hf_names.from_hugging_face(
            pair, model.state_dict()[pair.hf_name], config).detach().clone()
    (folder / "global_step1").mkdir(parents=True)
    for index, tensors in layers.items():
        torch.save(tensors, folder / "global_step1" / f"layer_{index:02d}-model_00-model_states.pt")


def logits_run(case: Case, base: str, tokens: torch.Tensor) -> torch.Tensor | None:
    """Job: this rank's share of the logits [b, s, V / TP] on the last stage, None elsewhere."""
    _, context, _, engine, _ = build_run(case, base)
    positions = torch.arange(SEQ).expand_as(tokens).contiguous()
    labels = (tokens.clone(), torch.ones(tokens.shape))
    engine.set_batch_fn(lambda batch: batch)
    reads = context.is_first_stage or context.is_last_stage
    batches = iter([((tokens, positions), labels)]) if reads else None
    _, logits = engine.eval_batch(batches, return_logits=True, num_micro_batches=1)
    return logits.detach().clone() if context.is_last_stage else None


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=lambda grid: "TP{}PP{}".format(*grid))
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_hugging_face(name, grid, tmp_path, worker_group):
    """vllm-project/vllm#53114: rows of query, key and value in another order, whose shapes fit; no bias is zero here."""
    import dataclasses

    model = hugging_face_model(name)
    write_layer_files(tmp_path / "base", name, model)
    case = dataclasses.replace(CASES[name], tp=grid[0], pp=grid[1])
    tokens = torch.randint(0, VOCAB, (case.micro, SEQ), generator=torch.Generator().manual_seed(4))
    shares = [share for share in worker_group(case.world).run(logits_run, case, str(tmp_path / "base"), tokens)
              if share is not None]
    ours = torch.cat(shares, dim=-1)[..., :VOCAB]
    with torch.no_grad():
        theirs = model(tokens).logits
    assert len(shares) == case.tp
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored, here, said", [
    ("fp32", torch.bfloat16, "word_embeddings.weight: float32 to bfloat16"), ("fp16", torch.bfloat16, "float16 to bfloat16"),
    ("bf16", torch.float16, "bfloat16 to float16"), ("bf16", torch.float32, None), ("bf16", torch.bfloat16, None)])
def test_rounded_weights_are_said_once(stored, here, said, tmp_path, capsys):
    """A base of another type: what is frozen differs from it after all, by the rounding."""
    from hf_jobs import case_of, random_model

    from megatron.checkpoint.hugging_face import HuggingFaceFolder
    from megatron.checkpoint.weights import load_weights
    from megatron.model.pipe import GPTModel
    from megatron.mpu.context import ParallelContext
    from megatron.mpu.random import seed_everything

    their = random_model("bloom", dtype=stored)
    their.save_pretrained(tmp_path / "base")
    context = ParallelContext()
    model = GPTModel(settings_of(case_of("bloom")).model, context, seed_everything(1, context)).to(here)
    stages = [dict(model.layers).get(str(index)) for index in range(1 + max(map(int, model.layers)))]
    load_weights(SimpleNamespace(forward_funcs=stages, _local_start=0), HuggingFaceFolder(tmp_path / "base"), context)
    out = capsys.readouterr().out
    assert out.count("are rounded") == (said is not None) and (said or "") in out
    assert out.count("\n") == out.count("are rounded")
    assert all(torch.equal(param.to(here).to(param.dtype), param) for param in their.parameters()) == (said is None)
