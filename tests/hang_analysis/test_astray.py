"""DDP606 where a rank does not find a file that another one wrote in a folder of its own."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.hang.first_failure import FirstFailure
from recordings import CWD, make_run, site, steps

from ddpdoctor.events import (
    Event,
    ExceptionRaised,
    FileRead,
    FileRemoved,
    FileWritten,
    FolderMade,
    Frame,
)
from ddpdoctor.report.findings import Finding

SAVED, READ = site(1, "train.py", 28, "torch.save(state, path)"), site(2, "train.py", 58)


def failing(looked_for: str, *saved: str, read: bool = True) -> Finding:
    frame = Frame(file=f"{CWD}/train.py", line=58, function="main", user=True)
    raised = ExceptionRaised(
        at=9.0, kind="FileNotFoundError", frames=(frame,), step=3,
        message=f"[Errno 2] No such file or directory: '{looked_for}'",
    )  # fmt: skip
    files: list[Event] = []
    for path in saved:
        files.append(FileWritten(at=8.0, path=path, site=1, how="save", step=3))
        files += [FileRead(at=8.5, path=path, site=2, how="load", step=3)] if read else []
    events = {0: [SAVED, READ, *steps(3), *files], 1: [READ, *steps(3), raised]}
    (finding,) = FirstFailure().examine(make_run(events, ended={0: -15, 1: 1}))
    return finding


@pytest.mark.parametrize(
    ("looked_for", "saved", "read"),
    [
        ("out/00-07-49.446109_x/last.pt", f"{CWD}/out/00-07-49.410233_x/last.pt", False),
        ("./out/00-07-49.446109_x/last.pt", f"{CWD}/out/00-07-49.410233_x/last.pt", False),
        ("/tmp/tmpab12cd3e/last.pt", "/tmp/tmpx_7yp0qr/last.pt", False),
        ("/out/jolly-otter/last.pt", "/out/sad-heron/last.pt", True),
    ],
)
def test_each_rank_made_the_path_by_itself(looked_for: str, saved: str, read: bool) -> None:
    finding = failing(looked_for, saved, read=read)
    assert finding.rule == "rank-specific-path"
    assert [r.location.line for r in finding.related] == [28]
    assert str(finding.evidence["written_by_another_rank"]).endswith("last.pt")


@pytest.mark.parametrize(
    ("looked_for", "saved", "read"),
    [
        ("/out/jolly-otter/last.pt", "/out/sad-heron/last.pt", False),
        ("/out/rank1/last.pt", "/out/rank0/last.pt", True),
        ("/out/checkpoint-1000/last.pt", "/out/checkpoint-500/last.pt", True),
        ("/out/a/best.pt", "/out/b/last.pt", True),
        ("/pretrained/last.pt", f"{CWD}/out/20261123_000749/last.pt", True),
        ("last.pt", "/somewhere/else/last.pt", True),
    ],
)
def test_what_another_rank_wrote_elsewhere_says_nothing(
    looked_for: str, saved: str, read: bool
) -> None:
    assert failing(looked_for, saved, read=read).rule == "exception"


def test_a_file_that_nobody_was_seen_to_write() -> None:
    assert failing("last.pt").rule == "exception"


def test_it_was_written_there_on_another_machine() -> None:
    there, own = "/out/20261123_000749/last.pt", "/out/20261123_000750/last.pt"
    assert failing(there, own, there).rule == "exception"


@pytest.mark.parametrize(
    ("path", "later", "said"),
    [
        ("/out/step-3/model.pt", 0.5, "writes /out/step-3/model.pt only 0.5 s later"),
        ("/out/step-3/model.pt", -0.5, "/out/step-3 was renamed or removed since"),
        ("/out/step-4/model.pt", 0.5, ""),
    ],
)
def test_a_folder_that_is_not_there_yet_or_any_more(path: str, later: float, said: str) -> None:
    frame = Frame(file=f"{CWD}/train.py", line=58, function="main", user=True)
    raised = ExceptionRaised(
        at=5.0, kind="RuntimeError", message="Parent directory /out/step-3 does not exist.",
        frames=(frame,), step=3,
    )  # fmt: skip
    wrote = FileWritten(at=5.0 + later, path=path, site=1, how="save", step=3)
    events = {0: [SAVED, *steps(3), wrote], 1: [READ, *steps(3), raised]}
    (finding,) = FirstFailure().examine(make_run(events, ended={0: -15, 1: 1}))
    assert (finding.rule == "other-moment") is bool(said)
    assert said in finding.cause


@pytest.mark.parametrize(
    ("theirs", "at", "rule"),
    [
        ("/out/step-3", 8, "made-twice"),
        ("/out/step-4", 8, "exception"),
        ("/out/step-3", 10, "exception"),  # after the failure
    ],
)
def test_two_ranks_make_one_folder(theirs: str, at: float, rule: str) -> None:
    place = Frame(file=f"{CWD}/train.py", line=28, function="main", user=True)
    message = "[Errno 17] File exists: '/out/step-3'"
    raised = ExceptionRaised(at=9, kind="FileExistsError", message=message, frames=(place,))
    others = [site(5, "train.py", 28), FolderMade(at=at, path=theirs, site=5)]
    events: dict[int, list[Event]] = {0: others, 1: [raised]}
    (finding,) = FirstFailure().examine(make_run(events, ended={0: -15, 1: 1}))
    assert finding.rule == rule
    assert ("rank 0 makes /out/step-3 as well" in finding.cause) is (rule == "made-twice")
    assert "exist_ok=True" in finding.fix


@pytest.mark.parametrize(
    ("theirs", "line", "rule"),
    [
        ("/out/old", 28, "removed-twice"),
        ("/out/other", 28, "exception"),
        ("/out/old", 29, "exception"),
    ],
)
def test_two_ranks_remove_one_folder(theirs: str, line: int, rule: str) -> None:
    place = Frame(file=f"{CWD}/train.py", line=line, function="main", user=True)
    raised = ExceptionRaised(
        at=9,
        kind="FileNotFoundError",
        message="[Errno 2] No such file or directory: 'shard_7.pt'",
        frames=(place,),
    )
    removing = [site(5, "train.py", 28), FileRemoved(at=8, path="/out/old", site=5, tree=True)]
    others = [site(5, "train.py", 28), FileRemoved(at=8, path=theirs, site=5, tree=True)]
    events: dict[int, list[Event]] = {0: others, 1: [*removing, raised]}
    (finding,) = FirstFailure().examine(make_run(events, ended={0: -15, 1: 1}))
    assert finding.rule == rule
