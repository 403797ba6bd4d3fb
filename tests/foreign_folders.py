"""Checkpoint folders as other trainers leave them, written by hand: none of our writing code, none of our tags."""

import argparse

import torch

#: dimension along which a tensor is cut over TP, by the end of its name; the rest is replicated
CUT = {"word_embeddings.weight": 0, "query_key_value.weight": 0, "query_key_value.bias": 0,
       "self_attention.dense.weight": 1, "dense_h_to_4h.weight": 0, "dense_h_to_4h.bias": 0, "dense_4h_to_h.weight": 1}


def cut(name, tensor, rank, tp, gated=False):
    """The share of TP rank ``rank``; both halves of a gated projection are cut, each for itself."""
    dim = next((dim for end, dim in CUT.items() if name.endswith(end)), None)
    if dim is None:
        return tensor.clone()
    halves = 2 if gated and "dense_h_to_4h" in name else 1
    size = tensor.shape[dim] // tp // halves
    starts = [(half * tp + rank) * size for half in range(halves)]
    return torch.cat([tensor.narrow(dim, start, size) for start in starts], dim).clone()


def layers_of(model):
    """Our pipeline index -> whole tensors of a GPTModel."""
    return {int(index): {name: value.clone() for name, value in layer.state_dict().items()}
            for index, layer in model.layers.items()}


def write_foreign(folder, layers, *, tp=1, first=3, gap=1, digits=2, gated=False, rename=lambda name: name,
                  state=None, pp=1):
    """Layer files with blocks from ``first`` on, files of optimizer shards and scripts beside them."""
    folder.mkdir(parents=True)
    depth = len(layers) - 2
    for index, tensors in layers.items():
        number = 1 if index == 1 else index - 3 + first if index < 3 + depth else first + depth + gap
        for rank in range(tp):
            share = {rename(name): cut(name, value, rank, tp, gated) for name, value in tensors.items()}
            torch.save(share, folder / f"layer_{number:0{digits}d}-model_{rank:02d}-model_states.pt")
    for rank in range(tp * pp):
        if state is not None:
            torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")
        (folder / f"bf16_zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt").write_bytes(b"flat fp32 masters")
    (folder / "zero_to_fp32.py").write_text("raise SystemExit\n")
    return folder


def bigscience_state(config, tp, **changes):
    """A state file with the keys of older versions: no record of ours, arguments with an enum member."""
    from megatron.enums import PositionEmbeddingType

    arguments = dict(
        num_layers=config.num_layers, hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads,
        kv_channels=config.kv_channels, ffn_hidden_size=config.ffn_hidden_size, layernorm_epsilon=1e-5,
        position_embedding_type=PositionEmbeddingType[config.position_embedding_type], glu_activation=None,
        embed_layernorm=config.embed_layernorm, apply_residual_connection_post_layernorm=False, bias_gelu_fusion=True,
        openai_gelu=False, onnx_safe=None, tensor_model_parallel_size=tp, pipeline_model_parallel_size=1,
        make_vocab_size_divisible_by=4, padded_vocab_size=config.padded_vocab_size, seq_length=config.seq_length,
        max_position_embeddings=config.max_position_embeddings, consumed_train_samples=4096, consumed_valid_samples=0,
        gigaflos_no_embeds=1.5, params_dtype=torch.bfloat16, vocab_file=None)
    import numpy

    return {"module": None, "dp_world_size": 8, "mp_world_size": tp, "global_steps": 12, "skipped_steps": 0,
            "lr_scheduler": {"max_lr": 1e-4, "num_steps": 4096}, "iteration": 12, "tokens": 65536,
            "checkpoint_version": 3.0, "args": argparse.Namespace(**{**arguments, **changes}),
            "checkpoint_info": {"padded_vocab_size": config.padded_vocab_size, "original_vocab_size": config.vocab_size},
            "np_rng_state": numpy.random.RandomState(3).get_state(), "random_rng_state": (3, (1, 2), None)}
