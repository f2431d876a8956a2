"""How many GPUs a rank would see, without importing torch."""

from __future__ import annotations

import os


def visible_gpus() -> int:
    """The value of `torch.cuda.device_count()`, from NVML and CUDA_VISIBLE_DEVICES."""
    present = _gpus_present()
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
