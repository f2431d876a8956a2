"""DDP305 beside tensor parallelism: groups that hold copies and never average them."""

from types import SimpleNamespace

import pytest
import torch
from ddpdoctor.checks.model.model_not_wrapped import ModelNotWrapped
from recordings import make_run, site, steps
from wraps import parameters

from ddpdoctor.events import GroupReady, Unwrapped, UnwrappedState
from ddpdoctor.probe.watchers.manual_sync import exchanges
from ddpdoctor.probe.watchers.manual_sync.exchanges import Exchange, Exchanges
from ddpdoctor.probe.watchers.manual_sync.parallelism import Parallelism

CHECK = ModelNotWrapped()
LOOKS = (0, 1, 2, 4, 8)


def ready(number, ranks):
    return GroupReady(
        at=0, group=number, name=f"{ranks}", backend="gloo", ranks=ranks, member=True, site=-1
    )


def rank(n, *, count=4, means="in backward", apart=LOOKS[1:], agree=(), carried=1, tp=900, over=1):
    """Ranks 0 and 2, 1 and 3 hold copies; 0 and 1, 2 and 3 compute together."""
    copies = {2: (0, 1)}.get(count, (n % 2, n % 2 + 2))
    yield site(1, "train.py", 3, "model = LocalDDP(GPT())")
    yield from (ready(0, tuple(range(count))), ready(1, copies), ready(3, (n // 2 * 2, n | 1)))
    yield Unwrapped(at=0, optimizer=0, kind="GPT", parameters=parameters(("body",)), site=1)
    for step in LOOKS:
        yield UnwrappedState(
            at=0,
            optimizer=0,
            step=step,
            gradients=50 + step + (0 if step in agree else n),
            parameters=70 + step + (n if step in apart else n % 2),
            exchanged=means,
            spread=over,
            numbers={1: 20 + carried * step, 3: tp * step},
        )
    yield from steps(9)


def found_in(count=4, **kwargs):
    run = make_run({n: list(rank(n, count=count, **kwargs)) for n in range(count)})
    return list(CHECK.examine(run))


def test_a_group_that_averages_only_its_losses():
    (found,) = found_in()
    assert (found.severity.value, found.confidence.value) == ("warning", "suspected")
    assert (found.ranks, found.location.line) == ((0, 1, 2, 3), 3)
    assert found.evidence["groups"] == [{"ranks": [0, 2]}, {"ranks": [1, 3]}]


@pytest.mark.parametrize("kwargs", [
    pytest.param({"carried": 20}, id="gradients of that group"),
    pytest.param({"carried": 0}, id="local steps that nothing is exchanged in"),
    pytest.param({"over": -1}, id="not sent to the group at first"),
    pytest.param({"over": 0}, id="sent to the world"),
    pytest.param({"count": 2}, id="the group is the world"),
    pytest.param({"apart": ()}, id="equal all the time"),
    pytest.param({"apart": (0, 1, 2, 4, 8)}, id="never equal"),
    pytest.param({"apart": (1, 2, 4)}, id="equal again"),
    pytest.param({"agree": (2,)}, id="gradients that agree once"),
    pytest.param({"means": "point-to-point"}, id="pipeline"),
    pytest.param({"means": "all-to-all"}, id="expert parallel"),
    pytest.param({"means": "gradients of a group"}, id="gradients"),
])  # fmt: skip
def test_groups_that_say_nothing(kwargs):
    assert found_in(**kwargs) == []


def test_a_group_of_other_ranks_connects_them_too():
    events = {n: list(rank(n)) for n in range(4)}
    for rows in events.values():
        rows[3] = ready(3, (0, 1, 2, 3))
    assert list(CHECK.examine(make_run(events))) == []


def test_parameters_that_were_handed_to_a_group(monkeypatch):
    window = Exchanges()
    monkeypatch.setattr(Exchanges, "current", window)
    made = [torch.nn.Parameter(torch.ones(n)) for n in (8, 3)]

    def handed(tensor, group=1):
        return Exchange(group, tensor.numel(), tensor.untyped_storage().data_ptr())

    window.earlier = [handed(p.data) for p in made]
    assert Exchanges.current.group_of_parameters(made) == 1
    window.earlier = [handed(made[0]), handed(made[1], group=2)]
    assert Exchanges.current.group_of_parameters(made) == -1
    window.earlier = [handed(made[0])]
    assert Exchanges.current.group_of_parameters(made) == -1
    window.earlier = [handed(p.clone()) for p in made]
    assert Exchanges.current.group_of_parameters(made) == -1


def test_numbers_are_counted_by_group(monkeypatch):
    window = Exchanges()
    monkeypatch.setattr(Exchanges, "current", window)
    monkeypatch.setattr(Exchanges.current._following, "enable", lambda: None)
    fresh = Parallelism()
    monkeypatch.setattr(Parallelism, "current", fresh)
    for group, op in ((1, "barrier"), (2, "barrier"), (1, "send")):
        call = exchanges.Call(
            op=op, group=group, p2p=op == "send", tensors=(torch.ones(5, dtype=int),)
        )
        Exchanges.current._called(SimpleNamespace(step=0), call)
    assert Exchanges.current.numbers_by_group() == {1: 10, 2: 5}
