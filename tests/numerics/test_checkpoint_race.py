"""DDP802 over literal events."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from ddpdoctor.checks.numerics.checkpoint_race import CheckpointRace
from recordings import make_run, site, started, steps

from ddpdoctor.events import (
    Event,
    ExceptionRaised,
    FileLocked,
    FileRead,
    FileRemoved,
    FileWritten,
    FolderMade,
    GroupReady,
    Tensor,
    Unwrapped,
    Wrapped,
)
from ddpdoctor.events.codec import decode
from ddpdoctor.probe.collectives.sync_points import SyncPoints
from ddpdoctor.probe.recording import patching
from ddpdoctor.probe.recording.recorder import Recorder, current
from ddpdoctor.probe.recording.threads import Threads
from ddpdoctor.probe.source import source_text
from ddpdoctor.probe.watchers.process import files
from ddpdoctor.probe.watchers.process.files import Files
from ddpdoctor.report.findings import Finding, Severity
from ddpdoctor.run import Location
from ddpdoctor.storage.run_folder import EventWriter

PATH = "/home/user/project/last.pt"
END = 1100.0


def wrote(path: str = PATH, mark: int = 4, **fields: object) -> Event:
    values: dict[str, object] = {"site": 1, "how": "save", "step": 3, "ended": END, **fields}
    marks = {"0.default": mark} if mark >= 0 else {}
    values = {"marks": marks, "marks_after": marks, **values}
    return FileWritten(at=0, path=path, **values)  # type: ignore[arg-type]


def found(*ranks: list[Event], nodes: tuple[str, ...] = ()) -> list[Finding]:
    line = site(1, "train.py", 18, "torch.save(model, path)")
    heads = [
        started(r, len(ranks), **({"node": nodes[r]} if nodes else {})) for r in range(len(ranks))
    ]
    run = make_run({r: [heads[r], line, *events] for r, events in enumerate(ranks)})
    return list(CheckpointRace().examine(run))


def test_all_ranks_save_one_path() -> None:
    (finding,) = found([wrote(), wrote(mark=8)], [wrote(), wrote(mark=8)])
    assert finding.severity is Severity.ERROR
    assert finding.ranks == (0, 1)
    assert finding.subjects == ("last.pt",)
    assert finding.location is not None and finding.location.line == 18


@pytest.mark.parametrize(("taken", "told", "writes"), [(6, 2, 3), (9, 3, 5)])
def test_writes_are_told_under_the_same_steps_as_the_finding(
    taken: int, told: int, writes: int
) -> None:
    """Written after steps, the last one among them or not; counts of steps are on record."""
    saves = [wrote(mark=4 * n, step=3 * min(n, 2)) for n in range(1, writes + 1)]
    (finding,) = found(*([*steps(taken), *saves] for _ in range(2)))
    rows = finding.evidence["writes"]
    assert isinstance(rows, list)
    assert finding.steps is not None and rows[0]["step"] == finding.steps.first == told
    assert finding.evidence.get("writes in all") == (10 if writes == 5 else None)


@pytest.mark.parametrize(
    ("parts", "how", "own"), [(True, "save", True), (False, "save", False), (True, "open", False)]
)
def test_ranks_that_hold_different_parts(parts: bool, how: str, own: bool) -> None:
    def trains(rank: int) -> Event:
        tensor = Tensor(name=f"stage{rank}.weight", shape=(4,), dtype="float32")
        return Unwrapped(at=0, optimizer=0, kind="Stage", parameters=(tensor,))

    (finding,) = found(*([trains(r if parts else 0), wrote(how=how)] for r in (0, 1)))
    assert finding.rule == ("model-parts" if own else "same-file")


def test_experts_that_the_wrapper_ignores() -> None:
    tensor = Tensor(name="experts.weight", shape=(4,), dtype="float32", ignored=True)
    wrap = Wrapped(
        at=0, model=0, wrapper="DistributedDataParallel", kind="Moe", group=0, site=-1,
        parameters=(tensor,),
    )  # fmt: skip
    (finding,) = found([wrap, wrote()], [wrap, wrote()])
    assert finding.rule == "model-parts"


@pytest.mark.parametrize(("other", "told"), [(3, [230]), (2, [])])
def test_who_called_the_helper_that_saves(other: int, told: list[int]) -> None:
    lines = [site(2, "train.py", 230, "save(model)"), site(3, "train.py", 200, "save(model)")]
    events = [wrote("/x/best.pt", callers=(other,)), wrote(callers=(2,))]
    (finding,) = found([*lines, *events], [*lines, events[1]])
    assert [r.location.line for r in finding.related] == told


@pytest.mark.parametrize(("both", "told"), [(True, 0), (False, 1)])
def test_a_file_that_is_only_cleared(both: bool, told: int) -> None:
    clears = wrote(how="open", empty=True)
    assert len(found([clears], [clears if both else wrote(how="open")])) == told


CLEARS = """
with open(path, "w") as f:  # clear it
    pass
