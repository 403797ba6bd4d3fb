"""Jobs that start runs as a command line would, and look at what they then hold."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import shlex
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from small_runs import SEQ, VOCAB, Case, settings_of, split_rows, train_steps

from megatron.arguments import parse_arguments
from megatron.checkpoint import files, load_plan, resume, save
from megatron.checkpoint.hugging_face_export import to_folder
from megatron.checkpoint.progress import Progress
from megatron.config import Settings
from megatron.engine import build_engine, build_model
from megatron.errors import RunError
from megatron.mpu.context import ParallelContext, build_context
from megatron.mpu.random import capture_rng_state, seed_everything

COMMON = (f"--num-layers 1 --hidden-size 24 --num-attention-heads 4 --seq-length {SEQ} --max-position-embeddings {SEQ} "
          "--position-embedding-type alibi --micro-batch-size 4 --global-batch-size 8 --train-iters 50 --weight-decay 0.1 "
          "--lr-decay-style linear --data-path d --tokenizer-type PretrainedFromHF --tokenizer-name-or-path t "
          "--init-method-std 0.2 --embed-layernorm")
PADDED = 100  # no other dimension of the model below
ALONE = Case(micro=4, layers=1)


def settings_for(flags: str) -> Settings:
    """Settings of a command line, as they are once the tokenizer has told its vocabulary."""
    defaults = {"--lr": "1e-3", "--seed": "7", "--initial-loss-scale": "1024", "--loss-scale-window": "100"}
    words = [*shlex.split(COMMON), *shlex.split(flags)]
    for flag, value in defaults.items():
        words += [] if flag in words else [flag, value]
    if "--save" in words:
        words += ["--save-interval", "5"]
    settings = parse_arguments(words, environ={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    return dataclasses.replace(settings, model=dataclasses.replace(
        settings.model, vocab_size=VOCAB, padded_vocab_size=PADDED, use_cpu_initialization=True))


@dataclasses.dataclass
class Started:
    """What a start has in its hands when training would begin."""

    settings: Settings
    context: ParallelContext
    streams: object
    engine: object
    schedule: object
    plan: load_plan.LoadPlan
    progress: Progress


def start(flags: str) -> Started:
    """The steps of ``training.pretrain`` up to the loop, without tokenizer and data."""
    from deepspeed.accelerator import get_accelerator

    # fp16 arithmetic is emulated, correctly, on CPUs without the instructions
    get_accelerator().is_fp16_supported = lambda: True
    settings = settings_for(flags)
    context = build_context(1, 1, 1, 0)
    streams = seed_everything(settings.train.seed, context)
    if not settings.train.eval_only:
        save.check_save_folder(settings.checkpoint, context)
    plan = load_plan.shared_plan(settings.checkpoint, context, eval_only=settings.train.eval_only)
    stored = resume.check_stored(plan, settings, context) if plan.folder else {}
    model = build_model(settings, context, streams, plan)
    resume.check_trained(plan, stored, settings, context, model)
    engine, schedule = build_engine(model, settings, context, 50, 8)
    engine.set_batch_fn(split_rows)
    progress = resume.resume(engine, plan, stored, streams, settings, context) if plan.folder else Progress()
    return Started(settings, context, streams, engine, schedule, plan, progress)


def go_on(run: Started, steps: int) -> None:
    """Train, count as the loop does, and save."""
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(steps):
            train_steps(run.engine, ALONE, run.context, run.progress.iteration, 1)
            run.progress.iteration += 1
            run.progress.consumed_train_samples += 8
            run.progress.consumed_train_tokens += 8 * SEQ
            run.progress.consumed_valid_samples += 3
            run.progress.gigaflos_no_embeds += 0.25
        save.save(run.engine, run.settings, run.context, run.progress, run.streams)


# --- what a start holds -------------------------------------------------------------------------


def digest(*tensors: torch.Tensor) -> str:
    """Hash of the values as fp32, in order; all zeros count as nothing."""
    flat = torch.cat([tensor.detach().float().flatten().cpu() for tensor in tensors]) if tensors else torch.zeros(0)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16] if flat.any() else "nothing"


def masters(engine) -> list[torch.Tensor]:
    """The fp32 copies that the optimizer updates, one flat tensor per group."""
    return [param for group in engine.optimizer.optimizer.param_groups for param in group["params"]]


def weights_in_order(engine) -> list[torch.Tensor]:
    """The model's weights as flat tensors, in the order of the masters."""
    optimizer = engine.optimizer
    groups = optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups
    return [torch.cat([param.detach().flatten() for param in group]) for group in groups]


