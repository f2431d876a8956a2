"""Which wrapped models the collectives belong to that DDP issues itself."""

from __future__ import annotations

from ...events import CallBlock, CallSite, Signature, Wrapped
from ...run import Location, Rank, Run

Line = tuple[str, tuple[Location | None, ...]]
"""An operation, and the lines that led to it."""


def sites_of_several(run: Run) -> set[tuple[int, str, int]]:
    """The calls of DDP on lines that make them for several models, one after the other: by rank,
    operation and number of the site. Lines of which the model is unknown on some rank are left
    out."""
    made: dict[Line, set[tuple[int, ...]]] = {}
    sites: dict[Line, set[tuple[int, str, int]]] = {}
    for rank in run.ranks.values():
        if len(rank.of(Wrapped)) < 2:
            continue
        of_models = {s.id: s for s in rank.of(Signature) if s.model >= 0}
        where = {s.id: s for s in rank.of(CallSite)}
        codes = {(c.signature, c.site) for c in (rank.ring.calls if rank.ring else ())}
        for block in rank.of(CallBlock):
            codes |= set(zip(block.codes[::2], block.codes[1::2], strict=False))
        for number, site in codes:
            if (signature := of_models.get(number)) is None or site not in where:
                continue
            line = signature.op, tuple(map(rank.location, (p.site for p in where[site].places)))
            made.setdefault(line, set()).add(tuple(models_of(rank, signature)))
            sites.setdefault(line, set()).add((rank.rank, signature.op, site))
    several = (line for line, models in made.items() if len(models) > 1 and () not in models)
    return {site for line in several for site in sites[line]}


def models_of(rank: Rank, signature: Signature) -> dict[int, Wrapped]:
    """The wrapped models that make a call of DDP, by their numbers in the order of wraps in their
    group, which is the same on every rank; empty where that is not known."""
    numbers = signature.models or (signature.model,)
    wrapped = [w for w in rank.of(Wrapped) if w.wrapper == "DistributedDataParallel"]
    group = next((w.group for w in wrapped if w.model == numbers[0]), None)
    wrapped = [w for w in wrapped if w.group == group]
    if any(w.adopted or w.options.get("init_sync") is False for w in wrapped):
        return {}
    return {at: w for at, w in enumerate(wrapped) if w.model in numbers}
