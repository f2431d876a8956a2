"""DDP402 without a wrapper, on literal events: gradients that are exchanged no more."""

import pytest
from test_unshared import found_with

from ddpdoctor.events import UnwrappedState
from ddpdoctor.events.pack import pack

SINCE = 3
STEPS = (0, 1, 2, 4, 8, 16, 32)


def states(rank, local=(2, 3), *, clipped=False, told=True, late=False, again=False, whole=False):
    """Before each of `STEPS`. From step `SINCE` on the gradients at `local` are a rank's own, and
    values there differ after it. `late`: before that, too, some are not exchanged in some step;
    `again`: one step later on is exchanged whole; `whole`: all are handed over in spite of that."""
    for step in STEPS:
        own, out = 1000 * (rank + 1), step >= SINCE
        gradients = [
            10 * step + i + 2 + (own if out and (clipped or i in local) else 0) for i in range(4)
        ]
        values = [100 * step + i + 2 + (own if out and i in local else 0) for i in range(4)]
        handed = [i for i in range(4) if told and (whole or not (out and i in local))]
        yield UnwrappedState(
            at=step,
            optimizer=0,
            step=step,
            gradients=sum(gradients),
            parameters=sum(values),
            exchanged="gradients",
            complete=not out,
            completed=min(step, SINCE) - (late and step > 1) + (again and step > 8),
            shared=step + 1,
            each=pack([*gradients, *values]),
            handed=pack(handed),
            exchange_site=3,
        )


def found(**fields):
    return found_with({rank: list(states(rank, **fields)) for rank in (0, 1)})


@pytest.mark.parametrize("fields", [{}, {"told": False}, {"clipped": True}])
def test_a_head_that_is_exchanged_no_more(fields):
    (finding,) = found(**fields)
    assert finding.rule == "sync-stopped"
    assert finding.severity.value == "warning" and finding.confidence.value == "suspected"
    assert finding.subjects == ("head.weight", "head.bias")
    assert (finding.location.line, finding.steps.first) == (8, 4)


def test_a_bias_that_is_exchanged_no_more():
    (finding,) = found(local=(3,))
    assert finding.severity.value == "error" and finding.confidence.value == "proven"
    assert finding.subjects == ("head.bias",)


@pytest.mark.parametrize(
    "fields",
    [
        {"local": ()},
        {"late": True},
        {"again": True},
        {"whole": True},
        {"clipped": True, "told": False},
        {"local": (0, 1, 2, 3)},
    ],
)
def test_traps(fields):
    """Nothing drifts; the exchange was never whole, or is so again; what is handed over; what is
    not known; all of them, which may be training apart."""
