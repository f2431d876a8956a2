"""Which parts of wrapped models are not compared between ranks, and why."""

from __future__ import annotations

from collections.abc import Iterator

from ...run import Run, counted
from .replicas import Replicas, replicas

IGNORED = "that DDP ignores (`_ddp_params_and_buffers_to_ignore`)"


def uncompared(run: Run, kind: str = "parameters") -> str | None:
    """The models, or their tensors of a kind, that DDP does not keep equal; None where all is
    compared."""
    groups = {(g.any.model, tuple(g.members)): g for g in replicas(run)}
    reported = dict.fromkeys(text for group in groups.values() for text in _reasons(group, kind))
    return "; ".join(reported) or None


def left_out(run: Run) -> str | None:
    """Which models are not compared at all; None where there is none."""
    groups = (g for g in replicas(run) if g.left_out)
    return (
        "; ".join(dict.fromkeys(f"{g.any.wrapped.kind}, as {g.left_out}" for g in groups)) or None
    )


def _reasons(group: Replicas, kind: str) -> Iterator[str]:
    """What of one model is not compared, with the reason."""
    wrapped = group.any.wrapped
    buffers = kind == "buffers"
    if group.left_out and not buffers:
        yield f"{wrapped.kind}, as {group.left_out}"
        return
    held = wrapped.buffers if buffers else wrapped.parameters
    count = sum(t.ignored and (t.trainable or buffers) for t in held)
    if count:
        yield f"{counted(count, kind.removesuffix('s'))} of {wrapped.kind} {IGNORED}"
