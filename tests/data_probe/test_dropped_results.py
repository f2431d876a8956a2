"""Results of collectives that the program drops: what is recorded of them."""

from functools import partial

import pytest
import torch

from ddpdoctor.events import ResultDropped, decode
from ddpdoctor.probe.collectives.call_hooks import Call, Issued
from ddpdoctor.probe.collectives.process_groups import ProcessGroups
from ddpdoctor.probe.recording import recorder
from ddpdoctor.probe.watchers.manual_sync.unused_allreduce import DroppedResults
from ddpdoctor.storage.run_folder import EventWriter

PROGRAM = """
def gathers(x):
    every = [None, None]
    dist.all_gather(every, x)
def returned(x):
    lib.all_gather(x)
def reduces(x):
    copy = x.clone()
    dist.all_reduce(copy)
def reduces_in_the_call(x):
    total = 1.0
    dist.all_reduce(torch.tensor(total))
def reduces_in_place(x):
    dist.all_reduce(x.view(2))
    dist.all_reduce(torch.zeros(1))
def starts(x):
    dist.all_reduce(x, async_op=True)
def keeps(x):
    work = dist.all_reduce(x, async_op=True)
def waits(x):
    work = dist.all_reduce(x, async_op=True)
    work.append(1)
    works = [dist.all_reduce(x, async_op=True)]
    works.clear()
def _started(x):
    return dist.all_reduce(x, async_op=True)
def has_it_started(x):
    _started(x)
def has_it_sent(x):
    dist.reduce(x, 0, async_op=True)
"""
TORCHS = """
class dist:
    def all_gather(every, x):
        called(Call("all_gather", 0, False, (x,)))
    def all_reduce(x, async_op=False):
        called(Call("all_reduce", 0, False, (x,)))
        if async_op:
            issued(Issued(0, ()))
            return []
    def reduce(x, to, async_op=False):
        called(Call("reduce", 0, False, (x,)))
        issued(Issued(0, ()))
"""
LIBRARYS = """
class lib:
    def all_gather(x):
        with torch.no_grad():  # as in the forward of an autograd function
            called(Call("all_gather", 0, False, (x,)))
"""


class Program:
    def __init__(self, folder):
        self.watcher, self.path = DroppedResults(), folder / "rank-0.jsonl"
        self.recorder = recorder.Recorder(EventWriter(self.path), folder, "rank-0", {})
        self.recorder.step = 3
        self.names = self._run(PROGRAM, folder / "train.py", "__main__")
        c10d = self._run(TORCHS, torch.distributed.__file__, "torch.distributed.distributed_c10d")
        library = self._run(LIBRARYS, torch.__file__, "torch.distributed.nn.functional")
        self.names |= {"dist": c10d["dist"], "lib": library["lib"]}

    def _run(self, text, path, name):
        called = partial(self.watcher._called, self.recorder)
        names = {"__name__": name, "called": called, "Call": Call, "torch": torch}
        names |= {"issued": partial(self.watcher._issued, self.recorder), "Issued": Issued}
        if name == "__main__":
            path.write_text(text)
        exec(compile(text, str(path), "exec"), names)
        return names

    def dropped(self):
        events = map(decode, self.path.read_bytes().splitlines())
        return [(e.name, e.op, e.learns) for e in events if isinstance(e, ResultDropped)]


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


@pytest.mark.parametrize(("function", "grad", "trained", "told"), [
    ("gathers", True, True, ("every", "all_gather", True)),
    ("gathers", False, True, ("every", "all_gather", False)),
    ("gathers", True, False, ("every", "all_gather", False)),
    ("returned", True, True, ("all_gather", "all_gather", True)),
    ("returned", True, False, ("all_gather", "all_gather", False)),
    ("reduces", False, False, ("copy", "all_reduce", False)),
])  # fmt: skip
def test_what_is_dropped_twice(program, function, grad, trained, told):
    value = torch.ones(2, requires_grad=trained)
    for times in range(3):
        with torch.set_grad_enabled(grad):
            program.names[function](value)
        assert len(program.dropped()) == (times > 0)
    assert program.dropped() == [told]


@pytest.mark.parametrize(("function", "told"), [
    ("reduces_in_the_call", ["torch.tensor(total)"]),
    ("reduces_in_place", []),
    ("starts", ["all_reduce"]),
    ("keeps", ["work"]),
    ("waits", []),
    ("has_it_started", ["all_reduce"]),
    ("has_it_sent", []),
])  # fmt: skip
def test_copies_made_in_the_call_and_handles(program, function, told):
    for _ in range(3):
        program.names[function](torch.ones(2))
    assert [name for name, *_ in program.dropped()] == told


@pytest.mark.parametrize(("others", "told"), [({}, 1), ({0: frozenset({1})}, 1),
                                              ({0: frozenset()}, 0)])  # fmt: skip
def test_a_rank_that_is_alone_in_a_group_loses_nothing(program, monkeypatch, others, told):
    monkeypatch.setattr(ProcessGroups.current, "others", others)
    for _ in range(3):
        program.names["reduces"](torch.ones(2))
    assert len(program.dropped()) == told


def test_the_code_of_a_file_itself(program, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("for n in range(3):\n    copy = x.clone()\n    dist.all_reduce(copy)\n")
    names = {**program.names, "x": torch.ones(2)}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert [name for name, *_ in program.dropped()] == ["copy"]
    path.write_text(path.read_text() + "def late():\n    return copy\n")
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert len(program.dropped()) == 1
