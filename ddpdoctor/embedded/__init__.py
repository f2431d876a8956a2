"""ddpdoctor inside a program: a decorator and a context manager that work with any launcher."""

from __future__ import annotations

from .session import FaultFound, checkup, examine, load

__all__ = ["FaultFound", "checkup", "examine", "load"]
