"""Somebody who is left to say which worker died: a process of its own.

A launcher that sees one MPI process die kills all others at once, so none of them can report it. The guard is not one
of them: rank 0 starts it in a session of its own. Every worker keeps a connection to it, which the system closes when
the worker dies, on whatever machine. The guard then names the worker and ends the others, for launchers that do
not see to that. A worker that is stopped, or whose machine is out of reach, closes nothing: it falls silent.

It speaks lines. A worker says `TOKEN RANK HOST PID`, then `alive` every second, in the end `bye` or `failed REASON`;
rank 0 says `timeout SECONDS` when there is work, and `over` before an end that is no accident. The guard says `lost`.
"""

import contextlib
import functools
import math
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from cnnexp.system.heartbeat import Heartbeat, beat

HELLO_S = 5.0  # a stranger who does not say who it is by then is sent away
LINE_BYTES = 4096
BEAT_S = 1.0  # between two signs of life
LOOK_S = 2.0  # how often the guard looks who has given none
SILENT = "has given no sign of life for {:g} s (workers.heartbeat_timeout_s)"
Address = tuple[str, int, str]  # host and port where a guard listens, and the word that shows who belongs to the group


class Member:
    """A worker's connection to the guard; `on_lost` is called in a thread when another worker or the guard has died."""

    def __init__(self, address: Address, rank: int, on_lost: Callable[[], None]) -> None:
        host, port, token = address
        self._socket = socket.create_connection((host, port), HELLO_S)
        self._socket.settimeout(None)
        self._on_lost, self._leaving, self._speaking = on_lost, threading.Event(), threading.Lock()
        self._say(f"{token} {rank} {socket.gethostname()} {os.getpid()}")
        threading.Thread(target=self._listen, daemon=True).start()
        beat(functools.partial(self._say, "alive"), BEAT_S, self._leaving)

    def expect(self, timeout_s: float) -> None:
        """Say for how long, from now on, a worker may be silent before the run ends."""
        self._say(f"timeout {timeout_s}")

    def leave(self, everyone: bool = False) -> None:
        """Say that this worker, or with it the whole group, ends as it should."""
        self._leaving.set()
        self._say("over" if everyone else "bye")

    def fail(self, reason: str) -> None:
        """Say why this worker is about to die."""
        self._leaving.set()
        self._say("failed " + reason.replace("\n", " "))

    def _say(self, line: str) -> None:
        with self._speaking, contextlib.suppress(OSError):  # `_listen` sees to a guard that is gone
            self._socket.sendall(line.encode()[: LINE_BYTES - 1] + b"\n")

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.recv(LINE_BYTES)  # returns when the guard says `lost`, or is gone
        if not self._leaving.is_set():
            self._on_lost()


def start_guard(size: int, reachable: bool) -> Address:
    """Start a guard for `size` workers; `reachable` from other machines, or from this one alone."""
    token = secrets.token_hex(16)
    host = "" if reachable else "127.0.0.1"
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, str(size), host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},  # of `heartbeat`, alone
    )
    with cast(IO[str], process.stdin) as stdin:
        stdin.write(token + "\n")
    with cast(IO[str], process.stdout) as stdout:
        port = int(stdout.readline())
    return socket.gethostname() if reachable else host, port, token


@dataclass
class _Watched:
    """A worker as the guard knows it: who it is, its heartbeat, what it has begun to say, how often it was heard."""

    who: str
    heartbeat: Heartbeat
    heard: bytes = b""
    signs: int = 1


def watch(server: socket.socket, size: int, token: str) -> str | None:
    """Wait until every worker has left, or one is lost; return the line that says which, None if all is well.

    Looks count only where some worker gives signs: a run stopped as a whole, but for its guard, may be continued.
    """
    members: dict[socket.socket, _Watched] = {}
    left, over, timeout_s, signs, next_look = 0, False, math.inf, 0, time.monotonic() + LOOK_S
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while left < size:
            for key, _ in selector.select(max(0.0, next_look - time.monotonic())):
                connection = cast(socket.socket, key.fileobj)
                if connection is server:
                    connection, member = _admit(server, size, token)
                    if member is not None:
                        members[connection] = member
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                for line in _hear(connection, members[connection]):
                    word, _, rest = line.partition(" ")
                    over = over or word == "over"
                    if word == "timeout":
                        timeout_s = float(rest)
                    elif word in ("failed", "") and not over:
                        return _part(members, connection, f"failed: {rest}" if word else "died; the run has ended")
                    elif word != "alive":
                        selector.unregister(connection)
                        connection.close()
                        del members[connection]
                        left += 1
                        break
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_S
                before, signs = signs, sum(member.signs for member in members.values())
                for connection, member in members.items() if signs != before else ():
                    member.heartbeat.timeout_s = timeout_s
                    if member.heartbeat.look(member.signs) and not over:
                        return _part(members, connection, f"{SILENT.format(timeout_s)}; the run has ended")
    return None


def _part(members: dict[socket.socket, _Watched], lost: socket.socket, reason: str) -> str:
    """Tell everyone to end, one that is only stopped too; return the line that says why."""
    for connection in members:
        with contextlib.suppress(OSError):  # gone too
            connection.sendall(b"lost\n")
    return f"{members[lost].who} {reason}"


def _admit(server: socket.socket, size: int, token: str) -> tuple[socket.socket, _Watched | None]:
    connection, _ = server.accept()
    connection.settimeout(HELLO_S)
    hello, _, rest = _receive(connection).partition(b"\n")
    words = hello.decode(errors="replace").split()
    if len(words) != 4 or not secrets.compare_digest(words[0].encode(), token.encode()):
        connection.close()
        return connection, None
    connection.settimeout(None)
    who = f"worker {words[1]} of {size} (pid {words[3]} on {words[2]})"
    return connection, _Watched(who, Heartbeat(math.inf, LOOK_S), rest)


def _hear(connection: socket.socket, member: _Watched) -> list[str]:
    """Return the lines a worker has said since; an empty one last if it is gone."""
    said = _receive(connection)
    member.signs += 1
    *lines, member.heard = (member.heard + said).split(b"\n")
    return [line.decode(errors="replace") for line in lines] + [""] * (not said)


def _receive(connection: socket.socket) -> bytes:
    """Return what has been said, nothing if the other end is gone."""
    with contextlib.suppress(OSError):
        return connection.recv(LINE_BYTES)
    return b""


def main() -> None:
    """Listen, print the port, watch, and say who died."""
    size, host = int(sys.argv[1]), sys.argv[2]
    token = sys.stdin.readline().strip()
    with socket.create_server((host, 0), backlog=size) as server:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        line = watch(server, size, token)
    if line is not None:
        sys.exit(f"cnnexp: error: {line}")


if __name__ == "__main__":
    main()
