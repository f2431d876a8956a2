"""Follows a non-finite loss back through the autograd graph: which operation made it, on what.

Used once something is wrong, so it may take its time: it reads the tensors that the graph has
saved for its backward, and changes nothing.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from ...recording.frames import variables
from ...recording.torch_compat import node_number, saved, shard
from ...source import call_graph
from ...tensors.digests import finite, memory_freed, readable
from ...training import autograd_grad

MOST_NODES = 4000

_IN_SOURCE = {
    "div": r"(?<![/\w])[^/\n#]*[^/\s]\s*/\s*[^/=]|\bdiv_?\(",
    "pow": r"\*\*|\bpow\w*\(",
    "linalg_vector_norm": r"norm\(",
    "log": r"(?<!math\.)(?<!self\.)(?<!wandb\.)(?<!logger\.)\blog_?\(",
}
"""How operations stand in Python where it is not by their name."""


_COMMON = ("div", "mul", "add", "sub", "mean", "sum")
"""Operations that stand in too many lines to be looked for beyond the model."""


class Origin:
    """Where it arose: `operation` as in torch, `parameter` the name of one that feeds it.
    Or `entered`, the operation that was given it as a constant, which the graph does not know.
    Where it arose in a derivative that the line `derivative_site` takes, `operation` is what has
    none that is finite there, empty where that is not known. `number` is torch's of its node, -1
    where that is not known."""

    def __init__(
        self,
        operation: str = "",
        parameter: str = "",
        entered: str = "",
        derivative_site: int = -1,
        number: int = -1,
    ) -> None:
        self.operation = operation
        self.parameter = parameter
        self.entered = entered
        self.derivative_site = derivative_site
        self.number = number

    @property
    def module(self) -> str:
        return self.parameter.rpartition(".")[0]


def value_in(tensor: Any) -> str:
    """`nan` where what is not finite of a tensor, or of this rank's shard, is so; else `inf`."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        return "nan" if bool(torch.isnan(shard(tensor).detach()).any()) else "inf"


def largest(tensors: Iterable[Any]) -> float:
    """The largest number, by its size, in those of these tensors that are on the CPU, or in this
    rank's shards of them; 0 where one of them is not finite."""
    import torch

    found = 0.0
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            plain = shard(tensor).detach()
            if plain.is_floating_point() and readable(plain) and plain.numel():
                found = max(found, *(abs(float(end)) for end in plain.aminmax()))
                if not finite(plain):
                    return 0.0
    return found


Names = Mapping[int, Sequence[str]]
"""Of parameters by id: of one that several modules share all it has, in the model's order."""


def trace(root: Any, names: Names) -> Origin:
    """The operation that first made something non-finite, an empty one where the graph does not
    tell."""
    start = getattr(root, "grad_fn", None)
    if start is None:
        return Origin()
    order = _nodes(start)
    hidden: set[Any] = set()
    wrong = {node: said for node in order if (said := _wrong(node, hidden))}
    later = _given_to(order, wrong)
    found = next((n for n in reversed(order) if n in wrong and n not in later), None)
    origin = _maker(found, wrong[found]) if found is not None else start
    if origin is None:
        parameter, number = _nearest(found, names), node_number(found)
        return Origin("", parameter, _operation(found), number=number)
    origin = _behind_harmless(origin)
    if hidden and not hidden.isdisjoint(_nodes(origin)):
        return Origin()  # it may have come from there
    site = autograd_grad.site_of(origin)
    if site >= 0:
        return _of_derivative(origin, order, names, site)
    return Origin(_operation(origin), _nearest(origin, names), number=node_number(origin))


def _of_derivative(made: Any, order: list[Any], names: Names, site: int) -> Origin:
    """The derivative's formula is of the result of the operation, or of what that was given."""
    below = _nodes(made)
    given = set(below)
    beside = (n for n in order if any(child in given for child, _ in n.next_functions))
    for node in (*below, *beside):
        if autograd_grad.site_of(node) < 0 and (operation := autograd_grad.singular(node)):
            return Origin(operation, _nearest(node, names), derivative_site=site)
    return Origin(derivative_site=site)


