"""A bias-only run is its base plus a small file."""

import shutil
import subprocess
import sys

import pytest
import torch
from launching import ROOT
from resume_jobs import first_half
from safetensors import safe_open
from small_runs import Case, reference_run, write_base

from megatron.bitfit import is_bias
from megatron.checkpoint import files

TOOL = [sys.executable, str(ROOT / "tools" / "bitfit_delta.py")]


def run(*words) -> subprocess.CompletedProcess:
    return subprocess.run([*TOOL, *map(str, words)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, worker_group):
    """A base, a bias-only run of it at TP=2, PP=2, and the delta of that run."""
    folder = tmp_path_factory.mktemp("delta")
    case = Case(tp=2, pp=2, bitfit=True, clip=0.0)
    write_base(str(folder / "base"), case)
    worker_group(4).run(first_half, case, str(folder / "base"), 3, str(folder / "run"))
    done = run("extract", "--checkpoint", folder / "run", "--output", folder / "d.safetensors")
    assert done.returncode == 0, done.stderr
    return folder, case, done.stdout


def test_the_delta_holds_the_whole_biases_of_a_single_process_run(trained):
    folder, case, said = trained
    truth = reference_run(Case(bitfit=True, clip=0.0, steps=3), str(folder / "base"))["tensors"]
    with safe_open(folder / "d.safetensors", "pt") as delta:
        assert delta.metadata()["tag"] == "global_step3" and delta.metadata()["layers"] == "4"
        assert sum(delta.get_tensor(name).numel() for name in delta.keys()) == 11 * 24 * 4 + 2 * 24
        for name, expected in ((f"layers.{i}.{term}", truth[f"{3 + i}.{term}"]) for i in range(4)
                               for term in ("self_attention.query_key_value.bias", "mlp.dense_h_to_4h.bias",
                                            "self_attention.dense.bias", "input_layernorm.bias")):
            torch.testing.assert_close(delta.get_tensor(name), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(delta.get_tensor("embedding.word_embeddings.norm.bias"),
                                   truth["tied_modules.embed.word_embeddings.norm.bias"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(delta.get_tensor("final_layernorm.bias"), truth["8.bias"], rtol=1e-5, atol=1e-6)
    assert "26 biases, 1,104 elements" in said and said.endswith("from global_step3\n")
    assert (folder / "d.safetensors").stat().st_size < 1104 * 4 + 4096


def test_a_run_of_some_terms_says_that_all_biases_are_written(trained, tmp_path):
    state = files.mp_rank_file(tmp_path / "run" / "global_step3", 0)
    shutil.copytree(trained[0] / "run", tmp_path / "run")
    torch.save(files.read(state) | {"bitfit_bias_terms": ["query", "layernorm"]}, state)
    done = run("extract", "--checkpoint", tmp_path / "run", "--output", tmp_path / "d.safetensors")
    assert done.stdout.endswith("from global_step3; all biases are in it, although only these trained: query layernorm\n")
    assert "26 biases" in done.stdout
    state.write_bytes(b"of another trainer")  # the layer files alone do not tell
    done = run("extract", "--checkpoint", tmp_path / "run", "--output", tmp_path / "d.safetensors")
    assert done.stdout.endswith("from global_step3\n"), done.stderr


def test_base_plus_delta_is_the_run_bit_for_bit_whatever_the_layout(trained, tmp_path):
    folder, _, _ = trained
    for base in ("run", "base"):  # files of TP=2 and of TP=1
        done = run("apply", "--base", folder / base, "--delta", folder / "d.safetensors", "--output", tmp_path / base)
        assert done.returncode == 0, done.stderr
    for path in sorted((folder / "run" / "global_step3").glob("layer_*")):
        merged, wanted = files.read(tmp_path / "run" / "global_step3" / path.name), files.read(path)
        assert all(torch.equal(merged[name], wanted[name]) for name in wanted)
    for path in sorted((folder / "base" / "global_step1").glob("layer_*")):
        before, after = files.read(path), files.read(tmp_path / "base" / "global_step1" / path.name)
        assert before.keys() == after.keys()
        for name in before:
            assert is_bias(name) or torch.equal(before[name], after[name]), name


def test_what_does_not_fit_is_named_and_leaves_nothing(trained, tmp_path):
    folder, case, _ = trained
    write_base(str(tmp_path / "other"), Case(hidden=48))
    done = run("apply", "--base", tmp_path / "other", "--delta", folder / "d.safetensors", "--output", tmp_path / "x")
    assert done.returncode == 1 and "does not fit the base" in done.stderr
    write_base(str(tmp_path / "shallow"), Case(layers=2))
    done = run("apply", "--base", tmp_path / "shallow", "--delta", folder / "d.safetensors", "--output", tmp_path / "x")
    assert done.returncode == 1 and "layers.2" in done.stderr
    done = run("extract", "--checkpoint", tmp_path / "nothing", "--output", tmp_path / "y")
    assert done.returncode == 1 and "holds no checkpoint" in done.stderr
    done = run("apply", "--base", folder / "base", "--delta", folder / "base" / "latest", "--output", tmp_path / "x")
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "shallow"]
