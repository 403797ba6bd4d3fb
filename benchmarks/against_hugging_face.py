"""Training speed of this trainer beside Hugging Face's BLOOM, with equal weights and data.

    python benchmarks/against_hugging_face.py
    python benchmarks/against_hugging_face.py --dtype bf16
    python benchmarks/against_hugging_face.py --quick

Five ways to train one BLOOM model on one batch, interleaved in one process:

  ours full, ours BitFit   the real step: DeepSpeed's PipelineEngine, engine.train_batch, TP = PP = 1
  HF full, HF BitFit       transformers.BloomForCausalLM in a plain loop: loss from labels, backward,
                           clip_grad_norm_(1.0), torch.optim.AdamW; BitFit trains the same biases
  PEFT LoRA                the same loop over peft's LoRA on query_key_value, with peft's defaults otherwise

Both sides start from equal weights (converted with megatron/model/hf_names.py) and must show equal
losses in the first two steps, else the benchmark ends with an error. Dropout is 0. bf16 means bf16 parameters
and an fp32 loss on both sides; DeepSpeed adds fp32 master copies of what trains, the plain loop has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import common

VARIANTS = ("ours full", "ours BitFit", "HF full", "HF BitFit", "PEFT LoRA")
BASE = "HF BitFit"
#: relative differences of the loss that rounding explains: first step (same weights), second (after an update)
TOLERANCE = {"fp32": (1e-5, 1e-4), "bf16": (1e-2, 2e-2)}
CLIP = 1.0
FULL_SHAPE = common.Shape(layers=8, hidden=512, heads=8, vocabulary=8192, length=512, batch=2)
QUICK_SHAPE = common.Shape(layers=2, hidden=64, heads=4, vocabulary=256, length=64, batch=2)


@dataclass
class Contender:
    """One way to train: its step, the trained elements, the losses it has returned."""

    step: Callable[[], float]
    trainable: int
    losses: list[float]

    def __call__(self) -> None:
        self.losses.append(self.step())


def hugging_face_model(trainer):
    """BloomForCausalLM with the weights of one of our engines; all of them must find their place."""
    import torch
    import transformers

    from megatron.model import hf_names

    config = trainer.settings.model
    theirs = transformers.BloomForCausalLM(transformers.BloomConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, n_layer=config.num_layers,
        n_head=config.num_attention_heads, layer_norm_epsilon=config.layernorm_epsilon, hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout, use_cache=False))
    ours = dict(trainer.engine.module.named_parameters())
    reference = next(iter(ours.values()))
    torch.nn.Module.to(theirs, device=reference.device, dtype=reference.dtype)
    theirs.train()
    unset = dict(theirs.named_parameters())
    with torch.no_grad():
        for pair in hf_names.bloom_names(config):
            name = f"tied_modules.embed.{pair.name}" if pair.index == hf_names.EMBEDDING_INDEX else f"{pair.index}.{pair.name}"
            unset.pop(pair.hf_name).copy_(hf_names.to_hugging_face(pair, ours.pop(name), config))
    if unset or ours:
        raise SystemExit(f"parameters without a counterpart: {sorted(unset)} there, {sorted(ours)} here")
    return theirs


def plain_loop(model, tokens, learning_rate: float) -> Contender:
    """One step of the loop a user of transformers would write, over what requires gradients."""
    import torch

    params = [param for param in model.parameters() if param.requires_grad]
    tokens = tokens.to(params[0].device)
    optimizer = torch.optim.AdamW(params, lr=learning_rate, weight_decay=0.0,
                                  fused=params[0].device.type == "cuda")

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return Contender(step, sum(param.numel() for param in params), [])


def our_contender(trainer) -> Contender:
    from megatron.bitfit import trainable

    return Contender(trainer.step, sum(param.numel() for _, param in trainable(trainer.engine.module)), [])


def with_lora(model, rank: int):
    """peft's LoRA on the fused query-key-value projections, alpha 2 x rank."""
    try:
        import peft
    except ImportError as error:
        raise SystemExit(f"PEFT LoRA needs the package peft: pip install 'megatron-bitfit[benchmark]' ({error})") from None
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, bias="none",
                                                      target_modules=["query_key_value"]))


