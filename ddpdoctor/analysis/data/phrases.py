"""Phrases and evidence that the checks of the family `data` share."""

from __future__ import annotations

from collections.abc import Iterable

from ...events import LoaderSeen, OptimizerSeen, ProbeTrouble
from ...report.findings import Evidence, Related, Steps
from ...run import Location, Run, some
from .epoch_audit import Audit
from .loaders import Epoch, Loader, Reader

SHORTEST = (
    "stop all ranks after the shortest one (`n = torch.tensor(len(loader), device=device)`, "
    "`dist.all_reduce(n, op=dist.ReduceOp.MIN)`, `for batch in islice(loader, n.item()):`)"
)
"""The fix where each rank has its own data, some of it more than others."""

FOLLOWING = "what each rank read from its DataLoaders"
"""What the probe reports as lost (`ProbeTrouble.lost`) where it could not follow DataLoaders."""


def no_loader(run: Run) -> str | None:
    """Why nothing is known of loaders, None where something is."""
    if run.any(LoaderSeen):
        return None
    if any(t.lost == FOLLOWING for rank in run.ranks.values() for t in rank.of(ProbeTrouble)):
        return "the doctor failed to follow the DataLoaders"
    return "no DataLoader was iterated"


def use(loader: Loader) -> str:
    """`training`, `evaluation`, or `plain reading` before there was a model."""
    if loader.trains:
        return "training"
    early = all(reader.before_models for reader in loader.readers.values())
    return "plain reading" if early else "evaluation"


def since(reader: Reader, number: int = 0) -> str:
    """`, from step 20 on`, where the data was divided otherwise before that epoch."""
    late = number > 0 or bool(reader.earlier)
    return f", from step {reader.epochs[number].began.step} on" if late else ""


def steps_from(reader: Reader, first: Epoch | None) -> Steps | None:
    """The optimizer steps from the begin of an epoch on. None where no step came before it, where
    several optimizers step, or where the loader does not train."""
    start, end = first.began.step if first else 0, reader.rank.steps
    if first is None or not 0 < start < end or len(reader.rank.of(OptimizerSeen)) > 1:
        return None
    trained = sum(e.trained for e in reader.epochs if e.began.step >= start)
    return Steps(start, end - 1, min(end - start, trained)) if trained else None


def dataset(reader: Reader) -> str:
    """`Images (64)`: class and length, where it has one."""
    seen = reader.seen
    return f"{seen.dataset} ({seen.length})" if seen.length >= 0 else seen.dataset


def datasets(readers: Iterable[Reader]) -> str:
    """`Subset (40, 30, 20) and Images (64)`: each class once."""
    lengths: dict[str, dict[int, None]] = {}
    for reader in readers:
        lengths.setdefault(reader.seen.dataset, {})[reader.seen.length] = None
    known = {kind: [n for n in found if n >= 0] for kind, found in lengths.items()}
    return " and ".join(f"{kind} ({some(n, 6)})" if n else kind for kind, n in known.items())


def figures(audit: Audit) -> Evidence:
    """What the ranks read in one epoch, as evidence."""
    never = f"{audit.never} never" if audit.complete else "the epoch was left early"
    compared = (
        "every index compared" if audit.sampled == 1 else f"1 index in {audit.sampled} compared"
    )
    return {
        "epoch": audit.number,
        "samples read": f"{audit.once} once, {len(audit.repeated)} more than once, {never}, of "
        f"{audit.length} ({compared})",
        "samples by rank": {r: e.samples for r, e in sorted(audit.epochs.items())},
        "for example": audit.duplicates()[:8],
    }


def spelled(indices: Iterable[int]) -> str:
    """`3 5 8`."""
    return " ".join(map(str, indices))


def on_each_rank(values: Iterable[tuple[int, object]], limit: int = 4) -> str:
    """`100 on rank 0, 98 on rank 1`, for pairs of rank and value."""
    pairs = sorted(values)
    shown = ", ".join(f"{value} on rank {rank}" for rank, value in pairs[:limit])
    return shown + (f" and {len(pairs) - limit} more" if len(pairs) > limit else "")


def related(
    reader: Reader,
    *,
    sampler: bool = True,
    loop: bool = True,
    gathered: Location | None = None,
) -> tuple[Related, ...]:
    """Where the sampler was made, the loader is iterated, and results are gathered."""
    places = [("iterated here", _loop(reader) if loop else None), ("gathered here", gathered)]
    if sampler and reader.seen.sampler_site >= 0:
        places.insert(0, ("sampler made here", reader.sampler_at))
    return tuple(Related(label, spot) for label, spot in places if spot is not None)


def _loop(reader: Reader) -> Location | None:
    """The line that iterates the loader, also where a single batch was taken elsewhere before."""
    return reader.rank.location(reader.epochs[0].began.site) or reader.loop_at
