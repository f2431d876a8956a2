"""What the program calls its wrapped models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .events import Named, Wrapped

if TYPE_CHECKING:
    from .run import Rank


def names_of(rank: Rank, wrapped: Wrapped) -> tuple[str, str]:
    """What it calls the wrapper, and what that was given; empty for unknown: as the line of the
    wrap does, unless that says nothing or wraps others as well."""
    spot = rank.location(wrapped.site) if not wrapped.adopted else None
    wrapper, given = spot.named("DDP", "DistributedDataParallel") if spot else ("", "")
    seen = next((e.name for e in rank.of(Named) if e.model == wrapped.model), "")
    alone = sum(w.site == wrapped.site for w in rank.of(Wrapped)) == 1
    return (wrapper if wrapper and alone else seen or wrapper), given


def title_of(rank: Rank, wrapped: Wrapped) -> str:
    """Its class, and where there are several of that, its name, if that tells them apart."""
    alike = [w for w in rank.of(Wrapped) if w.kind == wrapped.kind and w.model != wrapped.model]
    name = names_of(rank, wrapped)[0]
    apart = alike and name and all(names_of(rank, other)[0] != name for other in alike)
    return f"{name} ({wrapped.kind})" if apart else wrapped.kind
