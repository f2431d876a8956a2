"""The autograd graph: the leaves that it reaches, what is in it between a loss and a tensor, and
the constant that one of its nodes multiplies or divides by, such as the world size that a loss was
divided by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..recording.torch_compat import node_number, saved
from .limits import GRAPH_NODES

LINEAR = (
    "Add", "Alias", "AsStrided", "Cat", "Clone", "Diagonal", "Div", "Expand", "Index", "Mean",
    "Mul", "Neg", "Permute", "Repeat", "Reshape", "Rsub", "Select", "Slice", "Split", "Squeeze",
    "Stack", "Sub", "Sum", "T", "ToCopy", "Trace", "Transpose", "Unbind", "UnsafeView",
    "Unsqueeze", "View",
)  # fmt: skip
"""Nodes whose result is a sum of their inputs, each times a constant. A product is, too, if only
one factor takes part in the graph."""

FORMS = (
    "Alias", "AsStrided", "Clone", "Expand", "Permute", "Reshape", "Squeeze", "T", "ToCopy",
    "Transpose", "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip
"""Nodes whose result has the same numbers."""

KINDS = frozenset(f"{kind}Backward" for kind in LINEAR)


_BETWEEN_RANKS = ("allreduce", "allgather", "reducescatter", "alltoall")


def communicates(node: Any) -> bool:
    """Whether a node's backward exchanges gradients between ranks: a differentiable collective of
    torch's, or a function of the program's own whose `backward` calls one."""
    own = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
    names = getattr(getattr(own, "__code__", None), "co_names", ())
    said = "".join((node.name(), *names)).replace("_", "").lower()
    return any(word in said for word in _BETWEEN_RANKS)


def nodes_of(starts: Iterable[Any], most: int) -> list[Any]:
    """The nodes that a backward from these reaches, breadth first, up to `most`."""
    order = list(dict.fromkeys(starts))
    seen = set(order)
    for node in order:
        if len(order) >= most:
            break
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                order.append(child)
    return order


def leaves_of(roots: Iterable[Any], most: int) -> dict[int, Any] | None:
    """The leaves that a backward from these tensors reaches, by `id`; None where that would take a
    look at `most` nodes or more. What is inside of a reentrant checkpoint is not seen."""
    nodes = nodes_of([root.grad_fn for root in roots if root.grad_fn is not None], most)
    if len(nodes) >= most:
        return None
    leaves = (getattr(node, "variable", None) for node in nodes)
    return {id(leaf): leaf for leaf in leaves if leaf is not None}


REDUCTION = {1: "mean", 2: "sum"}
SIZES = "_saved_self_sym_sizes"

SUMS = ("Add", "Sub", "Stack", "Cat")
"""Nodes of these give each of their inputs a gradient by itself."""


def terms_of(root: Any, most: int) -> Iterator[list[Any]]:
    """For each term of a loss that is a sum, the nodes from `root` to it and on, up to the first
    that follows from several others; about `most` nodes of all terms."""
    paths, seen = [[root]], 1
    while paths:
        path = paths.pop()
        while True:
            ahead = [n for n, _ in path[-1].next_functions if n is not None]
            if not ahead or seen >= most:
                yield path
                break
            if len(ahead) > 1:
                if path[-1].name().startswith(SUMS):
                    paths += [[*path, node] for node in ahead]
                    seen += len(ahead)
                else:
                    yield path
                break
            path.append(ahead[0])
            seen += 1


def reduction_of(node: Any) -> str:
    """`mean` or `sum` if a node reduces many numbers to one, else empty."""
    kind = next((k for k in REDUCTION.values() if node.name().lower().startswith(k)), "")
    if kind:
        return "" if getattr(node, SIZES, None) == () else kind
    return REDUCTION.get(getattr(node, "_saved_reduction", 0), "")


def means(root: Any, most: int) -> tuple[float, ...]:
    """What each term of a loss is multiplied by, where every term is a mean over many numbers:
    empty where one is not, or is scaled by a number that is not read."""
    found: dict[Any, float] = {}
    left = [(root, 1.0)]
    for _ in range(most):
        if not left:
            return tuple(found.values())
        node, weight = left.pop()
        kind, ahead = reduction_of(node), [n for n, _ in node.next_functions if n is not None]
        several = len(ahead) > 1 and not (kind or node.name().startswith(SUMS))
        if not ahead or several or kind == "sum" or "AllReduce" in node.name():
            return ()
        # What is averaged may be scaled as well.
        scaling = [node, *(ahead if kind and len(ahead) == 1 else ())]
        if any(map(is_of_a_device, scaling)):
            return ()
        for one in scaling:
            weight /= divisor_of(one) or 1.0
        if kind:
            found[node] = float(f"{weight:.6g}")
        else:
            left += [(n, weight) for n in ahead]
    return ()


def divisor_of(node: Any) -> float:
    """The number that a node divides by; 0 if it does not divide by a single number on the CPU."""
    other = _number(node)
    if other is None or not other.is_cpu:
        return 0.0
    value = float(other)
    if node.name().startswith("Mul"):
        value = round(1 / value, 9) if value else 0.0  # a factor of 1/3 in float32 is 0.33333334
    return value


def is_of_a_device(node: Any) -> bool:
    """Whether a node multiplies or divides by a number on a device, which is not read: that would
    wait for the device."""
    other = _number(node)
    return other is not None and not other.is_cpu


def _number(node: Any) -> Any:
    """The single number that a node multiplies or divides by, as a tensor of one element; None
    if there is none, or it is a plain number, which functions of torch use internally."""
    if not node.name().startswith(("DivBackward", "MulBackward")):
        return None
    try:
        other = saved(node, "_saved_other")
    except LookupError:
        return None
    if other is None or isinstance(other, (int, float)):
        return None
    return None if other.numel() != 1 or other.requires_grad else other


def before_views(node: Any, output: int) -> tuple[Any, int]:
    """The node and the number of its output that a tensor shows, perhaps in another form or
    copied."""
    while node.name().rstrip("0123456789").removesuffix("Backward") in FORMS:
        (ahead, number), *_ = node.next_functions
        if ahead is None:
            break
        node, output = ahead, number
    return node, output


def is_used(made: tuple[Any, int], roots: list[Any]) -> bool:
    """Whether an output of a node is in the graph that begins at some nodes."""
    return made[0] in roots or any(
        (n, k) == made for node in nodes_of(roots, GRAPH_NODES) for n, k in node.next_functions
    )


def nodes_between(roots: list[Any], target: Any) -> set[Any] | None:
    """The nodes from the loss to another one, which is not among them; None if it is not found."""
    first = node_number(target)
    above: dict[Any, list[Any]] = {root: [] for root in roots}
    left = list(above)
    while left and len(above) < GRAPH_NODES:
        node = left.pop()
        for ahead, _ in node.next_functions:
            if ahead is None or node_number(ahead) < first:
                continue  # made before
            if ahead not in above:
                above[ahead] = []
                left.append(ahead)
            above[ahead].append(node)
    if left or target not in above:
        return None
    between, left = {target}, [target]
    while left:
        new = {*above[left.pop()]} - between
        between |= new
        left += new
    between.remove(target)
    return between


def linear(node: Any) -> bool:
    """Whether a node is of `LINEAR`, a product only where it is one with a constant."""
    kind = node.name().rstrip("0123456789")
    inputs = sum(n is not None for n, _ in node.next_functions)
    return kind in KINDS and not (kind in ("MulBackward", "DivBackward") and inputs > 1)


def leads_to(node: Any, tensors: Iterable[Any]) -> bool:
    """Whether one of some parameters is below a node."""
    wanted = {id(tensor) for tensor in tensors if tensor is not None}
    return any(id(getattr(n, "variable", None)) in wanted for n in nodes_of([node], GRAPH_NODES))
