"""DDP803 over literal events."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from ddpdoctor.checks.numerics.checkpoint_before_sync import CheckpointBeforeSync
from recordings import CWD, make_run, site, steps

from ddpdoctor.events import Event, ExceptionRaised, FileLocked, FileRead, FileWritten, Frame
from ddpdoctor.probe.collectives.sync_points import SyncPoints
from ddpdoctor.probe.watchers.process.files import Files
from ddpdoctor.report.findings import Confidence, Finding

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


def test_steps_are_those_that_it_came_after() -> None:
    """Written and read after every step of three; counts of steps are on record."""
    files = [[wrote()], [read()]]
    (finding,) = found(*([*steps(3), *events] for events in files))
    assert finding.steps is not None and (finding.steps.first, finding.steps.last) == (2, 2)
    (finding,) = found(*([*steps(9), *events] for events in files))
    assert finding.steps is not None and finding.steps.last == 3, "and others followed"


def test_a_thread_that_writes_is_waited_for_first() -> None:
    write = msgspec.structs.replace(wrote(), in_thread=True)
    (finding,) = found([write], [read()])
    assert "future.result()" in finding.fix and "dist.barrier()" in finding.fix


def test_the_reader_failed() -> None:
    (finding,) = found([wrote()], [read(failed="FileNotFoundError: best.pt", at=1000.5)])
    assert finding.rule == "failed-read"


def test_only_what_is_known_is_evidence() -> None:
    """Neither when a file that the program opened was closed, nor what its reader made of it."""
    write = msgspec.structs.replace(wrote(how="open"), ended=0.0)
    (finding,) = found([write], [msgspec.structs.replace(read(), how="open", ended=0.0)])
    assert finding.confidence is Confidence.SUSPECTED
    assert finding.evidence == {"write began": 0.0, "read began": 1.0}
    (finding,) = found([wrote()], [read()])
    assert finding.evidence == {"write began": 0.0, "write ended": 0.5, "read began": 1.0}


def test_a_barrier_in_between() -> None:
    assert not found([wrote(4), read(5)], [read(5)])


def test_there_before_and_overwritten_later() -> None:
    assert not found([read(0, at=1000.5), wrote(9)], [read(0, at=1000.5)])


def test_reads_its_own() -> None:
    assert not found([wrote(), read()], [])


def test_appears_whole() -> None:
    assert not found([wrote(how="rename")], [read(at=1001.2)])
    assert found([wrote(how="rename")], [read(at=1000.5, failed="FileNotFoundError")])


def test_takes_the_place_of_an_earlier_one() -> None:
    """The read may find either; whichever it was, nothing decided that."""
    earlier, later = wrote(3, how="rename", at=1000.0), wrote(how="rename")
    (finding,) = found([earlier, later], [read(at=1001.6)])
    assert finding.confidence is Confidence.SUSPECTED
    assert not found([earlier, later], [read(5, at=1001.6)]), "a collective after the write"
    assert not found([earlier, later], [read(3, at=1000.6)]), "and before it"
    apart = wrote(4, how="rename", at=1000.0)
    assert not found([apart, later], [read(at=1001.6)]), "no collective between the writes"
    asks = msgspec.structs.replace(read(at=1001.6), awaited=True)  # type: ignore[type-var]
    assert not found([earlier, later], [asks]), "waits until the file is a newer one"
    assert not found([earlier, later], [read(at=1001.2), read(at=1001.6)]), "reads until it is"


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


def test_it_waited_for_another_file() -> None:
    def waited(**more: object) -> Event:
        return msgspec.structs.replace(read(**more), polled=True)  # type: ignore[type-var,arg-type]

    assert not found([wrote()], [waited()])
    assert found([wrote()], [waited(at=1001.2)]), "in vain"
    assert found([wrote()], [waited(at=1001.2, failed=TORN)])


MISSING = f"FileNotFoundError: [Errno 2] No such file or directory: '{PATH}'"
FOREIGN = "UnpicklingError: Weights only load failed. Unsupported global: GLOBAL argparse.Namespace"
TORN = "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central"


def ended(kind: str, message: str = "", function: str = "main", at: float = 1003.0) -> Event:
    frame = Frame(file=f"{CWD}/train.py", line=34, function=function, user=True)
    return ExceptionRaised(at=at, kind=kind, message=message, frames=(frame,))


def opened(at: float = 1001.2, path: str = PATH) -> Event:
    marks = {"0.default": 4}
    return FileRead(at=at, path=path, site=2, how="open", step=3, marks=marks, marks_after=marks)


def explained(reader: list[Event], write: Event) -> tuple[Finding, bool]:
    lines = [site(1, "train.py", 30, "torch.save(...)", function="main"),
             site(2, "train.py", 33, "with open(path) as f:", function="main")]  # fmt: skip
    run = make_run({0: [*lines, write], 1: [*lines, *reader]}, ended={0: -15, 1: 1})
    check = CheckpointBeforeSync()
    (mine,), (failure,) = check.examine(run), FirstFailure().examine(run)
    return mine, check.explains(mine, failure)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("EOFError", "Ran out of input"),
        ("_pickle.UnpicklingError", "pickle data was truncated"),
        ("_pickle.UnpicklingError", "WeightsUnpickler error: \n\nUnsupported operand 80\n\nCheck"),
        ("_pickle.UnpicklingError", "A load persistent id instruction was encountered,\nbut no"),
        ("struct.error", "unpack requires a buffer of 4 bytes"),
        ("json.decoder.JSONDecodeError", "Expecting value: line 1 column 6 (char 5)"),
        ("OSError", "[Errno 22] Invalid argument"),
    ],
)
def test_the_reader_ended_with_what_half_a_file_gives(kind: str, message: str) -> None:
    write = msgspec.structs.replace(wrote(how="open"), ended=0.0)  # type: ignore[type-var]
    mine, explains = explained([opened(), ended(kind, message)], write)
    assert mine.confidence is Confidence.PROVEN
    assert explains


@pytest.mark.parametrize(
    "reader",
    [
        [opened(1002.0), ended("ValueError", "boom")],
        [opened(1002.0), ended("EOFError", function="receive")],
        [opened(1002.0), ended("OSError", "[Errno 5] Input/output error")],
        [opened(1002.0), opened(1002.5, "/other.json"), ended("json.JSONDecodeError", "Expecting")],
        [read(failed=FOREIGN), ended("_pickle.UnpicklingError", FOREIGN)],
        [opened(1002.0), ended("_pickle.UnpicklingError", "Unsupported operand 149")],
        [read(failed=TORN), ended("RuntimeError", TORN)],  # when the file was whole again
        [read(failed=MISSING, at=1002.0), ended("FileNotFoundError", MISSING)],  # and gone
    ],
)
def test_the_reader_ended_with_something_else(reader: list[Event]) -> None:
    mine, explains = explained(reader, wrote())
    assert mine.confidence is Confidence.SUSPECTED
    assert not explains


def test_the_writer_was_ended_with_the_reader() -> None:
    begun = msgspec.structs.replace(wrote(), ended=0.0)  # type: ignore[type-var]
    mine, explains = explained([read(failed=TORN), ended("RuntimeError", TORN)], begun)
    assert mine.confidence is Confidence.PROVEN
    assert explains
    assert mine.rule == "failed-read-ended-rank"
    assert mine.evidence["write ended"] is None


def test_a_save_is_told_once_though_recorded_twice() -> None:
    begun = msgspec.structs.replace(wrote(4), ended=0.0)  # type: ignore[type-var]
    assert not found([begun, wrote(4)], [read(5)])
    assert found([begun], [read(5)]), "no collective can have followed a save that is not over"


def test_a_failed_read_that_the_rank_survived_explains_nothing() -> None:
    later = ended("ValueError", "boom")
    mine, explains = explained([read(failed=MISSING, at=1000.5), later], wrote())
    assert mine.confidence is Confidence.PROVEN
    assert not explains


def test_a_save_is_on_record_before_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[FileWritten] = []
    monkeypatch.setattr(SyncPoints.current, "marks", lambda recorder: {"0.default": len(told)})
    recorder = Mock(emit=told.append, site=lambda: 1, step=3)
    recorder.sites.callers.return_value = ()
    begun = Files.current._saves(recorder, str(tmp_path / "a.pt"), 7.0, {"0.default": 0})
    Files.current._saved(recorder, begun, None)
    assert [(e.at, e.ended > 0, e.marks_after["0.default"]) for e in told] == [
        (7.0, False, 0),
        (7.0, True, 1),
    ]
