"""Signals that are a wish to stop (--exit-signal-handler), from before anything slow is imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

#: the signals of --exit-signal-handler
STOPPING = (signal.SIGTERM, signal.SIGUSR1)
#: seconds in which more signals are the first one again: a scheduler signals a launcher and its ranks,
#: and the launcher hands it on
REPEAT = 1.0


class Signals:
    """From now on SIGTERM and SIGUSR1 are a wish to stop; one that comes later than REPEAT ends this process.

    The latter by ``quit``(a sentence, exit code). Must be made in the main thread. A thread of its own reads what arrives: a handler in
    Python has to wait until the main thread returns from the collective it is in, which
    it never does when another rank is stuck.
    """

    def __init__(self, quit: Callable[[str, int], None]) -> None:
        self._quit = quit
        self.first = 0
        """number of the first signal; 0 before"""
        self._at = 0.0
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._fd_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _leave_to_thread) for number in STOPPING}
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()
        _active.append(self)

    def close(self, *, ignore: bool = False) -> None:
        """Let signals do again what they did before; or nothing (``ignore``), where this process is about to end for one."""
        _active.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ignore else handler)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self._writer)

    def _listen(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in STOPPING:
                    self._note(number)
        os.close(reader)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if not self.first:
            self.first, self._at = number, now
        elif now - self._at >= REPEAT:
            self._quit(f"second signal, {signal.Signals(number).name}: quitting at once", 128 + number)


#: the Signals of this process; its children must not write into its pipe
_active: list[Signals] = []


def _leave_to_thread(number: int, frame: object) -> None:
    """Nothing: the byte that Python writes to the wake-up descriptor is what counts."""


def _in_child() -> None:
    if _active:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_child)


def end_with_rank(worker: int) -> None:
    """Called at the start of a data loader's process: it ends when its rank does, however that was.

    torch looks whether the parent is another one now, but a worker that a fork server started never had
    its rank as parent.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None, "called in worker processes only"

    def watch() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def outlive_signals(worker: int) -> None:
    """As `end_with_rank`, and not before: a rank that was told to stop needs its worker until it has stopped.

    Schedulers signal every process of a job.
    """
    end_with_rank(worker)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        parent = multiprocessing.parent_process()
        assert parent is not None, "called in worker processes only"
        threading.Thread(target=_end_on_order, args=(parent.pid,), daemon=True).start()


def _end_on_order(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)
