"""What the text of the user's files says, each of which is parsed once."""

import ast
import inspect
import linecache
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed  # what is called is looked up there

from ddpdoctor.probe.recording.code_locations import Sites
from ddpdoctor.probe.source import (
    ast_cache,
    dead_branches,
    division,
    inplace_writes,
    loop_keys,
    passthrough,
    process_order,
    source_text,
)
from ddpdoctor.probe.source.source_text import always_mentioned, branch_around
from ddpdoctor.probe.watchers.memory import memory_holders


class Guarded:
    def forward(self, x):
        if x is None:  # decides
            return x
        return self.aux(x)


class InTraining:
    def forward(self, x):
        if not self.training:
            return x
        return self.aux(x)


class Skipping:
    def forward(self, samples):
        if not self.training:
            return samples
        for x in samples:
            if x is None:
                continue
        for x in samples:
            if not len(x):  # decides
                continue
            self.aux(x)
        return samples


class Inside:
    def forward(self, x):
        if x is None:
            return x
        if self.training and len(x) > 2:  # decides
            x = self.aux(x)
        return x


class Always:
    def forward(self, samples):
        for x in samples:
            if x is None:
                break
        return self.aux(samples)


@pytest.mark.parametrize("kind", [Guarded, InTraining, Skipping, Inside, Always])
def test_the_line_that_decides(kind: type) -> None:
    found = branch_around(kind(), "aux")
    lines, first = inspect.getsourcelines(kind)
    decides = [n for n, line in enumerate(lines, first) if "# decides" in line]
    assert ([found[1]] if found is not None else []) == decides


class Helped:
    def __init__(self):
        self.aux = None

    def forward(self, x):
        if x is None:
            return self.aux
        return self.helped(x)

    def helped(self, x):
        return [self.aux(y) for y in x]


class Elsewhere:
    def forward(self, x):
        return x if x is None else self.aux

    def build(self):
        return self.aux


@pytest.mark.parametrize(("kind", "always"), [
    (Guarded, True), (InTraining, True), (Helped, True), (Elsewhere, False), (int, False),
])  # fmt: skip
def test_an_attribute_that_every_forward_mentions(kind: type, always: bool) -> None:
    assert always_mentioned([int, kind], "aux") is always


PROGRAM = """\
import os
import torch, torch.distributed as dist

WORLD = int(os.environ["WORLD_SIZE"])
DEEP = True


def reduced(value):
    value = value.clone()
    dist.all_reduce(value)
    return value / WORLD


def train(model, figures):
    for name, value in figures.items():
        figures[name] = reduced(value)
    if DEEP:
        loss = model(value)
        loss = loss / WORLD
        loss.backward()
    for p in model.parameters():
        p.grad.zero_()
    seen.append(loss)
    with open("log") as file:
        pass
"""


def test_a_file_is_parsed_once_and_walked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    file = str(path)
    codes = {
        c.co_name: c for c in compile(PROGRAM, file, "exec").co_consts if hasattr(c, "co_name")
    }
    reduced, train = codes["reduced"], codes["train"]
    asked: Counter[str] = Counter()
    parse, walk = ast.parse, ast.walk

    def parsing(text: str, *args: Any, **more: Any) -> ast.AST:
        asked["parsed"] += len(text.splitlines()) > 1
        return parse(text, *args, **more)

    def walking(node: ast.AST) -> Iterator[ast.AST]:
        asked[ast.dump(node)] += isinstance(node, (ast.Module, ast.FunctionDef))
        return walk(node)

    monkeypatch.setattr(ast, "parse", parsing)
    monkeypatch.setattr(ast, "walk", walking)
    one = SimpleNamespace(
        frame=SimpleNamespace(f_code=train, f_lineno=23), owner=None, value=[], name="seen"
    )
    for _ in range(2):
        assert division.divided_by_world_size(file, 11)
        assert division.loss_divided(train, 20)[0] == 19
        assert passthrough.passes_through(reduced, 10, None)
        assert loop_keys.keys(train, 16, reduced)
        assert source_text.only_opens(train, 24)
        assert not source_text.quoted(file, 11)
        assert dead_branches.never_runs(train, 19, {"DEEP": False}.get)
        assert memory_holders.adding_line(one, Sites(lambda event: None))[1] == 23
        begin, end = [(train, 15)], [(train, 24)]
        assert inplace_writes.inplace_statements(begin, end) == [(train, 22)]
    assert asked["parsed"] == 1
    assert max(asked.values()) == 1


