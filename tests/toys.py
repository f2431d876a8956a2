"""Checks that exist only in tests, to render findings without a fault."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ddpdoctor.report import registry
from ddpdoctor.report.findings import Check, Consequence, Finding, Related, Severity, Steps
from ddpdoctor.run import Location, Run

HOSTILE = "[bold red]x[/] \x1b[31mred\x1b[0m <script>alert(1)</script> | `a` \u202e\x07"


class ToyStep(Check):
    """Ranks step on gradients of their own

    ## What it finds
    A step after a backward that never synchronised, told in a paragraph that is much longer than
    a line of the page so that it must be wrapped somewhere.

    ## How it knows
    The steps of all ranks are counted.

    ## Why it hurts
    - the models drift apart, which is an item that is longer than a line of the page is wide
    - nobody notices

    ## How to fix it
    Step when the last micro-batch is done:

        if (i + 1) % accumulate == 0 and this_line_of_code_is_much_longer_than_the_page_is_wide:
            optimizer.step()

    ## When it stays quiet
    Local SGD.
    """

    code = "DDP997"
    name = "toy-step"
    family = "drift"
    severity = Severity.ERROR

    def examine(self, run: Run) -> Iterable[Finding]:
        if not any(rank.steps for rank in run.ranks.values()):
            return
        yield self.finding(
            summary="rank-local gradients reach `optimizer.step()` on all 2 ranks",
            cause="the context is still open on the micro-batch that steps",
            fix="step at the end:\n\n    if (i + 1) % n == 0:\n        optimizer.step()",
            ranks=(0, 1),
            steps=Steps(4, 96, 25),
            subjects=tuple(f"net.{i}.weight" for i in range(45)),
            location=Location("train.py", 88, "main", "    with ddp.no_sync():"),
            label="still open here",
            related=(Related("steps here", Location("train.py", 101, "", "    opt.step()")),),
            evidence={"grad_norm": [{"rank": r, "norm": 4 + (r == 3)} for r in range(8)]},
            consequences=(Consequence("DDP606", "first-failure", "rank 1 raised"),),
        )


class ToyHostile(Check):
    """Everything in it came from an enemy."""

    code = "DDP998"
    name = "toy-hostile"
    family = "model"
    severity = Severity.WARNING

    def examine(self, run: Run) -> Iterable[Finding]:
        yield self.finding(
            summary=HOSTILE,
            cause=HOSTILE * 1000,
            fix=HOSTILE,
            subjects=(HOSTILE, "y" * 10_000),
            location=Location(HOSTILE, 1, HOSTILE, HOSTILE + "z" * 100_000),
            label=HOSTILE,
            related=(Related(HOSTILE, Location(HOSTILE + "2", 2, "", HOSTILE)),),
            evidence={
                HOSTILE: HOSTILE,
                "list": [HOSTILE] * 500,
                "table": [{HOSTILE: HOSTILE, "rank": n} for n in range(500)],
                "block": "\n".join([HOSTILE] * 500),
                "map": {HOSTILE: {HOSTILE: [None, True, 1.5]}},
            },
            consequences=(Consequence("DDP1", HOSTILE, HOSTILE),),
        )


class ToyQuiet(Check):
    """Never finds anything."""

    code = "DDP999"
    name = "toy-quiet"
    family = "data"
    severity = Severity.NOTE

    def examine(self, run: Run) -> Iterable[Finding]:
        return ()


class ToyBlind(ToyQuiet):
    """Never sees anything."""

    code = "DDP996"
    name = "toy-blind"

    def unobserved(self, run: Run) -> str | None:
        return "no GPU"


class ToyPartly(ToyQuiet):
    """Sees most of it."""

    code = "DDP995"
    name = "toy-partly"

    def left_out(self, run: Run) -> str | None:
        return "3 parameters"


ALL = (ToyBlind(), ToyStep(), ToyHostile(), ToyQuiet())


@pytest.fixture
def only_toys(monkeypatch: pytest.MonkeyPatch) -> tuple[Check, ...]:
    """The toys that do no harm take the place of the catalogue."""
    checks = (ToyBlind(), ToyStep(), ToyQuiet())
    monkeypatch.setattr(registry, "all_checks", lambda: checks)
    return checks
