"""DDP409 without a wrapper, on literal events, and which line divides a loss."""

from __future__ import annotations

from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from ddpdoctor.checks.drift.double_averaging import DoubleAveraging
from recordings import make_run, site, steps
from wraps import group, parameters

from ddpdoctor.events import Averaged, Event, OptimizerSeen, Unwrapped
from ddpdoctor.probe.source.division import loss_divided
from ddpdoctor.report.findings import Finding

LOCAL = ((1.0, 2.0, 8.0, 0.001), (3.0, -1.0, 4.0, 0.002))
MEAN = (2.0, 0.5, 6.0, 0.0015)


def found(
    factor: float, *, apart: bool = False, trained_by: str = "SGD", count: int = 2, **fields: Any
) -> list[Finding]:
    """Of two ranks that apply `factor` times their mean, from the second step on."""
    events: dict[int, list[Event]] = {}
    for n in range(2):
        lines = {1: (3, "net = Net()"), 2: (9, "step()"), 3: (20, "/= world"), 4: (22, "/= world")}
        applied = tuple(factor * m for m in MEAN)
        looks = [
            Averaged(
                at=0,
                optimizer=0,
                step=step,
                local=LOCAL[n],
                applied=(*applied[:-1], applied[-1] * (1 + 0.5 * apart)),
                **{"operations": ("SUM",), **fields},
            )
            for step in range(1, count + 1)
        ]
        events[n] = [
            *(site(i, "train.py", line, text) for i, (line, text) in lines.items()),
            group((0, 1)),
            Unwrapped(
                at=0, optimizer=0, kind="Net", site=1, step_site=2, parameters=parameters(("a",))
            ),
            OptimizerSeen(at=0, optimizer=0, kind=trained_by, site=1),
            *looks,
            *steps(8),
        ]
    return list(DoubleAveraging().examine(make_run(events)))


TWICE: dict[str, Any] = {"sites": (3, 4), "divisors": ("world", "world")}
ONCE: dict[str, Any] = {"sites": (2, 4), "divisors": ("", "world")}
LOSS: dict[str, Any] = {"loss_site": 3, "loss_divisor": "world"}


def test_gradients_that_are_divided_twice() -> None:
    (finding,) = found(0.5, **TWICE)
    assert (finding.location and finding.location.line, finding.ranks) == (22, (0, 1))
    assert finding.steps is not None
    assert (finding.steps.first, finding.steps.last) == (1, 7)
    assert found(0.5, **ONCE, operations=("AVG",))


def test_a_loss_that_is_divided_and_gradients_that_are_averaged() -> None:
    (finding,) = found(1.0, **LOSS)
    assert finding.location and finding.location.line == 20


@pytest.mark.parametrize("factor, fields", [
    (1.0, {}), (1.0, ONCE), (2.0, LOSS), (0.5, ONCE), (0.25, TWICE), (0.5, LOSS),
])  # fmt: skip
def test_other_ways_to_add_gradients_up(factor: float, fields: dict[str, Any]) -> None:
    assert found(factor, **fields) == []


def test_gradients_that_were_edited_besides_tell_nothing() -> None:
    assert found(0.5, apart=True, **TWICE) == []


def test_parameters_that_are_summed() -> None:
    (finding,) = found(2.0, kind="parameters", site=4)
    assert (finding.rule, finding.ranks) == ("summed-parameters", (0, 1))
    assert finding.location and finding.location.line == 22


@pytest.mark.parametrize("factor, apart", [(1.0, False), (2.0, True), (1.5, False)])
def test_parameters_that_are_averaged_or_moved_otherwise(factor: float, apart: bool) -> None:
    assert found(factor, kind="parameters", apart=apart) == []


MEANS: dict[str, Any] = {"means": (0.5, 1.0), "alone": True, "count": 3}
CLIPPED: dict[str, Any] = {"unclipped": tuple(2 * m for m in MEAN), "clip_site": 4}


def test_gradients_of_means_that_are_summed() -> None:
    (finding,) = found(2.0, **MEANS)
    assert (finding.rule, finding.severity.value) == ("summed-gradients", "note")
    assert (finding.location and finding.location.line, finding.related) == (9, ())
    (finding,) = found(0.1, **MEANS, **CLIPPED, trained_by="AdamW")
    assert [one.location.line for one in finding.related] == [22]
    (finding,) = found(0.1, **MEANS, **CLIPPED)
    assert (finding.steps and finding.steps.first, finding.ranks) == (1, (0, 1))


@pytest.mark.parametrize("factor, fields", [
    (2.0, {"means": ()}),
    (2.0, {"means": (0.5, 0.25)}),  # the loss is divided by the world size
    (2.0, {"alone": False}),  # each gradient may have parts of other ranks
    (2.0, {"count": 2}),
    (2.0, {"trained_by": "AdamW"}),  # its updates are the same
    (1.0, {}),
])  # fmt: skip
def test_sums_that_are_right_or_change_nothing(factor: float, fields: dict[str, Any]) -> None:
    assert found(factor, **{**MEANS, **fields}) == []


def line_of(tmp_path: Path, body: str) -> tuple[int, str]:
    """What divides the loss in a function, of which the last line calls `backward`."""
    path = tmp_path / "train.py"
    path.write_text(f"def step(x):\n{body}\n")
    module = compile(path.read_text(), str(path), "exec")
    code = next(c for c in module.co_consts if isinstance(c, CodeType))
    return loss_divided(code, len(path.read_text().splitlines()))


@pytest.mark.parametrize("body, line", [
    ("    loss = f(x)\n    (loss / world_size).backward()", 3),
    ("    loss = f(x) / dist.get_world_size()\n    loss.backward()", 2),
    ("    loss = f(x)\n    loss /= self.world\n    loss.backward()", 3),
])  # fmt: skip
def test_the_line_that_divides_the_loss(tmp_path: Path, body: str, line: int) -> None:
    assert line_of(tmp_path, body)[0] == line


@pytest.mark.parametrize("body", [
    "    shown = f(x) / world_size\n    loss.backward()",
    "    loss = f(x) / accumulation\n    loss.backward()",
    "    trainer = Trainer(rate / world_size)\n    trainer.fit()",
])  # fmt: skip
def test_lines_that_divide_something_else(tmp_path: Path, body: str) -> None:
    assert line_of(tmp_path, body) == (-1, "")


def test_a_division_after_the_backward_is_for_the_log(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def step(x):\n    loss.backward()\n    loss = loss / world_size\n")
    code = compile(path.read_text(), str(path), "exec").co_consts[0]
    assert isinstance(code, CodeType)
    assert loss_divided(code, 2) == (-1, "")
