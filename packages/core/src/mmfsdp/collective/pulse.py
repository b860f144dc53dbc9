"""Short messages between the first rank and every other one, beside all collectives, which notice who is gone.

Collectives cannot say which rank they wait for, and block until it comes. These messages never do: each rank has a
socket to the first one, read by a thread that waits no longer than it wants to.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
from contextlib import suppress
from time import monotonic
from typing import Any

from mmfsdp.basics.machines import close_in_children
from mmfsdp.collective.channels import host_of
from mmfsdp.collective.scopes import Scope
from mmfsdp.collective.steps import on_all_ranks, shared
from mmfsdp.errors import LostRankError

__all__ = ["GONE", "Pulse"]

GONE = "gone"
"""In place of a message: the other process has ended, or its connection is broken."""
_CONNECT = 20.0  # seconds
_MOST = 1 << 20  # bytes of a message


class Pulse:
    """This rank's connections: on the first rank to all others, elsewhere to the first. Making one is collective.

    Args:
        scope: The ranks.

    Raises:
        LostRankError: A rank cannot connect to the first one.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._selector = selectors.DefaultSelector()
        self._unread: dict[socket.socket, bytes] = {}
        self._unsent: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        server = socket.create_server(("", 0), backlog=scope.size) if scope.is_first else None
        meeting = shared(lambda: None if server is None else _meeting(server), scope)

        def connect() -> None:
            if not scope.is_first:
                self._add(_connect(*meeting, rank=scope.rank), 0)

        def accept() -> None:
            if server is not None:
                with server:
                    self._accept(server, meeting[2])

        close_in_children(self)  # while a child has them, the others do not notice that this process ends
        on_all_ranks(connect, scope)
        on_all_ranks(accept, scope)

    def send(self, message: Any) -> None:
        """Send something that JSON can express: from the first rank to all others, from others to the first."""
        data = json.dumps(message).encode() + b"\n"
        for connection in self._ranks:
            # If the message before is not through, as nobody reads, this one is dropped.
            unsent = self._unsent[connection] or data
            with suppress(OSError):  # full, or broken, which reading tells
                unsent = unsent[connection.send(unsent) :]
            self._unsent[connection] = unsent

    def receive(self, seconds: float) -> list[tuple[int, Any]]:
        """Return the messages of the next seconds, each with its rank; `GONE` for a rank that has ended."""
        found: list[tuple[int, Any]] = []
        deadline = monotonic() + seconds
        while (left := deadline - monotonic()) > 0:
            if not self._ranks:
                self._selector.select(left)
                break
            for key, _ in self._selector.select(left):
                found += self._read(key.fileobj)  # type: ignore[arg-type]
        return found

    def close(self) -> None:
        """Close all connections. Not collective; to the others this rank is `GONE`."""
        for connection in self._ranks:
            with suppress(OSError):  # the other one is gone
                connection.shutdown(socket.SHUT_RDWR)  # a process that a library forked may hold it, too
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close this process's end only, in a process that was forked: the connections go on in the other one."""
        for connection in self._ranks:
            connection.close()
        self._selector.close()

    def _read(self, connection: socket.socket) -> list[tuple[int, Any]]:
        rank = self._ranks[connection]
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._unread[connection] = (self._unread[connection] + data).split(b"\n")
        try:
            found = [(rank, json.loads(line)) for line in lines]
        except ValueError:
            data, found = b"", []
        if not data or len(self._unread[connection]) > _MOST:
            self._selector.unregister(connection)
            del self._ranks[connection]
            connection.close()
            found.append((rank, GONE))
        return found

    def _add(self, connection: socket.socket, rank: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(0)
        self._ranks[connection] = rank
        self._unread[connection] = self._unsent[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _accept(self, server: socket.socket, token: str) -> None:
        """Take the connections of all other ranks. They wait in the server's queue already."""
        server.settimeout(_CONNECT)
        while len(self._ranks) < self._scope.size - 1:
            try:
                connection = server.accept()[0]
                connection.settimeout(_CONNECT)
                told, rank = connection.makefile().readline(200).split()
            except (OSError, ValueError) as error:
                raise LostRankError(f"A rank did not connect to {host_of()!r} to be watched: {error}") from error
            if secrets.compare_digest(told, token):  # else it is a stranger
                self._add(connection, int(rank))
            else:
                connection.close()


def _meeting(server: socket.socket) -> tuple[list[str], int, str]:
    """Return where the first rank can be reached: addresses, port, and a token that tells ranks from strangers."""
    names = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    return [name for name in names if name], server.getsockname()[1], secrets.token_hex(16)


def _connect(addresses: list[str], port: int, token: str, rank: int) -> socket.socket:
    failed = []
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=_CONNECT)
            connection.sendall(f"{token} {rank}\n".encode())
        except OSError as error:
            failed.append(f"{address}: {error}")
        else:
            return connection
    raise LostRankError(
        f"Host {host_of()!r} cannot connect to port {port} of the first rank, so that ranks could watch each other "
        f"({'; '.join(failed)}). Open the ports between the hosts, or leave out watch_ranks()."
    )