def build(shape, names, *, lora_rank: int = 8, learning_rate: float = 1e-4) -> dict[str, Contender]:
    """The contenders called ``names``, all from equal weights and with one batch."""
    from our_trainer import build_trainer, random_tokens, start_world

    from megatron.bitfit import freeze

    context = start_world()
    tokens = random_tokens(shape)
    ours = {bitfit: build_trainer(shape, bitfit=bitfit, context=context, learning_rate=learning_rate,
                                  vary_vectors=True, tokens=tokens)
            for bitfit in (False, True) if f"ours {'BitFit' if bitfit else 'full'}" in names or bitfit}
    contenders = {}
    for name in names:
        if name.startswith("ours"):
            contenders[name] = our_contender(ours[name == "ours BitFit"])
            continue
        model = hugging_face_model(ours[True])
        if name == "HF BitFit":
            freeze(model)
        elif name == "PEFT LoRA":
            model = with_lora(model, lora_rank)
        contenders[name] = plain_loop(model, tokens, learning_rate)
    return contenders


def check_equal_losses(contenders: dict[str, Contender], dtype: str) -> None:
    """The first loss of all, and the second of those that train the same, must agree.

    Raises SystemExit with the figures otherwise: the comparison would be of unlike things.
    """
    first_tolerance, second_tolerance = TOLERANCE[dtype]
    first = next(iter(contenders.values())).losses[0]
    for name, contender in contenders.items():
        if not abs(contender.losses[0] - first) <= first_tolerance * abs(first):
            raise SystemExit(f"not like with like: first loss of {name} {contender.losses[0]:.7f}, expected {first:.7f}")
    for kind in ("full", "BitFit"):
        pair = [contenders[name].losses[1] for name in (f"ours {kind}", f"HF {kind}") if name in contenders]
        if len(pair) == 2 and not abs(pair[0] - pair[1]) <= second_tolerance * abs(pair[1]):
            raise SystemExit(f"not like with like: second {kind} loss {pair[0]:.7f} here, {pair[1]:.7f} there")


def command_line():
    made = common.parser(__doc__, repetitions=9)
    common.shape_options(made, FULL_SHAPE, QUICK_SHAPE)
    made.add_argument("--lora-rank", type=common.positive, default=8, metavar="N",
                      help="rank of the LoRA matrices (default %(default)s)")
    made.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME",
                      help=f"only these of: {', '.join(VARIANTS)} (quoted); {BASE} always runs")
    return made


def main(arguments=None) -> None:
    options = common.parse(command_line(), arguments)
    shape = common.shape_of(options)
    names = [name for name in VARIANTS if name in options.variants or name == BASE]
    common.progress(f"building {', '.join(names)}: {shape.text()}")
    contenders = build(shape, names, lora_rank=options.lora_rank)
    steps = {name: common.synchronized(contender) for name, contender in contenders.items()}
    common.interleave(steps, 0, warmup=2)
    check_equal_losses(contenders, options.dtype)
    common.progress("losses are equal")
    seconds = common.interleave(steps, options.repetitions, warmup=0, note=common.progress)
    rows, figures = [], {}
    for name in names:
        speed = [shape.tokens / value for value in seconds[name]]
        ratio = common.ratios(seconds[BASE], seconds[name])
        contender = contenders[name]
        rows.append([name, f"{contender.trainable:,}", common.spread(speed).text(0), common.spread(ratio).text(3),
                     f"{contender.losses[0]:.6f}", f"{contender.losses[1]:.6f}"])
        figures[name] = {"seconds": seconds[name], "tokens_per_second": speed, "ratio": ratio,
                         "trainable": contender.trainable, "losses": contender.losses}
    header = ["variant", "trained elements", "tokens/s", f"speed / {BASE}", "loss 1", "loss 2"]
    common.report(options, f"Training speed, {shape.text()}: median [min-max] of {options.repetitions} interleaved "
                  "repetitions", common.table(header, rows), figures)


if __name__ == "__main__":
    main()
