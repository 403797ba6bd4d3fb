"""Does BitFit keep the languages of a base model better than full fine-tuning?  One command finds out:

    python examples/retention/run.py --out retention-out            within an hour on two cores
    python examples/retention/run.py --out retention-fast --fast    five minutes: shows that it works

Start it again after an interruption: what is finished is not done again. See README.md beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # two jobs side by side are faster than two threads of one
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).resolve().parent
for place in (HERE.parents[1], HERE):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import plan as plans  # noqa: E402

from megatron.checkpoint.files import write_text  # noqa: E402
from megatron.errors import RunError  # noqa: E402


class Costs:
    """Wall time over all starts of the command, kept in the folder."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "costs.json"
        self.before = json.loads(self.file.read_text())["wall_seconds"] if self.file.exists() else 0.0
        self.began = time.monotonic()

    @property
    def wall(self) -> float:
        return self.before + time.monotonic() - self.began

    def save(self, **more: float) -> None:
        """Write it down, so that the next start goes on counting."""
        known = json.loads(self.file.read_text()) if self.file.exists() else {}
        write_text(self.file, json.dumps(known | {"wall_seconds": self.wall} | more))


def finished(folder: Path, job: plans.Job) -> bool:
    return (folder / "results" / f"{job.name}.json").exists()


def run_jobs(folder: Path, plan: plans.Plan, workers: int, costs: Costs) -> None:
    """All jobs that are not finished, ``workers`` at a time. Raises RunError with the end of the log of one that fails."""
    for name in ("results", "runs", "logs"):
        (folder / name).mkdir(exist_ok=True)
    jobs = plans.jobs(plan)
    todo = [job for job in jobs if not finished(folder, job)]
    print(f"{len(jobs)} runs, {len(jobs) - len(todo)} finished before", flush=True)
    total = sum(plans.cost(plan, job) for job in todo)
    done, began = 0.0, time.monotonic()
    from jobs import work

    # One server loads the libraries; every job is forked from it, a fresh process without their 10 s.
    # It looks for "jobs" before it is told of this process's path, and is silent when it finds none.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jobs"])
    running: dict = {}
    try:
        while todo or running:
            while len(running) < workers and (job := _ready(folder, todo)):
                todo.remove(job)
                log = folder / "logs" / f"{job.name}.log"
                process = context.Process(target=work, args=(str(folder), plan, job, str(log)))
                process.start()
                running[process.sentinel] = (process, job, log)
            for sentinel in wait(list(running)):
                process, job, log = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
                    raise RunError(f"{job.name} failed, its log {log} ends:\n{tail}")
                done += plans.cost(plan, job)
                elapsed = time.monotonic() - began
                costs.save()
                left = (total - done) / done * elapsed
                print(f"{elapsed / 60:6.1f} min  {job.name:<28} {_summary(folder, job)}  about {left / 60:.0f} min left",
                      flush=True)
    finally:
        for process, *_ in running.values():
            process.terminate()
        for process, *_ in running.values():
            process.join()


def _ready(folder: Path, todo: list[plans.Job]) -> plans.Job | None:
    """The first job whose base is there."""
    for job in todo:
        if job.method is None or finished(folder, plans.Job(job.size)):
            return job
    return None


def _summary(folder: Path, job: plans.Job) -> str:
    figures = json.loads((folder / "results" / f"{job.name}.json").read_text())
    last = figures["points"][-1]
    others = [loss for language, loss in last["languages"].items() if language != "en"]
    task = sum(last["tasks"].values()) / len(last["tasks"])
    return f"other languages {sum(others) / len(others):.3f}, tasks {task:.3f}, {figures['seconds']:.0f} s"


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 after one sentence on stderr."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, metavar="DIR",
                   help="folder of data, checkpoints and results; start again with it to go on")
    p.add_argument("--fast", action="store_true", help="two tiny models, two seeds: about five minutes, too little to learn the languages")
    p.add_argument("--more", action="store_true", help="two larger models besides: some hours")
    p.add_argument("--workers", type=int, default=2, metavar="N", help="runs side by side, one core each (default: 2)")
    p.add_argument("--report", type=Path, metavar="DIR",
                   help="folder of RESULTS.md, results.json and figures (default: DIR/report of --out)")
    args = p.parse_args(argv)
    if args.fast and args.more:
        p.error("--fast and --more are two experiments; give one")
    if args.workers < 1:
        p.error(f"--workers {args.workers} must be at least 1")
    name = "fast" if args.fast else "more" if args.more else "whole"
    plan = {"fast": plans.FAST, "more": plans.MORE, "whole": plans.WHOLE}[name]
    try:
        execute(args.out.resolve(), plan, name, args.workers, args.report or args.out / "report")
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def execute(folder: Path, plan: plans.Plan, name: str, workers: int, report_folder: Path) -> None:
    """Data, runs, report."""
    import prepare
    import report

    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "plan.json"
    if mark.exists() and json.loads(mark.read_text()) != name:
        raise RunError(f"{folder} holds the experiment {json.loads(mark.read_text())!r}, this is {name!r}; "
                       "give another --out")
    write_text(mark, json.dumps(name))
    costs = Costs(folder)
    facts = prepare.prepare(folder, plan)
    if "preparation_cpu_seconds" not in (json.loads(costs.file.read_text()) if costs.file.exists() else {}):
        costs.save(preparation_cpu_seconds=time.process_time())
    print(f"{sum(facts['training_tokens'].values()):,} training tokens of {len(facts['training_tokens'])} languages",
          flush=True)
    run_jobs(folder, plan, workers, costs)
    print(report.write(folder, plan, facts, json.loads(costs.file.read_text()), report_folder))


if __name__ == "__main__":
    sys.exit(main())
