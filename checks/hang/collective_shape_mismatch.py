"""DDP602."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ddpdoctor.analysis.calls.buffer_shapes import BufferMismatch, buffer_mismatches
from ddpdoctor.analysis.calls.message_sizes import SizeMismatch, message_mismatches
from ddpdoctor.analysis.divergence.divergences import divergences
from ddpdoctor.analysis.divergence.explanations import rules
from ddpdoctor.analysis.divergence.faults import STOPPED_RANKS, faults
from ddpdoctor.analysis.waiting.snapshot import RankSnapshot, Snapshot, snapshot_of
from ddpdoctor.events import CallSite, CommHook, SharedOutputs, Wrapped
from ddpdoctor.report.declarations import STOPPED, Effect, When, seen
from ddpdoctor.report.findings import Check, Finding, FixKind, Related, Severity, Steps
from ddpdoctor.run import Rank, Run, ranks_text, some

MESSAGES, SHARED = "message-sizes", "shared-outputs"


class CollectiveShapeMismatch(Check):
    """Ranks call the same collective with different arguments

    ## What it finds
    All ranks make the same call, at the same number of the same group, but with a different number
    of elements, dtype, device type, root or reduce operation, whether the run hangs, aborts or
    continues. Also DDP's own all-reduce of gradients, where the ranks registered different
    communication hooks on a model and stopped in a backward, and DDP's broadcast of buffers that
    some ranks lack, or that `forward` resizes with the rank's own batch. And messages (`send`,
    `isend`) in a size or dtype in which the other rank never receives any from this one. And lists
    of outputs (`[tensor] * world_size`) that are one tensor, in which each rank's part overwrites
    the part before.

    ## How it knows
    Every rank records the arguments of each collective before it calls it; they are compared number
    by number, as for `collective-mismatch`. Communication hooks are recorded when they are
    registered; the shapes of buffers that DDP broadcasts at the first 16 forwards, at powers of two
    and at every 64th, where they changed. Where the call is in a function that only passes its
    arguments on, the line shown is that of the caller. Whether outputs are one tensor is seen by
    their addresses, the first time that a line makes such a call. The finding is proven.

    ## Why it hurts
    With gloo, a different dtype or reduce operation gives wrong numbers and no error; a different
    shape aborts one process in C++ without a Python traceback, and the *other* rank gets the error
    message; a different root hangs or leaves one rank with its own value.

    ## How to fix it
    Pass the same arguments on all ranks: pad tensors to one size or exchange the sizes first, cast
    to one dtype, compute `src`, `dst` and `op` from values that are equal on all ranks. Make a
    tensor for each rank: `[torch.empty_like(x) for _ in range(world_size)]`.

    ## When it stays quiet
    - `all_gather_object` and similar, and `all_to_all` with uneven splits.
    - Messages of sizes that the other rank receives as well, in another order; messages that any
      rank may have sent (`recv` without `src`).
    - Different shapes with the same number of elements.
    - Outputs in one tensor that nothing reads afterwards (a measurement of the network, say).
    - `all_gather` of different sizes with NCCL, which supports it.
    """

    code = "DDP602"
    name = "collective-shape-mismatch"
    family = "hang"
    severity = Severity.ERROR
    rules: ClassVar[Mapping[str, str]] = {
        **rules(name),
        "communication-hooks": "ranks registered different communication hooks on one model",
        "buffers": "DDP broadcasts buffers that some ranks lack, or that have other shapes there",
        SHARED: "a collective writes the parts of several ranks to one tensor",
        MESSAGES: "a rank receives a message as a tensor of another size or dtype than it was sent",
    }
    requires = (seen(CallSite, Wrapped, otherwise="no collective was seen"),)
    effects = (Effect(STOPPED, when=(STOPPED_RANKS, When.SINCE)),)

    def examine(self, run: Run) -> Iterable[Finding]:
        for fault in faults(run, self.name):
            yield self.finding(**fault.fields(fault.standstill), fix_kind=FixKind.CHECK)
        # Hooks explain how a run ended, only where no call differs that would explain it better.
        if not divergences(run) and (hooked := _different_hooks(run)):
            yield self._report_hooks(snapshot_of(run), *hooked)
        for sent in buffer_mismatches(run):
            yield self._report_buffers(sent)
        for message in message_mismatches(run):
            yield self._report_message(message)
        by_line: dict[str, dict[Rank, SharedOutputs]] = {}
        for rank in run.ranks.values():
            for event in rank.of(SharedOutputs):
                by_line.setdefault(f"{rank.location(event.site)}", {}).setdefault(rank, event)
        for shared in by_line.values():
            yield self._report_shared(shared)

    def _report_shared(self, found: Mapping[Rank, SharedOutputs]) -> Finding:
        """Several ranks' parts are written to one tensor."""
        rank, event = next(iter(found.items()))
        call, made = rank.location(event.site), rank.location(event.made_site)
        single = event.distinct == 1
        tensors = f"the {event.outputs} outputs of {event.op} are " + (
            "one tensor" if single else f"only {event.distinct} different tensors"
        )
        return self.finding(
            rule=SHARED,
            ranks=tuple(r.rank for r in found),
            subjects=(event.op,),
            location=made or call,
            label="one tensor, several times" if made else tensors,
            related=(Related("the call that writes to it", call),) if made and call else (),
            summary=f"{tensors}: each rank's part overwrites the part before, and "
            + ("every entry is what the last rank sent" if single else "entries are lost"),
            cause="`[tensor] * n` is a list of n references to one tensor, not of n tensors"
            if made
            else "entries of the list are at one place in memory",
            fix="make a tensor for each rank: "
            "`[torch.empty_like(x) for _ in range(dist.get_world_size())]`",
            fix_kind=FixKind.CHECK,
            evidence={"outputs": event.outputs, "different_tensors": event.distinct},
            at=rank.wall(event.at),
        )

    def _report_message(self, found: SizeMismatch) -> Finding:
        """One rank sends a tensor, the other receives it into one of another size or dtype."""
        sender, receiver, sent, received = found.sender, found.receiver, found.sent, found.received
        there = receiver.location(received.site)
        what, into = (f"{e.numel} elements of {e.dtype}" for e in (sent, received))
        happens = (
            "the memory is read as another type"
            if found.same_size
            else "a part of the tensor is filled, without an error; the rest keeps its old values"
            if sent.bytes < received.bytes
            else "the message does not fit, and the run crashes or values are lost"
        )
        return self.finding(
            rule=MESSAGES,
            ranks=(sender.rank, receiver.rank),
            steps=Steps.of([sent.step]) if sent.step > 0 else None,
            subjects=("send", "recv"),
            location=sender.location(sent.site),
            label=f"rank {sender.rank} sends {what}",
            related=(Related(f"rank {receiver.rank} receives {into}", there),) if there else (),
            summary=f"rank {sender.rank} sends {what} to rank {receiver.rank}, which never "
            f"receives such a message from it, but one of {into}",
            cause=f"both sides have to pass tensors of one size and dtype; here {happens}",
            fix="allocate the tensor to receive into in the size and dtype of the one that is sent;"
            " where sizes vary, send the shape first",
            fix_kind=FixKind.CHECK,
            evidence={"sent_bytes": sent.bytes, "received_bytes": received.bytes},
            at=sender.wall(sent.at),
        )

    def _report_buffers(self, found: BufferMismatch) -> Finding:
        """DDP broadcasts the buffers at the start of a forward, whatever they are."""
        culprits, lacking = found.culprits, found.lacking
        shapes = "; ".join(
            f"rank {r}: " + ", ".join(f"{n} {shape}" for n, shape in found.shapes(r).items())
            for r in (found.root, culprits[0])
        )
        summary = f"that have different shapes on the ranks: {shapes}"
        why = "a buffer that `forward` creates or replaces has the size of the rank's own batch"
        fix = (
            "keep tensors that depend on the batch out of the buffers (use a plain attribute, "
            "or create them in `forward`), or allocate the largest size in `__init__`"
        )
        if lacking:
            told = "; ".join(f"rank {r} has no {some(names)}" for r, names in lacking.items())
            summary = f"that are not there on all ranks: {told}"
            why = (
                "a buffer, or the module with it, is made after the model was wrapped, in code "
                "that some ranks had not come to"
            )
            fix = (
                "make every module and buffer in `__init__`, before the model is wrapped; or keep "
                "the tensor out of the buffers (use a plain attribute)"
            )
        first = found.event.step
        made = (Related("makes the module with the buffer", found.made),) if found.made else ()
        return self.finding(
            rule="buffers",
            ranks=culprits,
            steps=Steps(first, found.last, found.last - first + 1),
            subjects=tuple({**found.shapes(culprits[0]), **found.shapes(found.root)}),
            location=found.rank.location(found.event.site),
            label=f"broadcasts the buffers of rank {found.root}",
            related=made,
            summary=f"DDP broadcasts buffers of {found.kind} {summary}",
            cause=f"at the start of each forward DDP broadcasts the buffers of rank {found.root} "
            f"and does not check what they are: values end up in the wrong places, or the run "
            f"crashes; {why}",
            fix=fix,
            fix_kind=FixKind.CHECK,
            evidence={
                "shapes": {str(r): found.shapes(r) for r in found.sent if found.shapes(r)},
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
