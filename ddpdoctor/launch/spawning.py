"""Recognises scripts that start their ranks themselves and so must not be run by torchrun.

Under torchrun such a script spawns all its ranks in each of torchrun's processes. These share one
port, and crash or hang there. The source is parsed, not executed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FROM_LAUNCHER = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "is_torchelastic_launched")
"""A script that uses one of these supports torchrun, and may spawn only without it."""

_SPAWNERS = (
    "torch.multiprocessing.spawn",
    "torch.multiprocessing.start_processes",
    "torch.multiprocessing.Process",
    "multiprocessing.Process",
)

_INIT = "init_process_group"


@dataclass(frozen=True)
class Spawning:
    """Where a script starts its ranks."""

    line: int
    call: str


def starts_its_own_ranks(script: Path) -> Spawning | None:
    """The call by which a script starts its ranks; None where it is not certain that it does."""
    try:
        content = script.read_bytes()
        tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if any(name.encode() in content for name in _FROM_LAUNCHER) or _reads_rank(tree):
        return None
    names = _imported(tree)
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (dotted := _dotted(node.func)):
            head, _, rest = dotted.partition(".")
            known = names.get(head, head)
            full = f"{known}.{rest}" if rest else known
            if full in _SPAWNERS:
                made = _groups_made(_target(node), functions)
                # One made elsewhere too: the script spawns in some of its modes only.
                if made and made == {id(call) for call in _group_calls(tree)}:
                    return Spawning(node.lineno, dotted)
    return None


def _target(call: ast.Call) -> str | None:
    """The name of the function that the new processes run."""
    given = [k.value for k in call.keywords if k.arg in ("target", "fn")] or call.args[:1]
    return given[0].id if given and isinstance(given[0], ast.Name) else None


def _groups_made(name: str | None, functions: dict[str, ast.FunctionDef]) -> set[int]:
    """The `init_process_group` calls (their ids) in a function and in the functions of the script
    that it calls."""
    made: set[int] = set()
    todo, seen = [name], set()
    while todo:
        function = functions.get(todo.pop() or "")
        if function is None or function.name in seen:
            continue
        seen.add(function.name)
        made |= {id(call) for call in _group_calls(function)}
        todo += [_dotted(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)]
    return made


def _group_calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            dotted = _dotted(node.func) or ""
            if dotted.rpartition(".")[2] == _INIT:
                yield node


def _reads_rank(tree: ast.AST) -> bool:
    """Whether the script takes its rank or world size from the environment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key: ast.AST = node.slice
        elif (
            isinstance(node, ast.Call)
            and node.args
            and (_dotted(node.func) or "").endswith(("environ.get", "getenv"))
        ):
            key = node.args[0]
        else:
            continue
        if isinstance(key, ast.Constant) and key.value in ("RANK", "WORLD_SIZE"):
            return True
    return False


def _imported(tree: ast.AST) -> dict[str, str]:
    """Imported names of the script, and what each stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _dotted(node: ast.AST) -> str | None:
    words = list(_words(node))
    return ".".join(reversed(words)) if words and words[-1] else None


def _words(node: ast.AST) -> Iterator[str]:
    while isinstance(node, ast.Attribute):
        yield node.attr
        node = node.value
    yield node.id if isinstance(node, ast.Name) else ""