def _nodes(start: Any) -> list[Any]:
    """The graph, breadth first."""
    order, seen = [start], {start}
    for node in order:
        if len(order) >= MOST_NODES:
            break
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                order.append(child)
    return order


def _given_to(order: list[Any], nodes: Iterable[Any]) -> set[Any]:
    """Those of a graph that come after any of some nodes, by whatever way."""
    users: dict[Any, list[Any]] = {}
    for node in order:
        for child, _ in node.next_functions:
            users.setdefault(child, []).append(node)
    reached: set[Any] = set()
    ahead = list(nodes)
    while ahead:
        for user in users.get(ahead.pop(), ()):
            if user not in reached:
                reached.add(user)
                ahead.append(user)
    return reached


_HARMLESS = ("view", "unsafe_view", "reshape_alias", "permute", "transpose", "t", "expand", "clone",
             "select", "slice", "squeeze", "unsqueeze", "unbind", "split", "alias", "relu", "tanh",
             "sigmoid", "native_dropout")  # fmt: skip
"""Operations that give nothing that is not finite, unless they were given it: by one input."""


def _behind_harmless(node: Any) -> Any:
    """The node that gave it what it only passes on."""
    while _operation(node) in _HARMLESS:
        source = next((c for c, _ in node.next_functions), None)
        if source is None or _is_leaf(source):
            break
        node = source
    return node


_INPUTS = {"_saved_self": 0, "_saved_input": 0, "_saved_mat1": 0, "_saved_other": 1,
           "_saved_mat2": 1, "_saved_weight": 1}  # fmt: skip
"""Saved inputs by their position among those that may have a gradient to pass on."""

_BEHIND_THE_BIAS = ("_saved_mat1", "_saved_mat2")


def _wrong(node: Any, hidden: set[Any]) -> str:
    """`result` where what the node returned is not finite, the name of what it was given where
    that is not. Nodes that cannot be read are added to those that are hidden."""
    said = ""
    if _is_leaf(node) and (memory_freed(node.variable) or not finite(node.variable)):
        hidden.add(node)  # a parameter that nobody could look at, or did
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        try:
            value = saved(node, name)
        except LookupError:
            hidden.add(node)
            continue
        if memory_freed(value):
            hidden.add(node)
        elif not finite(value):
            result = name in ("_saved_result", "_saved_output", "_saved_out")
            said = "result" if result else said or name
    return said or ("result" if _makes_infinity(node) else "")


def _makes_infinity(node: Any) -> bool:
    """Operations that keep their finite inputs and give infinity for some of them."""
    kind = _operation(node)
    try:
        if kind in ("log", "log2", "log10"):
            given = saved(node, "_saved_self")
            return readable(given) and bool((given <= 0).any())
        if kind == "div":
            other = saved(node, "_saved_other")
            return readable(other) and bool((other == 0).any())
    except (LookupError, AttributeError, RuntimeError, TypeError):  # None or a number, say
        return False
    return False


def _maker(node: Any, said: str) -> Any:
    """The node that returned it: the one itself, or the one that gave it its input; None where that
    was a constant, which has no node."""
    if said == "result":
        return node
    sources = [c for c, _ in node.next_functions]
    position = _INPUTS.get(said, -1) + (said in _BEHIND_THE_BIAS and "addmm" in _operation(node))
    if 0 <= position < len(sources):
        source = sources[position]
        return node if source is not None and _is_leaf(source) else source
    inner = [c for c in sources if c is not None and not _is_leaf(c)]
    return inner[0] if inner else node


def _is_leaf(node: Any) -> bool:
    return bool(node.name().endswith("AccumulateGrad"))


