"""Findings while a run goes on: after two looks, once, and taken back where they vanish."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path

from recordings import PID, rank_events, steps, write_folder
from toys import ToyStep

from ddpdoctor import Check, Finding
from ddpdoctor.events import encode
from ddpdoctor.monitor.findings_so_far import FindingsSoFar, SeenTwice
from ddpdoctor.report.findings import Confidence
from ddpdoctor.run import Run
from ddpdoctor.storage.run_folder import RunFolder


class Early(ToyStep):
    """Finds something before step 20 only"""

    code, name = "DDP996", "early"

    def examine(self, run: Run) -> Iterable[Finding]:
        if all(r.steps < 20 for r in run.ranks.values()):
            yield self.finding(summary=f"after {run.ranks[0].steps} steps", cause="", fix="")


def growing(tmp_path: Path, check: Check) -> tuple[FindingsSoFar, RunFolder]:
    folder = write_folder(tmp_path / "run", {0: steps(5)}, ended=None)
    return FindingsSoFar(folder, (check,)), folder


def grow(folder: RunFolder, count: int) -> None:
    ((_, path),) = folder.rank_files()
    events = list(rank_events(steps(count), 0, 1, pid=PID))[5:]
    with path.open("ab") as file:
        file.write(b"".join(encode(e) + b"\n" for e in events))


def test_a_finding_is_told_once_two_looks_have_made_it(tmp_path: Path) -> None:
    looks, folder = growing(tmp_path, Early())
    assert looks.look(), "the next look may confirm it"
    assert looks.take() == [] and looks.found == ()
    assert not looks.look()
    ((finding, made),) = looks.take()
    assert made and finding.check == "early" and looks.found == (finding,)
    looks.look()
    assert looks.take() == [], "once"
    grow(folder, 10)
    looks.look()
    assert looks.take() == [], "further steps make no other fault of it"
    grow(folder, 40)
    assert looks.look() and looks.found, "one look takes nothing back"
    looks.look()
    assert [(f.check, made) for f, made in looks.take()] == [("early", False)]
    assert looks.found == ()


def test_what_is_only_suspected_is_not_told() -> None:
    doubt = ToyStep().finding(summary="s", cause="", fix="", confidence=Confidence.SUSPECTED)
    seen = SeenTwice()
    assert seen.look([doubt]) == seen.look([doubt]) == []


def test_the_thread_ends_when_it_is_closed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", {0: steps(5)}, ended=None)
    looks = FindingsSoFar(folder, (Early(),), first_s=0.0)
    looks.start()
    deadline = time.monotonic() + 20
    while not looks.found and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [f.check for f in looks.found] == ["early"]
    looks.close()
    while "findings" in {t.name for t in threading.enumerate()} and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "findings" not in {t.name for t in threading.enumerate()}
