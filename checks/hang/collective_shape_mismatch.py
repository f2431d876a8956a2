"""DDP602."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.analysis.divergence.buffer_shapes import SkippedRound, apart
from ddpdoctor.analysis.divergence.divergence import describe_sides
from ddpdoctor.analysis.divergence.divergences import divergences
from ddpdoctor.analysis.divergence.mismatch_report import (
    Told,
    began,
    culprits_of,
    each_once,
    elsewhere,
    evidence,
    related,
)
from ddpdoctor.analysis.waiting.snapshot import RankSnapshot, Snapshot, scene
from ddpdoctor.events import CallSite, CommHook, Wrapped
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Run, fold_ranks, ranks_do, ranks_text

CONSEQUENCES = ("rank-missing", "rank-exited-early", "rank-died", "first-failure", "stall")
NAMES = {
    "numel": "shapes",
    "dtype": "dtypes",
    "device": "devices",
    "reduce_op": "reduce operations",
    "root": "roots",
}
FIXES = {
    "numel": "give every rank the same shape: pad, or exchange the sizes first",
    "dtype": "cast to one dtype on every rank before the call: `tensor.to(torch.float32)`",
    "device": "put the tensor on the same kind of device on every rank",
    "reduce_op": "pass the same `op=` on every rank",
    "root": "pass the same `src`/`dst` on every rank",
}


class CollectiveShapeMismatch(Check):
    """Ranks make the same collective with different arguments

    ## What it finds
    At one number of one group all ranks make the same call, but with another number of elements,
    dtype, kind of device, root or reduce operation, whether the run hangs, aborts, or goes on. The
    same of DDP's own averaging, where the ranks gave a model different communication hooks and came
    to a stop in a backward, and of its broadcast of buffers that a forward has made as large as the
    rank's own batch.

    ## How it knows
    Every rank writes down the arguments of each collective before it makes it; they are compared
    number by number, as for `collective-mismatch`. Communication hooks are recorded as they are
    registered; the shapes of the buffers that DDP is to broadcast at the first 16 forwards, at
    powers of two and at every 64th, where they have changed. Where the call is in a function that
    only hands on what it was given, the line shown is that of the caller that made it. The finding
    is proven.

    ## Why it hurts
    On gloo a different dtype or reduce operation ends with wrong numbers and no error; a different
    shape aborts one process from C++, without a Python traceback, and the *other* rank gets the
    error message; a different root hangs or leaves one rank with its own value.

    ## How to fix it
    Give all ranks the same arguments: pad tensors to one size or exchange sizes first, cast to one
    dtype, compute `src`, `dst` and `op` from values that all ranks share.

    ## When it stays quiet
    `all_gather_object` and its kin, `all_to_all` with uneven splits, point-to-point calls, shapes
    with equal numbers of elements, uneven `all_gather` on NCCL.
    """

    code = "DDP602"
    name = "collective-shape-mismatch"
    family = "hang"
    severity = Severity.ERROR

    def unobserved(self, run: Run) -> str | None:
        return None if run.any(CallSite) or run.any(Wrapped) else "no collective was seen"

    def examine(self, run: Run) -> Iterable[Finding]:
        parted = divergences(run)
        for reported in each_once(p for p in parted if p.key.name != "new_group" and p.same_call):
            yield self._report(run, reported)
        if not parted and (hooked := _hooked_apart(run)):
            yield self._report_hooks(scene(run), *hooked)
        for sent in apart(run):
            yield self._report_buffers(sent)

    def explains(self, mine: Finding, other: Finding) -> bool:
        if other.check not in CONSEQUENCES or mine.evidence.get("all_got_past"):
            return False
        return other.at == 0.0 or other.at >= mine.at - 1.0

    def _report(self, run: Run, reported: Told) -> Finding:
        divergence, _ = reported
        place, culprits = divergence.place, culprits_of(reported)
        op = place.signature.op
        words = " and ".join(NAMES[d] for d in divergence.differs if d in NAMES)
        sides = [(fold_ranks(side), m.signature.text) for side, m in describe_sides(divergence)]
        calls = "; ".join(f"rank{'s' if ',' in r or '-' in r else ''} {r}: {t}" for r, t in sides)
        return self.finding(
            ranks=culprits,
            steps=divergence.when,
            subjects=(op,),
            location=divergence.location,
            label=f"{ranks_do(culprits, 'differ')} in {words}",
            related=related(divergence, place, divergence.location),
            summary=f"{op} is called with different {words}: {calls}{elsewhere(reported)}",
            cause=f"the ranks pass different {words} to the same {op} ({divergence.key}, call "
            f"{divergence.index}); gloo checks none of it",
            fix="; ".join(FIXES[d] for d in divergence.differs if d in FIXES),
            fix_kind=FixKind.CHECK,
            evidence=evidence(run, reported),
            at=began(divergence, run.started),
        )

    def _report_buffers(self, found: SkippedRound) -> Finding:
        """DDP broadcasts the buffers at the begin of a forward, whatever their shapes."""
        culprits = found.culprits
        reported = "; ".join(
            f"rank {r}: " + ", ".join(f"{n} {shape}" for n, shape in found.shapes(r).items())
            for r in (found.root, culprits[0])
        )
        return self.finding(
            ranks=culprits,
            steps=Steps.of([found.event.step]),
            subjects=tuple({**found.shapes(culprits[0]), **found.shapes(found.root)}),
            location=found.rank.location(found.event.site),
            label=f"broadcasts the buffers of rank {found.root}",
            summary=f"DDP broadcasts buffers of {found.kind} that have other shapes on other "
            f"ranks: {reported}",
            cause=f"at the begin of each forward DDP sends the buffers of rank {found.root} to "
            "all, and checks no shapes: the values land where they do not belong, or the run "
            "crashes; what a forward makes or replaces is as large as the rank's own batch asks",
            fix="keep what depends on the batch out of the buffers (a plain attribute, or made "
            "anew in `forward`), or make it as large as it can get in `__init__`",
            fix_kind=FixKind.CHECK,
            evidence={
                "shapes": {str(r): found.shapes(r) for r in found.sent},
                "forward": found.event.forward,
            },
            at=found.rank.wall(found.event.at),
        )

    def _report_hooks(
        self, now: Snapshot, waiting: RankSnapshot, hooks: dict[int, CommHook | None]
    ) -> Finding:
        """Ranks average one model's gradients with different hooks, and stopped in doing so."""
        sides: dict[str, list[int]] = {}
        for rank, hook in hooks.items():
            sides.setdefault(hook.name if hook else "", []).append(rank)
        culprits = min(sides.values(), key=lambda side: (len(side), hooks[side[0]] is None))
        reported = "; ".join(f"{ranks_text(r)}: {name or 'none'}" for name, r in sides.items())
        placed = next(r for r in (*culprits, *hooks) if hooks[r] is not None)
        here = hooks[placed]
        waits = waiting.location
        return self.finding(
            ranks=tuple(culprits),
            subjects=tuple(name for name in sides if name),
            location=now.stands[placed].rank.location(here.site) if here else None,
            label=f"registered on {ranks_text(sides[here.name])}" if here else "",
            related=(Related(f"{ranks_text([waiting.rank.rank])} averages here", waits),)
            if waits
            else (),
            summary=f"ranks average the gradients of one model with different communication hooks: "
            f"{reported}",
            cause="a hook decides in which dtype and shape a rank sends its gradients, and the "
            "others receive them in theirs; the run came to its end in such a backward",
            fix="register the same hook on every rank, right after the model is wrapped",
            fix_kind=FixKind.CHECK,
            evidence={
                "model": here.model if here else -1,
                "hooks": {str(r): h.name if h else "none" for r, h in hooks.items()},
                "stuck": not now.failed,
            },
            at=now.at,
        )


def _hooked_apart(run: Run) -> tuple[RankSnapshot, dict[int, CommHook | None]] | None:
    """Who is in a backward, and the hooks that the ranks gave the last model of its group in which
    they differ, where the run failed or stands still."""
    now = scene(run)
    stands = now.stands.values()
    within = [s for s in stands if s.made and s.made.signature.op == "DDP backward"]
    if not within or not (now.failed or now.stall):
        return None
    key = within[0].key
    known: dict[int, dict[int, CommHook | None]] = {}
    for stand in stands:
        own = {h.model: h for h in stand.rank.of(CommHook)}
        for wrapped in stand.rank.of(Wrapped):
            if now.known.key(stand.rank, wrapped.group) == key:
                known.setdefault(wrapped.model, {})[stand.rank.rank] = own.get(wrapped.model)
    apart = [
        h for _, h in sorted(known.items()) if len({x.name if x else "" for x in h.values()}) > 1
    ]
    return (within[0], apart[-1]) if apart else None
