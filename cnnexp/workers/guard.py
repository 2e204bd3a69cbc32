"""Somebody who is left to say which worker died: a process of its own.

A launcher that sees one MPI process die kills all others at once, so none of them can report it. The guard is not one
of them: rank 0 starts it in a session of its own. Every worker keeps a connection to it, which the system closes when
the worker dies, on whatever machine. The guard then names the worker and tells the others to end, for launchers that do
not see to that.

It speaks lines. A worker says `TOKEN RANK HOST PID`, later `bye`, or `failed REASON`; rank 0 may say `over`: whatever
happens from here is no accident. The guard says `lost`.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

HELLO_S = 5.0  # a stranger who does not say who it is by then is sent away
LINE_BYTES = 4096


@dataclass(frozen=True)
class Address:
    """Where a guard listens, and the word that shows who belongs to the group."""

    host: str
    port: int
    token: str


class Member:
    """A worker's connection to the guard.

    Args:
        address: of the guard.
        rank: of this worker.
        on_lost: called in a thread when another worker has died, or the guard.
    """

    def __init__(self, address: Address, rank: int, on_lost: Callable[[], None]) -> None:
        self._socket = socket.create_connection((address.host, address.port), HELLO_S)
        self._socket.settimeout(None)
        self._on_lost, self._leaving = on_lost, False
        self._say(f"{address.token} {rank} {socket.gethostname()} {os.getpid()}")
        threading.Thread(target=self._listen, daemon=True).start()

    def leave(self, everyone: bool = False) -> None:
        """Say that this worker, or with it the whole group, ends as it should."""
        self._leaving = True
        self._say("over" if everyone else "bye")

    def fail(self, reason: str) -> None:
        """Say why this worker is about to die."""
        self._leaving = True
        self._say("failed " + reason.replace("\n", " "))

    def _say(self, line: str) -> None:
        self._socket.sendall(line.encode()[: LINE_BYTES - 1] + b"\n")

    def _listen(self) -> None:
        self._socket.recv(LINE_BYTES)  # returns when the guard says `lost`, or is gone
        if not self._leaving:
            self._on_lost()


def start_guard(size: int, reachable: bool) -> Address:
    """Start a guard for `size` workers; `reachable` from other machines, or from this one alone."""
    token = secrets.token_hex(16)
    host = "" if reachable else "127.0.0.1"
    process = subprocess.Popen(
        [sys.executable, "-I", __file__, str(size), host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    process.stdin.write(token + "\n")
    process.stdin.close()
    port = int(process.stdout.readline())
    process.stdout.close()
    return Address(socket.gethostname() if reachable else host, port, token)


def watch(server: socket.socket, size: int, token: str) -> str | None:
    """Wait until every worker has left, or one died; return the line that says which, None if all is well."""
    members: dict[socket.socket, tuple[int, str]] = {}
    left, over = 0, False
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while left < size:
            for key, _ in selector.select():
                if key.fileobj is server:
                    connection, member = _admit(server, token)
                    if member is not None:
                        members[connection] = member
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                connection, said = key.fileobj, _hear(key.fileobj)
                over = over or said == "over"
                if not over and said != "bye":
                    for other in members.keys() - {connection}:
                        _tell(other, "lost\n")
                    return _describe(*members[connection], size, said)
                selector.unregister(connection)
                connection.close()
                left += 1
    return None


def _describe(rank: int, where: str, size: int, said: str) -> str:
    who = f"worker {rank} of {size} ({where})"
    return f"{who} {said.replace('failed', 'failed:', 1)}" if said else f"{who} died; the run has ended"


def _admit(server: socket.socket, token: str) -> tuple[socket.socket, tuple[int, str] | None]:
    connection, _ = server.accept()
    connection.settimeout(HELLO_S)
    words = _hear(connection).split()
    if len(words) != 4 or not secrets.compare_digest(words[0].encode(), token.encode()):
        connection.close()
        return connection, None
    connection.settimeout(None)
    return connection, (int(words[1]), f"pid {words[3]} on {words[2]}")


def _hear(connection: socket.socket) -> str:
    """Return what a worker says, without the line's end; nothing if it is gone."""
    try:
        return connection.recv(LINE_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""


def _tell(connection: socket.socket, line: str) -> None:
    try:
        connection.sendall(line.encode())
    except OSError:
        return  # gone too


def main() -> None:
    """Listen, print the port, watch, and say who died."""
    size, host = int(sys.argv[1]), sys.argv[2]
    token = sys.stdin.readline().strip()
    with socket.create_server((host, 0), backlog=size) as server:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        line = watch(server, size, token)
    if line is not None:
        sys.stderr.write(f"cnnexp: error: {line}\n")
        sys.stderr.flush()
        sys.exit(1)


if __name__ == "__main__":
    main()
