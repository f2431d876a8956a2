"""Which operation made a loss NaN or infinite?

Follows the loss back through the autograd graph and reads the tensors saved for the backward,
without changing anything. Used only once a loss is not finite, so it may take its time.
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
from ...tensors.autograd_nodes import nodes_of
from ...tensors.digests import finite, memory_freed, readable
from ...training import autograd_grad
from ...training.autograd_grad import AutogradGrad

MOST_NODES = 4000
"""Autograd nodes read: about a second."""

_IN_SOURCE = {
    "div": r"(?<![/\w])[^/\n#]*[^/\s]\s*/\s*[^/=]|\bdiv_?\(",
    "pow": r"\*\*|\bpow\w*\(",
    "linalg_vector_norm": r"norm\(",
    "log": r"(?<!math\.)(?<!self\.)(?<!wandb\.)(?<!logger\.)\blog_?\(",
}
"""Patterns in Python source for operations that are not only written by their name."""


_COMMON = ("div", "mul", "add", "sub", "mean", "sum")
"""Operations too frequent in source code to be searched for outside of the model."""


class Origin:
    """Where the non-finite value arose.

    Attributes:
        operation: torch's name of it. If the value arose in a derivative, the operation without a
            finite derivative. Empty if unknown.
        parameter: name of a parameter that feeds the operation.
        entered: the operation that got the value as a constant, which has no graph.
        derivative_site: line of the `autograd.grad` that takes the derivative, else -1.
        number: torch's sequence number of the node, -1 if unknown.
    """

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
    """`nan` if a tensor (or this rank's shard of it) contains NaN, else `inf`."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        return "nan" if bool(torch.isnan(shard(tensor).detach()).any()) else "inf"


def largest(tensors: Iterable[Any]) -> float:
    """Largest absolute value in the tensors (or this rank's shards of them) that are on the CPU; 0
    if any is not finite."""
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
"""All names of each parameter, by its id, in the order of the model; shared ones have several."""


def trace(root: Any, names: Names) -> Origin:
    """The operation that first made something non-finite; an empty `Origin` if the graph does not
    show it."""
    start = getattr(root, "grad_fn", None)
    if start is None:
        return Origin()
    order = _nodes(start)
    hidden: set[Any] = set()
    wrong = {node: found_in for node in order if (found_in := _nonfinite_part(node, hidden))}
    later = _users_of(order, wrong)
    found = next((n for n in reversed(order) if n in wrong and n not in later), None)
    origin = _maker(found, wrong[found]) if found is not None else start
    if origin is None:
        parameter, number = _nearest_parameter(found, names), node_number(found)
        return Origin("", parameter, _operation(found), number=number)
    origin = _skip_harmless(origin)
    if hidden and not hidden.isdisjoint(_nodes(origin)):
        return Origin()  # an unreadable tensor before it may be the true origin
    site = AutogradGrad.current.site_of(origin)
    if site >= 0:
        return _of_derivative(origin, order, names, site)
    return Origin(_operation(origin), _nearest_parameter(origin, names), number=node_number(origin))


def _of_derivative(made: Any, order: list[Any], names: Names, site: int) -> Origin:
    """The origin of a value that arose in a derivative: the forward operation with a singular
    derivative, beneath the node or beside it."""
    below = _nodes(made)
    given = set(below)
    beside = (n for n in order if any(child in given for child, _ in n.next_functions))
    for node in (*below, *beside):
        if AutogradGrad.current.site_of(node) < 0 and (operation := autograd_grad.singular(node)):
            return Origin(operation, _nearest_parameter(node, names), derivative_site=site)
    return Origin(derivative_site=site)


def _nodes(start: Any) -> list[Any]:
    return nodes_of([start], MOST_NODES)


def _users_of(order: list[Any], nodes: Iterable[Any]) -> set[Any]:
    """All nodes of a graph that use, directly or not, the result of one of `nodes`."""
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
"""Operations with one input whose result is finite if the input is."""


def _skip_harmless(node: Any) -> Any:
    """The node whose result reaches `node` through harmless operations only."""
    while _operation(node) in _HARMLESS:
        source = next((c for c, _ in node.next_functions), None)
        if source is None or _is_leaf(source):
            break
        node = source
    return node


_INPUTS = {"_saved_self": 0, "_saved_input": 0, "_saved_mat1": 0, "_saved_other": 1,
           "_saved_mat2": 1, "_saved_weight": 1, "_saved_target": 1}  # fmt: skip
"""Attributes for saved inputs, by their position in `next_functions`."""

_RESULT = re.compile(r"_saved_(?:result|output|out)\d*$")
_OTHER_RESULT = re.compile(r"_saved_result[1-9]\d*$")

_BEHIND_THE_BIAS = ("_saved_mat1", "_saved_mat2")


def _nonfinite_part(node: Any, hidden: set[Any]) -> str:
    """`result` if the saved result of a node is not finite, the attribute of a saved input if that
    is not, else empty. Adds nodes that cannot be read to `hidden`."""
    found_in = ""
    if _is_leaf(node) and (memory_freed(node.variable) or not finite(node.variable)):
        hidden.add(node)  # its value cannot be read, or was not finite from the start
    names = [name for name in dir(node) if name.startswith("_saved_")]
    if "_saved_result0" in names:  # the others may be infinite by design (those of `ctc_loss`)
        names = [name for name in names if not _OTHER_RESULT.match(name)]
    for name in names:
        try:
            value = saved(node, name)
        except LookupError:
            hidden.add(node)
            continue
        if memory_freed(value):
            hidden.add(node)
        elif not finite(value):
            found_in = "result" if _RESULT.match(name) else found_in or name
    return found_in or ("result" if _makes_infinity(node) else "")


def _makes_infinity(node: Any) -> bool:
    """Whether a node computes infinity from its saved finite inputs: `log(0)`, `x / 0`."""
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


def _maker(node: Any, found_in: str) -> Any:
    """The node that returned the non-finite value: `node` itself, or the source of its input; None
    if that input was a constant, which has no node."""
    if found_in == "result":
        return node
    sources = [c for c, _ in node.next_functions]
    position = _INPUTS.get(found_in, -1) + (
        found_in in _BEHIND_THE_BIAS and "addmm" in _operation(node)
    )
    if 0 <= position < len(sources):
        source = sources[position]
        return node if source is not None and _is_leaf(source) else source
    inner = [c for c in sources if c is not None and not _is_leaf(c)]
    return inner[0] if inner else node


def _is_leaf(node: Any) -> bool:
    return bool(node.name().endswith("AccumulateGrad"))


def _operation(node: Any) -> str:
    """Name of a node's operation: `log` for `LogBackward0`."""
    name = re.sub(r"Backward\d*$", "", str(node.name()).rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _nearest_parameter(node: Any, names: Names) -> str:
    """Name of the parameter nearest to a node; empty if there is none.

    A shared parameter has several: the first one if an embedding uses it here, else the last one,
    which is nearest to the loss.
    """
    for user, below in _with_users(node):
        variable = getattr(below, "variable", None)
        if variable is not None and (known := names.get(id(variable))):
            return known[0 if user is None or "embedding" in _operation(user) else -1]
    return ""


def _with_users(node: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of a user and a node it uses, breadth first; the first node has no user."""
    yield None, node
    for user in _nodes(node):
        for below, _ in user.next_functions:
            yield user, below


_SOURCE_OF_MAKER = {"div": re.compile(_IN_SOURCE["div"].replace("[^/=]", r"(?![\s\d])[^/=]"))}
"""Patterns for operations that can make infinity: a division by a literal number cannot."""

_MAKERS = ("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "div", "pow", "exp")


def line_of_maker(model: Any, name: str) -> tuple[str, int, str] | None:
    """(file, line, function) of an operation before the call of a module that can make finite
    numbers non-finite; None if there is none or several.

    Searched in the `forward` that calls the module and in untrained modules called before it, then
    in functions that this `forward` calls.
    """
    owner, _, last = name.rpartition(".")
    codes = _forwards(model.get_submodule(owner), alone=True)
    first = _first_named(last, codes)
    patterns = [_SOURCE_OF_MAKER.get(o) or _source_pattern(o) for o in _MAKERS]
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
    """First line in the functions that names a module; 0 if there is none."""
    if not name.isidentifier():
        return 0
    named = re.compile(rf"\b{name}\b")
    return min((line for code in codes for _, line, _ in _matches(code, named)), default=0)


def _untrained_before(model: Any, name: str) -> Iterator[Any]:
    """Modules without trainable parameters that are called before the named one, in any of its
    parents. Their results need no gradient, so they are not in the graph."""
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


_MULTIPLICATION = r"[\w\])'\"]\s*\*=?\s*[\w(\[.-]|\bmul\w*\("


def line_after(operation: str, frame: FrameType, root: Any, first: int) -> int:
    """Line between `first` and the running line of a function that uses an operation: the one that
    assigns the loss, else the only one; -1 if there is none."""
    lines = linecache.getlines(frame.f_code.co_filename)[first - 1 : frame.f_lineno]
    pattern = re.compile(_MULTIPLICATION) if operation == "mul" else _source_pattern(operation)
    found = [n for n, text in enumerate(lines, first) if pattern.search(text.partition("#")[0])]
    given = line_of_loss(frame, root)
    return given if given in found else found[0] if len(found) == 1 else -1


def _source_pattern(operation: str) -> re.Pattern[str]:
    return re.compile(_IN_SOURCE.get(operation, rf"\b{re.escape(operation)}_?\("))


def lines_from(operation: str, frame: FrameType, first: int) -> set[tuple[str, int, str]]:
    """(file, line, function) of all uses of an operation between `first` and the running line of a
    function, and in what these lines call."""
    if operation in _COMMON and operation not in _SOURCE_OF_MAKER:
        return set()
    code, pattern = frame.f_code, _SOURCE_OF_MAKER.get(operation) or _source_pattern(operation)
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
    """(file, line, function) of the only use of an operation in the user's code; None if there is
    none or several.

    Searched in the `forward`s of the model, then in what they call, then in the file of the
    function that calls backward.
    """
    pattern = _source_pattern(operation)
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
    """(file, line, "") of all matches in the file of a frame."""
    found = []
    for number, text in enumerate(linecache.getlines(frame.f_code.co_filename), 1):
        if pattern.search(text.partition("#")[0]):
            found.append((frame.f_code.co_filename, number, ""))
    return found


def line_of_loss(frame: FrameType, root: Any) -> int:
    """The last line before the backward that assigns the loss, else the line of the backward."""
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
