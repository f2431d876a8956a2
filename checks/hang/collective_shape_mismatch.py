"""DDP602."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.events import CallSite
from ddpdoctor.findings import Check, Finding, FixKind, Severity, Steps
from ddpdoctor.run import Run, fold_ranks, ranks_text

from ._mismatch import Parting, describe_sides, partings
from ._telling import evidence, related

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
    dtype, kind of device, root or reduce operation. Found from the arguments, whether the run
    hangs, aborts, or goes on.

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
        return None if run.any(CallSite) else "no collective was seen"

    def examine(self, run: Run) -> Iterable[Finding]:
        for parting in partings(run):
            other = "op" in parting.differs or parting.shifted or parting.elsewhere
            if parting.key.name != "new_group" and not other:
                yield self._tell(run, parting)

    def explains(self, mine: Finding, other: Finding) -> bool:
        return other.check in CONSEQUENCES and (other.at == 0.0 or other.at >= mine.at - 1.0)

    def _tell(self, run: Run, parting: Parting) -> Finding:
        place = parting.place
        op = place.signature.op
        words = " and ".join(NAMES[d] for d in parting.differs if d in NAMES)
        sides = [(fold_ranks(side), m.signature.text) for side, m in describe_sides(parting)]
        told = "; ".join(f"rank{'s' if ',' in r or '-' in r else ''} {r}: {t}" for r, t in sides)
        return self.finding(
            ranks=parting.odd,
            steps=Steps.of([place.step]) if place.step >= 0 else None,
            subjects=(op,),
            location=parting.location,
            label=f"{ranks_text(parting.odd)} differ in {words}",
            related=related(parting, place),
            summary=f"{op} is called with different {words}: {told}",
            cause=f"the ranks pass different {words} to the same {op} ({parting.key}, call "
            f"{parting.index}); gloo checks none of it",
            fix="; ".join(FIXES[d] for d in parting.differs if d in FIXES),
            fix_kind=FixKind.CHECK,
            evidence=evidence(run, parting),
            at=min((m.rank.wall(m.call.began) for m in parting.made.values() if m.call),
                   default=run.started),
        )  # fmt: skip
