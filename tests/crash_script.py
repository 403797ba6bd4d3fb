"""``pretrain_gpt.py``, a save of which ends badly.

The environment variable CRASH holds a JSON object. ``save`` is the number of the save in this
job (1 is the first), and one of these says what happens then:

- ``call``: all ranks are killed before that file operation of this rank under --save;
- ``at``: [event, end of a path]: the same, before the first operation of that kind;
- ``seconds``: all ranks are killed so long after this rank began;
- ``alone``: true with one of those: this rank only;
- ``limit``: from then on no file of this rank can grow beyond so many bytes.

``pids`` is a folder in which the ranks find each other.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pretrain_gpt
from megatron.checkpoint.save import Saver

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir")


def arm(crash: dict) -> None:
    """Have this process die, or fail, as ``crash`` says."""
    pids = Path(crash["pids"])
    (pids / str(os.getpid())).touch()
    save, seen = Saver.save, {"saves": 0, "calls": 0, "folder": None}

    def die() -> None:
        seen["folder"] = None  # what follows is no operation of the save
        for path in [] if crash.get("alone") else pids.iterdir():
            if path.name != str(os.getpid()):
                os.kill(int(path.name), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(saver, *args):
        seen["saves"] += 1
        if seen["saves"] == crash.get("save"):
            seen.update(folder=str(saver.folder), calls=0)
            if "seconds" in crash:
                threading.Timer(crash["seconds"], die).start()
            if "limit" in crash:
                resource.setrlimit(resource.RLIMIT_FSIZE, (crash["limit"], resource.RLIM_INFINITY))
        save(saver, *args)
        if seen["folder"]:
            print(f"file operations: {seen['calls']}", flush=True)

    def watch(event: str, args: tuple) -> None:
        if seen["folder"] is None or event not in EVENTS or not str(args[0]).startswith(seen["folder"]):
            return
        seen["calls"] += 1
        path = str(args[1] if event == "os.rename" else args[0])
        kind, end = crash.get("at", (None, ""))
        if seen["calls"] == crash.get("call") or event == kind and path.endswith(end):
            die()

    Saver.save = counted
    sys.addaudithook(watch)


if __name__ == "__main__":
    if "CRASH" in os.environ:
        arm(json.loads(os.environ["CRASH"]))
    sys.exit(pretrain_gpt.main())
