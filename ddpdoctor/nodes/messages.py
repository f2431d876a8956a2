"""What nodes tell each other: pieces of their records, and the verdict of the first node."""

from __future__ import annotations

import zlib
from typing import TypeVar

import msgspec

M = TypeVar("M", bound=msgspec.Struct)

MOST_BYTES = 8 << 20
"""Of one message once it is unpacked."""


class MessageError(ValueError):
    """What came is no message of this version of ddpdoctor."""


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
        report: at the end, the report as `findings.json` has it.
    """

    notices: tuple[str, ...] = ()
    stop: str = ""
    report: bytes = b""


def packed(message: msgspec.Struct) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(message), 1)


def unpacked(data: bytes, kind: type[M]) -> M:
    """Raises MessageError where it is no such message, or a larger one than is ever sent."""
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, MOST_BYTES)
        if stream.unconsumed_tail:
            raise MessageError("too large")
        return msgspec.msgpack.decode(plain, type=kind)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(str(error)) from error
