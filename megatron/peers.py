"""What becomes of the other ranks: one that fails or vanishes ends all of them, and all of them say why.

Collectives alone do not do this: with NCCL a rank waits half an hour for one that is gone, and with gloo the log
ends with the complaints of those that were left. So every rank keeps a TCP connection to rank 0. Whoever fails says
so there first, a process that dies lets go of its connection, and rank 0 tells everybody who was first.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from megatron.errors import RunError

#: seconds in which rank 0 looks for what came before the failure it was told of, and the first one has the word alone
SETTLE = 0.5
#: seconds after which a failing rank gives up on an answer, and a connection on being accepted
PATIENCE, CONNECT = 5.0, 30.0
#: a machine without power or network is given up after 60 + 10 * 30 seconds; one that answers never is
KEEP_ALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 10))

#: connections of this process; one that a child kept would outlive it
_open: list[socket.socket] = []


def _close_in_child() -> None:
    for each in _open:
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


@dataclass(frozen=True)
class Failure:
    """What ended the job: the rank it began on, one line that says so, the exit code of all."""

    rank: int
    line: str
    exit_code: int = 1


class Peers:
    """The other ranks of this process, as far as their end is concerned; of no effect before ``join``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._socket: socket.socket | None = None
        self._failure: Failure | None = None
        self._told, self._over = threading.Event(), threading.Event()
        self._last_words = threading.Lock()
        self._where_rank_0 = ""

    def join(self, world_size: int, store: Any, addr: str) -> None:
        """Collective: from now on the end of one rank is that of all. ``store``: where they met; ``addr``: of rank 0.

        Comes before torch's groups, whose making waits for a rank that is gone. Raises RunError when rank 0 is.
        """
        if world_size == 1:
            return
        where = f"{socket.gethostname()}, process {os.getpid()}"
        key = f"megatron/peers/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        try:
            if self.rank == 0:
                bell = _Bell()
                bell.start()
                store.set(key, json.dumps([bell.port, bell.token, where]))
            port, token, self._where_rank_0 = json.loads(store.get(key))
        except RuntimeError as error:  # torch's, of a store
            raise RunError("rank 0 ended when all ranks had just met; its log says why") from error
        host = "127.0.0.1" if self.rank == 0 else addr
        try:
            connection = self._socket = _watched(socket.create_connection((host, port), timeout=CONNECT))
        except OSError as error:
            print(f"warning: rank {self.rank} cannot connect to port {port} of {host} ({error}): it will not hear of "
                  "other ranks that fail", flush=True)
            return
        self._send(token=token, rank=self.rank, where=where)
        threading.Thread(target=self._listen, args=(connection,), name="peers", daemon=True).start()

    def first(self, line: str, exit_code: int = 1, *, at_once: bool = False, second_hand: bool = False) -> Failure:
        """Tell the others of this rank's failure; returns the one that came first, perhaps another rank's.

        ``at_once``: nothing on another rank can be the cause of this one; ``second_hand``: something there is.
        """
        mine = Failure(self.rank, f"the first error was on rank {self.rank}: {line[:1000]}", exit_code)
        if self._socket is None or self._over.is_set():
            return mine
        self._send(line=mine.line, exit_code=exit_code, at_once=at_once, second_hand=second_hand)
        self._told.wait(PATIENCE)
        return self._failure or mine

    def leave(self, failure: Failure) -> NoReturn:
        """End this process because of another rank's failure, once that one has had time to speak."""
        try:
            time.sleep(SETTLE)
            with self._last_words:
                end(f"rank {self.rank} ends too: {failure.line}", failure.exit_code)
        finally:
            os._exit(failure.exit_code)

    def quit(self, line: str, exit_code: int) -> NoReturn:
        """End this process and all others at once."""
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())
        self.first(line, exit_code, at_once=True)
        os._exit(exit_code)

    def close(self) -> None:
        """Collective: ends in order are no failures from now on. Returns when rank 0 has come here too."""
        if self._socket is not None:
            self._send(bye=True)
            self._over.wait(PATIENCE)
            self._socket = None

    def _send(self, **message) -> None:
        assert self._socket is not None, "nobody is told anything before join"
        with contextlib.suppress(OSError):  # who cannot be told is gone
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self, connection: socket.socket) -> None:
        text = b""
        while b"\n" not in text:
            try:
                part = connection.recv(4096)
            except OSError:
                part = b""
            if not part:
                text = json.dumps(asdict(Failure(0, _gone([f"rank 0 ({self._where_rank_0})"])))).encode() + b"\n"
            text += part
        message = json.loads(text.partition(b"\n")[0])
        if message == {"over": True}:
            self._over.set()
            return
        self._failure = Failure(**message)
        self._told.set()
        if self._failure.rank != self.rank and self._socket is not None:
            self.leave(self._failure)


