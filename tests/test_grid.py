"""Any grid must train exactly as one process of plain torch does."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_runs import Case, grid_run, merge, overflow_run, pipeline_name, reference_run, write_base

from megatron.tokenizer.padding import padded_vocab_size

WORDS = "tied_modules.embed.word_embeddings.weight"
#: stage 0 ends behind the embedding, everything else is on stage 1
EMBEDDING_ALONE = "type:EmbeddingPipe|enter_blocks"
GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """One base checkpoint per architecture, written at full size."""
    made = {}

    def folder(case: Case) -> str:
        key = (case.embed_layernorm, case.positions, case.layers, case.hidden, case.heads, case.ffn, case.vocab,
               case.padded)
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp("base") / "checkpoint")
            write_base(made[key], case)
        return made[key]

    return folder


@pytest.fixture(scope="module")
def truth(base):
    """The plain-torch run of a case, computed once whatever grid it is compared with."""
    known = {}

    def run(case: Case) -> dict:
        case = dataclasses.replace(case, tp=1, pp=1, dp=1, recompute=False, dtype="fp32", zero_stage=1)
        if case not in known:
            known[case] = reference_run(case, base(case))
        return known[case]

    return run


def base_tensors(folder: str) -> dict[str, torch.Tensor]:
    """All tensors of a base checkpoint, named as the pipeline names them."""
    return {pipeline_name(f"layers.{int(path.name[6:8])}.{name}"): tensor
            for path in sorted(Path(folder, "global_step1").glob("layer_*"))
            for name, tensor in torch.load(path, weights_only=True).items()}


def check(case: Case, results: list[dict], expected: dict, tolerance: float) -> None:
    """Losses, norms and every trained tensor agree; frozen ones neither moved nor got a gradient."""
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert result["norms"] == pytest.approx(expected["norms"], rel=tolerance)
        assert result["frozen_moved"] == [] and result["frozen_grads"] == []
    for dp_rank in range(case.dp):
        tensors = merge(results, dp_rank)
        assert tensors.keys() == expected["tensors"].keys()
        for name, wanted in expected["tensors"].items():
            scale = float(wanted.abs().max())
            error = float((tensors[name] - wanted).abs().max()) / scale
            assert error <= tolerance, f"{name} is off by {error:.2e} of its largest value"


@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "TP{}PP{}DP{}".format(*grid))
def test_five_steps_equal_plain_torch(grid, bitfit, base, truth, worker_group):
    """A norm that counts no copy twice, and copies over TP that get the whole gradient.

    NVIDIA/Megatron-LM#7228: the tied word table counted on both of its stages. bigcode-project/Megatron-LM#12:
    replicated tensors of which each TP rank saw a part of the gradient.
    """
    case = Case(tp=grid[0], pp=grid[1], dp=grid[2], bitfit=bitfit, clip=0.2)
    results = worker_group(case.world).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5)
    assert (results[0]["frozen"] > 0) == bitfit


@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bit_runs_agree_to_their_precision(dtype, bitfit, base, truth, worker_group):
    """NVIDIA/Megatron-LM#7228: the norm of these optimizers, too, counts the tied word table once."""
    case = Case(tp=2, pp=2, bitfit=bitfit, dtype=dtype, lr=0.05, steps=3)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), 2e-2 if dtype == "bf16" else 4e-3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_zero_stage_0_is_routed_to_the_path_that_is_right(dtype, base, truth, worker_group):
    case = Case(tp=2, pp=1, dp=2, bitfit=True, dtype=dtype, zero_stage=0, lr=0.05, steps=3)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}[dtype])


@pytest.mark.parametrize("embed_layernorm", [True, False], ids=["embedLN", "plain"])
@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
def test_recomputation_changes_nothing(bitfit, embed_layernorm, base, truth, worker_group):
    case = Case(tp=2, pp=2, bitfit=bitfit, recompute=True, embed_layernorm=embed_layernorm)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5)


