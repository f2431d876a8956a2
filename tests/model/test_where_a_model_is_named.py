"""The line that is named for a model is one that ran."""

from __future__ import annotations

import sys
from types import CodeType

import pytest

from ddpdoctor.probe.source.call_resolver import Found, assignment_in_frames


class Net:
    def __init__(self, pretrained: bool = False) -> None:
        self.pretrained = pretrained


def named(wanted: object, made_at: tuple[CodeType, int] | None = None) -> int | None:
    """How many lines into the test the statement stands."""
    frame = sys._getframe(1)
    code = frame.f_code
    found: Found | None = assignment_in_frames(frame, lambda c: c is code, wanted, made_at)
    return None if found is None else found.line - code.co_firstlineno


def test_the_first_of_several_names() -> None:
    model = Net()
    copy = model
    assert named(copy) == 1


@pytest.mark.parametrize("pretrained", [False, True])
def test_the_branch_that_made_it(pretrained: bool) -> None:
    code = sys._getframe().f_code
    if pretrained:
        model = Net(pretrained=True)
        model.pretrained = True
    else:
        model = Net()
    line = 4 if pretrained else 7
    assert named(model, (code, code.co_firstlineno + line)) == line


@pytest.mark.parametrize("pretrained", [False, True])
def test_branches_of_which_either_may_have_run(pretrained: bool) -> None:
    if pretrained:
        model = Net(pretrained=True)
        model.pretrained = True
    else:
        model = Net()
    assert named(model) is None
    other = Net()
    assert named(other) is not None


def test_a_name_that_held_nothing_before() -> None:
    model = None
    for _ in range(2):
        model = Net() if model is None else Net(pretrained=True)
    assert named(model) == 3
