"""Ranks that were not observed are named, and no run with one is called faultless."""

from __future__ import annotations

from pathlib import Path

import pytest
from recordings import make_run, started, torch_loaded, write_folder
from toys import ToyQuiet

from ddpdoctor import render
from ddpdoctor.events import Event, GroupReady, ProbeTrouble, RankExiting
from ddpdoctor.report.coverage import why_nobody
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.run import load
from ddpdoctor.storage.run_folder import RunFolder

LEAVES = RankExiting(at=1, how="return")
PAST_THE_HOOK = RankExiting(at=1, how="return", torch_imported=True)
BROKEN = ProbeTrouble(at=1, part="hooks", error="boom", lost="training: torch is not watched")


@pytest.mark.parametrize(
    ("events", "status", "why"),
    [
        (
            [],
            0,
            "replaced itself by another program",
        ),  # by `os.execve` with an environment of its own
        ([], 1, "replaced itself by another program"),
        ([], -9, "ends before torch was imported"),
        ([LEAVES], 0, "torch was never imported"),
        ([PAST_THE_HOOK], 0, "around the doctor's import hook"),
        ([torch_loaded(), BROKEN], 0, "boom"),
        ([torch_loaded(late=True), LEAVES], 0, "noticed only after init_process_group"),
    ],
)
def test_a_rank_that_was_not_observed(events: list[Event], status: int, why: str) -> None:
    """Whatever the reason: it is named, with what to do, and the run is not called faultless."""
    run = make_run({0: [torch_loaded(), LEAVES], 1: events}, ended={0: 0, 1: status})
    report = diagnose(run, [ToyQuiet()])
    (unobserved,) = report.coverage.unobserved
    assert unobserved.ranks == (1,)
    assert why in unobserved.reason
    assert unobserved.help
    text = render.text(report)
    assert "no faults found" not in text
    assert "rank 1 was not observed" in text
    assert "over 1 rank" in text


def test_nothing_is_said_of_a_run_whose_ranks_were_not_observed() -> None:
    report = diagnose(make_run({0: [PAST_THE_HOOK], 1: [PAST_THE_HOOK]}), [ToyQuiet()])
    assert "ranks 0-1 were not observed, so nothing can be said of this run" in render.text(report)
    assert report.run.outcome == "completed"


def test_ranks_that_a_fake_group_pretends_to_have() -> None:
    group = GroupReady(at=0, group=0, name="0", backend="fake", ranks=(0, 1), member=True, site=1)
    report = diagnose(make_run({0: [torch_loaded(), group, LEAVES]}, world_size=2), [ToyQuiet()])
    (unobserved,) = report.coverage.unobserved
    assert unobserved.ranks == (1,)
    assert "there is no such process" in unobserved.reason


def test_a_probe_that_could_not_be_loaded(tmp_path: Path) -> None:
    said = "Traceback (most recent call last):\n  ...\nImportError: no \x1b[31mmsgspec\n"
    for name, known in (("some", {0: [torch_loaded(), LEAVES]}), ("none", {})):
        write_folder(tmp_path / name, known, world_size=2)
        (tmp_path / name / "probe-errors-7.txt").write_text(said)
    some = load([RunFolder(tmp_path / "some")])
    (unobserved,) = diagnose(some, [ToyQuiet()]).coverage.unobserved
    assert unobserved.ranks == (1,)
    none = why_nobody(load([RunFolder(tmp_path / "none")]))
    for text in (unobserved.reason, none):
        assert "could not be loaded" in text and "ImportError: no" in text
        assert "\x1b" not in text and "PYTHONPATH" not in text


@pytest.mark.parametrize(("local", "told"), [("1", "on another node"), ("2", "never started")])
def test_ranks_of_another_node_of_a_launcher_that_is_not_ours(local: str, told: str) -> None:
    """As many ranks as the launcher started here are on record: the others ran elsewhere."""
    here = started(0, 2, environment={"LOCAL_WORLD_SIZE": local})
    run = make_run({0: [here, torch_loaded(), LEAVES]}, world_size=2, ended={0: 0})
    (unobserved,) = diagnose(run, [ToyQuiet()]).coverage.unobserved
    assert unobserved.ranks == (1,) and told in unobserved.reason
