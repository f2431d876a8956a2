"""The doctor inside a program: a decorator and a context manager, for any launcher."""

from __future__ import annotations

from .session import FaultFound, checkup, examine, load

__all__ = ["FaultFound", "checkup", "examine", "load"]
