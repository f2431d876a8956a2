"""Keeps wrappers out of what the user sees of a call: tracebacks, and the places of warnings."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

_passed_over: dict[CodeType, CodeType] = {}


def unframe(error: BaseException) -> None:
    """Take the caller, a wrapper that is about to re-raise `error`, out of its traceback.

    Python 3.10 re-raises with the traceback that it had, and the wrapper stays.
    """
    trace = error.__traceback__
    if trace is not None and trace.tb_frame is sys._getframe(1):
        # Not by assignment: the user's class may be frozen.
        BaseException.with_traceback(error, trace.tb_next)


def passed_over(wrapper: Any) -> Any:
    """Have `warnings` pass over a wrapper, so that `stacklevel` still means the user's line.

    It passes over the frames of the import system, which it knows by the names of their files.
    """
    code = wrapper.__code__
    if code not in _passed_over:
        name = f"{code.co_filename}(importlib._bootstrap)"
        _passed_over[code] = code.replace(co_filename=name)
    wrapper.__code__ = _passed_over[code]
    return wrapper
