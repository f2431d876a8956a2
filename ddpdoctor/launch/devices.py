"""How many GPUs a rank would see, without importing torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys

OTHER_BUILDS = ("rocm", "xpu", "hpu")
"""Builds of torch, as the local part of its version says, for devices that NVML does not know."""

ASKED_S = 60.0

_COUNT = "import torch; print(torch.accelerator.device_count())"


def visible_devices() -> int:
    """How many devices a rank would see: GPUs of NVIDIA, or what torch was built for. Of the others
    only torch knows the number: a process of its own is asked."""
    if (gpus := visible_gpus()) or not _of_other_build():
        return gpus
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        command = [sys.executable, "-c", _COUNT]
        asked = subprocess.run(command, capture_output=True, timeout=ASKED_S, check=True)
        return int(asked.stdout.split()[-1]) if asked.stdout.split() else 0
    return 0


def _of_other_build() -> bool:
    try:
        _, _, build = importlib.metadata.version("torch").partition("+")
    except importlib.metadata.PackageNotFoundError:
        return False
    return build.startswith(OTHER_BUILDS)


def visible_gpus() -> int:
    """The value of `torch.cuda.device_count()`, from NVML and CUDA_VISIBLE_DEVICES."""
    present = _gpus_present()
    if present and _parted():
        return min(1, _chosen(present))  # CUDA offers a process one part, of one GPU
    return _chosen(present)


def _chosen(present: int) -> int:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return present
    seen: set[str] = set()
    for word in (w.strip() for w in chosen.split(",")):
        # CUDA stops at the first entry that names no device.
        by_number = word.isdecimal() and int(word) < present
        if word in seen or not (by_number or word.startswith(("GPU-", "MIG-"))):
            break
        seen.add(word)
    return len(seen)


def _parted() -> bool:
    """Whether a GPU of the machine is divided into instances (MIG)."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return False
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return any(pynvml.nvmlDeviceGetMigMode(handle)[0] for handle in handles)
    except Exception:  # of GPUs that cannot be divided
        return False
    finally:
        pynvml.nvmlShutdown()


def _gpus_present() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library, a library too old: no GPU that we could count
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()
