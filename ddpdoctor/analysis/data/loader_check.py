"""What the checks of loaders share: selection, words, and how a finding is filled in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple

from ...events import LoaderSeen, OptimizerSeen, ProbeTrouble, ProgramSeen, Watched
from ...report.findings import (
    Check,
    Confidence,
    Evidence,
    Finding,
    Related,
    Requirement,
    Severity,
    Steps,
)
from ...run import Location, Run, some
from .epoch_audit import Audit
from .fault import LoaderFault
from .loader_faults import of_check
from .loaders import Epoch, Loader, Reader
from .rng_state import Seeding

SHORTEST = (
    "stop all ranks after the shortest one (`n = torch.tensor(len(loader))`, on the GPU with NCCL, "
    "`dist.all_reduce(n, op=dist.ReduceOp.MIN)`, `for batch in itertools.islice(loader, n):`)"
)
"""The fix where each rank has its own data, some of it more than others."""


class Words(NamedTuple):
    """The sentences of one rule; what is in braces is filled in from the facts of a finding.

    Attributes:
        when: when the rule decides, for `ddpdoctor explain`.
    """

    when: str
    cause: str
    fix: str
    label: str = ""
    summary: str = ""


def when(words: Mapping[str, Words]) -> dict[str, str]:
    """`Check.rules` of a check with such words."""
    return {rule: row.when for rule, row in words.items()}


def no_loader(run: Run) -> str | None:
    """Why nothing is known of loaders, None where something is."""
    if run.any(LoaderSeen):
        return None
    troubles = (t for rank in run.ranks.values() for t in rank.of(ProbeTrouble))
    if any(t.watched is Watched.LOADERS for t in troubles):
        return "the doctor failed to follow the DataLoaders"
    return "no DataLoader was iterated"


class LoaderCheck(Check):
    """A check of what loaders delivered.

    `words` has a row for each rule; where a check gives none, it writes its sentences itself.
    """

    family = "data"
    words: ClassVar[Mapping[str, Words]] = {}
    requires: ClassVar[tuple[Requirement, ...]] = (no_loader,)

    def faults(self, run: Run) -> list[LoaderFault]:
        """The faults of loaders that this check reports."""
        return of_check(run, self.name)

    def of_reader(self, reader: Reader, **fields: object) -> Finding:
        """A finding about a loader, from one of its readers: by default at the line that makes it,
        from its first epoch on."""
        defaults = {
            "subjects": (reader.seen.dataset,),
            "location": reader.made_at,
            "related": related(reader),
            "at": reader.rank.wall(reader.epochs[0].began.at),
        }
        return self.finding(**defaults | fields)

    def of_fault(
        self,
        fault: LoaderFault,
        facts: Mapping[str, object],
        *,
        note: bool = False,
        **fields: object,
    ) -> Finding:
        """A finding about a fault, with the sentences of its rule.

        Args:
            note: what is found does no harm.
            fields: the others, and those that differ from what the rule says.
        """
        reader, audit, words = fault.readers[0], fault.audit, self.words[fault.rule]
        known: dict[str, object] = {
            "dataset": dataset(reader),
            "kind": reader.seen.dataset,
            "sampler": reader.seen.sampler,
            **fault.facts,
            **facts,
        }
        sentences = {
            name: text.format_map(known)
            for name, text in words._asdict().items()
            if text and name != "when" and name not in fields
        }
        defaults = {
            "rule": fault.rule,
            "severity": Severity.NOTE if note or fault.doubt else self.severity,
            "confidence": Confidence.SUSPECTED if fault.doubt else Confidence.PROVEN,
            "ranks": fault.ranks,
            "evidence": {**(figures(audit) if audit else {}), **fault.evidence},
            "at": reader.rank.wall(
                audit.at if audit else reader.epochs[fault.first_epoch].began.at
            ),
        }
        return self.of_reader(reader, **defaults | sentences | fields)


def seeded_here(*seedings: Seeding | None) -> tuple[Related, ...]:
    """The lines that seed all ranks alike, or restore the same state on them."""
    lines = {s.line: s for s in seedings if s is not None}
    how = {False: "seeded alike", True: "the same state is restored"}
    return tuple(Related(f"{how[s.restored]} on these ranks", at) for at, s in lines.items())


def by_accelerate(reader: Reader) -> bool:
    """Whether `Accelerator.prepare` has put a batch sampler of its own into the loader, which gives
    each rank its part of the batches."""
    versions = (e.versions for e in reader.rank.of(ProgramSeen))
    ours = reader.seen.batch_sampler == "BatchSamplerShard"
    return ours and any("accelerate" in v for v in versions)


def doubt(fault: LoaderFault) -> str:
    """` (all compared samples are identical)`, where what is found may be intended."""
    return f" ({fault.doubt.value})" if fault.doubt else ""


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


def steps_from(reader: Reader, first: Epoch | None, *, only: bool = False) -> Steps | None:
    """The optimizer steps from the begin of an epoch on. None where no step came before it, where
    several optimizers step, or where the loader does not train.

    Args:
        only: only those in that epoch.
    """
    start, end = first.began.step if first else 0, reader.rank.steps
    if first is None or not 0 < start < end or len(reader.rank.of(OptimizerSeen)) > 1:
        return None
    after = (e.began.step for e in reader.epochs if only and e.began.step > start)
    end = min((end, *after))
    trained = sum(e.trained for e in reader.epochs if start <= e.began.step < end)
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
    never = f"{audit.never} never" if audit.complete else "the epoch was stopped early"
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
