"""Nodes that vanished during the run, in words."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ..events import NodeSilent
from .phrases import ranks_text
from .rank import Facts


def silence_text(event: NodeSilent, which: str = "") -> str:
    """`node 1 (gpu-7, ranks 8-15) has not been heard of since 12:03:10`, with `which` after the
    node."""
    whom = f"{event.host}, {ranks_text(event.ranks)}" if event.ranks else event.host
    since = time.strftime("%H:%M:%S", time.localtime(event.wall))
    if event.over:
        return f"node {event.node} ({whom}){which} is heard of again"
    return f"node {event.node} ({whom}){which} has not been heard of since {since}"


def silences(nodes: Iterable[Facts]) -> list[NodeSilent]:
    """For each node that was not heard of any more in the end, since when; given the records of the
    monitors."""
    last = {e.node: e for node in nodes for e in node.of(NodeSilent)}
    return [event for _, event in sorted(last.items()) if not event.over]
