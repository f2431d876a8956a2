"""DDP105 over literal events."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddpdoctor.checks.launch.process_group_leak import ProcessGroupLeak
from recordings import make_run, site

from ddpdoctor.events import Event, GroupReady, RankExiting
from ddpdoctor.events.codec import decode
from ddpdoctor.probe.collectives.process_groups import ProcessGroups
from ddpdoctor.probe.recording import patching
from ddpdoctor.probe.recording.recorder import Recorder, current
from ddpdoctor.storage.run_folder import EventWriter


def rank(alive: int, library: str = "") -> list[Event]:
    return [
        site(1, "train.py", 5, "dist.init_process_group()"),
        GroupReady(
            at=0,
            group=0,
            name="0",
            backend="gloo",
            ranks=(0, 1),
            member=True,
            site=1,
            library=library,
        ),
        RankExiting(at=0, how="return", groups_alive=alive),
    ]


def test_left_alive() -> None:
    (finding,) = ProcessGroupLeak().examine(make_run({0: rank(1), 1: rank(1)}))
    assert finding.ranks == (0, 1)
    assert finding.location is not None and finding.location.line == 5


def test_created_by_a_library() -> None:
    left = rank(1, "accelerate.state")
    assert not list(ProcessGroupLeak().examine(make_run({0: left, 1: left})))


def test_destroyed() -> None:
    assert not list(ProcessGroupLeak().examine(make_run({0: rank(0), 1: rank(0)})))


def test_a_rank_failed_anyway() -> None:
    run = make_run({0: rank(1), 1: rank(1)}, ended={0: 0, 1: 1})
    assert not list(ProcessGroupLeak().examine(run))


INIT = """
def init():
    import torch.distributed as dist
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
"""


@pytest.mark.parametrize(
    ("file", "library"),
    [("/opt/site-packages/frame/work.py", "frame.work"), ("/home/user/setup.py", "")],
)
def test_who_creates_a_group(
    file: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist = pytest.importorskip("torch").distributed
    recorder = Recorder(EventWriter(tmp_path / "rank-0.jsonl"), tmp_path, "rank-0", {})
    monkeypatch.setattr(current, "recorder", recorder)
    ProcessGroups.begin()
    ProcessGroups.current.activate_with(lambda *_: None)
    code = {"__name__": "frame.work"}
    exec(compile(INIT, file, "exec"), code)
    main = {"init": code["init"]}
    exec(compile("def main():\n    init()\n", "/home/user/main.py", "exec"), main)
    try:
        main["main"]()  # type: ignore[operator]
    finally:
        patching.restore()
        dist.destroy_process_group()
    lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines()
    (made,) = [e for line in lines if isinstance(e := decode(line), GroupReady)]
    assert made.library == library
