"""Which findings follow from which: conditions of effects, and kinds of errors."""

from __future__ import annotations

import pytest

from ddpdoctor.report.declarations import Effect, When
from ddpdoctor.report.errors import ErrorKind, error_kinds
from ddpdoctor.report.findings import Condition, Finding, Severity, Steps


def finding(check: str = "a", **fields: object) -> Finding:
    wanted = {"code": "DDP999", "severity": Severity.ERROR, "summary": "", "cause": "", "fix": ""}
    return Finding(check=check, **{**wanted, **fields})  # type: ignore[arg-type]


STEPS = Steps(4, 9, 6)


@pytest.mark.parametrize(
    ("condition", "mine", "holds", "fails"),
    [
        (When.IS_ERROR, {}, {}, None),
        (When.SAME_RANKS, {"ranks": (0, 1)}, {"ranks": (1, 0)}, {"ranks": (1,)}),
        (When.SHARED_RANK, {"ranks": (0, 1)}, {"ranks": (1, 2)}, {"ranks": (2,)}),
        (When.OTHER_RANKS, {"ranks": (0, 1)}, {"ranks": (2,)}, {"ranks": (1, 2)}),
        (When.WITHIN_RANKS, {"ranks": (0, 1)}, {"ranks": (0, 1)}, {"ranks": (1, 2)}),
        (When.FEWER_RANKS, {"ranks": (0, 1)}, {"ranks": (1,)}, {"ranks": (0, 1)}),
        (When.SHARED_SUBJECT, {"subjects": ("x", "y")}, {"subjects": ("y",)}, {"subjects": ("z",)}),
        (When.SAME_OPTIMIZER, {"optimizers": (0,)}, {}, {"optimizers": (1,)}),
        (When.NOT_BEFORE, {"at": 5.0}, {"at": 5.0}, {"at": 4.5}),
        (When.SINCE, {"at": 5.0}, {"at": 4.5}, {"at": 3.5}),
        (When.SINCE, {"at": 5.0}, {"at": 0.0}, {"at": 3.5}),
        (When.STEP_NOT_BEFORE, {"steps": STEPS}, {"steps": STEPS}, {"steps": Steps(3, 9, 7)}),
        (When.STEP_AFTER, {"steps": STEPS}, {"steps": Steps(5, 9, 5)}, {"steps": STEPS}),
        (When.STEP_AFTER, {"steps": STEPS}, {}, {"steps": STEPS}),
        (When.about("SIGABRT"), {}, {"subjects": ("SIGABRT",)}, {"subjects": ("SIGKILL",)}),
    ],
)
def test_conditions(
    condition: Condition,
    mine: dict[str, object],
    holds: dict[str, object],
    fails: dict[str, object] | None,
) -> None:
    assert condition.holds(finding(**mine), finding(**holds))
    assert fails is None or not condition.holds(finding(**mine), finding(**fails))


def test_an_effect_is_of_checks_rules_and_errors() -> None:
    lost = (ErrorKind.CONNECTION,)
    effect = Effect(("b", "c"), of=("mine",), rules=("theirs",), errors=lost, when=(When.IS_ERROR,))
    mine, other = finding(rule="mine"), finding("b", rule="theirs", errors=lost)
    assert effect.covers(mine, other)
    assert not effect.covers(finding(rule="mine", severity=Severity.NOTE), other)
    assert not effect.covers(finding(rule="other"), other)
    for unlike in (
        finding("d", rule="theirs", errors=lost),
        finding("b", rule="other", errors=lost),
        finding("b", rule="theirs", errors=(ErrorKind.TIMED_OUT,)),
    ):
        assert not effect.covers(mine, unlike)
    assert effect.describe() == (
        "from rule mine; of rule theirs; about this error: connection; if the cause is an error"
    )


@pytest.mark.parametrize(
    ("message", "kinds"),
    [
        ("[gloo] Connection closed by peer [127.0.0.1]:1234", {ErrorKind.CONNECTION,
                                                                ErrorKind.PEER_GONE}),
        ("Timed out waiting 10000ms for recv operation", {ErrorKind.TIMED_OUT}),
        ("Application timeout caused pair closure", {ErrorKind.TIMED_OUT}),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", {ErrorKind.OUT_OF_MEMORY}),
        ("Expected to have finished reduction in the prior iteration before starting a new one",
         {ErrorKind.REDUCTION_UNFINISHED}),
        ("Expected to mark a variable ready only once.", {ErrorKind.READY_TWICE}),
        ("Your training graph has changed in this iteration", {ErrorKind.GRAPH_CHANGED}),
        ("DDP expects same model across all ranks", {ErrorKind.DIFFERENT_MODELS}),
        ("PytorchStreamReader failed reading zip archive", {ErrorKind.BROKEN_FILE}),
        ("a bad batch", set()),
    ],
)  # fmt: skip
def test_kinds_of_errors(message: str, kinds: set[ErrorKind]) -> None:
    assert set(error_kinds(message)) == kinds
