"""What the program communicates itself, as far as it concerns data."""

from __future__ import annotations

from ddpdoctor.events import CallBlock, CallRun, GroupReady, Signature
from ddpdoctor.run import Rank

GATHERS = frozenset({"all_gather", "all_gather_into_tensor", "all_gather_object", "gather",
                     "gather_object"})  # fmt: skip
SUMS = frozenset({"all_reduce", "reduce_scatter", "reduce_scatter_tensor"})
HANDS_OUT = frozenset({"broadcast", "scatter", "broadcast_object_list", "scatter_object_list",
                       "recv", "irecv"})  # fmt: skip

MEETS = frozenset({"barrier", "monitored_barrier", "new_group"})
FEW = 8
"""Numbers in one call that report on the training, and are no samples, activations or gradients."""


def gathers_results(rank: Rank, step: int) -> bool:
    """Whether more than single numbers are gathered when `step` optimizer steps were taken."""
    return any(
        (step - run.step) % max(1, run.every) == 0 and 0 <= step - run.step < run.repeat * span
        for run, span in _runs(rank, GATHERS, several=True)
    )


def sums_over_all(rank: Rank) -> bool:
    """Whether more than single numbers are summed over all ranks, step after step."""
    calls = _counted(rank, SUMS, several=True)
    return any(run.group == 0 and run.repeat > 1 for run, _ in calls)


def only_reports_beyond(rank: Rank, ranks: frozenset[int]) -> bool:
    """Whether all that the rank is known to exchange with others than these is a few numbers."""
    inside = {g.group for g in rank.of(GroupReady) if ranks >= set(g.ranks)}
    much = {s.id for s in rank.of(Signature) if s.op not in MEETS and not 0 <= s.numel <= FEW}
    blocks = {b.id for b in rank.of(CallBlock) if much & set(b.codes[::2])}
    beyond = [r for r in rank.of(CallRun) if r.group not in inside]
    return bool(beyond) and not any(r.block in blocks for r in beyond)


def handed_out(rank: Rank) -> int:
    """How often tensors or objects were received from another rank."""
    return sum(run.repeat * count for run, count in _counted(rank, HANDS_OUT))


def _runs(rank: Rank, ops: frozenset[str], *, several: bool) -> list[tuple[CallRun, int]]:
    wanted = {s.id for s in rank.of(Signature) if s.op in ops and (not several or s.numel != 1)}
    blocks = {b.id for b in rank.of(CallBlock) if wanted & set(b.codes[::2])}
    return [(r, max(1, r.every)) for r in rank.of(CallRun) if r.block in blocks]


def _counted(
    rank: Rank, ops: frozenset[str], *, several: bool = False
) -> list[tuple[CallRun, int]]:
    wanted = {s.id for s in rank.of(Signature) if s.op in ops and (not several or s.numel != 1)}
    blocks = {b.id: sum(c in wanted for c in b.codes[::2]) for b in rank.of(CallBlock)}
    return [(r, n) for r in rank.of(CallRun) if (n := blocks.get(r.block, 0))]
