"""Large runs: ranks that did the same are folded, and what is said is what all of them told."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from recordings import steps, write_folder
from sampling import ROOT

from ddpdoctor.events import Event, ExceptionRaised, LoaderSeen, RankExiting, StepDone, encode
from ddpdoctor.report.findings import Report
from ddpdoctor.report.postmortem import open_run
from ddpdoctor.report.registry import all_checks
from ddpdoctor.run import Recording, fold_numbers, fold_ranks, folding, told_of, whom
from ddpdoctor.run.phrases import Fold
from ddpdoctor.storage.run_folder import Lines, RunFolder

sys.path.insert(0, str(ROOT / "benchmarks"))
import synthetic

RANKS = 96
ODD = 37


def written(path: Path, steps: int = 24) -> RunFolder:
    return synthetic.write(path, ranks=RANKS, steps=steps)


def rewrite(folder: RunFolder, rank: int, change: dict[type[Event], dict[str, object]]) -> None:
    """Change fields of a rank's events."""
    ((_, path),) = [item for item in folder.rank_files() if item[0] == rank]
    events = [msgspec.structs.replace(e, **change.get(type(e), {})) for e in Lines(path).events()]
    path.write_bytes(b"".join(map(encode, events)))


def reported(folder: RunFolder) -> Report:
    return open_run([folder.path]).report(all_checks())


def both(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> tuple[Report, Report]:
    """The report of the folded run, and that of the run read whole."""
    folded = reported(folder)
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["ddpdoctor.run.load"], "FOLD_FROM", RANKS + 1)
        return folded, reported(folder)


def said(report: Report) -> list[tuple[object, ...]]:
    return [(f.code, f.rule, f.ranks, f.summary) for f in report.findings]


def test_most_of_equal_ranks_are_not_read_whole(tmp_path: Path) -> None:
    run = Recording(written(tmp_path / "run"), fold=True).refresh()
    assert run.world_size == len(run.everyone) == RANKS and not run.missing
    assert len(run.ranks) < 60 < len(run.everyone)
    assert all(not r.of(StepDone) or len(r.of(StepDone)) == 24 for r in run.everyone.values())
    assert {r.of(LoaderSeen)[0].sampler_rank for r in run.everyone.values()} == {*range(RANKS)}


def test_a_clean_run_is_told_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folded, whole = both(written(tmp_path / "run"), monkeypatch)
    assert said(folded) == said(whole)
    assert [r.rank for r in folded.ranks] == [*range(RANKS)]
    assert [(r.node, r.pid, r.state, r.steps) for r in folded.ranks] == [
        (r.node, r.pid, r.state, r.steps) for r in whole.ranks
    ]
    tables = [next(t for t in r.tables if "loaders" in t.title) for r in (folded, whole)]
    assert tables[0] == tables[1]
    assert any(t.title.startswith("Ranks that did the same") for t in folded.tables)


def test_what_all_ranks_do_is_told_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "run")
    for rank in range(RANKS):
        rewrite(folder, rank, {StepDone: {"synced": 0}})
    folded, whole = both(folder, monkeypatch)
    assert said(folded) == said(whole)


def test_an_odd_rank_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "run")
    rewrite(folder, ODD, {LoaderSeen: {"seed": 5}, RankExiting: {"how": "exception", "status": 1}})
    ((_, path),) = [item for item in folder.rank_files() if item[0] == ODD]
    raised = ExceptionRaised(at=2000.0, kind="ValueError", message="odd")
    path.write_bytes(path.read_bytes() + encode(raised))
    folded, whole = both(folder, monkeypatch)
    assert said(folded) == said(whole)
    assert any(f.ranks == (ODD,) for f in folded.findings)


def test_a_damaged_file_is_read_whole(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    ((_, path),) = [item for item in folder.rank_files() if item[0] == ODD]
    path.write_bytes(path.read_bytes()[:-5])
    run = Recording(folder, fold=True).refresh()
    assert run.ranks[ODD].torn


def test_a_rank_that_is_slow_once_is_read_whole(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    ((_, path),) = [item for item in folder.rank_files() if item[0] == ODD]
    events = list(Lines(path).events())
    slow = next(n for n, e in enumerate(events) if isinstance(e, StepDone) and e.step == 9)
    events[slow] = msgspec.structs.replace(events[slow], wall_s=3.0)
    path.write_bytes(b"".join(map(encode, events)))
    assert ODD in Recording(folder, fold=True).refresh().ranks


def test_kinds_that_differ_on_all_ranks_tell_none_apart() -> None:
    sketches = [
        folding.Sketch(n, Path(), {"own": n, "same": 1, "odd": n == 5}, took=(1.0,))
        for n in range(RANKS)
    ]
    made = folding.Folding(sketches)
    (fold,) = made.folds
    assert 5 not in fold.others and 5 not in fold.kept
    assert len(fold.others) == RANKS - 1 - len(fold.kept)


def test_folded_ranks_are_named_where_all_that_stand_for_them_are() -> None:
    with told_of([Fold(frozenset({0, 2}), (4, 6))]):
        assert fold_ranks([0, 1, 2]) == "0-2,4,6"
        assert fold_ranks([0]) == "0"
        assert whom([0, 1, 2], 5) == "all 5 ranks"
        assert fold_numbers([0, 1, 2]) == "0-2"
    assert fold_ranks([0, 1, 2]) == "0-2"


def test_several_processes_make_the_same_sketches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "run", {rank: steps(3 + rank % 2) for rank in range(8)})
    files = folder.rank_files()
    monkeypatch.setattr(folding, "PER_WORKER", 2)
    monkeypatch.setattr(folding.threading, "active_count", lambda: 1)
    monkeypatch.setattr(folding.os, "sched_getaffinity", lambda pid: {0, 1})
    alone, forked = folding._sketched(files), list(folding.sketches_of(files))
    assert [s.rank for s in forked] == [*range(8)]
    assert [(s.did, s.took) for s in forked] == [(s.did, s.took) for s in alone]
