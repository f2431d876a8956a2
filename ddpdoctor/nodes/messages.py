"""What nodes tell each other: pieces of their records, and the verdict of the first node."""

from __future__ import annotations

import re
import zlib
from typing import TypeVar

import msgspec

from .last_words import Address

M = TypeVar("M", bound=msgspec.Struct)

MOST_BYTES = 8 << 20
"""Of one message once it is unpacked."""


FORMAT = 1
"""Of messages: other formats cannot be read."""

_HEAD = re.compile(rb"ddpdoctor (\d{1,4}) (\S{1,40})\n")


class MessageError(ValueError):
    """What came is no message of this version of ddpdoctor.

    Attributes:
        version: the one whose message it is; empty where it is none at all.
    """

    def __init__(self, text: str, version: str = "") -> None:
        super().__init__(text)
        self.version = version


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a file of a run folder.

    Attributes:
        name: its path in the folder; offset: where the bytes belong.
    """

    name: str
    offset: int
    data: bytes


class Parcel(msgspec.Struct, frozen=True):
    """What a node has written since its last parcel.

    Attributes:
        origin: made up by the node, and the same as long as its launcher lives.
        version: of ddpdoctor; host: the node's name; wall: its time, seconds since the epoch.
        over: its ranks have ended and nothing more will come.
    """

    origin: str
    version: str
    host: str
    wall: float
    pieces: tuple[Piece, ...] = ()
    over: bool = False


class Orders(msgspec.Struct, frozen=True):
    """What the first node says to the others.

    Attributes:
        notices: lines for their users, all so far.
        stop: why the run is stopped; empty where it is not.
        ended: in words, what the user ended the first node with; empty for nothing.
        report: at the end, the report as `findings.json` has it.
        address: where to ask for the report if the store ends before there is one.
    """

    notices: tuple[str, ...] = ()
    stop: str = ""
    report: bytes = b""
    address: Address = Address()
    ended: str = ""


def packed(message: msgspec.Struct, version: str = "0") -> bytes:
    """`version`: of ddpdoctor, for those who cannot read the message."""
    head = f"ddpdoctor {FORMAT} {version}\n".encode()
    return head + zlib.compress(msgspec.msgpack.encode(message), 1)


def unpacked(data: bytes, kind: type[M]) -> M:
    """Raises MessageError where it is no such message, or a larger one than is ever sent."""
    head = _HEAD.match(data)
    if head is None:
        raise MessageError("not of ddpdoctor")
    if int(head[1]) != FORMAT:
        version = head[2].decode(errors="replace")
        raise MessageError(f"of ddpdoctor {version}", version)
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data[head.end() :], MOST_BYTES)
        if stream.unconsumed_tail:
            raise MessageError("too large")
        return msgspec.msgpack.decode(plain, type=kind)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(str(error)) from error