def test_a_file_that_was_changed_is_parsed_again(tmp_path: Path) -> None:
    path = tmp_path / "cell.py"
    for value in ("1", "22"):
        path.write_text(f"def f():\n    return {value}\n")
        linecache.checkcache(str(path))
        (code,) = (c for c in compile(path.read_text(), str(path), "exec").co_consts if c)
        node = ast_cache.function_of(code)
        assert node is not None and value in ast.dump(node)


@pytest.mark.parametrize("text", ["def f(:\n", "", "x = 1\n" * 20_001])
def test_a_file_that_cannot_be_parsed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.py"
    path.write_text(text)
    code = compile("x = 1", str(path), "exec")
    assert ast_cache.function_of(code) is None
    assert not source_text.quoted(str(path), 1)
    assert not division.divided_by_world_size(str(path), 1)
    assert loop_keys.keys(code, 1, None) == ()


class Named:
    def __init__(self, names: list[str]) -> None:
        self.numbers = {name: i for i, name in enumerate(set(names))}  # a set
        self.sorted = {name: i for i, name in enumerate(sorted(set(names)))}
        kinds = set(names)
        self.kinds = list(kinds)  # a set
        self.known = sorted(kind for kind in kinds if kind)
        self.count = len(list(kinds))

    def bucket(self, name: str) -> int:
        return hash(name) % 8  # a hash

    def listed(self, folder: Path) -> list[Path]:
        random.shuffle(self.kinds)  # a shuffle
        order = torch.randperm(3, generator=torch.Generator().manual_seed(0))
        sorted(folder.glob("*"))
        return list(folder.iterdir())[: len(order)]  # a listing

    def __hash__(self) -> int:
        return hash(1)


def test_lines_that_give_other_results_in_each_process() -> None:
    lines = Path(__file__).read_text().splitlines()
    found = process_order.places(Named, [])
    assert {p.file for p in found} == {__file__}
    told = [(p.how, lines[p.line - 1].partition("  # a ")[2]) for p in found]
    assert told == [
        ("set", "set"), ("set", "set"), ("hash", "hash"), ("shuffle", "shuffle"),
        ("listing", "listing"),
    ]  # fmt: skip
    assert not process_order.places(dict, [])


NESTED = """
def train(model, data):
    for batch in data:
        def closure():
            return model(batch)
        if batch:
            model.step(lambda: batch)
        model.head.update(batch)[0].run()
    class Local:
        x = 1
    return model(data)
"""


def test_the_nodes_of_a_function_are_walked_once() -> None:
    tree = ast.parse(NESTED)
    function = tree.body[0]

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
                yield child
                yield from walk(child)

    nodes = ast_cache.own_nodes(function)
    assert nodes == [*walk(function)]
    assert ast_cache.own_nodes(function) is nodes
    assert ast_cache.own_of(function, ast.Call) == [n for n in nodes if isinstance(n, ast.Call)]
    assert ast_cache.own_of(function, ast.Call) is ast_cache.own_of(function, ast.Call)


def test_the_calls_on_an_object() -> None:
    function = ast.parse(NESTED).body[0]

    def called(owner: str) -> list[str]:
        return [name for _, name in ast_cache.calls_on(function, owner)]

    assert called("model") == ["step", "__call__"]
    assert called("model.head") == ["update"]
    assert called("model.head.update(batch)[0]") == ["run"]
    assert called("batch") == []


@pytest.mark.parametrize(
    ("statement", "divisor"),
    [
        ("loss = loss / world_size", "world_size"),
        ("loss = sum(losses) / len(losses); log = loss.detach() / world_size", ""),
        ("return total / 2, total.detach() / 2 / world_size", ""),
        ("log = loss.item() / world_size", ""),
        ("log = loss.detach().mean().div(world_size)", ""),
        ("loss = (loss + other.detach()) / world_size", "world_size"),
        ("loss = loss.mean().div(world_size)", "world_size"),
    ],
)
def test_divisions_of_values_without_gradients_do_not_count(
    tmp_path: Path, statement: str, divisor: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"def train():\n    {statement}\n")
    assert division.divided_by_world_size(str(path), 2) == divisor
