"""Models that DDP averages within groups of ranks only, although the groups train one model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...events import (
    CallBlock,
    CallRun,
    GroupReady,
    Hyperparameters,
    LoaderSeen,
    Replica,
    Signature,
    Wrapped,
)
from ...events.drift import UNHELD
from ...events.operations import operation
from ...report.findings import Confidence, Severity, Steps
from ...run import Location, Rank, Run, counted, ranks_text
from .causes import between
from .replica import Member
from .replicas import Divergence, Replicas, divergence
from .thresholds import FEW_NUMBERS, SEVERAL_STEPS

RULE = "groups-apart"
RULES = {RULE: "DDP averages within groups of ranks, and nothing does between them"}


@dataclass(frozen=True)
class Apart:
    """Groups of ranks whose copies start equal and diverge.

    Attributes:
        ranks: of each group.
        joint: why the groups train one model; empty where nothing on record shows it.
    """

    copies: Replicas
    found: Divergence
    ranks: tuple[tuple[int, ...], ...]
    joint: str

    @property
    def line(self) -> Location | None:
        return self.copies.any.rank.location(self.copies.any.wrapped.site)

    def fields(self, run: Run) -> dict[str, object]:
        """The fields of a finding."""
        kind, alone = self.copies.any.wrapped.kind, all(len(g) == 1 for g in self.ranks)
        groups = ", ".join(str(list(g)) for g in self.ranks[:4])
        groups += ", ..." if len(self.ranks) > 4 else ""
        averaged = (
            "the process group passed to DDP holds one rank, so it averages nothing"
            if alone
            else f"DDP averages gradients within the groups {groups} only"
        )
        doubt = (
            "" if self.joint else "; if each group is meant to train its own model, this is fine"
        )
        members = tuple(sorted(self.copies.members))
        return {
            "rule": RULE,
            "ranks": members,
            "steps": Steps.of(self.found.keys),
            "subjects": tuple(self.found.names),
            "location": self.line,
            "label": f"averages over {counted(len(self.ranks[0]), 'rank')} only",
            "severity": Severity.ERROR if self.joint else Severity.WARNING,
            "confidence": Confidence.PROVEN if self.joint else Confidence.SUSPECTED,
            "summary": f"{kind} is trained apart by {counted(len(self.ranks), 'group')} of ranks: "
            f"its parameters start equal and differ {between(self.found.split, run)} since step "
            f"{self.found.first}",
            "cause": f"{averaged}, and nothing averages them between the groups"
            + (f"; {self.joint}" if self.joint else "")
            + doubt,
            "fix": f"wrap with a group of all ranks that train this model ({ranks_text(members)}): "
            "leave `process_group=` out, or pass the group of the whole mesh "
            '(`mesh["dp", "sp"]._flatten().get_group()`)',
            "evidence": {"averaged_within": [list(g) for g in self.ranks]},
            "at": self.found.at,
        }


def apart(run: Run) -> Iterator[Apart]:
    """Each model that groups of ranks train apart."""
    for members in _same_model(run):
        copies = Replicas(members)
        groups = tuple(sorted({m.seen.ranks for m in members.values()}))
        found = divergence(copies, "parameters")
        if found is None or found.healed >= 0 or found.before != 0 or found.first != 1:
            continue
        if found.compared <= SEVERAL_STEPS or any(m.seen.left_out for m in members.values()):
            continue
        # Within a group copies agree: else another rule is right.
        if any(len({_side(found, r) for r in group}) > 1 for group in groups):
            continue
        ranks = {n: m.rank for n, m in members.items()}
        if _averaged_together(ranks, groups) or _own_options(members):
            continue
        exchanged = _exchanged(ranks, groups)
        if exchanged is not None:
            yield Apart(copies, found, groups, _joint(ranks, groups, exchanged))


def _side(found: Divergence, rank: int) -> int:
    return next((n for n, side in enumerate(found.split) if rank in side), -1)


def _same_model(run: Run) -> Iterator[dict[int, Member]]:
    """Ranks in several groups that wrap models of one look at one line, and train them with the
    same optimizer; all ranks of each group."""
    found: dict[object, dict[int, Member]] = {}
    for number, rank in run.ranks.items():
        latest = {(e.model, e.optimizer): e for e in rank.of(Replica) if e.optimizer != UNHELD}
        wrapped = {w.model: w for w in rank.of(Wrapped)}
        order = {model: n for n, model in enumerate(wrapped)}
        for (model, optimizer), seen in latest.items():
            if (one := wrapped.get(model)) is None or number not in seen.ranks:
                continue
            look = tuple(p.look for p in one.parameters)
            key = (order[model], optimizer, rank.location(one.site), seen.parameters, look)
            found.setdefault(key, {})[number] = Member(rank, seen, one)
    for members in found.values():
        groups = {m.seen.ranks for m in members.values()}
        whole = {rank for group in groups for rank in group}
        if len(groups) > 1 and whole == set(members) and sum(map(len, groups)) == len(members):
            yield members


def _averaged_together(ranks: dict[int, Rank], groups: tuple[tuple[int, ...], ...]) -> bool:
    """Whether another wrapped model is averaged over ranks of two of the groups: then these are
    parts of one model that differ by design (experts)."""
    return any(
        len(_of(groups, known.get(wrapped.group, ()))) > 1
        for rank in ranks.values()
        for known in ({g.group: g.ranks for g in rank.of(GroupReady)},)
        for wrapped in rank.of(Wrapped)
    )


def _of(groups: tuple[tuple[int, ...], ...], ranks: tuple[int, ...]) -> set[int]:
    """Which of the groups have a rank among these."""
    return {n for n, group in enumerate(groups) if not set(group).isdisjoint(ranks)}


def _own_options(members: dict[int, Member]) -> bool:
    """Whether the ranks train with different options from the first step on: trials of a search."""
    first = [
        next((e.groups for e in m.of(Hyperparameters) if not e.step), ()) for m in members.values()
    ]
    return any(options != first[0] for options in first)


def _exchanged(ranks: dict[int, Rank], groups: tuple[tuple[int, ...], ...]) -> set[str] | None:
    """The operations with which ranks of different groups exchange values in the steps; None where
    these may carry activations or parameters, so that the copies may be parts of one model (tensor
    or pipeline parallelism), or are made equal."""
    found: set[str] = set()
    for rank in ranks.values():
        spanning = {
            g.group for g in rank.of(GroupReady) if g.member and len(_of(groups, g.ranks)) > 1
        }
        signatures = {s.id: s for s in rank.of(Signature)}
        if any(_is_message(s.op) for s in signatures.values()):
            return None
        blocks = {b.id: b.codes[::2] for b in rank.of(CallBlock)}
        for call in rank.of(CallRun):
            if call.group not in spanning or call.step + call.every * (call.repeat - 1) < 1:
                continue
            for signature in (signatures.get(s) for s in blocks.get(call.block, ())):
                if signature is None or operation(signature.op).meets:
                    continue
                kind = operation(signature.op)
                swapped = signature.op.startswith("all_to_all")
                if not swapped and not kind.objects and not 0 <= signature.numel <= FEW_NUMBERS:
                    return None
                found.add(signature.op)
    return found


def _joint(ranks: dict[int, Rank], groups: tuple[tuple[int, ...], ...], exchanged: set[str]) -> str:
    """What shows that the groups train one model together; empty for nothing."""
    if any(op.startswith("all_to_all") for op in exchanged):
        return "the groups exchange parts of their batches by `all_to_all`"
    largest = max(map(len, groups))
    if any(e.replicas > largest for rank in ranks.values() for e in rank.of(LoaderSeen)):
        return "their samplers divide the data over the ranks of all groups"
    if exchanged:
        return "the groups reduce values together in the steps"
    return ""


def _is_message(op: str) -> bool:
    return operation(op).sends or operation(op).receives or op == "batch_isend_irecv"
