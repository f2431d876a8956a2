"""Values as JSON, whatever text is in them."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What msgspec raises over text that is no JSON, or not the JSON that was asked for."""

_encoder = msgspec.json.Encoder()


def to_json(value: object) -> bytes:
    """JSON, also of text that is no Unicode: a file name that is not UTF-8 has surrogates."""
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
