"""`@ddpdoctor.checkup` on functions of every kind: they stay what they are."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import ddpdoctor
from ddpdoctor.embedded import session


class Nothing:
    """A session that only counts."""

    def __init__(self) -> None:
        self.began = self.over = self.lost = 0

    def prepare(self, asked: Any) -> None: ...

    def begin(self, asked: Any) -> None:
        self.began += 1

    def left(self) -> None:
        self.lost += 1

    def verdict(self, raise_on: str, asked: Any, calls: int) -> None:
        self.over += 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Nothing:
    counts = Nothing()
    monkeypatch.setattr(session, "session", lambda: counts)
    return counts


def test_methods_of_a_class_in_either_order(counted: Nothing) -> None:
    class Trainer:
        @ddpdoctor.checkup
        @staticmethod
        def outer(x: int) -> int:
            return x + 1

        @staticmethod
        @ddpdoctor.checkup
        def inner(x: int) -> int:
            return x + 2

        @ddpdoctor.checkup(raise_on="error")
        @classmethod
        def named(cls, x: int) -> tuple[str, int]:
            return cls.__name__, x

    assert (Trainer().outer(1), Trainer.inner(1), Trainer.named(3)) == (2, 3, ("Trainer", 3))
    assert (counted.began, counted.over) == (3, 1)


def test_a_generator(counted: Nothing) -> None:
    @ddpdoctor.checkup(raise_on="error")
    def steps(n: int) -> Iterator[int]:
        yield from range(n)
        return "end"

    assert inspect.isgeneratorfunction(steps)
    assert list(steps(3)) == [0, 1, 2]
    assert (counted.began, counted.over, counted.lost) == (1, 1, 0)
    next(steps(3))  # closed before its end
    assert (counted.over, counted.lost) == (1, 1)


def test_a_coroutine_is_over_when_it_was_awaited(counted: Nothing) -> None:
    @ddpdoctor.checkup(raise_on="error")
    async def step(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    assert inspect.iscoroutinefunction(step)
    waiting = step(2)
    assert counted.over == 0
    assert asyncio.run(waiting) == 4
    assert (counted.over, counted.lost) == (1, 0)


def test_an_exception_passes(counted: Nothing) -> None:
    @ddpdoctor.checkup(raise_on="error")
    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step()
    assert (counted.over, counted.lost) == (0, 1)


def test_what_is_no_function_is_refused(counted: Nothing) -> None:
    class Trainer:
        def step(self) -> int:
            return 1

    with pytest.raises(TypeError, match=r"not the class .*Trainer; decorate its method"):
        ddpdoctor.checkup(Trainer)
    with pytest.raises(TypeError, match=r"not 3; options go by name"):
        ddpdoctor.checkup(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="a function, not <property"):
        ddpdoctor.checkup(every=3)(property(Trainer.step))  # type: ignore[arg-type]


def test_what_can_be_called_like_a_function_is_decorated(counted: Nothing) -> None:
    class Step:
        def __call__(self, x: int) -> int:
            return x + 1

    ready, part = ddpdoctor.checkup(Step()), ddpdoctor.checkup(functools.partial(pow, 2))
    assert (ready(1), part(3)) == (2, 8)
    assert counted.began == 2


def test_load_needs_a_folder() -> None:
    with pytest.raises(TypeError, match="needs a run folder"):
        ddpdoctor.load()
