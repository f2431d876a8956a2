"""Steps that follow each other fast share a record; none is lost, none comes out of order."""

from __future__ import annotations

from pathlib import Path

import pytest
from recordings import ring_of, site, write_folder

from ddpdoctor.events import Event, NotObserved, OptimizerSeen, StepDone
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.training.limits import JOINED_S
from ddpdoctor.probe.training.optimizers import FIRST_STEPS, Optimizers
from ddpdoctor.probe.training.records import Optimizer, Step
from ddpdoctor.run import load
from ddpdoctor.storage.run_folder import EventWriter, Lines


class Loop:
    """Steps of one optimizer, `apart` seconds from each other."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "rank-0.jsonl"
        self.recorder = Recorder(EventWriter(self.path), folder, "rank-0", {})
        self.known = Optimizer(0, self)
        self.now = 100.0

    def steps(self, count: int, apart: float, line: int = 0) -> None:
        for _ in range(count):
            self.now += apart
            number, self.known.steps = self.known.steps, self.known.steps + 1
            self.known.began = self.now
            self.known.step = Step(lambda: None, self.known, number, line, self.now)  # type: ignore[arg-type]
            now, before = Optimizers.current, Optimizers.current.last_step_at
            now.last_step_at = self.now
            now._record_steps(self.recorder, self.known, 1, self.now - before, 0.0)

    def told(self) -> list[StepDone]:
        return [e for e in Lines(self.path).events() if isinstance(e, StepDone)]


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loop:
    fresh = Optimizers()
    fresh.last_step_at = 100.0
    monkeypatch.setattr(Optimizers, "current", fresh)
    return Loop(tmp_path)


def covered(told: list[StepDone]) -> list[int]:
    return [n for e in told for n in range(e.step - e.count + 1, e.step + 1)]


def test_the_first_steps_have_a_record_each(loop: Loop) -> None:
    loop.steps(FIRST_STEPS, apart=0.001)
    assert [e.count for e in loop.told()] == [1] * FIRST_STEPS


def test_later_ones_share_one(loop: Loop) -> None:
    loop.steps(FIRST_STEPS + 1000, apart=0.001)
    Optimizers.current._leaving(loop.recorder, None)
    told = loop.told()
    assert covered(told) == list(range(FIRST_STEPS + 1000))
    assert len(told) == pytest.approx(FIRST_STEPS + 1000 * 0.001 / JOINED_S, abs=2)
    assert sum(e.wall_s for e in told) == pytest.approx(loop.now - 100)


def test_slow_steps_have_one_each(loop: Loop) -> None:
    loop.steps(FIRST_STEPS + 20, apart=1.5 * JOINED_S)
    assert all(e.count == 1 for e in loop.told())


def test_another_line_begins_another_record(loop: Loop) -> None:
    loop.steps(FIRST_STEPS, apart=0.001)
    loop.steps(3, apart=0.001, line=1)
    loop.steps(2, apart=0.001, line=2)
    Optimizers.current._leaving(loop.recorder, None)
    assert [(e.site, e.count, e.step) for e in loop.told()[FIRST_STEPS:]] == [
        (1, 3, FIRST_STEPS + 2),
        (2, 2, FIRST_STEPS + 4),
    ]


def test_what_happens_after_a_step_is_written_after_it(loop: Loop) -> None:
    loop.steps(FIRST_STEPS + 3, apart=0.001)
    loop.recorder.emit(NotObserved(at=loop.now, check="DDP401", reason="because"))
    *_, before, last = Lines(loop.path).events()
    assert isinstance(before, StepDone) and before.step == FIRST_STEPS + 2
    assert isinstance(last, NotObserved)
    assert loop.recorder.before_events is None


def seen(number: int, steps: int) -> list[Event]:
    return [
        OptimizerSeen(at=1.0, optimizer=number, kind="SGD", site=0),
        StepDone(at=2.0, optimizer=number, step=steps - 1, site=0, wall_s=0.1),
    ]


@pytest.mark.parametrize(
    ("events", "steps"),
    [(seen(0, 140), 145), ([*seen(0, 140), *seen(1, 80)], 140)],
    ids=["of one optimizer", "of several, which the ring does not tell apart"],
)
def test_steps_that_a_kill_kept_off_the_record(
    tmp_path: Path, events: list[Event], steps: int
) -> None:
    folder = write_folder(tmp_path / "run", {0: [site(0, "/t.py", 1), *events]})
    writer = ring_of(*folder.rank_files()[0])
    writer.step = 145
    writer.moved(0.0)
    assert load([folder]).ranks[0].steps == steps