def held(run: Started) -> dict:
    """Column of the table -> value that says whether two starts hold the same."""
    engine, progress, schedule = run.engine, dict(vars(run.progress)), run.schedule.state_dict()
    moments = [state[name] for state in engine.optimizer.optimizer.state.values()
               for name in ("exp_avg", "exp_avg_sq") if name in state]
    rng = capture_rng_state(run.streams)
    scaler = getattr(engine.optimizer, "loss_scaler", object)
    return {
        # without the rows that pad the vocabulary, which are nobody's weights
        "weights": digest(*(param[:VOCAB] if len(param) == PADDED else param for param in engine.module.parameters())),
        "fp32 masters": digest(*masters(engine)),
        "weights as masters": digest(*weights_in_order(engine)),
        "Adam": digest(*moments),
        "iteration": progress.pop("iteration"),
        "samples": progress,
        "LR progress": (schedule.pop("num_steps"), schedule.pop("num_tokens"), schedule.pop("warmup_tokens")),
        "LR constants": schedule,
        "loss scale": {name: value for name, value in vars(scaler).items()
                       if name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")},
        "RNG": (rng["random_rng_state"], rng["np_rng_state"][1].tolist(), rng["np_rng_state"][2:],
                digest(rng["torch_rng_state"]), digest(*rng["rng_tracker_states"].values())),
        "rate": {group["lr"] for group in engine.optimizer.optimizer.param_groups},
        "wanted rate": {run.schedule.get_lr()},
    }


def cells(root: str, rows: list[str], precision: str = "--fp16") -> tuple[dict, dict]:
    """One process: save two runs below ``root``, then start each row and look.

    A row is a command line whose folders are the words of docs/loading.md. Returns
    ({"BASE", "RUN", "RUN before", "fresh": what was held there}, {row: what it holds, or the
    sentence that refuses it}). Rows whose plans and schedules are the same share one start.
    """
    folders = Path(root)
    known = {}
    base = start(f"--save {folders / 'BASE'} --seed 3 --lr 7e-4 --initial-loss-scale 256 {precision}")
    go_on(base, 1)
    known["BASE"] = held(base)
    run = start(f"--save {folders / 'RUN'} --seed 4 --initial-loss-scale 512 {precision}")
    for name in ("RUN before", "RUN"):
        go_on(run, 1)
        known[name] = held(run)
    known["fresh"] = held(start(precision))
    _odd_folders(folders)
    to_folder(folders / "BASE", folders / "HF")
    seen, started = {}, {}
    for row in rows:
        here = Path(root, f"row{len(seen)}")
        words = [_folder(word, here, folders) for word in row.split()]
        line = f"{' '.join(words)} {precision}"
        settings = settings_for(line)
        try:
            context = ParallelContext()
            plan = load_plan.shared_plan(settings.checkpoint, context, eval_only=settings.train.eval_only)
            same = dataclasses.replace(plan, reason="", warning=None), settings.optimizer
            if str(same) not in started:
                started[str(same)] = held(start(line))
            seen[row] = {**started[str(same)], "read": str(plan.path.relative_to(folders)) if plan.folder else "nothing", "warning": plan.warning}
        except RunError as error:
            seen[row] = str(error)
    return known, seen


def _folder(word: str, here: Path, folders: Path) -> str:
    """The path for a word of a row; NEW, MISSING and EMPTY are each row's own."""
    name, _, tag = word.partition("/")
    if name == "EMPTY":
        (here / name).mkdir(parents=True, exist_ok=True)
    if name in ("NEW", "MISSING", "EMPTY"):
        return str(here / name)
    if name.isupper():
        return str(folders / name / "global_step1" if tag else folders / name)
    return word


def _odd_folders(folders: Path) -> None:
    shutil.copytree(folders / "RUN", folders / "TORN")
    whole = next((folders / "TORN" / "global_step2").glob("layer_03*"))
    os.truncate(whole, whole.stat().st_size - 7)
    (folders / "STRANGE").mkdir()
    (folders / "STRANGE" / "latest").write_text("../BASE/global_step1")
    for name, tags in (("ONE", ["global_step1"]), ("SEVERAL", ["global_step1", "global_step2"])):
        for tag in tags:
            shutil.copytree(folders / "BASE" / "global_step1", folders / name / tag)
            (folders / name / tag / "manifest.json").unlink(missing_ok=True)


# --- lr = 0 -------------------------------------------------------------------------------------


def step_without_rate(root: str, stage: int, precision: str, kinds: list[str]) -> dict[str, tuple]:
    """Per kind of start: (masters equal the loaded weights, what a step with a rate of 0 changed, whether Adam saw it)."""
    folder = Path(root)
    first = start(f"--save {folder / 'run'} --seed 3 --initial-loss-scale 256 {precision}")
    go_on(first, 1)
    result = {}
    for kind in kinds:
        more = kind.format(run=folder / "run", new=folder / "new")
        run = start(f"{more} --lr 0 --zero-stage {stage} {precision}")
        assert run.plan.folder and not run.plan.resume
        stored = [value.clone() for value in run.engine.module.parameters()]
        files_hold = _stored_weights(run.plan.path)
        equal = all(torch.equal(master[:len(weight)], weight.float())
                    for master, weight in zip(masters(run.engine), weights_in_order(run.engine), strict=True))
        before = [value.clone() for value in masters(run.engine)]
        train_steps(run.engine, ALONE, run.context, 5, 1)
        changed = sum(not torch.equal(one, other) for one, other in zip(stored, run.engine.module.parameters()))
        changed += sum(not torch.equal(one, other) for one, other in zip(before, masters(run.engine)))
        loaded = digest(*run.engine.module.parameters()) == digest(*files_hold)
        result[kind] = (equal, loaded, changed, held(run)["Adam"] != "nothing")
    return result


# --- weights alone ------------------------------------------------------------------------------


def weights_without_optimizer(root: str, rows: list[str]) -> tuple[dict, dict, dict[str, tuple]]:
    """One process: save a run, take away its optimizer files, start each row from the rest; see ``held``.

    Even rows find no optimizer files, odd ones folders of their names, which nothing can read.
    Returns what the run held, what a fresh start holds, and per row what that start holds, the path it read and the
    engine's counters (steps, samples, skipped steps, micro-steps).
    """
    folder = Path(root)
    run = start(f"--save {folder / 'whole'} --seed 4 --initial-loss-scale 512 --fp16")
    go_on(run, 2)
    counted = {}
    for number, row in enumerate(rows):
        copy = folder / f"copy{number}"
        shutil.copytree(folder / "whole", copy)
        for path in list(copy.rglob("*_optim_states.pt")):
            path.unlink()
            if number % 2:
                path.mkdir()
        begun = start(f"{row.replace('RUN', str(copy)).replace('NEW', str(folder / f'new{number}'))} --fp16")
        engine = begun.engine
        counted[row] = (held(begun), str(begun.plan.path.relative_to(copy)),
                        (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps))
    return held(run), held(start("--fp16")), counted


def _stored_weights(tag: Path) -> list[torch.Tensor]:
    return [value for path in sorted(tag.glob("layer_*")) for value in files.read(path).values()]


# --- two ranks ----------------------------------------------------------------------------------


def what_all_say(folders: list[str], flags: dict) -> str:
    """The plan of this rank, which works in ``folders[rank]``, or the refusal."""
    home = os.getcwd()
    rank = dist.get_rank()
    settings = settings_of(Case(tp=len(folders)), rank)
    context = build_context(len(folders), 1, dist.get_world_size(), rank)
    os.chdir(folders[rank])
    try:
        plan = load_plan.shared_plan(dataclasses.replace(settings.checkpoint, **flags), context)
        return f"{plan.folder} {plan.tag}"
    except RunError as error:
        return f"refused: {error}"
    finally:
        os.chdir(home)
