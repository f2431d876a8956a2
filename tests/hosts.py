"""Hosts as network namespaces: each has an address, a name and a folder of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NETWORK = "10.77.0"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def why_not() -> str:
    """Why there can be no such hosts here; empty where there can."""
    name = f"ddp-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
        subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed: {error.stderr.decode().strip()[:100]}"
    return ""


class Host:
    """One of the hosts, on a bridge with the others.

    Attributes:
        address: its own; folder: where its commands run.
    """

    def __init__(self, number: int, folder: Path, tag: str) -> None:
        self.number, self.folder = number, folder
        self.name, self.cable = f"ddp{tag}h{number}", f"d{tag}c{number}"
        self.address = f"{NETWORK}.{number + 1}"

    def command(self, *words: str) -> list[str]:
        """What runs a command on this host."""
        named = ["sh", "-c", f'hostname host{self.number} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", *named, *words]

    def cut(self) -> None:
        """No message reaches or leaves it any more."""
        _ip("link", "set", self.cable, "down")

    def heal(self) -> None:
        _ip("link", "set", self.cable, "up")


@contextmanager
def hosts(count: int, place: Path) -> Iterator[list[Host]]:
    """So many hosts, each with a folder in `place`."""
    tag = f"{os.getpid() % 10000}"
    bridge = f"d{tag}br"
    made = [Host(number, place / f"host{number}", tag) for number in range(count)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in made:
            host.folder.mkdir(parents=True)
            _ip("netns", "add", host.name)
            inside = f"{host.cable}i"
            _ip("link", "add", host.cable, "type", "veth", "peer", "name", inside)
            _ip("link", "set", host.cable, "master", bridge, "up")
            _ip("link", "set", inside, "netns", host.name, "name", "eth0")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", host.name, "link", "set", device, "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
            subprocess.run(["ip", "link", "del", host.cable], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
