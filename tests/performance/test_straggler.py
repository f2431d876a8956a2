"""straggler: one rank that the others wait for, and ranks that only seem to be one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ddpdoctor.checks.performance.data_bound import DataBound
from ddpdoctor.checks.performance.imbalanced_batches import ImbalancedBatches
from ddpdoctor.checks.performance.straggler import Straggler
from recordings import make_run, site

from ddpdoctor.events import Event, GroupReady, LoaderSeen, Pace, Wrapped
from ddpdoctor.report.findings import Finding, Severity

SITES = [
    site(1, "train.py", 10, "for batch in loader:"),
    site(2, "train.py", 11, "loss = model(batch)"),
    site(3, "train.py", 12, "loss.backward()"),
    site(4, "train.py", 13, "optimizer.step()"),
    site(5, "train.py", 9, "loader = DataLoader(data)"),
]
USUAL = {"data": 0.01, "forward": 0.02, "backward": 0.04, "optimizer": 0.01, "after step": 0.02}
PLACES = {"data": 0, "forward": 1, "backward": 2, "optimizer": 3, "after data": 4, "after step": 7}


def pace(window: int, lags: dict[str, float], *, wall: float, **fields: float) -> Pace:
    """A stretch of steps of 0.1 s and what the given phases take longer; the rest is waiting."""
    own = [0.0] * 8
    for name, place in PLACES.items():
        own[place] = USUAL.get(name, 0.0) + lags.get(name, 0.0)
    values = {"waited_s": wall - sum(own), "delayed_s": 0.0, **fields}
    return Pace(
        at=0, optimizer=0, step=8 * window + 15, count=8, wall_s=wall, own_s=tuple(own),
        sites=(1, 2, 3, 4), **values,
    )  # fmt: skip


def examine(*ranks: Sequence[dict[str, float]], **fields: float) -> list[Finding]:
    """Ranks as lists of stretches, each as the seconds by which its phases are longer."""
    return list(Straggler().examine(run_of(*ranks, **fields)))


def run_of(*ranks: Sequence[dict[str, float]], **fields: float):  # type: ignore[no-untyped-def]
    walls = [0.11 + max(sum(w.values()) for w in window) for window in zip(*ranks, strict=True)]
    return make_run(
        {
            r: [*SITES, *(pace(n, w, wall=walls[n], **fields) for n, w in enumerate(windows))]
            for r, windows in enumerate(ranks)
        }
    )


NONE: dict[str, float] = {}


@pytest.mark.parametrize(
    ("phase", "line", "words"),
    [
        ("data", 10, "load a batch"),
        ("forward", 11, "in the forward"),
        ("backward", 12, "in the backward"),
        ("optimizer", 13, "optimizer's step"),
        ("after data", 10, "between a batch and the forward"),
        ("after step", 13, "between steps"),
    ],
)
def test_a_slow_rank_in_each_phase(phase: str, line: int, words: str) -> None:
    (finding,) = examine([NONE] * 6, [{phase: 0.05}] * 6, [NONE] * 6)
    assert finding.ranks == (1,)
    assert finding.location is not None and finding.location.line == line


@pytest.mark.parametrize(
    ("workers", "delayed_s", "told"), [(2, 0.02, False), (2, 0.001, True), (0, 0.02, True)]
)
def test_workers_of_the_loader_on_a_machine_that_has_too_much_to_do(
    workers: int, delayed_s: float, told: bool
) -> None:
    run = run_of([NONE] * 6, [{"data": 0.05}] * 6, delayed_s=delayed_s)
    loader = LoaderSeen(
        at=0, loader=0, dataset="D", length=9, sampler="", loop_site=1, site=5, workers=workers
    )
    for rank in run.ranks.values():
        rank.add(loader)
    assert bool(list(Straggler().examine(run))) is told


def test_code_between_two_lines_is_named_by_both() -> None:
    (finding,) = examine([{"after step": 0.05}] * 6, [NONE] * 6)
    assert finding.location is not None and finding.location.line == 13
    assert [r.location.line for r in finding.related] == [10]


def test_since_when() -> None:
    (finding,) = examine([NONE] * 10, [NONE] * 5 + [{"forward": 0.05}] * 5)
    assert finding.steps is not None and finding.steps.first == 48


def test_since_when_where_not_all_steps_were_looked_at() -> None:
    run = run_of([NONE] * 10, [NONE] * 4 + [{"forward": 0.05}] * 6)
    left = {r: [e for e in rank.of(Pace) if e.step != 8 * 4 + 15] for r, rank in run.ranks.items()}
    (finding,) = Straggler().examine(make_run({r: [*SITES, *e] for r, e in left.items()}))
    assert finding.steps is not None and finding.steps.first == 48


SLOW = {"forward": 0.05}


def slow_in(*stretches: int) -> list[dict[str, float]]:
    """A rank that is slow in these of 36 stretches."""
    return [SLOW if n in stretches else NONE for n in range(36)]


def test_slow_for_a_while() -> None:
    (finding,) = examine([NONE] * 36, slow_in(*range(10, 16)))
    assert (finding.severity, finding.ranks) == (Severity.NOTE, (1,))
    (finding,) = examine([NONE] * 36, slow_in(*range(10, 22)))
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    "ranks",
    [
        ([NONE] * 36, slow_in(*range(10, 15))),  # too short
        ([NONE] * 36, slow_in(*range(10, 13), *range(14, 18))),  # with a break
        ([NONE] * 36, slow_in(*range(6))),  # while it warms up
        (slow_in(*range(7)), slow_in(*range(10, 16))),  # each in turn
    ],
)
def test_slow_for_less_than_a_while(ranks: Sequence[Sequence[dict[str, float]]]) -> None:
    assert not examine(*ranks)


def test_it_begins_where_that_phase_does() -> None:
    """The first stretch is slow for another reason."""
    (finding,) = examine([NONE] * 6, [{"data": 0.05}] + [{"forward": 0.05}] * 5)
    assert finding.steps is not None and finding.steps.first == 16
    assert finding.evidence["windows examined"] == 5


def test_a_rank_that_is_slower_as_a_whole_is_so_from_the_start_on() -> None:
    slower = {"data": 0.02, "forward": 0.02, "backward": 0.03}
    (finding,) = examine([NONE] * 6, [slower] * 6)
    assert (finding.rule, finding.steps and finding.steps.first) == ("slow-backward", 8)


def test_several_slow_ranks_are_one_finding() -> None:
    (finding,) = examine([NONE] * 6, [NONE] * 6, *[[{"forward": 0.06}] * 6] * 2)
    assert finding.ranks == (2, 3)


def test_one_stretch_that_is_not_slow() -> None:
    assert examine([NONE] * 6, [{"data": 0.05}] * 3 + [NONE] + [{"data": 0.05}] * 2)


def test_ranks_alike() -> None:
    assert not examine([NONE] * 6, [{"forward": 0.005}] * 6)


def test_slow_now_and_then() -> None:
    windows = ([{"after step": 2.0}] + [NONE] * 3) * 4
    assert not examine(windows, [NONE] * 16)


def test_another_rank_each_time() -> None:
    slow = {"forward": 0.05}
    assert not examine([slow, NONE] * 6, [NONE, slow] * 6)
    assert not examine(([slow] * 3 + [NONE] * 3) * 3, ([NONE] * 3 + [slow] * 3) * 3)


def test_ranks_that_do_not_wait() -> None:
    assert not examine([NONE] * 6, [{"forward": 0.05}] * 6, waited_s=0.0)


def test_a_rank_without_a_core() -> None:
    """Other programs on the same machine hold it up."""
    lags = [{"forward": 0.05}] * 6
    run = run_of([NONE] * 6, lags)
    held = [
        *SITES,
        *(pace(n, w, wall=0.16, delayed_s=0.05) for n, w in enumerate(lags)),
    ]  # fmt: skip
    ranks: dict[int, list[Event]] = {0: [*SITES, *run.ranks[0].of(Pace)], 1: held}
    assert Straggler().unobserved(make_run(ranks)) is None
    assert not list(Straggler().examine(make_run(ranks)))


def test_a_slow_rank_on_a_busy_machine() -> None:
    """The figures are those that were measured; what it had no core for is told beside them."""
    quick = [pace(n, NONE, wall=0.26) for n in range(6)]
    slow = [pace(n, {"forward": 0.15}, wall=0.26, delayed_s=0.05) for n in range(6)]
    (finding,) = Straggler().examine(make_run({0: [*SITES, *quick], 1: [*SITES, *slow]}))
    first, second = finding.evidence["a step, ms"]
    assert (first["waiting"], second["waiting"]) == (160, 10)
    assert (first["step"], second["without a CPU core"]) == (260, 50)


def without_a_core(*stretches: int) -> list[Finding]:
    """Slow on rank 1 in all of 12 stretches; for most of that in these it had no core."""
    slow = [pace(n, SLOW, wall=0.16, delayed_s=0.04 if n in stretches else 0.0) for n in range(12)]
    quick = [pace(n, NONE, wall=0.16) for n in range(12)]
    return list(Straggler().examine(make_run({0: [*SITES, *quick], 1: [*SITES, *slow]})))


@pytest.mark.parametrize("stretches", [(0, 3, 4), (8, 9, 10, 11), (0, 9, 10, 11)])
def test_where_it_had_no_core_is_neither_beginning_nor_end(stretches: tuple[int, ...]) -> None:
    (finding,) = without_a_core(*stretches)
    judged, first = 8 * (12 - len(stretches)), 16 if 0 in stretches else 8
    assert finding.steps is not None and finding.steps.first == first
    assert (finding.steps.count, finding.steps.compared) == (judged, judged)


def test_where_it_had_no_core_before_it_is_seen() -> None:
    (finding,) = without_a_core(0, 1, 2)
    assert finding.steps is not None and finding.steps.first == 32


def test_where_the_others_had_no_core_it_may_have_been_slow() -> None:
    """They took as long in the first three of twelve stretches, but lacked a core."""
    slow = [pace(n, SLOW, wall=0.16) for n in range(12)]
    quick = [
        pace(n, SLOW if n < 3 else NONE, wall=0.16, waited_s=0.06, delayed_s=0.06 * (n < 3))
        for n in range(12)
    ]
    (finding,) = Straggler().examine(make_run({0: [*SITES, *quick], 1: [*SITES, *slow]}))
    assert (finding.rule, finding.ranks) == ("slow-forward", (1,))


def test_steps_between_which_it_was_not_slow_are_not_counted() -> None:
    slow = [SLOW] * 3 + [NONE] + [SLOW] * 4
    (finding,) = examine([NONE] * 8, slow)
    assert finding.steps is not None and (finding.steps.count, finding.steps.compared) == (56, None)


def test_a_little_slower() -> None:
    assert not examine([NONE] * 6, [{"forward": 0.02}] * 6)


def test_short_runs_and_single_ranks() -> None:
    assert Straggler().unobserved(run_of([NONE] * 3, [NONE] * 3))
    assert Straggler().unobserved(run_of([NONE] * 9))


def test_waiting_on_the_gpu() -> None:
    def run_on(device: str):  # type: ignore[no-untyped-def]
        both = GroupReady(
            at=0, group=0, name="0", backend="cpu:gloo,cuda:nccl", ranks=(0, 1), member=True,
            site=1,
        )  # fmt: skip
        ddp = Wrapped(
            at=0, model=0, wrapper="DistributedDataParallel", kind="Net", group=0, site=2,
            device=device,
        )  # fmt: skip
        recorded = [pace(n, NONE, wall=0.1) for n in range(9)]
        return make_run({r: [both, ddp, *recorded] for r in range(2)})

    assert "GPU" in (Straggler().unobserved(run_on("cuda:0")) or "")
    assert Straggler().unobserved(run_on("cpu")) is None


def test_steps_that_not_all_ranks_recorded() -> None:
    run = make_run(
        {
            0: [*SITES, *(pace(n, NONE, wall=0.16) for n in range(12))],
            1: [*SITES, *(pace(n, {"data": 0.05}, wall=0.16) for n in range(6, 18))],
        }
    )
    (finding,) = Straggler().examine(run)
    assert finding.steps is not None and finding.steps.first == 56


def _told(check: str, *ranks: int) -> Finding:
    return Finding(
        code="", check=check, severity=Straggler.severity, summary="", cause="", fix="",
        ranks=ranks,
    )  # fmt: skip


def test_one_fault_is_told_once() -> None:
    (loading,) = examine([NONE] * 6, [{"data": 0.05}] * 6)
    (computing,) = examine([NONE] * 6, [{"forward": 0.05}] * 6)
    assert Straggler().explains(loading, _told("data-bound", 1))
    assert not Straggler().explains(loading, _told("data-bound", 0, 1))
    assert not Straggler().explains(computing, _told("data-bound", 1))
    assert DataBound().explains(_told("data-bound", 0, 1), loading)
    assert not DataBound().explains(_told("data-bound", 0, 1), computing)
    assert ImbalancedBatches().explains(_told("imbalanced-batches", 1), computing)
    assert not ImbalancedBatches().explains(_told("imbalanced-batches", 0, 1), computing)


def test_the_loader_is_named() -> None:
    run = run_of([NONE] * 6, [{"data": 0.05}] * 6)
    loader = LoaderSeen(
        at=0, loader=0, site=5, loop_site=1, dataset="Files", length=9, sampler="Random"
    )
    run.ranks[1].add(loader)
    (finding,) = Straggler().examine(run)
    assert [r.location.line for r in finding.related] == [9]
