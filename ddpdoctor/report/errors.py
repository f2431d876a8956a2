"""Kinds of errors that findings follow from, told by what torch, gloo, NCCL and Python say."""

from __future__ import annotations

import enum
import re


class ErrorKind(enum.Enum):
    """What an error is about."""

    DIFFERENT_MODELS = "different models"
    GRAPH_CHANGED = "graph changed"
    READY_TWICE = "parameter ready twice"
    REDUCTION_UNFINISHED = "reduction unfinished"
    REDUCER_UNPREPARED = "reducer unprepared"
    CONNECTION = "connection"
    PEER_GONE = "other rank gone"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "memory"
    SHARED_GPU = "GPU of two ranks"
    BROKEN_FILE = "file incomplete"


_TEXTS = {
    ErrorKind.DIFFERENT_MODELS: r"same model across|to match sizes",
    ErrorKind.GRAPH_CHANGED: r"graph has changed|expect_autograd_hooks",
    ErrorKind.READY_TWICE: r"ready only once",
    # the second is Lightning's wording
    ErrorKind.REDUCTION_UNFINISHED: r"finished reduction|not used in producing the loss",
    ErrorKind.REDUCER_UNPREPARED: (
        r"`initialize_buckets` must NOT be called|still allreduced by DDP reducer"
    ),
    ErrorKind.CONNECTION: r"[Cc]onnection",
    ErrorKind.PEER_GONE: r"closed by peer|reset by peer",
    ErrorKind.TIMED_OUT: r"[Tt]imed out|Application timeout caused",
    ErrorKind.OUT_OF_MEMORY: r"(?i:memory)",
    ErrorKind.SHARED_GPU: r"Duplicate GPU detected",
    ErrorKind.BROKEN_FILE: r"PytorchStreamReader|EOFError|invalid load key|Ran out of input",
}

LOST_PEER = (ErrorKind.PEER_GONE, ErrorKind.TIMED_OUT)
"""What gloo and NCCL say where another rank is gone."""


def error_kinds(message: str) -> tuple[ErrorKind, ...]:
    """All that the text of an exception tells of."""
    return tuple(kind for kind, text in _TEXTS.items() if re.search(text, message))
