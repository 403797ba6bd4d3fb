"""Small training runs for the multi-rank tests, and the plain-torch run they must equal.

Everything here is importable by name, so that a worker group can run it.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.config import (
    BIAS_TERMS,
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Settings,
    TokenizerConfig,
    TrainConfig,
)

VOCAB, SEQ = 93, 16


@dataclass(frozen=True)
class Case:
    """One run: grid, what trains, arithmetic."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    bitfit: bool = False
    bias_terms: tuple[str, ...] = BIAS_TERMS
    dtype: str = "fp32"
    steps: int = 5
    micro: int = 2
    optimizer: str = "sgd"
    lr: float = 0.5
    clip: float = 1.0
    recompute: bool = False
    embed_layernorm: bool = True
    positions: str = "alibi"
    activation: str = "gelu_tanh"
    dropout: float = 0.0
    partition: str = "type:transformer"
    layers: int = 4
    hidden: int = 24
    heads: int = 4
    ffn: int = 0
    reset_mask: bool = False
    zero_stage: int = 1
    weight_decay: float = 0.0
    save: str | None = None
    load: str | None = None
    seed: int = 7
    initial_scale_power: int = 10
    decay: str = "constant"
    override: bool = False
    vocab: int = VOCAB
    padded: int = 96

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def global_batch(self) -> int:
        return 8


def settings_of(case: Case, rank: int = 0) -> Settings:
    """Settings a command line with these values would give (minus tokenizer and data)."""
    model = ModelConfig(num_layers=case.layers, hidden_size=case.hidden, num_attention_heads=case.heads,
                        ffn_hidden_size=case.ffn, seq_length=SEQ, vocab_size=case.vocab, padded_vocab_size=case.padded,
                        position_embedding_type=case.positions, max_position_embeddings=SEQ,
                        embed_layernorm=case.embed_layernorm, activation=case.activation, attention_dropout=case.dropout,
                        hidden_dropout=case.dropout, init_method_std=0.2, params_dtype=case.dtype,
                        checkpoint_activations=case.recompute, use_cpu_initialization=True,
                        reset_attention_mask=case.reset_mask)
    optimizer = OptimizerConfig(optimizer=case.optimizer, lr=case.lr, lr_decay_style=case.decay, override_lr_scheduler=case.override,
                                clip_grad=case.clip, bitfit=case.bitfit, weight_decay=case.weight_decay,
                                bitfit_bias_terms=case.bias_terms,
                                zero_stage=case.zero_stage,
                                initial_loss_scale=2.0**case.initial_scale_power)
    train = TrainConfig(micro_batch_size=case.micro, global_batch_size=case.global_batch,
                        train_iters=100, seed=case.seed)
    return Settings(model=model, optimizer=optimizer, train=train,
                    parallel=ParallelConfig(world_size=case.world, rank=rank,
                                            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
                                            tensor_model_parallel_size=case.tp,
                                            pipeline_model_parallel_size=case.pp,
                                            pp_partition_method=case.partition),
                    checkpoint=CheckpointConfig(save=case.save, load=case.load), data=DataConfig(),
                    tokenizer=TokenizerConfig(), logging=LoggingConfig(log_interval=1))


def global_batch(step: int, size: int = 8) -> torch.Tensor:
    """Rows [size, SEQ + 1] of step ``step``, the same on every rank and in every grid."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCAB, (size, SEQ + 1), generator=generator)


def micro_batches(case: Case, step: int, dp_rank: int):
    """This replica's rows of one step, micro-batch by micro-batch, in loader order."""
    rows = global_batch(step, case.global_batch)
    per_pass = case.micro * case.dp
    for start in range(0, case.global_batch, per_pass):
        mine = start + dp_rank * case.micro
        yield rows[mine:mine + case.micro]


