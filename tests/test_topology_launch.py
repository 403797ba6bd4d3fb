"""The same through the command line: nothing but the degrees in it changes."""

import shutil

import pytest
from launching import launch, run_alone, training_lines
from tiny_data import small_model_flags

from megatron.checkpoint.files import write_text


@pytest.mark.slow
@pytest.mark.parametrize("bitfit", [[], ["--bitfit"]], ids=["full", "bitfit"])
def test_a_command_line_goes_on_with_other_degrees(bitfit, tmp_path):
    run = tmp_path / "run"
    flags = [*small_model_flags(tmp_path), "--hidden-dropout", "0", "--attention-dropout", "0", "--train-iters", "8",
             "--save", str(run), "--save-interval", "5", "--eval-interval", "8", *bitfit]
    unbroken = launch([*flags, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"])
    shutil.rmtree(run / "global_step8")
    write_text(run / "latest", "global_step5")
    resumed = {}
    for name, grid, ranks in (("alone", [], 1), ("stages", ["--pipeline-model-parallel-size", "2"], 2),
                              ("replicas", ["--zero-stage", "0", "--bf16"], 2)):
        shutil.copytree(run, tmp_path / name)
        mine = [str(tmp_path / name) if flag == str(run) else flag for flag in flags] + grid
        resumed[name] = run_alone(mine) if ranks == 1 else launch(mine, ranks=ranks)
    wanted = training_lines(unbroken)[5:]
    for name, said in resumed.items():
        lines = training_lines(said)
        assert [line["iteration"] for line in lines] == [6, 7, 8]
        tolerance = 2e-2 if name == "replicas" else 1e-5
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in lines] == pytest.approx([line[key] for line in wanted], rel=tolerance)
        for key in ("learning_rate", "consumed_samples", "consumed_tokens", "global_batch_size"):
            assert [line[key] for line in lines] == [line[key] for line in wanted]
        assert said.count("saved at TP, PP, DP = (2, 2, 1), going on at") == 1
        assert said.count("random streams start anew from --seed 1234 and iteration 5") == 1
        assert evaluation(said) == pytest.approx(evaluation(unbroken), rel=tolerance)


def evaluation(log: str) -> float:
    line = next(line for line in log.splitlines() if line.startswith("valid loss at the end"))
    return float(line.split("lm loss value: ")[1].split()[0])
