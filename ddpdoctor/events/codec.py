"""Events to lines and back."""

from __future__ import annotations

from functools import cache

import msgspec

from .base import Event
from .json_text import to_json


def encode(event: Event) -> bytes:
    """One line of JSON, newline included."""
    return to_json(event) + b"\n"


def _kinds(cls: type[Event]) -> list[type[Event]]:
    found = []
    for sub in cls.__subclasses__():
        found += [sub, *_kinds(sub)]
    return found


@cache
def _decoder() -> msgspec.json.Decoder[Event]:
    # Built from the classes that exist, so that adding an event edits no list.
    kinds = _kinds(Event)
    union: object = kinds[0]
    for kind in kinds[1:]:
        union = union | kind
    return msgspec.json.Decoder(union)


def decode(line: bytes) -> Event:
    """The event on a line.

    Raises:
        msgspec.DecodeError: the line is torn, foreign, or of a kind this version does not know.
    """
    return _decoder().decode(line)
