"""DDP308: zero at every step looked at, and decayed."""

import msgspec
from ddpdoctor.checks.model.zero_gradient import ZeroGradient
from recordings import make_run, steps
from wraps import codes, rank, wrap

from ddpdoctor.events import Submodule, ZeroGradients

CHECK = ZeroGradient()


def zeros(samples=4, decay=0.1, indices=(4, 5)):
    return ZeroGradients(
        at=0, model=0, optimizer=0, step=8, samples=samples, indices=indices, weight_decay=decay
    )


def both(*events, wrapped=None):
    return make_run({r: rank(*events, *steps(9), wrapped=wrapped) for r in (0, 1)})


def test_a_head_that_is_cut_off():
    (found,) = CHECK.examine(both(zeros()))
    assert found.severity.value == "note"
    assert found.location.line == 12


def test_an_optimizer_inside_another_on_some_ranks_tells_the_same():
    inner = msgspec.structs.replace(zeros(), optimizer=0)
    outer = msgspec.structs.replace(zeros(), optimizer=1)
    run = make_run({0: rank(outer, *steps(9)), 1: rank(inner, outer, *steps(9))})
    (found,) = CHECK.examine(run)
    assert found.ranks == (0, 1)


def test_two_optimizers_of_which_each_has_its_own():
    other = msgspec.structs.replace(zeros(indices=(2, 3)), optimizer=1)
    assert len(list(CHECK.examine(both(zeros(), other)))) == 2


def test_without_decay_nothing_is_lost():
    assert codes(both(zeros(decay=0.0)), CHECK) == []


def test_too_few_steps():
    assert codes(both(zeros(samples=3)), CHECK) == []


def test_rows_of_an_embedding():
    plain = wrap()
    modules = [
        msgspec.structs.replace(m, kind="Embedding") if m.name == "aux" else m
        for m in plain.modules
    ]
    assert isinstance(modules[0], Submodule)
    embedding = msgspec.structs.replace(plain, modules=tuple(modules))
    assert codes(both(zeros(), wrapped=embedding), CHECK) == []


def test_gradients_that_came_back():
    assert codes(both(zeros(), zeros(samples=5, indices=())), CHECK) == []
