"""Where a report is written to: terminals, files, pipes, whatever their encoding."""

from __future__ import annotations

import os
import shutil
from typing import TextIO

PLAIN_WIDTH = 80


def is_terminal(stream: TextIO) -> bool:
    """Whether a person with a terminal that knows escapes is on the other end."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def width_of(stream: TextIO) -> int:
    return (
        shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns if is_terminal(stream) else PLAIN_WIDTH
    )


def emit(content: str, stream: TextIO) -> None:
    """Write text to a stream, whatever its encoding."""
    try:
        stream.write(content)
    except UnicodeEncodeError:
        known = stream.encoding or "ascii"
        stream.write(content.encode(known, "replace").decode(known))
    stream.flush()
