"""The program that `ddpdoctor preflight` runs on every rank: it compares environments and times
collectives.

It is launched and examined like a training script.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 120
SIZES = (4 * 1024, 1024**2, 16 * 1024**2, 256 * 1024**2)
CPU_LIMIT = 16 * 1024**2
ROUNDS = 5

Manifest = dict[str, str]

VARIABLES = ("NCCL_", "OMP_", "TORCH_", "GLOO_", "MKL_", "CUDA_", "PYTORCH_")
MAY_DIFFER = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_")


def main() -> int:
    """Run the checks; rank 0 prints. Returns 1 if a collective gives a wrong result, else 0."""
    import torch
    import torch.distributed as dist

    device = _device()
    if gpu := device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        everyone: list[Manifest] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, _manifest(device))
        if dist.get_rank() == 0:
            _say(_who(everyone))
        rows, right = _measure(device)
        if dist.get_rank() == 0:
            _say(rows)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0 if right else 1


def _device() -> torch.device:
    """Where this rank works. With fewer GPUs than ranks all work on the CPU: else some would take
    NCCL, the others gloo."""
    import torch

    local = int(os.environ["LOCAL_RANK"])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= here
    return torch.device("cuda", local) if enough else torch.device("cpu")


def _manifest(device: object) -> Manifest:
    """What must be equal on all ranks, and the rank's `node`."""
    import torch

    facts = {
        "node": socket.gethostname(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "device": torch.cuda.get_device_name() if str(device) != "cpu" else "CPU",
    }
    if str(device) != "cpu":
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        facts["NCCL"] = ".".join(map(str, version))
    for name, value in os.environ.items():
        if name.startswith(VARIABLES) and not name.startswith(MAY_DIFFER):
            facts[name] = value
    return facts


def _who(everyone: list[Manifest]) -> list[str]:
    """Lines that say which ranks can reach each other, and what differs between them."""
    from ..run import counted, ranks_text

    nodes = {m["node"] for m in everyone}
    first = everyone[0]
    lines = [
        f"{counted(len(everyone), 'rank')} on {counted(len(nodes), 'node')} can reach each other: "
        f"torch {first['torch']}, Python {first['Python']}, CUDA {first['CUDA']}, {first['device']}"
    ]
    names = sorted({name for m in everyone for name in m} - {"node"})
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, manifest in enumerate(everyone):
            values.setdefault(manifest.get(name, "not set"), []).append(rank)
        if len(values) > 1:
            sides = "; ".join(f"{v!r} on {ranks_text(r)}" for v, r in values.items())
            lines.append(f"{name} differs: {sides}")
    return lines


def _measure(device: object) -> tuple[list[str], bool]:
    """The table of times, and whether every all_reduce gave the right sum."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    lines = [f"{'collective':<12}{'size':>10}{'time':>12}{'bus bandwidth':>16}"]
    lines.append(f"{'barrier':<12}{'':>10}{_timed(dist.barrier, device) * 1000:>9.3f} ms")
    right = True
    for size in SIZES:
        if str(device) == "cpu" and size > CPU_LIMIT:
            continue
        tensor = torch.ones(size // 4, device=device)  # type: ignore[call-overload]
        dist.all_reduce(tensor)
        right &= bool((tensor == world).all())
        seconds = _timed(lambda t=tensor: dist.all_reduce(t), device)  # type: ignore[misc]
        # The bus bandwidth of nccl-tests, so that different world sizes can be compared.
        speed = size / seconds * 2 * (world - 1) / world / 1e9
        shown = f"{size // 1024} KiB" if size < 1024**2 else f"{size // 1024**2} MiB"
        lines.append(f"{'all_reduce':<12}{shown:>10}{seconds * 1000:>9.3f} ms{speed:>11.3f} GB/s")
    if not right:
        lines.append("all_reduce returns a wrong sum: check the devices and their links")
    return lines, right


def _timed(call: Callable[[], object], device: object) -> float:
    """The median time of a call in seconds, after one call to warm up."""
    import torch

    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        call()
        if str(device) != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[ROUNDS // 2]


def _say(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(main())
