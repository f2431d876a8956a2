"""What the first of many nodes has to do for the others: simulated nodes send it what nodes send.

    python benchmarks/node_load.py --nodes 1024 --seconds 60

The store is torch's, in the process of the first node, as torchrun has it. Each other node is a
thread of a second process, sends the records of eight ranks that train (an event and the end of the
ring of each), and reads the orders. What the first node's link costs is measured; what reading
these records costs its monitor is not.

The store asks for the name of each host that connects. Where that takes long (no DNS), give
127.0.0.1 one: `::ffff:127.0.0.1 localhost` in /etc/hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from ddpdoctor.nodes import link as linking
from ddpdoctor.nodes.desk import Desk
from ddpdoctor.nodes.link import Link
from ddpdoctor.nodes.messages import Orders, Piece

RANKS = 8
TOLD = b'{"event":"step","optimizer":0,"step":%d,"site":10,"wall_s":%f,"at":%f}\n'


class Training:
    """In the place of an `Outbox`: what is new of eight ranks that train."""

    def __init__(self, folder: Path) -> None:
        self._steps = 0
        self._offset = 0

    def pieces(self) -> list[Piece]:
        self._steps += 1
        line = TOLD % (self._steps, random.random(), time.monotonic())
        found = []
        for rank in range(RANKS):
            found.append(Piece(f"rank-{rank}.jsonl", self._offset, line))
            found += [Piece(f"rank-{rank}.ring", 512 * n, random.randbytes(512)) for n in (0, 1, 9)]
        self._offset += len(line)
        return found


def linked(store: object, folder: Path, node: int, nodes: int) -> Link:
    folder.mkdir(parents=True, exist_ok=True)
    made = Link(
        store,  # type: ignore[arg-type]
        folder, node=node, nodes=nodes, attempt=0, places={}, origin=f"n{node}", host=f"h{node}",
        version="1",
    )  # fmt: skip
    made.start()
    return made


def memory_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def others(port: int, nodes: int, seconds: float, place: Path) -> None:
    """The second process: prints its processor seconds, and how long an order took to come."""
    from torch.distributed import TCPStore

    linking.Outbox = Training  # type: ignore[misc, assignment]
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    folders = [place / str(node) for node in range(1, nodes)]
    for node, folder in enumerate(folders, 1):
        linked(store, folder, node, nodes)
    (place / "ready").touch()
    begun, used = time.monotonic(), time.process_time()
    waiting, came = dict(enumerate(folders)), []
    while time.monotonic() < begun + seconds + 10:
        for n, folder in list(waiting.items()):
            if (orders := Desk(folder).orders()) is not None and orders.notices:
                came.append(time.time() - float(orders.notices[0]))
                del waiting[n]
        time.sleep(0.2)
        if time.monotonic() > begun + seconds:
            break
    took = time.process_time() - used
    told = {"cpu": took / seconds / (nodes - 1), "came": len(came), "last": max(came, default=-1)}
    print(json.dumps(told), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--place", type=Path)
    args = parser.parse_args()
    if args.port:
        others(args.port, args.nodes, args.seconds, args.place)
        return
    from torch.distributed import TCPStore

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        lead, before = linked(store, place / "first", 0, args.nodes), memory_mb()
        command = [sys.executable, __file__, "--nodes", str(args.nodes), "--port", str(store.port)]
        command += ["--seconds", str(args.seconds), "--place", str(place)]
        second = subprocess.Popen(command, stdout=subprocess.PIPE)
        while not (place / "ready").exists():
            time.sleep(0.1)
        time.sleep(lead._standing.beat_s)
        begun, used = time.monotonic(), time.process_time()
        Desk(place / "first").write_orders(Orders(notices=(str(time.time()),)))
        time.sleep(args.seconds - lead._standing.beat_s - 2)
        share = (time.process_time() - used) / (time.monotonic() - begun)
        heard = [time.monotonic() - h.at for h in lead._standing.heard.values()]
        told = json.loads(second.communicate()[0])
        print(
            f"{args.nodes} nodes: {100 * share:.0f} % of a core and {memory_mb() - before:.0f} MB"
        )
        print(f"heard of {len(heard)} nodes, the longest ago {max(heard):.1f} s")
        print(f"an order reached {told['came']} nodes, the last after {told['last']:.1f} s")
        print(f"each other node: {100 * told['cpu']:.2f} % of a core")
        os._exit(0)


if __name__ == "__main__":
    main()
