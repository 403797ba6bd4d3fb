"""Models of transformers with values no term can hide behind, and jobs that load their folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from small_runs import SEQ, VOCAB, Case, build_run, settings_of, train_steps

from megatron.checkpoint import load_plan, resume, save
from megatron.checkpoint.progress import Progress
from megatron.mpu.context import build_context

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def random_model(kind: str, *, layers: int = 2, hidden: int = 48, heads: int = 6, dtype: str = "fp32", vocab: int = VOCAB):
    """A BLOOM or GPT-2 of transformers; biases and norms far from 0 and 1."""
    import transformers

    torch.manual_seed(11)
    shape = dict(vocab_size=vocab, n_layer=layers, n_head=heads, bos_token_id=1, eos_token_id=2)
    if kind == "bloom":
        model = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=hidden, **shape))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=hidden, n_positions=SEQ, **shape))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model.to(DTYPES[dtype]).eval()


def write_bin(folder: Path, model, *, shards: int = 1, prefix: bool = True, zipped: bool = True, more=None) -> None:
    """What older transformers wrote: config and ``pytorch_model.bin``, or several with an index."""
    model.config.save_pretrained(folder)
    tensors = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    if not prefix:
        tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    tensors |= more or {}
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        return
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        held = {name: tensors[name] for name in sorted(tensors)[number::shards]}
        torch.save(held, folder / file, _use_new_zipfile_serialization=zipped)
        weight_map |= dict.fromkeys(held, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def case_of(kind: str, **more) -> Case:
    """The run that fits ``random_model(kind)``."""
    positions = dict(positions="absolute", embed_layernorm=False) if kind == "gpt2" else {}
    return Case(**{"layers": 2, "hidden": 48, "heads": 6, "clip": 0.0, **positions, **more})


def some_tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(4))


def run_from(case: Case, folder: str, steps: int = 0, target: str | None = None) -> torch.Tensor | None:
    """Job: ``--load folder``, train ``steps`` steps, save to ``target``; this rank's share of the logits [b, s, V / TP].

    None on all stages but the last.
    """
    import torch.distributed as dist

    case = dataclasses.replace(case, load=folder, save=target)
    settings = settings_of(case, dist.get_rank())
    context = build_context(case.tp, case.pp, dist.get_world_size(), dist.get_rank())
    plan = load_plan.shared_plan(settings.checkpoint, context)
    resume.check_stored(plan, settings, context)
    settings, context, streams, engine, _ = build_run(case, plan)
    if steps:
        train_steps(engine, case, context, 0, steps)
    if target:
        save.save(engine, settings, context, Progress(iteration=steps), streams)
    tokens = some_tokens()
    positions = torch.arange(SEQ).expand_as(tokens).contiguous()
    engine.set_batch_fn(lambda batch: batch)
    reads = context.is_first_stage or context.is_last_stage
    batches = iter([((tokens, positions), (tokens.clone(), torch.ones(tokens.shape)))]) if reads else None
    _, logits = engine.eval_batch(batches, return_logits=True, num_micro_batches=1)
    return logits.detach().clone() if context.is_last_stage else None
