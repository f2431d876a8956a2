"""Which sharded model a backward trains."""

import pytest
from torch import nn

from ddpdoctor.events import ShardedModel, decode
from ddpdoctor.probe.recording import recorder
from ddpdoctor.probe.training.module_origins import ModuleOrigins
from ddpdoctor.probe.watchers.losses import sharded_models
from ddpdoctor.probe.watchers.losses.sharded_models import ShardedModels
from ddpdoctor.storage.run_folder import EventWriter

LATE = 100_001
"""A backward of a run that is under way, at which no search is due."""


class Program:
    """
    Attributes:
        roots: the sharded modules that the program has; `searches` for them so far.
        averages: the ranks over which they average.
    """

    def __init__(self, folder):
        self.roots, self.searches, self.averages = [], 0, (0, 1)
        self.watcher = ShardedModels()
        self.path = folder / "rank-0.jsonl"
        self.recorder = recorder.Recorder(EventWriter(self.path), folder, "rank-0", {})

    def search(self):
        self.searches += 1
        return list(self.roots)

    def trained(self, backwards):
        return [m.number for m in self.watcher.trained(self.recorder, backwards)]


@pytest.fixture
def program(tmp_path, monkeypatch):
    made = Program(tmp_path)
    monkeypatch.setattr(sharded_models, "sharded_roots", made.search)
    monkeypatch.setattr(sharded_models, "averages_over", lambda module: made.averages)
    monkeypatch.setattr(ModuleOrigins, "current", ModuleOrigins())
    return made


def test_the_only_model_that_is_trained(program):
    teacher = nn.Linear(2, 2).requires_grad_(False)
    program.roots = [nn.Linear(2, 2), teacher]
    assert [program.trained(n) for n in range(3)] == [[-1], [-1], [-1]]
    events = map(decode, program.path.read_bytes().splitlines())
    assert [(e.model, e.ranks) for e in events if isinstance(e, ShardedModel)] == [(-1, (0, 1))]


@pytest.mark.parametrize(("count", "averages"), [(0, (0, 1)), (2, (0, 1)), (1, (0,)), (1, ())])
def test_it_is_not_known_which_one(program, count, averages):
    program.roots, program.averages = [nn.Linear(2, 2) for _ in range(count)], averages
    assert program.trained(0) == []


def test_modules_are_searched_when_there_are_new_ones(program):
    program.roots = [nn.Linear(2, 2)]
    program.trained(LATE)
    program.trained(LATE + 1)
    assert program.searches == 1
    program.roots.append(nn.Linear(2, 2))
    ModuleOrigins.current.registrations += 2
    assert program.trained(LATE + 2) == []
    assert program.searches == 2


def test_a_model_that_is_gone(program):
    program.roots = [nn.Linear(2, 2)]
    assert program.trained(LATE) == [-1]
    program.roots.clear()
    assert program.trained(LATE + 1) == []
