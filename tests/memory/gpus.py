"""Ranks on GPUs, as literal events."""

from __future__ import annotations

from collections.abc import Sequence

from recordings import PID, START, make_run, monitor, site, started, steps

from ddpdoctor.events import DeviceUsed, Event, RankSample
from ddpdoctor.run import Run

GB = 1 << 30
UUIDS = ("GPU-aaaa", "GPU-bbbb", "GPU-cccc")


def uses(index: int, uuid: str, why: str = "parameters") -> Event:
    return DeviceUsed(at=0, index=index, uuid=uuid, name="H200", site=1, why=why)


def held(rank: int, second: int, **gpus: int) -> Event:
    """What NVML saw: `g0=GB` is a gigabyte on the first GPU."""
    sizes = {int(name[1:]): size for name, size in gpus.items()}
    return RankSample(at=START + second, rank=rank, pid=PID + rank, rss_bytes=1, gpu_bytes=sizes)


def gpu_run(
    ranks: Sequence[list[Event]],
    *seen: Event,
    gpus: int = 2,
    divided: tuple[str, ...] = (),
    **more: object,
) -> Run:
    """Ranks of one node with that many GPUs, and what its monitor saw."""
    node = monitor(gpus=("H200",) * gpus, gpu_uuids=UUIDS[:gpus], divided=divided)
    line = site(1, "train.py", 12, "model.cuda()")
    heads = [started(r, len(ranks)) for r in range(len(ranks))]
    events = {r: [heads[r], line, *own, *steps(3)] for r, own in enumerate(ranks)}
    return make_run(events, nodes={0: [node, *seen]}, **more)  # type: ignore[arg-type]
