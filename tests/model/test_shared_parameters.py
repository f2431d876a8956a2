"""DDP313 on literal events, and which memory is shared."""

import os

import pytest
import torch
from ddpdoctor.checks.model.shared_parameters import SharedParameters
from recordings import HOST, make_run, started
from torch.nn.parameter import UninitializedParameter
from wraps import group, sites, wrap

from ddpdoctor.events import StepDone, Unwrapped, UnwrappedState
from ddpdoctor.probe.tensors.shared_memory import shared_memory


def stepped():
    return StepDone(at=1, optimizer=0, step=0, site=-1, wall_s=0.1)


def judged(memory=("a", "a"), *, nodes=(HOST, HOST), steps=True):
    def events(rank):
        wrapped = wrap(memory=memory[rank])
        return [started(rank, 2, node=nodes[rank]), *sites(), group([0, 1]), wrapped,
                *([stepped()] if steps else [])]  # fmt: skip

    return list(SharedParameters().examine(make_run({n: events(n) for n in range(2)})))


def test_ranks_that_train_the_same_memory():
    (finding,) = judged()
    assert (finding.ranks, finding.location.line, finding.subjects) == ((0, 1), 5, ("Net",))
    assert "each step is applied 2 times" in finding.summary


@pytest.mark.parametrize(
    "given",
    [
        {"memory": ("a", "b")},
        {"memory": ("", "")},
        {"memory": ("a", "")},
        {"nodes": (HOST, "other")},
        {"steps": False},
    ],
)
def test_memory_of_ones_own(given):
    assert judged(**given) == []


@pytest.mark.parametrize(("exchanged", "told"), [("gradients", 1), ("", 0)])
def test_gradients_that_the_program_averages(exchanged, told):
    def events(rank):
        mine = Unwrapped(at=0, optimizer=0, kind="Net", parameters=(), memory="a")
        state = UnwrappedState(at=1, optimizer=0, step=0, gradients=1, parameters=1,
                               exchanged=exchanged)  # fmt: skip
        return [started(rank, 2), *sites(), group([0, 1]), mine, state, stepped()]

    run = make_run({n: events(n) for n in range(2)})
    assert len(list(SharedParameters().examine(run))) == told


def test_a_mapping_is_the_same_in_another_process():
    own, shared = torch.ones(3), torch.ones(3).share_memory_()
    assert shared_memory([own]) == ""
    here = shared_memory([own, shared])
    assert here
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, shared_memory([shared]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100).decode() == here
    assert shared_memory([torch.ones(3).share_memory_()]) != here
    others = [torch.ones(2, device="meta"), torch.ones(2).to_sparse(), UninitializedParameter()]
    assert shared_memory(others) == ""
