"""What models without a wrapper are given, while somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.probe import given, modules, patching
from ddpdoctor.probe.recorder import Recorder, set_recorder
from ddpdoctor.runfolder import EventWriter

torch = pytest.importorskip("torch")
hooks = torch.nn.modules.module


@pytest.fixture(autouse=True)
def watched(tmp_path: Path) -> Iterator[None]:
    modules.install()
    given.install()
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    set_recorder(Recorder(writer, tmp_path, "rank-0", {}))
    yield
    set_recorder(None)
    patching.restore()
    writer.close()


def test_the_first_forward_with_gradients_is_looked_at() -> None:
    net, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    first, second = torch.ones(3, 4), torch.zeros(3, 4)

    def seen(*inputs: object) -> given.Given:
        given.ask(0, list(net.parameters()))
        other(second)
        with torch.no_grad():
            net(second)
        for x in inputs:
            net(x)
        return given.take(0)

    mine = seen(first, second)
    assert mine.inputs and (mine.numbers, mine.drawn) == (12, 0)
    assert seen(first).inputs == mine.inputs != seen(second).inputs
    assert seen() == given.Given()


def test_nothing_is_left_when_nobody_asks() -> None:
    net = torch.nn.Linear(4, 2)
    before = len(hooks._global_forward_pre_hooks)
    given.ask(0, list(net.parameters()))
    assert len(hooks._global_forward_pre_hooks) == before + 1
    given.let_go()
    assert len(hooks._global_forward_pre_hooks) == before
    net(torch.ones(3, 4))
    assert given.take(0) == given.Given()
