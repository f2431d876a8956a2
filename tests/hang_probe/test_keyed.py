"""Which variable of a loop chooses what a call sends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace

import pytest
import torch.distributed  # what is called is looked up there

from ddpdoctor.probe.source import loop_keys

assert torch.distributed

PROGRAM = """\
def plain(figures):
    for name in figures:
        dist.all_reduce(figures[name])

def made_first(figures):
    for name, value in figures.items():
        new = torch.tensor(value, device="cpu").float()
        dist.all_reduce(new)

def in_a_helper(figures):
    for name, value in figures.items():
        figures[name] = reduced(
            value,
        )

def comprehension(figures):
    return {k: reduced(v) for k, v in sorted(figures.items())}

def nested(parts):
    for part in parts:
        for name in part:
            dist.all_reduce(part[name])

def in_place(figures):
    for name, value in figures.items():
        value = value.data.clone()
        dist.all_reduce(value.div_(dist.get_world_size()))

def computed(loaders):
    for name, loader in loaders.items():
        total = evaluate(loader)
        dist.all_reduce(total)

def computed_there(loaders):
    for name, loader in loaders.items():
        dist.all_reduce(model.evaluate(loader))

def beside(tasks):
    for name, task in tasks.items():
        loss = train(task)
        dist.all_reduce(gradient)

def after(figures):
    for name in figures:
        print(name)
    dist.all_reduce(figures["a"])

def within(names):
    for name in names:
        def run(value):
            dist.all_reduce(value)
        run(values[name])
"""
REDUCED = compile("def reduced(x): pass", "other.py", "exec").co_consts[0]


@pytest.fixture
def codes(tmp_path: Path) -> dict[str, CodeType]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return {c.co_name: c for c in functions(compile(PROGRAM, str(path), "exec"))}


def functions(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from functions(constant)


def line(text: str, nth: int = 0) -> int:
    return [n for n, t in enumerate(PROGRAM.splitlines(), 1) if text in t][nth]


@pytest.mark.parametrize(
    ("function", "at", "called", "names"),
    [
        ("plain", "figures[name])", None, ("name",)),
        ("made_first", "all_reduce(new)", None, ("name", "value")),
        ("in_a_helper", "= reduced(", REDUCED, ("name", "value")),
        ("comprehension", "{k: reduced(v)", REDUCED, ("k", "v")),
        ("nested", "part[name])", None, ("name", "part")),
        ("in_place", "value.div_(", None, ("name", "value")),
        ("computed", "all_reduce(total)", None, ()),
        ("computed_there", "model.evaluate", None, ()),
        ("beside", "all_reduce(gradient)", None, ()),
        ("after", 'figures["a"]', None, ()),
        ("run", "all_reduce(value)", None, ()),
    ],
)
def test_what_chooses(
    codes: dict[str, CodeType],
    function: str,
    at: str,
    called: CodeType | None,
    names: tuple[str, ...],
) -> None:
    assert loop_keys.keys(codes[function], line(at), called) == names


def key_in(known: loop_keys.LoopKey, name: object) -> str:
    return known.key(sys._getframe())


def test_the_key_is_read_where_the_loop_runs() -> None:
    known = loop_keys.LoopKey(key_in.__code__, ("other", "name"))
    inner = SimpleNamespace(f_code=None, f_back=sys._getframe())
    assert key_in(known, "loss") == "name = 'loss'"
    assert known.key(inner) == ""  # type: ignore[arg-type]


def test_a_loop_over_something_else_is_left_alone() -> None:
    known = loop_keys.LoopKey(key_in.__code__, ("name",))
    assert not any(key_in(known, 7) or known.over for _ in range(3))
    assert key_in(known, 7) == "" and known.over
    known = loop_keys.LoopKey(key_in.__code__, ("name",))
    known.sites = {str(n): n for n in range(loop_keys.KEYS + 1)}
    assert known.over


def test_objects_are_told_apart_by_name_in_one_round() -> None:
    named = {7: "0.weight", 8: "0.bias"}
    known = loop_keys.LoopKey(key_in.__code__, ("name",), lambda value: named.get(value, ""))
    for value in named:
        key = key_in(known, value)
        assert key == f"name = '{named[value]}'"
        known.sites[key] = len(known.sites)
        assert not known.over
    assert key_in(known, 7) == "" and known.over


def frames() -> list[FrameType]:
    return [sys._getframe()]


def test_a_call_in_no_loop() -> None:
    assert loop_keys.keyed(frames()) is None


SETTERS = """\
def fill(out, x):
    out["loss"] = x
    if x.bad:
        out["bad"] = 1
        out["both"] = 1
    else:
        out["both"] = 2
    read = out["read"]
    out.setdefault("late", x)
    out.update(size=3)
    return {"acc": x, **out}
"""


@pytest.mark.parametrize(
    ("name", "line"),
    [("loss", 2), ("bad", 4), ("both", 0), ("read", 0), ("late", 9), ("size", 10), ("acc", 11)],
)
def test_the_line_that_sets_an_entry(tmp_path: Path, name: str, line: int) -> None:
    path = tmp_path / "fill.py"
    path.write_text(SETTERS)
    found = loop_keys.setter(name, [str(path)])
    assert found == ((str(path), line, "fill") if line else None)
