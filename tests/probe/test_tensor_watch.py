"""Tensors that are looked at again, by their values and by how often they were written to."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from ddpdoctor.probe.tensors.tensor_watch import (  # noqa: E402
    TensorWatch,
    marks,
    owner_marks,
    spread,
)


@pytest.mark.parametrize(
    ("count", "chosen"),
    [
        (0, []),
        (1, [0]),
        (6, [0, 1, 2, 3, 4, 5]),
        (7, [0, 1, 2, 3, 4, 6]),
        (100, [0, 19, 39, 59, 79, 99]),
    ],
)
def test_a_few_are_spread_over_all(count: int, chosen: list[int]) -> None:
    assert spread(range(count), 6) == chosen


def test_what_changed_between_moments() -> None:
    tensors = [torch.zeros(3), torch.zeros(3), torch.zeros(3)]
    watch = TensorWatch([0, 2], lambda positions: [tensors[p] for p in positions])
    watch.keep("wrap")
    tensors[1] += 1
    assert watch.changed("wrap") == [], "it is not among them"
    tensors[2] += 1
    watch.keep("step")
    assert watch.changed("wrap") == watch.changed("wrap", until="step") == [2]
    tensors[2] -= 1
    assert (watch.changed("wrap"), watch.changed("step")) == ([], [2])


def test_writes_show_without_another_value() -> None:
    tensors = [torch.zeros(3), torch.zeros(3), None]
    watch = TensorWatch(range(3), lambda positions: [tensors[p] for p in positions], marks)
    watch.keep("backward")
    tensors[0].mul_(1)
    tensors[1].data.add_(1)
    assert watch.changed("backward") == [0], "torch does not count writes through `.data`"
    tensors[1] = torch.zeros(3)
    assert watch.changed("backward") == [0, 1]


def test_writes_to_the_shard_of_a_dtensor_show() -> None:
    tensor = torch.zeros(3)
    tensor._local_tensor = torch.zeros(3)
    watch = TensorWatch([0], lambda positions: [tensor], marks)
    watch.keep("backward")
    assert watch.changed("backward") == []
    tensor._local_tensor.add_(1)
    assert watch.changed_again("backward") == [0], "FSDP2 accumulates so; DTensors do not count it"
    tensor.zero_()
    assert watch.changed_again("backward") == [0], "`zero_grad` writes so; shards do not count it"
    tensor._local_tensor = torch.zeros(3)
    assert watch.changed("backward") == [0]


def test_a_new_view_of_the_same_tensor_is_no_change() -> None:
    with torch.no_grad():
        flat, views = torch.zeros(6), [None]
        watch = TensorWatch([0], lambda positions: views, owner_marks)
        watch.keep("none")
        views[0] = flat[:3]
        assert watch.changed("none") == [0]
        watch.keep("step")
        views[0] = flat[:3]
        assert watch.changed("step") == []
        views[0].zero_()
        assert watch.changed_again("step") == [0]
        views[0] = torch.zeros(6)[:3]
        assert watch.changed("step") == [0]
