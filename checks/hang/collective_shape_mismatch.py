"""DDP602."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.divergence.buffer_shapes import BufferMismatch, buffer_mismatches
from ddpdoctor.analysis.divergence.divergence import describe_sides
from ddpdoctor.analysis.divergence.divergences import divergences
from ddpdoctor.analysis.divergence.mismatch_report import (
    STOPPED_RANKS,
    Mismatch,
    began,
    each_once,
    evidence,
    related,
    standstill,
)
from ddpdoctor.analysis.waiting.snapshot import RankSnapshot, Snapshot, snapshot_of
from ddpdoctor.events import CallSite, CommHook, Wrapped
from ddpdoctor.report.declarations import STOPPED, Effect, When, seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Run, listed, ranks_text

NAMES = {
    "numel": "shapes",
    "dtype": "dtypes",
    "device": "devices",
    "reduce_op": "reduce operations",
    "root": "roots",
}
FIXES = {
    "numel": "pass tensors of the same shape on every rank: pad them, or exchange the sizes first",
    "dtype": "cast to one dtype on every rank before the call: `tensor.to(torch.float32)`",
    "device": "put the tensor on the same type of device on every rank",
    "reduce_op": "pass the same `op=` on every rank",
    "root": "pass the same `src`/`dst` on every rank",
}


class CollectiveShapeMismatch(Check):
    """Ranks call the same collective with different arguments

    ## What it finds
    All ranks make the same call, at the same number of the same group, but with a different number
    of elements, dtype, device type, root or reduce operation, whether the run hangs, aborts or
    continues. Also DDP's own all-reduce of gradients, where the ranks registered different
    communication hooks on a model and stopped in a backward, and DDP's broadcast of buffers that
    `forward` resizes with the rank's own batch.

    ## How it knows
    Every rank records the arguments of each collective before it calls it; they are compared number
    by number, as for `collective-mismatch`. Communication hooks are recorded when they are
    registered; the shapes of buffers that DDP broadcasts at the first 16 forwards, at powers of two
    and at every 64th, where they changed. Where the call is in a function that only passes its
    arguments on, the line shown is that of the caller. The finding is proven.

    ## Why it hurts
    With gloo, a different dtype or reduce operation gives wrong numbers and no error; a different
    shape aborts one process in C++ without a Python traceback, and the *other* rank gets the error
    message; a different root hangs or leaves one rank with its own value.

    ## How to fix it
    Pass the same arguments on all ranks: pad tensors to one size or exchange the sizes first, cast
    to one dtype, compute `src`, `dst` and `op` from values that are equal on all ranks.

    ## When it stays quiet
    - `all_gather_object` and similar, and `all_to_all` with uneven splits.
    - Point-to-point calls.
    - Different shapes with the same number of elements.
    - `all_gather` of different sizes with NCCL, which supports it.
    """

    code = "DDP602"
    name = "collective-shape-mismatch"
    family = "hang"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        "arguments": "one collective is called with different arguments",
        "communication-hooks": "ranks registered different communication hooks on one model",
        "buffers": "DDP broadcasts buffers that have different shapes on the ranks",
    }
    requires = (seen(CallSite, Wrapped, otherwise="no collective was seen"),)
    effects = (Effect(STOPPED, when=(STOPPED_RANKS, When.SINCE)),)

    def examine(self, run: Run) -> Iterable[Finding]:
        found = divergences(run)
        for mismatch in each_once(d for d in found if d.key.name != "new_group" and d.same_call):
            yield self._report(run, mismatch)
        # Hooks explain how a run ended, only where no call differs that would explain it better.
        if not found and (hooked := _different_hooks(run)):
            yield self._report_hooks(snapshot_of(run), *hooked)
        for sent in buffer_mismatches(run):
            yield self._report_buffers(sent)

    def _report(self, run: Run, mismatch: Mismatch) -> Finding:
        divergence, culprits = mismatch.divergence, mismatch.culprits
        place = divergence.call
        op = place.signature.op
        names = listed([NAMES[d] for d in divergence.differs if d in NAMES])
        calls = "; ".join(
            f"{ranks_text(side)}: {made.signature.text}"
            for side, made in describe_sides(divergence)
        )
        return self.finding(
            rule="arguments",
            deadlocked=standstill(run, mismatch).deadlocked,
            ranks=culprits,
            steps=divergence.when,
            subjects=(op,),
            location=divergence.location,
            label=_label(mismatch),
            related=related(divergence, place, divergence.location),
            summary=f"{op} is called with different {names}: {calls}{mismatch.elsewhere}",
            cause=f"the ranks pass different {names} to the same {op} (call {divergence.index} of "
            f"{divergence.key}); gloo does not check this",
            fix="; ".join(FIXES[d] for d in divergence.differs if d in FIXES),
            fix_kind=FixKind.CHECK,
            evidence=evidence(run, mismatch),
            at=began(divergence, run.started),
        )

    def _report_buffers(self, found: BufferMismatch) -> Finding:
        """DDP broadcasts the buffers at the start of a forward, whatever their shapes."""
        culprits = found.culprits
        shapes = "; ".join(
            f"rank {r}: " + ", ".join(f"{n} {shape}" for n, shape in found.shapes(r).items())
            for r in (found.root, culprits[0])
        )
        return self.finding(
            rule="buffers",
            ranks=culprits,
            steps=Steps.of([found.event.step]),
            subjects=tuple({**found.shapes(culprits[0]), **found.shapes(found.root)}),
            location=found.rank.location(found.event.site),
            label=f"broadcasts the buffers of rank {found.root}",
            summary=f"DDP broadcasts buffers of {found.kind} that have different shapes on the "
            f"ranks: {shapes}",
            cause=f"at the start of each forward DDP broadcasts the buffers of rank {found.root} "
            "and does not check shapes: values end up in the wrong places, or the run crashes; a "
            "buffer that `forward` creates or replaces has the size of the rank's own batch",
            fix="keep tensors that depend on the batch out of the buffers (use a plain attribute, "
            "or create them in `forward`), or allocate the largest size in `__init__`",
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
        """Ranks use different hooks for one model's gradients, and stopped in a backward."""
        sides: dict[str, list[int]] = {}
        for rank, hook in hooks.items():
            sides.setdefault(hook.name if hook else "", []).append(rank)
        culprits = min(sides.values(), key=lambda side: (len(side), hooks[side[0]] is None))
        named = "; ".join(f"{ranks_text(r)}: {name or 'none'}" for name, r in sides.items())
        placed = next(r for r in (*culprits, *hooks) if hooks[r] is not None)
        here = hooks[placed]
        waits = waiting.location
        return self.finding(
            rule="communication-hooks",
            deadlocked=not now.failed,
            ranks=tuple(culprits),
            subjects=tuple(name for name in sides if name),
            location=now.by_rank[placed].rank.location(here.site) if here else None,
            label=f"registered on {ranks_text(sides[here.name])}" if here else "",
            related=(Related(f"{ranks_text([waiting.rank.rank])} is in this backward", waits),)
            if waits
            else (),
            summary=f"ranks registered different communication hooks on one model: {named}",
            cause="the hook decides in which dtype and shape a rank sends its gradients, so ranks "
            "with different hooks cannot match; the run ended in such a backward",
            fix="register the same hook on every rank, right after wrapping the model",
            fix_kind=FixKind.CHECK,
            evidence={
                "model": here.model if here else -1,
                "hooks": {str(r): h.name if h else "none" for r, h in hooks.items()},
            },
            at=now.at,
        )


def _label(mismatch: Mismatch) -> str:
    """Who passes what else, and than whom; all ranks where nothing tells who is right."""
    culprits, differs = mismatch.culprits, mismatch.divergence.differs
    names = [NAMES[d] for d in differs if d in NAMES]
    every = {rank for one in (mismatch.divergence, *mismatch.others) for rank in one.calls}
    others = every - {*culprits}
    if len(culprits) == 1:
        what = f"a different {listed([name.removesuffix('s') for name in names])}"
    else:
        what = f"different {listed(names)}"
    passes = f"{ranks_text(culprits)} pass{'es' if len(culprits) == 1 else ''} {what}"
    return f"{passes} than {ranks_text(others)}" if others else passes


def _different_hooks(run: Run) -> tuple[RankSnapshot, dict[int, CommHook | None]] | None:
    """A rank that is in a backward of DDP, and each rank's hook of the last model in its group for
    which they differ; None where the run neither failed nor stands still."""
    now = snapshot_of(run)
    stands = now.by_rank.values()
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
    different = [
        h for _, h in sorted(known.items()) if len({x.name if x else "" for x in h.values()}) > 1
    ]
    return (within[0], different[-1]) if different else None
