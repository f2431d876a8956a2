"""What a forward made and its backward left out, as the program's variables tell."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ddpdoctor.probe.recording.torch_compat import graph  # noqa: E402
from ddpdoctor.probe.watchers.graph import unused_outputs  # noqa: E402

ACTIVE: Any = SimpleNamespace(
    sites=SimpleNamespace(kind=lambda code: "user" if code.co_filename == __file__ else "")
)


class Net(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x: Any, head: bool = True) -> dict[str, Any]:
        hidden = self.body(x)
        out = {"main": hidden.sum()}
        if head:
            out["head"] = self.head(hidden)
        return out


def told(net: Net, unused: tuple[int, ...], first: int) -> tuple[int, ...]:
    model: Any = SimpleNamespace(
        first_node=first, parameters=[weakref.ref(p) for p in net.parameters()]
    )
    return unused_outputs.unused_results(ACTIVE, model, unused)


def test_an_output_that_is_not_in_the_loss() -> None:
    net, first = Net(), graph.next_number()
    out = net(torch.ones(1, 2))
    out["main"].backward()
    assert told(net, (1, 2), first) == (1,)


def test_a_branch_that_is_not_taken_and_outputs_of_a_step_before() -> None:
    net = Net()
    before = net(torch.ones(1, 2))
    first = graph.next_number()
    out = net(torch.ones(1, 2), head=False)
    out["main"].backward()
    assert told(net, (1, 2), first) == ()
    assert "head" in before


def test_containers_of_the_users_are_read_without_its_code() -> None:
    class Lazy(dict):  # type: ignore[type-arg]
        def values(self) -> Any:
            raise AssertionError

    net, first = Net(), graph.next_number()
    out = Lazy(net(torch.ones(1, 2)))
    assert told(net, (1,), first) == (1,)
    assert out
