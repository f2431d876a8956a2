"""Loaders that ranks iterate to train, and also for something else."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.data.sampler_seed_skew import SamplerSeedSkew
from readers import found, loader, run_of

from ddpdoctor.analysis.data.loaders import loaders
from ddpdoctor.events import Event

ORDERS = [[3, 1, 7, 0, 9, 4], [1, 2, 6, 8, 5, 7], [0, 3, 2, 10, 11, 5]]
RESTS = [[i for i in range(12) if i not in order] for order in ORDERS]


def rank(number: int, also: dict[str, object] | None = None) -> list[Event]:
    """Three epochs of one rank of two; `also`: what is known of an iteration after the second."""
    orders = [RESTS, ORDERS][number] if also is None else [*ORDERS[:2], ORDERS[1][:4], ORDERS[2]]
    epochs = [0, 1, 2] if also is None else [0, 1, 1, 2]
    ends: dict[str, object] = {}
    began: dict[str, object] = {"sampler_epoch": epochs, "epochs_set": [e + 1 for e in epochs]}
    if also is not None:
        began["site"] = [3, 3, also.get("site", 3), 3]
        ends = {name: [value, value, also[name], value] for name, value in NONE.items()}
        ends["backwards"] = [2, 2, 0, 2]
    return loader(0, orders, length=12, distributed=True, replicas=2, sampler_rank=number,
                  total_size=12, shuffle=True, sampler_site=1, batch_size=3, seed=0,
                  began=began, ends=ends)  # fmt: skip


NONE = {"evaluated": 0, "grad_enabled": True, "exhausted": True}


@pytest.mark.parametrize(
    "also",
    [
        {**NONE, "evaluated": 2},
        {**NONE, "grad_enabled": False, "exhausted": False},
        {**NONE, "site": 4, "exhausted": False},
    ],
)
def test_what_one_rank_does_beside_training_is_no_epoch_of_it(also: dict[str, object]) -> None:
    run = run_of(rank(0), rank(1, also))
    assert found(SamplerSeedSkew(), run) == []
    training, other = loaders(run)
    assert [len(r.epochs) for r in training.readers.values()] == [3, 3]
    assert (training.trains, other.trains) == (True, False)
    assert [(n, len(r.epochs), r.trains_too) for n, r in other.readers.items()] == [(1, 1, True)]


def test_an_iteration_that_was_left_before_its_first_backward_is_an_epoch() -> None:
    (training,) = loaders(run_of(rank(0), rank(1, {**NONE, "exhausted": False})))
    assert [len(r.epochs) for r in training.readers.values()] == [3, 4]
