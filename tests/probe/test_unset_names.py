"""Where a name that an exception says is missing would have been set."""

import importlib.util

import pytest

from ddpdoctor.probe.source.exception_lines import never_set

PROGRAM = """
if rank == 0:
    import json as writer_of_main
late = None
if rank == 0:
    late = open


class Trainer:
    tags = None

    def __init__(self):
        self.logger = None
        self.always = 1
        if rank == 0:
            self.writer = 1
            self.logger = 1
        if rank == 0:
            self.twice = 1
        if rank == 1:
            self.twice = 2

    def missing(self):
        return self.writer

    def none(self):
        return self.logger.log(1)

    def two(self):
        return self.twice


def local():
    if rank == 0:
        best = 1
    return best


def other_arm():
    if rank != 0:
        pass
    else:
        best = 1
    return best


def argument(best=None):
    return best.value


def set_later():
    return found
    found = 1


def nothing():
    return never_heard_of


def imported():
    return writer_of_main


def none():
    return late.seek(0)


def chosen():
    average = Average() if rank == 0 else None
    average.updates = 3


def not_chosen():
    average = None if rank else Average()
    return average.updates
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location("program", tmp_path / "program.py")
    module = importlib.util.module_from_spec(spec)
    module.rank = 1
    spec.loader.exec_module(module)
    return module


def told(call):
    with pytest.raises((NameError, AttributeError)) as raised:
        call()
    found = never_set(raised.value)
    return found and (found.name, PROGRAM.splitlines()[found.line - 1].strip(), found.under.label)


def test_local_variables(program):
    assert told(program.local) == ("best", "best = 1", "if rank == 0:")
    assert told(program.other_arm) == ("best", "best = 1", "else:  # if rank != 0:")


def test_conditional_expressions(program):
    line = "average = Average() if rank == 0 else None"
    assert told(program.chosen) == ("average", line, "if rank == 0")
    line = "average = None if rank else Average()"
    assert told(program.not_chosen) == ("average", line, "if not rank")


def test_variables_of_a_file(program):
    name, line, under = told(program.imported)
    assert (name, under) == ("writer_of_main", "if rank == 0:") and "import json" in line
    assert told(program.none) == ("late", "late = open", "if rank == 0:")


def test_attributes(program, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "program", program)
    trainer = program.Trainer()
    assert told(trainer.missing) == ("writer", "self.writer = 1", "if rank == 0:")
    assert told(trainer.none) == ("self.logger", "self.logger = 1", "if rank == 0:")
    assert told(lambda: trainer.always.bits) is None
    program.rank = 2
    assert told(program.Trainer().two) is None


@pytest.mark.parametrize("name", ["argument", "set_later", "nothing"])
def test_what_no_condition_explains(program, name):
    assert told(getattr(program, name)) is None
