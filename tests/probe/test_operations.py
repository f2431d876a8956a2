"""One table says what kind of operation a call is."""

from __future__ import annotations

from ddpdoctor.events.operations import OPERATIONS, operation
from ddpdoctor.probe.collectives.collectives import BATCH, KINDS


def test_every_call_that_is_watched_is_in_the_table() -> None:
    assert {kind.op for kind in KINDS.values()} - OPERATIONS.keys() == {BATCH}


def test_the_kinds_agree_with_how_the_arguments_are_read() -> None:
    for kind in KINDS.values():
        one = operation(kind.op)
        assert kind.p2p == (one.sends or one.receives or kind.op == BATCH)
        assert bool(kind.gathered) == (one.gathers and one.objects)
        assert not one.reduces or kind.reduces


def test_an_unknown_operation_has_no_property() -> None:
    assert not any(vars(operation("something new")).values())