def test_layers_that_do_not_divide_over_stages_are_all_built(base, truth, worker_group):
    case = Case(pp=2, layers=3, bitfit=True)
    results = worker_group(2).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_stage_with_nothing_to_train_works(tp, dtype, base, truth, worker_group):
    """deepspeedai/DeepSpeed#5071: stage 0 is the embedding alone, without LayerNorm: BitFit has nothing to train there."""
    case = Case(tp=tp, pp=2, layers=1, bitfit=True, embed_layernorm=False, dtype=dtype, steps=3, lr=0.05,
                partition=EMBEDDING_ALONE)
    results = worker_group(case.world).run(grid_run, case, base(case))
    check(case, results, truth(case), {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}[dtype])
    assert all(list(result["tensors"]) == [WORDS] for result in results if result["place"][0] == 0)


@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stages_of_different_kinds_share_one_norm(dtype, bitfit, base, truth, worker_group):
    """deepspeedai/DeepSpeed#1522: a hang in the norm, between an embedding with its LayerNorm and all blocks."""
    case = Case(pp=2, dp=2, bitfit=bitfit, dtype=dtype, steps=3, lr=0.05, clip=1.0, partition=EMBEDDING_ALONE)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5 if dtype == "fp32" else 2e-2)
    for result in results:
        blocks = [name for name in result["tensors"] if name.startswith(("3.", "4.", "5.", "6."))]
        assert bool(blocks) == (result["place"][0] == 1)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_both_copies_of_the_frozen_word_table_stay_those_of_the_checkpoint(dtype, base, worker_group):
    """deepspeedai/DeepSpeed#5477: the sum of tied gradients over stages met a frozen weight without one."""
    case = Case(pp=2, bitfit=True, dtype=dtype, steps=3, lr=0.05)
    stored = torch.load(Path(base(case)) / "global_step1" / "layer_01-model_00-model_states.pt", weights_only=True)
    wanted = stored["word_embeddings.weight"].to({"fp32": torch.float32, "bf16": torch.bfloat16}.get(dtype, torch.float16))
    copies = [result["tensors"][WORDS] for result in worker_group(2).run(grid_run, case, base(case))]
    assert [copy for _, _, copy in copies] == [False, True], "each stage holds one"
    assert all(torch.equal(table, wanted.float()) for table, _, _ in copies)


#: sizes with as many elements in the only bias that trains, and the elements
FEW = {"one element a stage, two replicas": (dict(pp=2, dp=2, layers=2, ffn=1), 1),
       "three elements, four replicas": (dict(dp=4, layers=1, ffn=3), 3)}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("few", FEW)
def test_replicas_outnumber_the_elements_that_train(few, dtype, optimizer, base, truth, worker_group):
    """deepspeedai/DeepSpeed#129: some replicas then own no part of the optimizer's state."""
    sizes, elements = FEW[few]
    case = Case(bitfit=True, bias_terms=("mlp_intermediate",), dtype=dtype, steps=3, micro=1, optimizer=optimizer,
                lr=0.5 if optimizer == "sgd" else 1e-2, **sizes)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5 if dtype == "fp32" else 2e-2)
    assert {result["trained"] for result in results} == {elements}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_four_replicas_of_two_stages_of_one_narrow_block(dtype, base, truth, worker_group):
    """deepspeedai/DeepSpeed#129: biases of four elements each, cut in four."""
    case = Case(pp=2, dp=4, layers=2, hidden=4, heads=2, bitfit=True, dtype=dtype, steps=3, micro=1, lr=0.05)
    results = worker_group(8).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5 if dtype == "fp32" else 2e-2)


