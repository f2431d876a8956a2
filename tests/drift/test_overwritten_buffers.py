"""DDP403 on literal events: buffers that a broadcast overwrites."""

import pytest
from ddpdoctor.checks.drift.buffer_drift import BufferDrift
from replicas import LINE, OTHER, digests, run_of

from ddpdoctor.events import BufferUpdates
from ddpdoctor.report.findings import Severity

EVALUATED = digests("buffers", {6: (1, 2)}, point="eval", optimizer=-1, site=LINE)


def updates(values, names=("codes.embed", "codes.count"), reads=(OTHER, -1)):
    """The buffers of one rank before forwards 2, 3, ...: the first has these values."""
    return [
        BufferUpdates(
            at=0,
            model=0,
            forward=forward,
            names=names,
            sketches=tuple((value + n, 1.0) for n in range(len(names))),
            read_sites=reads,
            write_sites=(LINE,) * len(names),
        )
        for forward, value in enumerate(values, 2)
    ]


RISING = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]


def found(mine, others, *events, **more):
    ranks = {0: [*updates(mine), *events], 1: [*updates(others), *events]}
    return list(BufferDrift().examine(run_of(ranks, **more)))


def test_only_the_data_of_rank_0_counts():
    (finding,) = found(RISING, [v + 0.5 for v in RISING], EVALUATED)
    assert finding.rule == "overwritten-by-broadcast"
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (0, 1))
    assert finding.subjects == ("codes.embed", "codes.count")
    assert finding.location.line == 33
    assert [r.location.line for r in finding.related] == [35, 10]


def test_neither_evaluated_nor_saved_is_a_note():
    (finding,) = found(RISING, [v + 0.5 for v in RISING])
    assert finding.severity is Severity.NOTE


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        (RISING, RISING),
        (RISING, [v + 0.001 for v in RISING]),  # rounding
        (RISING, [*RISING[:4], *(v + 0.5 for v in RISING[4:])]),  # now and then
        ([10.0, 11.0] * 3 + [10.0], [10.5, 11.5] * 3 + [10.5]),  # written anew in each forward
        ([1.0, -1.5, 2.0, -0.5, 3.0, 9.0, -9.0], [0.0] * 7),  # noise
        ([10.0] * 7, [11.0] * 7),  # not updated
    ],
)
def test_what_is_equal_or_does_not_last(mine, others):
    assert found(mine, others, EVALUATED) == []


def test_where_ddp_does_not_broadcast():
    assert found(RISING, [v + 0.5 for v in RISING], broadcast=False) == []


def test_a_buffer_that_is_not_used():
    ranks = {n: updates([v + n / 2 for v in RISING], reads=(-1, -1)) for n in range(2)}
    assert not list(BufferDrift().examine(run_of(ranks)))
