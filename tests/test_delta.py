"""A bias-only run is its base plus a small file."""

import contextlib
import io
import shutil
import struct
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
from megatron.checkpoint.delta_file import read_delta

sys.path.insert(0, str(ROOT / "tools"))
import bitfit_delta


def run(*words) -> subprocess.CompletedProcess:
    """The tool in this process: starting another one takes longer than all it does."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = bitfit_delta.main(list(map(str, words)))
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


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
        assert delta.metadata()["step"] == "3" and delta.metadata()["layers"] == "4"
        assert sum(delta.get_tensor(name).numel() for name in delta.keys()) == 11 * 24 * 4 + 2 * 24
        for term in ("self_attention.query_key_value.bias", "mlp.dense_h_to_4h.bias", "self_attention.dense.bias",
                     "input_layernorm.bias"):
            expected = torch.stack([truth[f"{3 + i}.{term}"] for i in range(4)])
            torch.testing.assert_close(delta.get_tensor(f"layers.{term}"), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(delta.get_tensor("embedding.word_embeddings.norm.bias"),
                                   truth["tied_modules.embed.word_embeddings.norm.bias"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(delta.get_tensor("final_layernorm.bias"), truth["8.bias"], rtol=1e-5, atol=1e-6)
    assert "26 biases, 1,104 elements" in said and said.endswith("from iteration 3\n")
    data = (folder / "d.safetensors").read_bytes()
    assert len(data) == 8 + struct.unpack("<Q", data[:8])[0] + 1104 * 4


def test_a_run_of_some_terms_gives_these_alone(trained, tmp_path):
    state = files.mp_rank_file(tmp_path / "run" / "global_step3", 0)
    shutil.copytree(trained[0] / "run", tmp_path / "run")
    (tmp_path / "run" / "global_step3" / "manifest.json").unlink()
    torch.save(files.read(state) | {"bitfit_bias_terms": ["query", "layernorm"]}, state)
    done = run("extract", "--checkpoint", tmp_path / "run", "--output", tmp_path / "d.safetensors")
    assert "14 biases, 336 elements, of query layernorm alone" in done.stdout, done.stderr
    whole, some = read_delta(trained[0] / "d.safetensors"), read_delta(tmp_path / "d.safetensors")
    fused = whole.tensors["layers.2.self_attention.query_key_value.bias"].view(4, 3, 6)
    assert torch.equal(some.tensors["layers.2.self_attention.query_key_value.query.bias"].view(4, 6), fused[:, 0])
    assert "layers.0.mlp.dense_4h_to_h.bias" in some.facts.prints.keys() - whole.facts.prints.keys()
    state.write_bytes(b"of another trainer")  # the layer files alone do not tell
    done = run("extract", "--checkpoint", tmp_path / "run", "--output", tmp_path / "d.safetensors")
    assert "26 biases, 1,104 elements, " in done.stdout and done.stdout.endswith("from iteration 0\n"), done.stderr


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


def test_removing_gives_the_base_back_bit_for_bit(trained, tmp_path):
    folder, _, _ = trained
    run("apply", "--base", folder / "base", "--delta", folder / "d.safetensors", "--output", tmp_path / "merged")
    for way, more in (("undo", []), ("base", ["--base", folder / "base"])):
        done = run("remove", "--checkpoint", tmp_path / "merged", "--output", tmp_path / way, *more)
        assert done.returncode == 0, done.stderr
        for path in sorted((folder / "base" / "global_step1").glob("layer_*")):
            before, after = files.read(path), files.read(tmp_path / way / "global_step1" / path.name)
            assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_what_does_not_fit_is_named_and_leaves_nothing(trained, tmp_path):
    folder, case, _ = trained
    write_base(str(tmp_path / "other"), Case(hidden=48))
    done = run("apply", "--base", tmp_path / "other", "--delta", folder / "d.safetensors", "--output", tmp_path / "x")
    assert done.returncode == 1 and "is not the base of" in done.stderr and "embedding.word_embeddings.weight differs" in done.stderr
    write_base(str(tmp_path / "shallow"), Case(layers=2))
    done = run("apply", "--base", tmp_path / "shallow", "--delta", folder / "d.safetensors", "--output", tmp_path / "x")
    assert done.returncode == 1 and "has 2 layers" in done.stderr
    done = run("extract", "--checkpoint", tmp_path / "nothing", "--output", tmp_path / "y")
    assert done.returncode == 1 and f"--checkpoint {tmp_path / 'nothing'} holds no checkpoint" in done.stderr
    done = run("extract", "--checkpoint", folder / "run", "--base", tmp_path / "nothing", "--output", tmp_path / "y")
    assert done.returncode == 1 and f"--base {tmp_path / 'nothing'} holds no checkpoint" in done.stderr
    done = run("apply", "--base", folder / "base", "--delta", folder, "--output", tmp_path / "x")
    assert done.returncode == 1 and f"is a folder; give the file of a delta, such as {folder}/TAG/delta.safetensors" in done.stderr
    done = run("apply", "--base", folder / "base", "--delta", folder / "base" / "latest", "--output", tmp_path / "x")
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "shallow"]