@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
def test_one_plain_step_moves_every_bias_alike_at_any_tp(bitfit, base, truth, worker_group):
    """pytorch/torchtitan#4332: right outputs, but 1 / TP of a row-parallel bias's gradient. Adam would hide it, SGD cannot."""
    case = Case(tp=2, bitfit=bitfit, steps=1, clip=0.0)
    expected, before = truth(case), base_tensors(base(case))
    moved = merge(worker_group(2).run(grid_run, case, base(case)))
    biases = [name for name in moved if name.endswith("bias")]
    assert len(biases) == 6 * case.layers + 2
    for name in biases:
        step, wanted = (after[name] - before[name] for after in (moved, expected["tensors"]))
        assert float(wanted.abs().max()) > 1e-3, name
        torch.testing.assert_close(step, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("bitfit", [False, True], ids=["full", "bitfit"])
def test_an_odd_vocabulary_is_padded_to_tp_and_the_padding_left_out_of_the_loss(bitfit, base, truth, worker_group):
    """NVIDIA/Megatron-LM#1754: --make-vocab-size-divisible-by 1 at TP 2 gave another loss than one process."""
    vocab, padded = 201, padded_vocab_size(201, tp=2, divisible_by=1, pad_to=None)
    assert padded == 202
    case = Case(tp=2, bitfit=bitfit, vocab=vocab, padded=padded, lr=0.05)
    alone = dataclasses.replace(case, padded=vocab)  # no padding at all in one process
    expected = truth(alone)
    results = worker_group(2).run(grid_run, case, base(alone))
    table = merge(results)[WORDS]
    assert len(table) == padded and not table[vocab:].any(), "a row of padding learns nothing"
    without = {name: F.pad(tensor, (0, 0, 0, padded - vocab)) if name == WORDS else tensor
               for name, tensor in expected["tensors"].items()}
    check(case, results, {**expected, "tensors": without}, 1e-5)


@pytest.mark.parametrize("positions", ["absolute", "rotary"])
def test_other_position_types_agree_over_the_grid(positions, base, truth, worker_group):
    case = Case(tp=2, pp=2, bitfit=True, positions=positions)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5)


def test_segment_ids_travel_between_stages(base, truth, worker_group):
    """deepspeedai/DeepSpeed#3895: integers beside the hidden states, of which no gradient comes back."""
    case = Case(tp=2, pp=2, bitfit=True, reset_mask=True)
    results = worker_group(4).run(grid_run, case, base(case))
    check(case, results, truth(case), 1e-5)
    without = truth(dataclasses.replace(case, reset_mask=False))
    assert abs(without["losses"][0] - results[0]["losses"][0]) > 1e-4


def test_an_overflow_skips_the_step_on_all_ranks_together(base, worker_group):
    case = Case(tp=2, pp=2, bitfit=True, dtype="fp16", steps=8, lr=1e-3, initial_scale_power=22)
    results = worker_group(4).run(overflow_run, case, base(case))
    seen = results[0]["seen"]
    assert all(result["seen"] == seen or [step[:3] for step in result["seen"]] == [step[:3] for step in seen]
               for result in results)
    skips = [step[0] for step in seen]
    assert skips[0] == 1, "the first step overflows"
    assert not seen[0][3] and seen[0][2] == 0, "neither weights nor schedule moved"
    assert skips[-1] < len(seen) and seen[-1][3], "then the scale has come down and training goes on"
    assert seen[-1][1] < 2.0**22 and seen[-1][2] == 8 * (len(seen) - skips[-1])


def test_gradient_norm_of_bitfit_is_that_of_the_bias_part(base, truth):
    """NVIDIA/Megatron-LM#7228: a frozen tied weight adds nothing (the grids above have this norm)."""
    full, bitfit = truth(Case(clip=0.0)), truth(Case(clip=0.0, bitfit=True))
    assert full["losses"][0] == bitfit["losses"][0]
    part = torch.sqrt(sum((gradient.double()**2).sum() for name, gradient in full["gradients"].items()
                          if name.rpartition(".")[2] == "bias"))
    assert bitfit["norms"][0] == pytest.approx(float(part), rel=1e-9)
    assert bitfit["norms"][0] < full["norms"][0]
    assert pipeline_name("layers.1.word_embeddings.weight") in full["gradients"]
