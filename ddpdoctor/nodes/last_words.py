"""How the other nodes get the verdict of the first one where it comes after the end of the store in
which they met: `init_process_group` has its store in rank 0, and that ends with it.

The first node's monitor listens on a port of its own, which it announces while there is the store.
A node that knows the token is sent the verdict as soon as there is one.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import socketserver
import threading
import time

import msgspec

TOKEN_S = 5.0
"""So long it may take to connect, and to show the token."""

MOST_BYTES = 64 << 20
_LENGTH = 8


class Address(msgspec.Struct, frozen=True):
    """Where to ask for the verdict.

    Attributes:
        host: empty where only the port is known.
    """

    host: str = ""
    port: int = 0
    token: str = ""


class LastWords:
    """Waits for the other nodes, each in a thread, until `close`.

    Raises:
        OSError: there is no port to listen on.
    """

    def __init__(self) -> None:
        self._said = threading.Event()
        self._words = b""
        self._one = threading.Lock()
        self._served = 0
        self._token = secrets.token_hex(16)
        owner = self

        class Asked(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
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
        """Send this to all who have asked, and wait so long until so many nodes have asked."""
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
        self._said.wait()
        asked.sendall(len(self._words).to_bytes(_LENGTH, "big") + self._words)
        with self._one:
            self._served += 1


def ask(address: Address, most_s: float) -> bytes:
    """The verdict of the first node.

    Args:
        most_s: how long it is waited for.

    Raises:
        OSError: it cannot be reached, or said nothing in time.
    """
    deadline = time.monotonic() + most_s
    limit = min(most_s, TOKEN_S)
    with socket.create_connection((address.host, address.port), limit) as asked:
        asked.sendall(address.token.encode())
        asked.settimeout(max(0.1, deadline - time.monotonic()))
        length = int.from_bytes(_received(asked, _LENGTH), "big")
        if length > MOST_BYTES:
            raise OSError(f"a verdict of {length >> 20} MiB")
        asked.settimeout(TOKEN_S)
        return _received(asked, length)


def _received(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = source.recv(min(count - len(data), 1 << 16))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)
