"""JSON of values that may contain any text."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""The errors that msgspec raises for invalid JSON and for JSON of another type."""

_encoder = msgspec.json.Encoder()


def to_json(value: object) -> bytes:
    """Encode as JSON, including text with surrogates (file names that are not UTF-8)."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_mended(msgspec.to_builtins(value)))


def _mended(value: object) -> object:
    if isinstance(value, str):
        return value.encode(errors="surrogateescape").decode(errors="replace")
    if isinstance(value, dict):
        return {_mended(k): _mended(v) for k, v in value.items()}
    return [_mended(v) for v in value] if isinstance(value, list | tuple) else value
