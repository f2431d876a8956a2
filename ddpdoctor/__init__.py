"""ddpdoctor: run a PyTorch distributed training job and be told what is wrong with it.

    ddpdoctor run train.py

or, under any launcher, from inside the program: `@ddpdoctor.checkup` on the function that takes a
step, `with ddpdoctor.examine():` around the training. `ddpdoctor.load(folder)` reads a report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from .embedded import FaultFound, checkup, examine, load
    from .report.findings import Check, Finding


__all__ = ["Check", "FaultFound", "Finding", "__version__", "checkup", "examine", "load"]

_HOMES = {"Check": "report.findings", "Finding": "report.findings"}


def __getattr__(name: str) -> object:
    # Imported when asked for: the shim imports this package in every rank.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOMES.get(name, 'embedded')}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