def _operation(node: Any) -> str:
    """`log` for `LogBackward0`."""
    name = re.sub(r"Backward\d*$", "", str(node.name()).rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _nearest(node: Any, names: Names) -> str:
    """Of a parameter that is shared, the table that is looked up comes first, and last what is
    nearest to the loss."""
    for user, below in _with_users(node):
        variable = getattr(below, "variable", None)
        if variable is not None and (known := names.get(id(variable))):
            return known[0 if user is None or "embedding" in _operation(user) else -1]
    return ""


def _with_users(node: Any) -> Iterator[tuple[Any, Any]]:
    """The nodes of a graph, breadth first, each after those that it is given to."""
    yield None, node
    for user in _nodes(node):
        for below, _ in user.next_functions:
            yield user, below


_MAKES = {"div": re.compile(_IN_SOURCE["div"].replace("[^/=]", r"(?![\s\d])[^/=]"))}
"""How they stand there where that is not by their name alone: what is divided by a number in the
text stays finite."""

_MAKERS = ("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "div", "pow", "exp")


def line_of_maker(model: Any, name: str) -> tuple[str, int, str] | None:
    """(file, line, function) of what may have made numbers non-finite that were finite, before the
    module of that name was called: in the `forward` that calls it or in modules that have nothing
    to train, or else in a function that this `forward` calls; if in one line only."""
    owner, _, last = name.rpartition(".")
    codes = _forwards(model.get_submodule(owner), alone=True)
    first = _first_named(last, codes)
    patterns = [_MAKES.get(o) or _spelled(o) for o in _MAKERS]
    places = {place for code in codes for p in patterns for place in _matches(code, p)}
    found = {place for place in places if place[1] < first}
    untrained = {code for module in _untrained_before(model, name) for code in _forwards(module)}
    found |= {place for code in untrained for p in patterns for place in _matches(code, p)}
    if not found and first:
        begun = call_graph.forwards([model.get_submodule(owner)])
        helpers = [code for code in call_graph.called_by(begun) if _is_called(code, codes, first)]
        found = {place for code in helpers for p in patterns for place in _matches(code, p)}
    return found.pop() if len(found) == 1 else None


def _first_named(name: str, codes: Iterable[CodeType]) -> int:
    """The first line of some functions that names a module; 0 for none."""
    if not name.isidentifier():
        return 0
    named = re.compile(rf"\b{name}\b")
    return min((line for code in codes for _, line, _ in _matches(code, named)), default=0)


def _untrained_before(model: Any, name: str) -> Iterator[Any]:
    """The modules without parameters to train that are called before the one of that name, by it or
    by one that it is in: what they return needs no gradient."""
    import torch

    path = name.split(".")
    for depth, last in enumerate(path):
        owner = model.get_submodule(".".join(path[:depth]))
        others = {k: m for k, m in owner._modules.items() if m is not None}
        if isinstance(owner, torch.nn.Sequential):
            before = list(others)[: list(others).index(last)]
        else:
            codes = _forwards(owner, alone=True)
            first = _first_named(last, codes)
            before = [k for k in others if k != last and 0 < _first_named(k, codes) <= first]
        for module in (others[k] for k in before):
            if not any(p.requires_grad for p in module.parameters()):
                yield module


def _is_called(code: CodeType, callers: Iterable[CodeType], before: int) -> bool:
    named = re.compile(rf"\b{re.escape(code.co_name)}\(")
    return any(line < before for caller in callers for _, line, _ in _matches(caller, named))


def _forwards(module: Any, *, alone: bool = False) -> set[CodeType]:
    modules = (module,) if alone else module.modules()
    codes = (getattr(getattr(type(m), "forward", None), "__code__", None) for m in modules)
    return {code for code in codes if code is not None}


_TIMES = r"[\w\])'\"]\s*\*=?\s*[\w(\[.-]|\bmul\w*\("


def line_after(operation: str, frame: FrameType, root: Any, first: int) -> int:
    """The line, from that one to the one that is running, of a function that uses an operation: the
    one that gave the loss its value, or else the only one; -1 where there is none."""
    lines = linecache.getlines(frame.f_code.co_filename)[first - 1 : frame.f_lineno]
    pattern = re.compile(_TIMES) if operation == "mul" else _spelled(operation)
    found = [n for n, text in enumerate(lines, first) if pattern.search(text.partition("#")[0])]
    given = line_of_loss(frame, root)
    return given if given in found else found[0] if len(found) == 1 else -1


def _spelled(operation: str) -> re.Pattern[str]:
    return re.compile(_IN_SOURCE.get(operation, rf"\b{re.escape(operation)}_?\("))


def lines_from(operation: str, frame: FrameType, first: int) -> set[tuple[str, int, str]]:
    """(file, line, function) of what uses an operation in the lines of a function from that one to
    the one that is running, or in what these call."""
    if operation in _COMMON and operation not in _MAKES:
        return set()
    code, pattern = frame.f_code, _MAKES.get(operation) or _spelled(operation)
    lines = linecache.getlines(code.co_filename)[first - 1 : frame.f_lineno]
    plain = [text.partition("#")[0] for text in lines]
    found = {
        (code.co_filename, number, code.co_name)
        for number, text in enumerate(plain, first)
        if pattern.search(text)
    }
    called = call_graph.called_in(frame, "".join(plain))
    return found | {place for code in called for place in _matches(code, pattern)}


def line_of_operation(
    operation: str, module: Any, frame: FrameType | None
) -> tuple[str, int, str] | None:
    """(file, line, function) where the user's code uses an operation, if in one place only: in a
    `forward` of the model, if there is one, or else in what that calls, or in the file that calls
    backward."""
    pattern = _spelled(operation)
    codes = set() if module is None else _forwards(module)
    found = {place for code in codes for place in _matches(code, pattern)}
    if not found and module is not None and operation not in _COMMON:
        called = call_graph.called_by(call_graph.forwards(module.modules()))
        found = {place for code in called for place in _matches(code, pattern)}
    if not found and frame is not None and operation not in _COMMON:
        found = set(_in_file(frame, pattern))
    return found.pop() if len(found) == 1 else None


def _matches(code: CodeType, pattern: re.Pattern[str]) -> list[tuple[str, int, str]]:
    from ...recording.code_locations import classify

    if classify(code.co_filename) != "user":
        return []
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        return []
    return [
        (code.co_filename, number, code.co_name)
        for number, text in enumerate(lines, first)
        if pattern.search(text.partition("#")[0])
    ]


def _in_file(frame: FrameType, pattern: re.Pattern[str]) -> list[tuple[str, int, str]]:
    """Lines of the functions that are defined in the file of a frame."""
    found = []
    for number, text in enumerate(linecache.getlines(frame.f_code.co_filename), 1):
        if pattern.search(text.partition("#")[0]):
            found.append((frame.f_code.co_filename, number, ""))
    return found


def line_of_loss(frame: FrameType, root: Any) -> int:
    """The line of this function that last gave the loss its value before the backward."""
    known = variables(frame)
    names = [n for n, value in known.items() if value is root]
    if not names:  # `scaler.scale(loss).backward()`, `(loss / k).backward()`
        names = [n for n, value in known.items() if _is_bad_scalar(value)]
    lines = linecache.getlines(frame.f_code.co_filename)
    first = max(frame.f_code.co_firstlineno, 1)
    words = "|".join(re.escape(n) for n in names)
    given = re.compile(rf"^\s*(?:[\w., ]+,\s*)?(?:{words})\s*(?:,[\w., ]+)?(?:[-+*/]|\*\*)?=(?!=)")
    best = frame.f_lineno
    for number, text in enumerate(lines[first - 1 : frame.f_lineno - 1], first):
        if names and given.match(text):
            best = number
    return best


def _is_bad_scalar(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.numel() == 1 and not finite(value)
