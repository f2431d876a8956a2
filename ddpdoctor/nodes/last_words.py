"""How the first node gets the last records of the others, and they its verdict, after the end of
the store in which they met: `init_process_group` has its store in rank 0, and that ends with it.

The first node's monitor listens on a port of its own, which it announces while there is the store.
A node that knows the token is told what the first one has of its records, brings the rest, and is
sent the verdict as soon as there is one.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

TOKEN_S = 5.0
"""So long it may take to connect, and to show the token."""

MOST_BYTES = 64 << 20
"""Of one message."""
_LENGTH = 8


class Address(msgspec.Struct, frozen=True):
    """Where to ask for the verdict.

    Attributes:
        host: empty where only the port is known.
    """

    host: str = ""
    port: int = 0
    token: str = ""


class Had(msgspec.Struct, frozen=True):
    """What the first node has of the records of another one.

    Attributes:
        mark: see `Desk.mark`: a node that has it in its own folder shares that, and brings nothing.
        sizes: of the files that grow, by name.
    """

    mark: str = ""
    sizes: dict[str, int] = {}


class Keeper(Protocol):
    """Keeps the records of the other nodes, for `LastWords`."""

    def had(self, node: int) -> Had: ...
    def keep(self, node: int, records: bytes) -> None: ...


class LastWords:
    """Waits for the other nodes, each in a thread, until `close`.

    Args:
        keeper: gets what the others bring.

    Attributes:
        brought: the nodes that have brought their last records.

    Raises:
        OSError: there is no port to listen on.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._said = threading.Event()
        self._words = b""
        self._one = threading.Lock()
        self._served = 0
        self.brought: set[int] = set()
        self._token = secrets.token_hex(16)
        owner = self

        class Asked(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    owner._answer(self.request)

        self._server = socketserver.ThreadingTCPServer(("", 0), Asked, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.request_queue_size = 128
        try:
            self._server.server_bind()
            self._server.server_activate()
        except OSError:
            self._server.server_close()
            raise
        self.address = Address(port=self._server.server_address[1], token=self._token)
        threading.Thread(
            target=self._server.serve_forever, name="ddpdoctor verdict", daemon=True
        ).start()

    def say(self, words: bytes, nodes: int, most_s: float) -> None:
        """Send this to all who have asked, and wait so long until so many nodes have it."""
        self._words = words
        self._said.set()
        deadline = time.monotonic() + most_s
        while self._served < nodes and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, asked: socket.socket) -> None:
        asked.settimeout(TOKEN_S)
        shown = _received(asked, len(self._token))
        if not hmac.compare_digest(shown, self._token.encode()):
            return
        node = int(_message(asked))
        _send(asked, msgspec.json.encode(self._keeper.had(node)))
        records = _message(asked)
        with self._one:
            if records:
                self._keeper.keep(node, records)
            self.brought.add(node)
        self._said.wait()
        _send(asked, self._words)
        with self._one:
            self._served += 1


def ask(address: Address, node: int, records: Callable[[Had], bytes], most_s: float) -> bytes:
    """The verdict of the first node, to which this one brings its last records.

    Args:
        node: this one's number.
        records: what to bring, given what the first node has; empty for nothing.
        most_s: how long the verdict is waited for.

    Raises:
        OSError: it cannot be reached, or said nothing in time.
    """
    deadline = time.monotonic() + most_s
    limit = min(most_s, TOKEN_S)
    with socket.create_connection((address.host, address.port), limit) as asked:
        asked.sendall(address.token.encode())
        _send(asked, str(node).encode())
        try:
            had = msgspec.json.decode(_message(asked), type=Had)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OSError(str(error)) from error
        _send(asked, records(had))
        asked.settimeout(max(0.1, deadline - time.monotonic()))
        length = _length(asked)
        asked.settimeout(TOKEN_S)
        return _received(asked, length)


def _send(to: socket.socket, words: bytes) -> None:
    to.sendall(len(words).to_bytes(_LENGTH, "big") + words)


def _message(source: socket.socket) -> bytes:
    return _received(source, _length(source))


def _length(source: socket.socket) -> int:
    length = int.from_bytes(_received(source, _LENGTH), "big")
    if length > MOST_BYTES:
        raise OSError(f"a message of {length >> 20} MiB")
    return length


def _received(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = source.recv(min(count - len(data), 1 << 16))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)
