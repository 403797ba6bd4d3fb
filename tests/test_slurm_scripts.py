"""The launch scripts of examples/: they parse, their flags are accepted, and they really start, stop and go on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from launching import ROOT, free_port, training_lines
from slurm_jobs import EXAMPLES, THREE_STEPS, TINY_MODEL, Cluster, free_job, small_data, wait_until, warm_ranks

from megatron.planning.shape import PRESET_PADDED_VOCAB, PRESETS

SLURM_SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.slurm"))
SHELL_SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in (
    *EXAMPLES.glob("*.slurm"), *EXAMPLES.rglob("*.sh"), ROOT / "tools" / "setup_env.sh", ROOT / "tests" / "run.sh", ROOT / ".ci" / "run"))
#: script -> preset, nodes, GPUs of a node, steps of one job
TRAINING = {"bitfit_mtf_7b1.slurm": ("bloom-7b1", 8, 8, 1), "bitfit_mtf_560m.slurm": ("bloom-560m", 1, 8, 1),
            "bitfit_176b.slurm": ("bloom-176b", 1, 8, 1), "baseline_and_bitfit.slurm": ("bloom-560m", 1, 8, 2),
            "learning_rates.slurm": ("bloom-560m", 1, 8, 1), "requeue.slurm": ("bloom-3b", 2, 8, 1)}
#: a log with the lines of a run of four iterations
LOG = "".join(f" iteration {i:8d}/       4 | consumed samples: {8 * i} | consumed tokens: {64 * i} | elapsed time per iteration"
              f" (s): 1.00 | learning rate: 1.000E-03 | global batch size:     8 | lm loss: {6 / i:.6E} | grad norm: 1.000 |"
              " num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per second:"
              " 8.000 | TFLOPs: 1.00 |\n" for i in range(1, 5))


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def directives(name):
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", (EXAMPLES / name).read_text(), re.M))


def steps_of(cluster, name, *arguments, **more):
    """The steps of a script whose steps do nothing; an array is one task of it."""
    if "array" in directives(name) and "options" not in more:
        more["options"] = ("--array", "2")
    cluster.printed.write_text(LOG)
    job = cluster.submit(name, *arguments, FAKE_SLURM_CODE="0 0 0 0 0", **more)
    assert job.code == 0, job.text
    return job.steps


def value(flags, name):
    """That of the last one, as the parser takes it."""
    return flags[len(flags) - flags[::-1].index(name)]


# --- the text of the scripts ------------------------------------------------------------------


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_bash_can_read_it(script):
    done = subprocess.run(["bash", "-n", script], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", "--external-sources", *SHELL_SCRIPTS], cwd=ROOT, text=True, capture_output=True,
                          check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SLURM_SCRIPTS)
def test_its_first_lines_are_in_order(script):
    text = (EXAMPLES / script).read_text()
    assert text.startswith("#!/usr/bin/env bash\n#SBATCH ") and "\nset -euo pipefail\n" in text
    assert not re.search(r"(?<!-)\beval\b(?!-)", text)
    # sbatch stops reading at the first command, and takes a line with two words for another option
    ahead, behind = text.split("\nset -euo pipefail\n")
    assert "#SBATCH" not in behind and not re.search(r"^#SBATCH \S+ ", ahead, re.M)
    asked = directives(script)
    assert asked["account"] == "my_project" and {"nodes", "gres", "time", "output", "cpus-per-task"} <= asked.keys()
    # each value at the top can be given from outside
    block = re.search(r"# --- edit here.*?\n(.*?)\n# -{50,}\n", behind, re.S)[1]
    for name, default in re.findall(r"^(?:export )?(\w+)=(.*)$", block, re.M):
        assert re.match(rf'"\$\{{{name}:[-?]', default), f"{name}={default}"


@pytest.mark.parametrize("script", SLURM_SCRIPTS)
def test_the_readme_says_what_it_is(script):
    assert f"| [`{script}`]({script}) |" in (EXAMPLES / "README.md").read_text()


def minutes(limit):
    hours, minutes, _ = map(int, limit.split(":"))
    return 60 * hours + minutes


# --- the command lines ------------------------------------------------------------------------


@pytest.mark.parametrize("script", TRAINING)
def test_its_flags_are_accepted_on_the_nodes_it_asks_for(script, cluster):
    preset, nodes, gpus, number = TRAINING[script]
    asked = directives(script)
    assert (int(asked["nodes"]), asked["gres"]) == (nodes, f"gpu:{gpus}")
    steps = steps_of(cluster, script)
    assert len(steps) == number
    ports = [step.environ["MASTER_PORT"] for step in steps]
    assert len(set(ports)) == number
    for step in steps:
        ranks = nodes * gpus
        settings = step.settings(ranks)
        model, options = settings.model, step.options
        assert (model.num_layers, model.hidden_size, model.num_attention_heads) == PRESETS[preset]
        assert (model.seq_length, model.position_embedding_type, model.embed_layernorm) == (2048, "alibi", True)
        assert settings.tokenizer.pad_vocab_size_to == PRESET_PADDED_VOCAB
        assert step.environ["MASTER_ADDR"] == "127.0.0.1"
        if options["command"][0] == "python":
            assert (step.launchers, options["ntasks_per_node"], options["kill_on_bad_exit"]) == (ranks, gpus, 0)
            assert int(asked["ntasks-per-node"]) == gpus and options["output"].endswith("/train/rank-%4t.log")
        else:
            assert options["command"][:2] == ["bash", "examples/slurm_node.sh"] and options["command"][3] == str(gpus)
            assert (step.launchers, options["ntasks_per_node"], options["kill_on_bad_exit"]) == (nodes, 1, 1)
        assert (options["nodes"], options["wait"]) == (nodes, 60)
        # without this a step has one core a task, whatever the job was given
        assert options["cpus_per_task"] == int(asked["cpus-per-task"])
        assert all(step.environ[f"{name}_OFFLINE"] == "1" for name in ("HF_HUB", "TRANSFORMERS", "HF_DATASETS"))
        # the same line starts and goes on
        assert settings.checkpoint.load == "/data/base" and settings.checkpoint.save not in (None, "/data/base")
        stops = value(step.flags, "--exit-duration-in-mins") if "--exit-duration-in-mins" in step.flags else None
        if stops is None:
            assert "--exit-signal-handler" in step.flags and asked["signal"] == "USR1@600" and "requeue" in asked
        else:
            assert number * int(stops) < minutes(asked["time"]) - 10
        bitfit = settings.optimizer.bitfit
        assert bitfit or (script, step) == ("baseline_and_bitfit.slurm", steps[0])
        assert settings.optimizer.lr == (1e-3 if number == 1 else 2e-5)


def test_the_7b1_run_is_the_public_one_but_for_its_rate(cluster):
    """GBS 2048 of micro-batches of 4, no TP and PP, fp16, 6,348,800 samples, decay 1e-4, evaluations of 50 batches each 250."""
    step, = steps_of(cluster, "bitfit_mtf_7b1.slurm")
    settings = step.settings(64)
    assert settings.model.params_dtype == "fp16" and settings.parallel.data_parallel_size == 64
    told = {"--micro-batch-size": "4", "--global-batch-size": "2048", "--weight-decay": "1e-4", "--eval-interval": "250",
            "--eval-iters": "50", "--train-samples": "6_348_800", "--adam-beta2": "0.95", "--seed": "42", "--zero-stage": "1",
            "--lr-decay-style": "constant", "--initial-loss-scale": "4096", "--loss-scale-window": "500"}
    assert {name: value(step.flags, name) for name in told} == told
    assert "--norm-target-loss" not in step.flags


def plan(*flags):
    """Whether tools/plan_run.py finds a way, and what it found or said."""
    done = subprocess.run([sys.executable, "tools/plan_run.py", *flags, "--json"], cwd=ROOT, text=True, capture_output=True,
                          check=False)
    return done.returncode == 0, json.loads(done.stdout) if done.returncode == 0 else done.stderr


def test_176b_asks_for_the_fewest_nodes_that_hold_it(cluster):
    told, = re.findall(r"^#   python tools/plan_run.py (.*)$", (EXAMPLES / "bitfit_176b.slurm").read_text(), re.M)
    found, fewest = plan(*told.split())
    assert found, fewest
    step, = steps_of(cluster, "bitfit_176b.slurm")
    nodes, gpus = step.options["nodes"], int(step.options["command"][3])
    flags = [*step.flags, "--vocab-size", "250680", "--gpu-memory-gb", "80", "--gpus"]
    found, own = plan(*flags, str(nodes * gpus))
    assert found and own["asked"] == "BitFit" and own["plans"]["BitFit"]["fits"], own
    for name in ("grid", "parameters", "dtype", "micro_batch_size", "global_batch_size"):
        assert own[name] == fewest[name], "the comment plans another run than the script starts"
    assert own["plans"]["BitFit"]["stages"] == fewest["plans"]["BitFit"]["stages"]
    # on a node less, or half of the only one, no grid of any shape holds it
    less = (nodes - 1) * gpus or gpus // 2
    at = flags.index("--tensor-model-parallel-size")
    anyhow = flags[:at] + flags[at + 4:]
    assert flags[at + 2] == "--pipeline-model-parallel-size"
    found, said = plan(*anyhow, str(less))
    assert not found and f"no grid of --gpus {less} holds BitFit training" in said


def test_the_pair_differs_in_one_flag(cluster):
    baseline, bitfit = steps_of(cluster, "baseline_and_bitfit.slurm", "--seed", "7")
    assert bitfit.flags[-1] == "--bitfit" and len(baseline.flags) == len(bitfit.flags) - 1
    differ = [(one, other) for one, other in zip(baseline.flags, bitfit.flags) if one != other]
    assert sorted(differ) == [(f"{cluster.folder}/run/baseline/{name}", f"{cluster.folder}/run/bitfit/{name}")
                              for name in ("checkpoints", "tensorboard")]
    page, table = (cluster.folder / "run" / f"comparison.{kind}" for kind in ("html", "txt"))
    assert "<html" in page.read_text() and table.read_text() in cluster.output.read_text()
    assert re.search(r"baseline +bitfit", table.read_text())


def test_each_task_of_the_array_has_its_rate_folder_and_port(cluster):
    steps = steps_of(cluster, "learning_rates.slurm", options=("--array", directives("learning_rates.slurm")["array"]))
    rates = [value(step.flags, "--lr") for step in steps]
    assert rates == ["1e-4", "3e-4", "1e-3", "1.6e-3", "3e-3"]
    assert [value(step.flags, "--save") for step in steps] == [f"{cluster.folder}/runs/lr-{rate}/checkpoints" for rate in rates]
    assert len({step.environ["MASTER_PORT"] for step in steps}) == len(rates)
    others = [[word for word in step.flags if word not in rates and "/lr-" not in word] for step in steps]
    assert all(flags == others[0] for flags in others), "the runs differ in their rate alone"
    job = cluster.submit("learning_rates.slurm", options=("--array", "5"), FAKE_SLURM_CODE="0", RATES="1 2 3 4 5")
    assert job.code == 1 and "has no rate number 5" in job.text and len(job.steps) == len(rates)


def test_jobs_beside_each_other_on_a_node_have_other_ports(cluster):
    """Each takes up to eight of them, one for each step."""
    taken = set()
    for job in (4242, 4243):
        for folder in cluster.fakes.iterdir():
            shutil.rmtree(folder)
        steps = steps_of(cluster, "baseline_and_bitfit.slurm", job=job)
        ports = {int(step.environ["MASTER_PORT"]) for step in steps}
        assert len(ports) == 2 and not ports & taken and all(1024 <= port < 32768 for port in ports)
        taken |= ports


def test_a_launcher_in_the_environment_of_the_submission_is_forgotten(cluster):
    step, = steps_of(cluster, "requeue.slurm", RANK="3", WORLD_SIZE="4", LOCAL_RANK="3", MASTER_PORT="1", MASTER_ADDR="elsewhere")
    assert step.environ.keys().isdisjoint({"RANK", "WORLD_SIZE", "LOCAL_RANK"})
    assert step.environ["MASTER_ADDR"] == "127.0.0.1" and step.environ["MASTER_PORT"] != "1"


# --- how scripts end --------------------------------------------------------------------------


@pytest.mark.parametrize("script", SLURM_SCRIPTS)
def test_the_code_of_a_failed_step_is_that_of_the_job(script, cluster):
    """Through tee, and without going on: the pair starts no second run and compares nothing."""
    job = cluster.submit(script, FAKE_SLURM_CODE="3 0", options=("--array", "0") if "array" in directives(script) else ())
    assert job.code == 3 and len(job.steps) == 1, job.text
    assert not (cluster.fakes / "requeued").exists()
    (log,) = cluster.folder.glob("run*/**/logs/*.log")
    assert "what the step prints" in log.read_text() and "what the step prints" in job.text


@pytest.mark.parametrize("code, restarts, requeued", [(75, "", True), (75, "3", True), (75, "20", False), (0, "", False),
                                                      (1, "", False), (137, "", False), (143, "", False)])
def test_only_a_run_that_saved_goes_back_into_the_queue(code, restarts, requeued, cluster):
    job = cluster.submit("requeue.slurm", FAKE_SLURM_CODE=str(code), FAKE_SLURM_RESTARTS=restarts)
    assert (job.code == code) == (restarts != "20"), job.text
    noted = cluster.fakes / "requeued"
    assert (noted.read_text() if noted.exists() else None) == ("4242\n" if requeued else None)


def test_a_site_that_does_not_queue_again_is_heard(cluster):
    job = cluster.submit("requeue.slurm", FAKE_SLURM_CODE="75", FAKE_SLURM_NO_REQUEUE="1")
    assert job.code not in (0, 75) and "not supported" in job.text


@pytest.mark.parametrize("script, without, words", [
    ("bitfit_mtf_7b1.slurm", "BASE", "BASE: is not set: folder of bloom-7b1"),
    ("requeue.slurm", "DATA", "DATA: is not set: prefix of the pairs"),
    ("smoke_2gpus.slurm", "ENV_SETUP", "/.venv/bin/activate is no file; see 'Once, on the login node'")])
def test_what_is_missing_is_named_before_anything_starts(script, without, words, cluster, tmp_path):
    del cluster.values[without]
    # a copy of what scripts need, where no .venv is
    repository = tmp_path / "repository"
    shutil.copytree(EXAMPLES, repository / "examples")
    (repository / "pretrain_gpt.py").touch()
    job = cluster.submit(script, FAKE_SLURM_CODE="0", REPO=str(repository))
    assert job.code != 0 and words in job.text and not job.steps


def test_without_slurm_a_script_says_so(cluster):
    environ = {**cluster.environ(1), "REPO": str(ROOT)}
    done = subprocess.run(["bash", EXAMPLES / "bitfit_mtf_560m.slurm"], env=environ, cwd=ROOT, text=True, capture_output=True,
                          check=False)
    assert done.returncode == 1 and "this is no SLURM job: start the script with sbatch" in done.stderr


# --- real training ----------------------------------------------------------------------------

EIGHT_STEPS = ("--train-samples", "64", "--lr-warmup-samples", "8")
TWO_BY_TWO = ("--nodes", "2", "--gres", "gpu:2", "--cpus-per-task", "1")


@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["warm", "fresh"])
def test_a_job_out_of_time_saves_queues_itself_again_and_goes_on(warm, cluster, tmp_path):
    """srun alone, 2 nodes x 2 ranks: USR1 after the first iteration, code 75, scontrol requeue; then the same line once more."""
    cluster.values |= small_data(tmp_path)
    number, run = free_job(), tmp_path / "run"
    more = {"options": (*TWO_BY_TWO, "--ntasks-per-node", "2"), "job": number}
    with warm_ranks(tmp_path) as address:
        if warm:
            more["FAKE_SLURM_WARM"] = address
        job = cluster.start("requeue.slurm", *TINY_MODEL, *EIGHT_STEPS, **more)
        step = cluster.fakes / f"job{number:05d}" / "step0.pids"
        ranks = run / "logs" / f"job{number}.0" / "train"
        wait_until(lambda: training_lines(said(ranks / "rank-0003.log")), job)
        for pid in cluster.pids(step):
            os.kill(pid, signal.SIGUSR1)
        assert job.wait(400) == 75, cluster.output.read_text()
        assert (cluster.fakes / "requeued").read_text() == f"{number}\n"
        first = training_lines(said(ranks / "rank-0003.log"))
        assert 1 <= len(first) < 8, "stopped before its end"
        at = len(first)
        assert f"exiting program at iteration {at}: SIGUSR1" in said(ranks / "rank-0000.log")
        assert [path.name for path in (run / "checkpoints").glob("global_step*")] == [f"global_step{at}"]
        again = cluster.submit("requeue.slurm", *TINY_MODEL, *EIGHT_STEPS, FAKE_SLURM_RESTARTS="1", **more)
    assert again.code == 0, again.text
    ranks = run / "logs" / f"job{number}.1" / "train"
    assert sorted(path.name for path in ranks.iterdir()) == [f"rank-{rank:04d}.log" for rank in range(4)]
    assert f"resuming: --save {run}/checkpoints holds this run's global_step{at}" in said(ranks / "rank-0000.log")
    second = training_lines(said(ranks / "rank-0003.log"))
    assert [line["iteration"] for line in first + second] == [*range(1, 9)]
    # one log of both starts, and what the job printed has both too
    for text in (said(run / "logs" / "train.log"), again.text):
        assert [line["iteration"] for line in training_lines(text)] == [*range(1, 9)]
    assert (cluster.fakes / "requeued").read_text() == f"{number}\n", "a finished run is not queued again"


def said(path):
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
def test_srun_and_torchrun_train_on_two_nodes_and_keep_the_output_of_each_rank(cluster, tmp_path):
    cluster.values |= small_data(tmp_path)
    number, run = free_job(), tmp_path / "run"
    more = {"options": TWO_BY_TWO, "job": number}
    job = cluster.submit("bitfit_mtf_560m.slurm", *TINY_MODEL, *THREE_STEPS, **more)
    assert job.code == 0, job.text
    assert [line["iteration"] for line in lines_of(job.text)] == [1, 2, 3] and "trainable" in job.text
    assert "using world size: 4" in job.text
    files = {(path.parts[-5], path.parts[-2]): said(path) for path in (run / "logs" / f"job{number}.0" / "train").glob(
        "node*/*/attempt_0/*/stdout.log")}
    assert sorted(files) == [(f"node{node}", str(rank)) for node in range(2) for rank in range(2)]
    assert len(training_lines(files["node1", "1"])) == 3 and not training_lines(files["node0", "0"])
    # the same line goes on, and has nothing left to do
    again = cluster.submit("bitfit_mtf_560m.slurm", *TINY_MODEL, *THREE_STEPS, **more)
    assert again.code == 0, again.text
    assert f"resuming: --save {run}/checkpoints holds this run's global_step3" in again.text
    # a fault of all ranks: the job fails, each rank's own words are in a file of its own
    wrong = cluster.submit("bitfit_mtf_560m.slurm", *TINY_MODEL, *THREE_STEPS, "--load", "/nowhere", "--save",
                           str(tmp_path / "new"), **more)
    assert wrong.code != 0 and "/nowhere" in wrong.text
    newest = {}
    for path in sorted((run / "logs" / f"job{number}.0" / "train").glob("node*/*/attempt_0/*/stderr.log"),
                       key=lambda path: path.stat().st_mtime):
        newest[path.parts[-5], path.parts[-2]] = said(path)
    assert "error" in newest["node0", "0"] and "/nowhere" in newest["node0", "0"]


def lines_of(text):
    """Training lines of what torchrun prints, without its [default1]: in front."""
    return training_lines("\n".join(re.sub(r"^\[\w+\]:", "", line) for line in text.splitlines()))


@pytest.mark.slow
def test_the_pair_trains_and_ends_in_its_table(cluster, tmp_path):
    cluster.values |= small_data(tmp_path)
    job = cluster.submit("baseline_and_bitfit.slurm", *TINY_MODEL, "--train-iters", "4", "--lr-warmup-iters", "1",
                         options=("--gres", "gpu:2"), job=free_job(), LR="1e-2")
    assert job.code == 0, job.text
    logs = {name: lines_of(said(tmp_path / "run" / "logs" / f"{name}.log")) for name in ("baseline", "bitfit")}
    assert [len(lines) for lines in logs.values()] == [4, 4]
    assert logs["baseline"][0]["loss"] == logs["bitfit"][0]["loss"] and logs["baseline"][-1]["loss"] != logs["bitfit"][-1]["loss"]
    table = said(tmp_path / "run" / "comparison.txt")
    assert job.text.endswith(table) and "trainable parameters" in table
    assert "<svg" in said(tmp_path / "run" / "comparison.html")


@pytest.mark.slow
def test_the_smoke_test_passes_and_fails_without_gpus(cluster, tmp_path):
    job = cluster.submit("smoke_2gpus.slurm", job=free_job(), DEVICES="cpu", DS_ACCELERATOR="cpu")
    assert job.code == 0 and job.text.endswith("smoke test passed\n"), job.text
    assert {path.name for path in (tmp_path / "run" / "files").glob("*.log")} == {"base.log", "tp2.log", "pp2.log"}
    again = cluster.submit("smoke_2gpus.slurm", job=free_job(), DEVICES="cpu")
    assert again.code == 1 and "holds an earlier smoke test" in again.text
    import torch
    if torch.accelerator.device_count() < 2:
        cluster.values["RUN"] = str(tmp_path / "other")
        assert (job := cluster.submit("smoke_2gpus.slurm", job=free_job())).code == 1 and "needs two GPUs" in job.text


@pytest.mark.slow
def test_two_machines_without_slurm(cluster, tmp_path):
    values = small_data(tmp_path)
    environ = {**cluster.environ(1), **values, "GPUS": "1", "MASTER_PORT": str(free_port())}
    environ["DATA"] += "_inputs_document"
    command = ["bash", str(EXAMPLES / "bitfit_multinode.sh")]
    flags = [*TINY_MODEL, *THREE_STEPS, "--eval-iters", "0"]
    # the place as arguments on one, in variables on the other
    first = subprocess.Popen([*command, "0", "2", "127.0.0.2", *flags], cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL)
    other = subprocess.run([*command, "1", "2", "127.0.0.2", *flags], cwd=tmp_path, env=environ, text=True, capture_output=True,
                           check=False, timeout=200)
    assert first.wait(60) == 0 and other.returncode == 0, other.stdout + other.stderr
    assert [line["iteration"] for line in lines_of(other.stdout)] == [1, 2, 3]
    assert said(tmp_path / "run" / "logs" / "node1" / "train.log") == other.stdout


@pytest.mark.parametrize("place, words", [(("2", "2", "host0"), "NODE_RANK=2 must be below NNODES=2"), (("0", "2"), "MASTER_ADDR"),
                                          (("one", "2", "host0"), "NODE_RANK=one is not a whole number")])
def test_a_wrong_place_is_refused(place, words, cluster):
    done = subprocess.run(["bash", EXAMPLES / "bitfit_multinode.sh", *place], env=cluster.environ(1), cwd=ROOT, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 2 and words in done.stderr
