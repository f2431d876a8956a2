"""Nodes that vanished during the run, in words."""

from __future__ import annotations

import time

from ..events import NodeSilent
from .phrases import ranks_text
from .run import Run


def silence_text(event: NodeSilent) -> str:
    """`node 1 (gpu-7, ranks 8-15) has not been heard of since 12:03:10`"""
    whom = f"{event.host}, {ranks_text(event.ranks)}" if event.ranks else event.host
    since = time.strftime("%H:%M:%S", time.localtime(event.wall))
    return f"node {event.node} ({whom}) has not been heard of since {since}"


def silent_nodes(run: Run) -> str:
    """The nodes that were not heard of any more; empty for none."""
    last = {e.node: e for node in run.nodes.values() for e in node.of(NodeSilent)}
    return ", ".join(silence_text(event) for _, event in sorted(last.items()))
