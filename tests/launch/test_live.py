"""What is shown of a run while it goes on, where stderr is no terminal, and that it can be off."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from recordings import make_run, steps
from toys import ToyStep

from ddpdoctor.config import Options
from ddpdoctor.launch import live
from ddpdoctor.monitor.findings_so_far import FindingsSoFar
from ddpdoctor.storage.run_folder import RunFolder


def looking() -> bool:
    return any(t.name == "findings" for t in threading.enumerate())


@pytest.mark.parametrize("options", [Options(live=False), Options(quiet=True)])
def test_off_it_costs_nothing(options: Options, tmp_path: Path) -> None:
    with live.shown(RunFolder(tmp_path), options, print) as show:
        assert show is None and not looking()


def test_findings_are_told_as_they_are_made_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = ToyStep().finding(summary="it is wrong", cause="", fix="")
    news = iter([[(finding, True)], [], [(finding, False)]])
    monkeypatch.setattr(FindingsSoFar, "take", lambda self: next(news))
    said: list[str] = []
    run = make_run({0: steps(5)}, ended=None)
    with live.shown(RunFolder(tmp_path), Options(live=True), said.append) as show:
        assert show is not None and looking()
        for _ in range(3):
            show(run)
    assert said == [
        "error[DDP997] toy-step: it is wrong",
        "no longer found: DDP997 toy-step",
    ]


def test_a_node_that_does_not_lead_tells_no_findings(tmp_path: Path) -> None:
    with live.shown(RunFolder(tmp_path), Options(live=True), print, leads=False) as show:
        assert show is not None and not looking()


def test_a_log_that_nobody_asked_for_has_lines_without_findings(tmp_path: Path) -> None:
    with live.shown(RunFolder(tmp_path), Options(), print) as show:
        assert show is not None and not looking()


def test_what_fails_there_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object) -> None:
        raise RuntimeError("no thread")

    monkeypatch.setattr(FindingsSoFar, "start", broken)
    with live.shown(RunFolder(tmp_path), Options(live=True), print) as show:
        assert show is None