def split_rows(rows: torch.Tensor, reset_mask: bool = False) -> tuple:
    """Stage inputs and labels; every third label is masked out of the loss."""
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    positions = torch.arange(SEQ).expand_as(tokens).contiguous()
    mask = torch.ones(labels.shape)
    mask[:, ::3] = 0
    inputs = (tokens, positions)
    if reset_mask:
        inputs += ((torch.arange(SEQ) // 6).expand_as(tokens).contiguous(),)
    return inputs, (labels, mask)


def write_base(folder: str, case: Case, seed: int = 3) -> None:
    """A base checkpoint of random full-size layer files: biases and norms far from 0 and 1."""
    from megatron.model.pipe import GPTModel
    from megatron.mpu.context import ParallelContext
    from megatron.mpu.random import seed_everything

    context = ParallelContext()
    streams = seed_everything(seed, context)
    config = dataclasses.replace(settings_of(case).model, params_dtype="fp32")
    model = GPTModel(config, context, streams)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    target = Path(folder) / "global_step1"
    target.mkdir(parents=True)
    for index, layer in model.layers.items():
        torch.save({name: value.clone() for name, value in layer.state_dict().items()},
                   target / f"layer_{int(index):02d}-model_00-model_states.pt")
    (Path(folder) / "latest").write_text("global_step1")


# --- the truth: one process, plain torch ------------------------------------------------------


def reference_run(case: Case, base: str) -> dict:
    """The same training by plain torch in one process: no DeepSpeed, no groups, fp32 unless asked.

    Returns losses and pre-clip gradient norms per step, the full gradients of the first
    step and the full trained tensors, named as the pipeline names them.
    """
    from megatron.bitfit import freeze
    from megatron.model.pipe import GPTModel, loss_function
    from megatron.mpu.context import ParallelContext
    from megatron.mpu.random import seed_everything

    context = ParallelContext()
    streams = seed_everything(case.seed, context)
    config = dataclasses.replace(settings_of(case).model, params_dtype="fp32", checkpoint_activations=False)
    model = GPTModel(config, context, streams)
    for index, layer in model.layers.items():
        path = Path(base) / "global_step1" / f"layer_{int(index):02d}-model_00-model_states.pt"
        layer.load_state_dict(torch.load(path, weights_only=True))
    if case.bitfit:
        freeze(model)
        keep_terms(model, case)
    params = [param for param in model.parameters() if param.requires_grad]
    decayed = [param for param in params if param.dim() > 1]
    plain = [param for param in params if param.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": case.weight_decay}] if decayed else []
    groups.append({"params": plain, "weight_decay": 0.0})
    optimizer = (torch.optim.SGD(groups, lr=case.lr, momentum=0.9) if case.optimizer == "sgd"
                 else torch.optim.AdamW(groups, lr=case.lr))
    loss_of = loss_function(config, context)
    result = {"losses": [], "norms": []}
    for step in range(case.steps):
        optimizer.zero_grad()
        loss_sum = 0.0
        rows = global_batch(step, case.global_batch)
        chunks = rows.split(case.micro)
        for chunk in chunks:
            inputs, labels = split_rows(chunk, case.reset_mask)
            loss = loss_of(model(*inputs), labels) / len(chunks)
            loss.backward()
            loss_sum += float(loss.detach())
        norm = torch.sqrt(sum((param.grad.double()**2).sum() for param in params))
        if step == 0:
            result["gradients"] = {pipeline_name(name): param.grad.clone()
                                   for name, param in model.named_parameters() if param.grad is not None}
        if case.clip:
            for param in params:
                param.grad *= min(1.0, case.clip / (float(norm) + 1e-6))
        optimizer.step()
        result["losses"].append(loss_sum)
        result["norms"].append(float(norm))
    result["tensors"] = {pipeline_name(name): param.detach().clone()
                         for name, param in model.named_parameters()}
    return result


def keep_terms(model, case: Case) -> None:
    """What ``bias_terms`` leave trainable, the plain way: no other gradients, zeros in slices of the fused bias."""
    owners = {"dense": "attention_output", "dense_h_to_4h": "mlp_intermediate", "dense_4h_to_h": "mlp_output"}
    for name, param in model.named_parameters():
        owner = name.split(".")[-2]
        if not name.endswith("bias"):
            continue
        if owner == "query_key_value":
            kept = torch.tensor([float(term in case.bias_terms) for term in ("query", "key", "value")])
            mask = kept.view(1, 3, 1).expand(case.heads, 3, case.hidden // case.heads).flatten()
            param.register_hook(lambda grad, mask=mask: grad * mask)
            param.requires_grad_(bool(kept.any()))
        else:
            param.requires_grad_(owners.get(owner, "layernorm") in case.bias_terms)


def pipeline_name(name: str) -> str:
    """``layers.4.mlp.x`` -> ``4.mlp.x``; the embedding keeps the tied name of the pipeline."""
    _, index, rest = name.split(".", 2)
    return f"tied_modules.embed.{rest}" if index == "1" else f"{index}.{rest}"


# --- the same on a grid, through DeepSpeed ----------------------------------------------------


def build_run(case: Case, base):
    """Collective: context, streams and engine of ``case``, weights taken from ``base``: a folder, a plan or None."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from megatron.checkpoint.load_plan import LoadPlan
    from megatron.engine import build_engine, build_model
    from megatron.mpu.context import build_context
    from megatron.mpu.random import seed_everything

    if case.dtype == "fp16" and get_accelerator().device_name() == "cpu":
        # fp16 arithmetic is emulated, correctly, on CPUs without the instructions
        get_accelerator().is_fp16_supported = lambda: True
    rank = dist.get_rank()
    settings = settings_of(case, rank)
    context = build_context(case.tp, case.pp, dist.get_world_size(), rank)
    streams = seed_everything(case.seed, context)
    plan = base if isinstance(base, LoadPlan) else LoadPlan(base, "global_step1") if base else LoadPlan(None, None)
    model = build_model(settings, context, streams, plan)
    engine, schedule = build_engine(model, settings, context, 100, case.global_batch)
    engine.set_batch_fn(lambda rows: split_rows(rows, case.reset_mask))
    return settings, context, streams, engine, schedule


def train_steps(engine, case: Case, context, first: int, count: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of ``count`` steps starting with data of step ``first``."""
    losses, norms = [], []
    for step in range(first, first + count):
        reads = context.is_first_stage or context.is_last_stage
        rows = micro_batches(case, step, context.dp_rank) if reads else None
        losses.append(float(engine.train_batch(rows)))
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def local_tensors(engine) -> dict:
    """name -> (tensor on the CPU, tag, whether another stage owns it), this rank's share."""
    from megatron.bitfit import is_anchor
    from megatron.mpu.tags import tag_of

    return {name: (param.detach().cpu().float().clone(), tag_of(param),
                   bool(getattr(param, "ds_pipe_replicated", False)))
            for name, param in engine.module.named_parameters() if not is_anchor(param)}


def grid_run(case: Case, base: str) -> dict:
    """Job for a worker group: train ``case`` and return what this rank saw."""
    from megatron.bitfit import trainable

    _, context, _, engine, _ = build_run(case, base)
    before = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    losses, norms = train_steps(engine, case, context, 0, case.steps)
    frozen = [name for name, param in engine.module.named_parameters() if not param.requires_grad]
    by_name = dict(engine.module.named_parameters())
    return {"losses": losses, "norms": norms, "tensors": local_tensors(engine),
            "place": (context.pp_rank, context.dp_rank, context.tp_rank),
            "frozen_moved": [name for name in frozen if not torch.equal(by_name[name], before[name])],
            "frozen_grads": [name for name in frozen if by_name[name].grad is not None],
            "frozen": len(frozen), "trained": sum(param.numel() for _, param in trainable(engine.module))}


def overflow_run(case: Case, base: str) -> dict:
    """Job: a few fp16 steps from a loss scale that overflows at first."""
    _, context, _, engine, schedule = build_run(case, base)
    before = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    seen = []
    for step in range(case.steps):
        train_steps(engine, case, context, step, 1)
        moved = any(not torch.equal(param, before[name]) for name, param in engine.module.named_parameters())
        seen.append((engine.skipped_steps, engine.optimizer.cur_scale, schedule.num_steps, moved))
    return {"seen": seen}


def merge(results: list[dict], dp_rank: int = 0) -> dict[str, torch.Tensor]:
    """Full tensors from the shares of one replica; a replicated tensor must agree over TP."""
    from megatron.mpu.tags import unshard

    shares: dict[str, dict[int, tuple]] = {}
    for result in results:
        _, dp, tp = result["place"]
        if dp != dp_rank:
            continue
        for name, (tensor, tag, copy) in result["tensors"].items():
            if not copy:
                shares.setdefault(name, {})[tp] = (tensor, tag)
    merged = {}
    for name, by_tp in shares.items():
        tag = by_tp[0][1]
        pieces = [by_tp[tp][0] for tp in sorted(by_tp)]
        if tag.dim is None:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{name} differs over TP"
        merged[name] = unshard(pieces, tag)
    return merged
