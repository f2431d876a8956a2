"""ddpdoctor inside a program: a decorator and a context manager that work with any launcher."""

from __future__ import annotations

from .session import FaultFound, Steps, checkup, examine, load, steps_of

__all__ = ["FaultFound", "Steps", "checkup", "examine", "load", "steps_of"]