open(path, "w").close()
with open(path, "w") as f:
    f.write("x")
f = open(path, "w")
f.close()
with lock, open(path, "w"):
    pass
with path.open("w"):
    ...
"""


def test_which_statements_only_clear(tmp_path: Path) -> None:
    file = tmp_path / "clears.py"
    file.write_text(CLEARS)
    code = compile(CLEARS, str(file), "exec")
    lines = range(1, len(CLEARS.splitlines()) + 1)
    assert [n for n in lines if source_text.only_opens(code, n)] == [2, 4, 11]


def test_a_file_per_epoch_is_one_finding() -> None:
    files = [wrote(f"/home/user/project/{n}.pt", mark=n) for n in range(5)]
    (finding,) = found(files, files)
    assert len(finding.subjects) == 5


def test_renamed_onto_one_target() -> None:
    (finding,) = found([wrote(how="rename")], [wrote(how="rename")])
    assert finding.severity is Severity.ERROR


TARGET = "/home/user/project/checkpoint-4"
OCCUPIED = f"[Errno 39] Directory not empty: '/home/user/project/tmp' -> '{TARGET}'"


def moved(mark: int = 4, **fields: object) -> Event:
    return wrote(TARGET, mark, **{"how": "rename", "tree": True, **fields})


def raised(message: str = OCCUPIED) -> Event:
    return ExceptionRaised(at=END, kind="OSError", message=message)


def removed(at: float) -> Event:
    return FileRemoved(at=at, path=TARGET, site=1, tree=True)


def test_folders_moved_onto_one_target() -> None:
    (finding,) = found([moved()], [moved(), raised()])
    assert (finding.rule, finding.severity) == ("moved-folder", Severity.ERROR)
    assert finding.ranks == (0, 1) and finding.subjects == ("checkpoint-4",)
    assert finding.location is not None and finding.location.line == 18
    failed = FirstFailure().finding(
        ranks=(1,), subjects=("OSError",), evidence={"message": OCCUPIED},
        location=finding.location, at=finding.at + 1, summary="", cause="", fix="",
    )  # fmt: skip
    assert CheckpointRace().explains(finding, failed)


@pytest.mark.parametrize(
    ("ending", "step", "told"),
    [
        (None, 3, ("moved-folder", Severity.NOTE)),  # the program handles the error
        (None, 0, ("moved-folder", Severity.NOTE)),
        (raised(), 0, ("moved-folder", Severity.ERROR)),
        (raised("[Errno 28] No space left on device"), 3, ("moved-folder", Severity.NOTE)),
        (removed(1), 3, ("moved-folder", Severity.NOTE)),  # what was left of another run
        (removed(END), 3, ("moved-folder", Severity.ERROR)),
    ],
)
def test_how_a_moved_folder_ends(
    ending: Event | None, step: int, told: tuple[str, Severity]
) -> None:
    (finding,) = found([moved(step=step)], [moved(step=step), *([ending] if ending else [])])
    assert (finding.rule, finding.severity) == told


def test_a_folder_moved_into_that_of_another_rank() -> None:
    (finding,) = found([moved()], [moved(how="into")])
    assert (finding.rule, finding.severity) == ("moved-folder", Severity.ERROR)


def test_folders_that_are_no_race() -> None:
    assert not found([moved(how="into")], [moved(how="into")])  # a folder that was there before
    assert not found([moved()], [wrote("/home/user/project/other", how="rename", tree=True)])
    assert not found([moved()], [])
    assert not found([moved(), moved()], [])
    assert not found([moved(4)], [moved(6)])  # a collective in between
    assert not found([moved(locked=True)], [moved(locked=True)])


def test_folders_that_are_made_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    monkeypatch.setattr(current, "recorder", recorder)
    project = tmp_path.parent / f"{tmp_path.name}-project"
    SyncPoints.begin()
    Files.begin()
    for name in ("a", "a", "b/c"):
        os.makedirs(project / name, exist_ok=True)
    with pytest.raises(FileExistsError):
        os.mkdir(project)
    patching.restore()
    lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines()
    made = [e.path for line in lines if isinstance(e := decode(line), FolderMade)]
    assert made == [str(project), *(str(project / name) for name in ("a", "b", "b/c"))]


def test_moves_of_folders_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    monkeypatch.setattr(current, "recorder", recorder)
    project = tmp_path.parent / f"{tmp_path.name}-project"
    SyncPoints.begin()
    Files.begin()
    for n in range(5):
        (project / f"tmp-{n}").mkdir(parents=True)
    os.renames(project / "tmp-0", project / "a")
    os.rename(project / "tmp-1", project / "b")
    shutil.move(project / "tmp-2", project / "c")
    (project / "c" / "file").touch()
    shutil.move(project / "tmp-3", project / "c")
    with pytest.raises(OSError, match="not empty"):
        os.rename(project / "tmp-4", project / "c")
    patching.restore()
    lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines()
    events = [e for line in lines if isinstance(e := decode(line), FileWritten)]
    seen = [(Path(e.path).name, e.how) for e in events if e.tree]
    assert seen[:3] == [("a", "rename"), ("b", "rename"), ("c", "rename")]
    assert seen[3:] == [("c", "into"), ("tmp-3", "rename"), ("c", "rename")]


@pytest.mark.parametrize(("how", "severity"), [("rename", "note"), ("save", "error")])
def test_what_each_rank_prepares_before_the_first_step(how: str, severity: str) -> None:
    (finding,) = found([wrote(how=how, step=0)], [wrote(how=how, step=0)])
    assert finding.severity.value == severity


@pytest.mark.parametrize(
    ("path", "line", "follows"),
    [(PATH, 18, True), ("last.pt", 18, True), ("/data/part-3", 18, False), (PATH, 30, False)],
)
def test_a_file_that_another_rank_has_renamed(path: str, line: int, follows: bool) -> None:
    (finding,) = found([wrote(), wrote(mark=8)], [wrote(), wrote(mark=8)])
    message = f"[Errno 2] No such file or directory: '{path}' -> '/home/user/project/best.pt'"
    failed = FirstFailure().finding(
        ranks=(1,), subjects=("FileNotFoundError",), evidence={"message": message},
        location=Location("train.py", line), at=finding.at + 1, summary="", cause="", fix="",
    )  # fmt: skip
    assert CheckpointRace().explains(finding, failed) is follows


def test_before_there_is_a_group() -> None:
    assert found([wrote(mark=-1)], [wrote(mark=-1)])


def test_logs_are_a_warning() -> None:
    log = wrote("/home/user/project/train.log", how="open")
    assert [f.severity for f in found([log], [log])] == [Severity.WARNING]


def test_a_file_per_rank() -> None:
    assert not found([wrote("/x/state-0.pt")], [wrote("/x/state-1.pt")])


def test_one_rank_saves() -> None:
    assert not found([wrote(), wrote(mark=9)], [])


def test_ranks_take_turns_around_a_barrier() -> None:
    assert not found([wrote(mark=4)], [wrote(mark=5)])


def test_written_before_the_group_and_after() -> None:
    assert not found([wrote(mark=-1)], [wrote(mark=0)])


def test_each_machine_has_its_own_disk() -> None:
    assert not found([wrote()], [wrote()], nodes=("a", "b"))


def test_machines_share_a_disk() -> None:
    assert found([wrote(shared=True)], [wrote(shared=True)], nodes=("a", "b"))


def test_under_a_file_lock() -> None:
    assert not found([wrote(locked=True)], [wrote(locked=True)])


def test_met_in_a_group_of_their_own() -> None:
    def at(own: int) -> Event:
        marks = {"0.default": 4, "0.1": own}
        return wrote(marks=marks, marks_after=marks)

    assert not found([at(2)], [at(3)])


def test_nobody_writes() -> None:
    assert CheckpointRace().unobserved(make_run({0: [], 1: []}))


def test_a_file_that_is_there_to_be_locked() -> None:
    lock = "/home/user/project/guard"
    opened = wrote(lock, how="open")
    assert found([opened], [opened])
    assert not found([opened, FileLocked(at=0, path=lock, site=1)], [opened])


def settings(mark: int = -1, **fields: object) -> Event:
    named = {"path": "/home/user/project/.settings/start.yaml", "how": "open", "step": 0}
    return wrote(mark=mark, **{**named, "library": "launchlib", **fields})  # type: ignore[arg-type]


def test_settings_that_a_library_notes_before_there_is_a_group() -> None:
    assert not found([settings()], [settings()])


def test_settings_that_the_program_reads() -> None:
    path = "/home/user/project/.settings/start.yaml"
    read = FileRead(at=1, path=path, site=1, how="open", step=0)
    assert found([settings(), read], [settings()])


def test_settings_that_the_program_itself_writes() -> None:
    assert found([settings(library="")], [settings(library="")])


def test_what_a_library_writes_while_the_ranks_work_together() -> None:
    assert found([settings(mark=4)], [settings(mark=4)])


def test_data_that_a_library_writes_before_there_is_a_group() -> None:
    data = settings(path="/home/user/project/tokens.bin")
    assert found([data], [data])


def test_files_that_one_function_writes_in_one_go() -> None:
    copy = site(2, "train.py", 20, "shutil.copyfile(path, 'best.pt')")
    best = wrote("/home/user/project/best.pt", how="open", site=2)
    (finding,) = found([copy, wrote(), best], [copy, wrote(), best])
    assert finding.subjects == ("last.pt", "best.pt")
    assert finding.location is not None and finding.location.line == 18
    assert [r.location.line for r in finding.related] == [20]
    renamed = wrote("/home/user/project/best.pt", how="rename", site=2)
    (finding,) = found([copy, wrote(), renamed], [copy, wrote(), renamed])
    found_apart = found([copy, wrote(), best], [copy, wrote(), best], [copy, wrote()])
    assert [f.ranks for f in found_apart] == [(0, 1, 2), (0, 1)]
    later = wrote("/home/user/project/best.pt", how="open", site=2, mark=6)
    assert len(found([copy, wrote(), later], [copy, wrote(), later])) == 2


def test_a_thread_without_a_line_of_the_user_s_is_told_by_who_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Threads.current, "started_at", lambda: 7)
    assert [files._site(Mock(site=lambda n=n: n)) for n in (3, -1)] == [3, 7]


def test_a_write_whose_line_is_not_known() -> None:
    (finding,) = found([wrote(site=-1)], [wrote(site=-1)])
    assert (finding.rule, finding.location) == ("same-file", None)


@pytest.mark.parametrize("before", [True, False])
def test_what_each_rank_writes_before_it_has_a_group(before: bool) -> None:
    ready = GroupReady(at=0, group=0, name="0", backend="gloo", ranks=(0, 1), member=True, site=-1)
    events = [wrote(), ready] if before else [ready, wrote()]
    (finding,) = found(events, events)
    assert ("call `init_process_group` before" in finding.fix) is before
