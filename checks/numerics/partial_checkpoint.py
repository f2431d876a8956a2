"""DDP805."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.replicas.moving import divided
from ddpdoctor.analysis.replicas.replicas import replicas
from ddpdoctor.events import FileWritten, SavedPart
from ddpdoctor.report.declarations import Effect, When, seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Rank, Run, counted, ranks_do, ranks_text, shorten

SHARDS, STATE = "shards-of-some-ranks", "state-of-some-ranks"


class PartialCheckpoint(Check):
    """A checkpoint holds only what some ranks have of the model or the optimizer

    ## What it finds
    `torch.save` on some ranks only, of tensors that `fully_shard` (or another sharding by DTensors)
    has divided: the file holds the shards of these ranks. And of an optimizer's state that each
    rank keeps for a part of the parameters (ZeRO, Muon): the file lacks what the other ranks keep.

    ## How it knows
    What a rank passes to `torch.save` is looked through for DTensors with shards, and for
    `optimizer.state_dict()`s in which some parameters have a state and others have none. Which
    ranks hold the shards is told by their mesh; that ranks keep different parts of a state, by
    digests of the states on all ranks: each lacks some that another has. It is reported if not all
    of these ranks save in that step.
    The finding is proven.

    ## Why it hurts
    Saving raises no error. The loss shows when training is to go on: shapes do not fit, or a part
    of the weights or of the momentum is silently that of another rank, or new.

    ## How to fix it
    Collect the whole on all ranks first (`get_model_state_dict` and `get_optimizer_state_dict` of
    `torch.distributed.checkpoint.state_dict`, with `full_state_dict=True`), or save with
    `torch.distributed.checkpoint.save` on all ranks. Of a state of your own: gather it from the
    ranks that keep it.

    ## When it stays quiet
    - Every rank saves its own part.
    - The whole was collected before: no shard is saved.
    - Parameters without a state on all ranks: frozen ones, or such that have had no gradient yet.
    - One rank has the state of all parameters, or a rank lacks a state because it had no gradient,
      and the parameter differs: other checks tell why.
    """

    code = "DDP805"
    name = "partial-checkpoint"
    family = "numerics"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        SHARDS: "some ranks save their shards of the model or the optimizer, the others do not",
        STATE: "some ranks save the optimizer's state that they keep, the others do not",
    }
    effects = (
        Effect(
            ("optimizer-state-drift",), rules=("state-of-another-shard",), when=(When.NOT_BEFORE,)
        ),
    )
    requires = (seen(FileWritten, otherwise="no rank was seen to write a file"),)

    def examine(self, run: Run) -> Iterable[Finding]:
        told: set[object] = set()
        for rank in run.ranks.values():
            for event in rank.of(SavedPart):
                place = rank.location(event.site)
                if place not in told and (found := self._judge(run, rank, event)) is not None:
                    told.add(place)
                    yield found

    def _judge(self, run: Run, rank: Rank, event: SavedPart) -> Finding | None:
        path = shorten(event.path, rank.cwd) if event.path else "a buffer"
        if event.shards:
            savers, others = _divided(run, event, event.ranks, shards=True)
            if others:
                their = "its" if len(savers) == 1 else "their"
                return self._finding(
                    rank, event, SHARDS, savers,
                    summary=f"{ranks_do(savers, 'save')} only {their} own shards to {path}: "
                    f"{event.shards} of {counted(event.tensors, 'tensor')} are parts, and "
                    f"{ranks_text(others)} {'holds' if len(others) == 1 else 'hold'} the rest",
                    cause="the `state_dict()` of a sharded model, and of its optimizer, holds "
                    "DTensors, and `torch.save` writes the part of each that this rank has; "
                    f"{ranks_text(others)} saved none in this step",
                    fix="collect the whole on all ranks first: `get_model_state_dict(model, "
                    "options=options)` and `get_optimizer_state_dict(model, optimizer, "
                    "options=options)` of `torch.distributed.checkpoint.state_dict`, with "
                    "`options = StateDictOptions(full_state_dict=True, cpu_offload=True)`; then "
                    "save it on one rank. Or let all ranks call "
                    "`torch.distributed.checkpoint.save`",
                )  # fmt: skip
        if event.lacking:
            for group in replicas(run):
                kept = divided(group) if rank.rank in group.members else ""
                savers, others = _divided(run, event, tuple(group.members), shards=False)
                if kept and others:
                    return self._finding(
                        rank, event, STATE, savers,
                        summary=f"{ranks_do(savers, 'save')} the optimizer's state to {path} "
                        f"without that of {event.lacking} of {event.parameters} parameters, which "
                        "other ranks keep",
                        cause=f"each rank keeps the state (`{kept}`) of a part of the parameters "
                        f"only, and {ranks_text(others)} saved none in this step",
                        fix="gather the state from the ranks that keep it before one rank saves it "
                        "(`dist.gather_object(optimizer.state_dict()['state'], states)`, then "
                        "merge them), or let every rank save a file of its own and load that",
                    )  # fmt: skip
        return None

    def _finding(
        self, rank: Rank, event: SavedPart, rule: str, savers: tuple[int, ...], **texts: str
    ) -> Finding:
        return self.finding(
            rule=rule,
            ranks=savers,
            steps=Steps.of([event.step], rank.steps),
            subjects=(event.path,) if event.path else (),
            location=rank.location(event.site),
            label="saves a part only",
            fix_kind=FixKind.CHECK,
            evidence={
                "shards": event.shards,
                "tensors": event.tensors,
                "parameters_without_a_state": event.lacking,
            },
            at=rank.wall(event.at),
            **texts,
        )


def _divided(
    run: Run, event: SavedPart, ranks: tuple[int, ...], *, shards: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the ranks that hold parts of one whole, those that save theirs in the step of an event,
    and the others."""
    saving = tuple(
        r
        for r in ranks
        if r in run.ranks and any(_same(e, event, shards) for e in run.ranks[r].of(SavedPart))
    )
    return saving, tuple(r for r in ranks if r not in saving)


def _same(one: SavedPart, other: SavedPart, shards: bool) -> bool:
    return one.step == other.step and bool(one.shards if shards else one.lacking)
