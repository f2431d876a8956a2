"""Runs a script as if its tensors lay on a device: their values cannot be read at once.

    python opaque_values.py SCRIPT [ARGUMENT ...]

What the probe reads later, by a sum that is on its way, it still gets.
"""

from __future__ import annotations

import importlib
import pkgutil
import runpy
import sys
from typing import Any

import torch
import torch.distributed  # noqa: F401

import ddpdoctor.probe
from ddpdoctor.probe.tensors import digests as known


def unreadable(tensor: Any) -> bool:
    return False


def absent(tensors: Any) -> list[int]:
    return [known.ABSENT for _ in tensors]


def nothing(tensors: Any) -> list[float]:
    return []


STUBS = {"readable": unreadable, "digests": absent, "some_values": nothing}


def main() -> None:
    found = pkgutil.walk_packages(ddpdoctor.probe.__path__, "ddpdoctor.probe.")
    modules = [importlib.import_module(m.name) for m in found if "bootstrap" not in m.name]
    for name, stub in STUBS.items():
        real = getattr(known, name)
        for module in modules:
            if getattr(module, name, None) is real:
                setattr(module, name, stub)
    script, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