def _gone(who: list[str]) -> str:
    return (f"{' and '.join(who)} {'is' if len(who) == 1 else 'are'} gone without a word: killed from outside or crashed; "
            "out of memory? (dmesg there, sacct, the launcher's report)")


def _watched(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE:
        if hasattr(socket, name):  # not on macOS
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    _open.append(connection)
    return connection


class _Member:
    """A rank as rank 0 knows it; -1 until it has shown that it is one."""

    def __init__(self) -> None:
        self.rank, self.where, self.text = -1, "", b""
        self.may_go = False
        """whether it said why its connection will end"""


class _Bell(threading.Thread):
    """On rank 0: hears of the first failure and tells everybody."""

    def __init__(self) -> None:
        super().__init__(name="bell", daemon=True)
        both = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET,
                                              dualstack_ipv6=both, backlog=1024)
        _open.append(self._listener)
        self.port, self.token = self._listener.getsockname()[1], secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._members: dict[socket.socket, _Member] = {}
        self._gone: list[_Member] = []
        self._claims: list[tuple[bool, Failure]] = []
        """in the order they came: whether another rank is the cause, and what was said"""
        self._failure: Failure | None = None
        self._due: float | None = None
        """when the first failure is made known"""

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._due and max(0.0, self._due - time.monotonic())):
                if key.fileobj is self._listener:
                    try:
                        connection = _watched(self._listener.accept()[0])
                    except OSError:  # gone already; or no descriptor is free, which may take a while
                        time.sleep(0.05)
                        continue
                    self._members[connection] = _Member()
                    self._selector.register(connection, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)
            if self._due and time.monotonic() >= self._due:
                self._due = None
                self._decide()

    def _hear(self, connection: socket.socket) -> None:
        member = self._members[connection]
        try:
            part = connection.recv(4096)
        except OSError:
            part = b""
        *lines, member.text = (member.text + part).split(b"\n")
        try:
            for line in lines:
                self._take(connection, member, json.loads(line))
        except (ValueError, TypeError, LookupError, RecursionError):  # a stranger
            part = b""
        if not part or len(member.text) > 1 << 16:
            self._drop(connection)
            if member.rank >= 0 and not member.may_go:
                self._gone.append(member)
                self._expect()

    def _take(self, connection: socket.socket, member: _Member, message: dict) -> None:
        if member.rank < 0:
            if message["token"] != self.token:
                raise ValueError("not a rank of this job")
            member.rank, member.where = message["rank"], message["where"]
            return
        member.may_go = True
        if "bye" in message:
            if member.rank == 0:
                self._tell({"over": True})
        elif self._failure:
            self._tell(asdict(self._failure), [connection])
        else:
            self._claims.append((message["second_hand"], Failure(member.rank, message["line"], message["exit_code"])))
            self._expect(0 if message["at_once"] else SETTLE)

    def _expect(self, seconds: float = SETTLE) -> None:
        due = time.monotonic() + seconds
        self._due = None if self._failure else min(self._due or due, due)

    def _decide(self) -> None:
        """A process that vanished did so before anybody could complain of it; one that complains waits for this answer."""
        failure = min(self._claims, key=lambda claim: claim[0])[1] if self._claims else None
        if self._gone:
            names = [f"rank {each.rank} ({each.where})" for each in sorted(self._gone, key=lambda each: each.rank)]
            failure = Failure(min(each.rank for each in self._gone), _gone(names))
        assert failure is not None, "a decision is due once somebody has complained or vanished"
        self._failure = failure
        self._tell(asdict(failure))

    def _tell(self, message: dict, whom=None) -> None:
        """Rank 0 last: it may end at once then."""
        for connection in whom or sorted(self._members, key=lambda each: self._members[each].rank, reverse=True):
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(message).encode() + b"\n")

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._members[connection]
        _open.remove(connection)
        connection.close()


def end(line: str, exit_code: int, callstack: str | None = None) -> NoReturn:
    """`say_last`, and end this process; after PATIENCE anyway, if a pipe that nobody reads takes no last words."""
    try:
        watch = threading.Timer(PATIENCE, os._exit, [exit_code])
        watch.daemon = True
        watch.start()
        say_last(line, callstack)
    finally:
        os._exit(exit_code)


def say_last(line: str, callstack: str | None = None, *, aloud: bool = True) -> None:
    """Print why this process ends (if ``aloud``), and have torchrun's table of failures show it.

    torchrun names a JSON file in TORCHELASTIC_ERROR_FILE: {"message": {"message", "extraInfo":
    {"py_callstack", "timestamp" in s}}}. Of several ranks it calls the earliest the root cause.
    """
    # nobody reads it, the disk is full, or it was closed before the start: no reason to stay, or not to try the other
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    if aloud and sys.stderr:
        with contextlib.suppress(OSError, ValueError):
            print(f"{line}\n{callstack}" if callstack else line, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"timestamp": str(int(time.time()))} | ({"py_callstack": callstack} if callstack else {})
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": line, "extraInfo": extra}}, file)
