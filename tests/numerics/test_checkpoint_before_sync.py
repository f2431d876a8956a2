"""DDP803 over literal events."""

from __future__ import annotations

import msgspec
from ddpdoctor.checks.numerics.checkpoint_before_sync import CheckpointBeforeSync
from recordings import make_run, site

from ddpdoctor.events import Event, FileLocked, FileRead, FileWritten
from ddpdoctor.findings import Confidence, Finding

PATH = "/home/user/project/best.pt"


def wrote(mark: int = 4, how: str = "save", at: float = 1001.0) -> Event:
    marks = {"0.default": mark}
    return FileWritten(at=at, path=PATH, site=1, how=how, step=3, ended=at + 0.5, marks=marks,
                       marks_after=marks)  # fmt: skip


def read(mark: int = 4, failed: str = "", at: float = 1002.0) -> Event:
    marks = {"0.default": mark}
    return FileRead(at=at, path=PATH, site=2, how="load", step=3, ended=at + 0.1, marks=marks,
                    marks_after=marks, failed=failed)  # fmt: skip


def found(*ranks: list[Event]) -> list[Finding]:
    lines = [site(1, "train.py", 30, "torch.save(...)"), site(2, "train.py", 33, "torch.load(...)")]
    run = make_run({r: [*lines, *events] for r, events in enumerate(ranks)})
    return list(CheckpointBeforeSync().examine(run))


def test_the_reader_was_lucky() -> None:
    (finding,) = found([wrote(), read()], [read()])
    assert finding.ranks == (1,)
    assert finding.location is not None and finding.location.line == 33
    assert finding.related[0].location.line == 30


def test_the_reader_failed() -> None:
    (finding,) = found([wrote()], [read(failed="FileNotFoundError: best.pt", at=1000.5)])
    assert "failed" in finding.summary


def test_a_barrier_in_between() -> None:
    assert not found([wrote(4), read(5)], [read(5)])


def test_there_before_and_overwritten_later() -> None:
    assert not found([read(0, at=1000.5), wrote(9)], [read(0, at=1000.5)])


def test_reads_its_own() -> None:
    assert not found([wrote(), read()], [])


def test_appears_whole() -> None:
    assert not found([wrote(how="rename")], [read(at=1001.2)])
    assert found([wrote(how="rename")], [read(at=1000.5, failed="FileNotFoundError")])


def test_nobody_writes() -> None:
    assert CheckpointBeforeSync().unobserved(make_run({0: [read()]}))


def asked(at: float, path: str = "/home/user/project/guard") -> Event:
    return FileLocked(at=at, path=path, site=1)


def test_both_take_a_lock_in_turn() -> None:
    assert not found([asked(1000.9), wrote()], [asked(1001.2), read()])
    assert found([asked(1000.9), wrote()], [asked(1001.2, "another"), read()])
    assert found([asked(1000.9), wrote()], [read(), asked(1003.0)]), "asked only afterwards"


def test_a_reader_that_came_late_may_have_waited_in_its_own_way() -> None:
    (late,), (early,) = found([wrote()], [read(at=1002.0)]), found([wrote()], [read(at=1001.2)])
    assert late.confidence is Confidence.SUSPECTED
    assert early.confidence is Confidence.PROVEN


def test_it_waited_for_a_key_of_a_store() -> None:
    def after(stored: float) -> Event:
        return msgspec.structs.replace(read(), stored=stored)  # type: ignore[type-var]

    assert not found([wrote()], [after(1001.8)])
    assert found([wrote()], [after(1000.2)]), "before the file was written"
