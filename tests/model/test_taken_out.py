"""The line that took a model out of its wrapper, by the source of the running functions."""

from __future__ import annotations

import sys
from functools import partial
from types import CodeType, SimpleNamespace
from typing import Any

from ddpdoctor.probe.source.call_resolver import Found
from ddpdoctor.probe.source.taken_out import HandedOn, TakenOut, handed_on, taken_out

MODEL = SimpleNamespace()


def wrap() -> Any:
    return SimpleNamespace(module=MODEL)


def bare(model: Any) -> Any:
    return model.module if hasattr(model, "module") else model


def both(*models: Any) -> list[Any]:
    return [bare(model) for model in models]


def of_a_library(model: Any) -> Any:
    return getattr(model, "module", model)


def is_user(code: CodeType) -> bool:
    return code.co_filename == __file__ and code.co_name != "of_a_library"


def found(made_at: Found | None = None) -> TakenOut | None:
    return taken_out(sys._getframe(1), is_user, MODEL, made_at)


def lines(taken: TakenOut | None, code: CodeType) -> tuple[int, str]:
    assert taken is not None
    return (
        taken.named.line - code.co_firstlineno,
        "" if taken.read is None else taken.read.code.co_name,
    )


def test_at_once() -> None:
    code, model = sys._getframe().f_code, wrap()
    model = model.module
    assert lines(found(), code) == (2, code.co_name)
    model = None


def test_in_a_function_of_the_program() -> None:
    code, model = sys._getframe().f_code, MODEL
    model = wrap()
    other, model = both(None, model)
    assert lines(found(), code) == (3, "bare")
    assert other is None and model is MODEL


def test_in_a_function_of_a_library() -> None:
    code, model = sys._getframe().f_code, wrap()
    model = of_a_library(model)
    assert lines(found(), code) == (2, "")
    assert model is MODEL


def test_a_model_that_was_never_in_the_variable_of_the_wrapper() -> None:
    model = MODEL
    wrapper = wrap()
    assert found() is None
    assert wrapper.module is model


def test_what_stands_before_the_wrap() -> None:
    code, holder = sys._getframe().f_code, SimpleNamespace(module=MODEL)
    model = holder.module
    made_at = Found(code, code.co_firstlineno + 3)
    assert found(made_at) is None
    assert found() is not None and model is MODEL


def loss(model: Any, wrapper: Any) -> HandedOn | None:
    return handed_on(sys._getframe(1), is_user, MODEL, wrapper)


class Held:
    """Has the model, as a library's helper may, and asks how it came by it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def calls(self, kept: list[Any]) -> HandedOn | None:
        return loss(self.model, kept[0])


def through(model: Any, kept: list[Any]) -> HandedOn | None:
    return Held(model).calls(kept)


def test_an_argument_without_the_wrapper() -> None:
    code, net = sys._getframe().f_code, wrap()
    one = through(net.module, [net])
    assert one is not None
    assert (one.argument, one.found) == ("net.module", Found(code, code.co_firstlineno + 2))
    inner = net.module
    other = through(inner, kept=[net])
    assert other is not None
    assert (other.argument, other.found.line) == ("inner", code.co_firstlineno + 6)


def test_who_has_the_wrapper_chose_the_model() -> None:
    net = wrap()
    assert loss(net.module, net) is None  # called here, where the wrapper is

    def outer(model: Any) -> HandedOn | None:
        mine = kept[0]
        return loss(mine.module, mine)

    kept = [net]
    assert outer(net.module) is None


def test_an_argument_that_partial_was_given() -> None:
    code, net = sys._getframe().f_code, wrap()
    compute = partial(loss, net.module, net)
    one = compute()
    assert one is not None
    assert (one.argument, one.found) == ("net.module", Found(code, code.co_firstlineno + 2))
    same = partial(through, kept=[net])
    one = same(net.module)
    assert one is not None and one.found.line == code.co_firstlineno + 7
    given_the_wrapper = partial(loss, net)
    assert given_the_wrapper(net) is None


def test_an_argument_before_there_was_a_wrapper() -> None:
    kept: list[Any] = []

    def train(model: Any) -> HandedOn | None:
        kept.append(wrap())
        return through(model, kept)

    one = train(MODEL)
    assert one is None
