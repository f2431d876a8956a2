"""Phrases that the checks of this family share."""

from __future__ import annotations

from collections.abc import Iterable

from ...events import LoaderSeen, OptimizerSeen, ProbeTrouble
from ...report.findings import Evidence, Related, Steps
from ...run import Location, Run, some
from .epoch_audit import Audit
from .loaders import Epoch, Loader, Reader

SHORTEST = (
    "stop all ranks after the shortest (`n = torch.tensor(len(loader), device=device)`, "
    "`dist.all_reduce(n, op=dist.ReduceOp.MIN)`, `for batch in islice(loader, n.item()):`)"
)
"""What to do where each rank has data of its own, some more of it than others."""

FOLLOWING = "what each rank read from its DataLoaders"
"""What is lost where loaders could not be followed, as the probe names it."""


def no_loader(run: Run) -> str | None:
    """Why nothing is known of loaders, None where something is."""
    if run.any(LoaderSeen):
        return None
    if any(t.lost == FOLLOWING for rank in run.ranks.values() for t in rank.of(ProbeTrouble)):
        return "the doctor failed to follow the DataLoaders"
    return "no DataLoader was iterated"


def use(loader: Loader) -> str:
    if loader.trains:
        return "training"
    early = all(reader.before_models for reader in loader.readers.values())
    return "plain reading" if early else "evaluation"


def since(reader: Reader, number: int = 0) -> str:
    """Where the loader was another one, or right, before that epoch."""
    late = number > 0 or bool(reader.earlier)
    return f", from step {reader.epochs[number].began.step} on" if late else ""


def steps_from(reader: Reader, first: Epoch | None) -> Steps | None:
    """The steps from an epoch on that begins after others were taken, where one optimizer trains on
    what the loader gives; None where it comes first, or that is not known."""
    start, end = first.began.step if first else 0, reader.rank.steps
    if first is None or not 0 < start < end or len(reader.rank.of(OptimizerSeen)) > 1:
        return None
    trained = sum(e.trained for e in reader.epochs if e.began.step >= start)
    return Steps(start, end - 1, min(end - start, trained)) if trained else None


def dataset(reader: Reader) -> str:
    seen = reader.seen
    return f"{seen.dataset} ({seen.length})" if seen.length >= 0 else seen.dataset


def datasets(readers: Iterable[Reader]) -> str:
    """`Subset (40, 30, 20) and Images (64)`: each kind once."""
    lengths: dict[str, dict[int, None]] = {}
    for reader in readers:
        lengths.setdefault(reader.seen.dataset, {})[reader.seen.length] = None
    known = {kind: [n for n in found if n >= 0] for kind, found in lengths.items()}
    return " and ".join(f"{kind} ({some(n, 6)})" if n else kind for kind, n in known.items())


def figures(audit: Audit) -> Evidence:
    """What the ranks consumed, as evidence."""
    never = f"{audit.never} never" if audit.complete else "the rest not yet: left early"
    compared = "every index" if audit.sampled == 1 else f"one index in {audit.sampled}"
    return {
        "epoch": audit.number,
        "seen": f"{audit.once} once, {len(audit.repeated)} more than once, {never}, of "
        f"{audit.length} ({compared} compared)",
        "read by each rank": {r: e.samples for r, e in sorted(audit.epochs.items())},
        "for example": audit.duplicates()[:8],
    }


def spelled(indices: Iterable[int]) -> str:
    return " ".join(map(str, indices))


def related(
    reader: Reader,
    *,
    sampler: bool = True,
    loop: bool = True,
    gathered: Location | None = None,
) -> tuple[Related, ...]:
    places = [("iterated here", _loop(reader) if loop else None), ("gathered here", gathered)]
    if sampler and reader.seen.sampler_site >= 0:
        places.insert(0, ("sampler made here", reader.sampler_at))
    return tuple(Related(label, spot) for label, spot in places if spot is not None)


def _loop(reader: Reader) -> Location | None:
    """Where it is iterated, also where a single batch was taken elsewhere first."""
    return reader.rank.location(reader.epochs[0].began.site) or reader.loop_at
