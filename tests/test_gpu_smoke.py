"""The gate of a machine with exactly two accelerators: whole launches of two ranks, TP=2 and PP=2.

Where two are visible the ranks use them, through NCCL on NVIDIA's; elsewhere the very
same launches run on gloo.
"""

import math

import pytest
from deepspeed.accelerator import get_accelerator
from launching import facts, torchrun, training_lines
from tiny_data import small_model_flags

# minutes where the ranks share two cores; other tests cover the grids there
pytestmark = pytest.mark.slow if get_accelerator().device_name() == "cpu" else []

GRIDS = {"TP=2": ["--tensor-model-parallel-size", "2"], "PP=2": ["--pipeline-model-parallel-size", "2"]}
LAYERS, HIDDEN = 2, 32
BIASES = 11 * HIDDEN * LAYERS + 2 * HIDDEN


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """(grid, "full" or "bitfit") -> log of a launch from one base, and "base" -> the log of that base (TP=2)."""
    folder = tmp_path_factory.mktemp("gate")
    base = str(folder / "base")
    flags = [*small_model_flags(folder), "--bf16", "--hidden-dropout", "0", "--attention-dropout", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_DEBUG", "VERSION")  # NCCL itself then says that it was started
        made = {"base": torchrun([*flags, *GRIDS["TP=2"], "--train-iters", "10", "--save", base,
                                "--save-interval", "10"], ranks=2, accelerators=True)}
        for grid, degrees in GRIDS.items():
            for kind, more in (("full", []), ("bitfit", ["--bitfit"])):
                made[grid, kind] = torchrun([*flags, *degrees, "--train-iters", "4", "--load", base, *more], ranks=2, accelerators=True)
    return made


def losses(log):
    return [line["loss"] for line in training_lines(log)]


def test_training_at_tp2_lowers_the_loss(logs):
    found = losses(logs["base"])
    assert len(found) == 10 and all(map(math.isfinite, found))
    assert found[0] == pytest.approx(math.log(257), abs=0.3), "a fresh model guesses among 257 bytes"
    assert found[-1] < found[0] - 0.5, found


@pytest.mark.parametrize("kind", ["full", "bitfit"])
def test_tp2_and_pp2_train_alike_from_one_checkpoint(kind, logs):
    ours = [training_lines(logs[grid, kind]) for grid in GRIDS]
    assert [len(lines) for lines in ours] == [4, 4]
    for tp2, pp2 in zip(*ours):
        # bf16 keeps 8 bits: the order of a sum already changes the third digit
        assert tp2["loss"] == pytest.approx(pp2["loss"], rel=1e-2)
        assert tp2["grad_norm"] == pytest.approx(pp2["grad_norm"], rel=5e-2) and pp2["grad_norm"] > 0
    assert ours[0][0]["loss"] < losses(logs["base"])[0] - 0.5, "it starts from the base's weights"


@pytest.mark.parametrize("grid", GRIDS)
def test_bitfit_trains_the_biases_alone(grid, logs):
    full, bitfit = logs[grid, "full"], logs[grid, "bitfit"]
    assert losses(full)[0] == losses(bitfit)[0], "the same forward pass"
    assert training_lines(bitfit)[0]["grad_norm"] < training_lines(full)[0]["grad_norm"]
    assert losses(bitfit)[-1] < losses(bitfit)[0] + 0.1
    counted = facts(bitfit)
    assert counted["trainable parameters"] == BIASES
    assert facts(full)["trainable parameters"] == counted["total parameters"]
    state, most = counted["optimizer state bytes (all ranks)"], facts(full)["optimizer state bytes (all ranks)"]
    # fp32 master and two moments, once per rank that holds the bias
    assert 12 * BIASES <= state <= 2 * 12 * BIASES + 64 < most / 10


def test_the_accelerators_are_used_when_there_are_two(logs):
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.device_count() >= 2 else None
    nccl = found is not None and found.type == "cuda"
    for name, log in logs.items():
        assert ("CCL version" in log) == nccl, f"{name}: what NCCL says of itself does not fit {found}"
