"""sampler-drops-tail: what nobody ever sees."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.data.sampler_drops_tail import SamplerDropsTail
from readers import found, loader, run_of

from ddpdoctor.events import Event, Layer, ProgramSeen
from ddpdoctor.events.pack import pack
from ddpdoctor.report.findings import Finding, Related, Severity


def part(
    rank: int,
    count: int,
    *,
    length: int = 43,
    shuffled: bool = False,
    shifts: tuple[int, ...] = (0,),
    **more: object,
) -> list[Event]:
    """`shifts`: by how much the indices are moved on in each epoch."""
    indices = list(range(rank, count, 2))[:: -1 if shuffled else 1]
    return loader(
        0,
        [[(i + shift) % length for i in indices] for shift in shifts],
        length=length,
        distributed=True,
        replicas=2,
        sampler_rank=rank,
        **{"sampler_drop_last": True, "sampler_site": 1, "total_size": count, **more},  # type: ignore[arg-type]
    )


def examine(count: int, **more: object) -> list[Finding]:
    return found(SamplerDropsTail(), run_of(part(0, count, **more), part(1, count, **more)))  # type: ignore[arg-type]


def test_evaluation_that_leaves_one_out() -> None:
    (finding,) = examine(42, trains=False)
    assert finding.evidence["never read, for example"] == "42"


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({}, "sampler-drop-last"),
        ({"drop_last": True, "batch_size": 5}, "loader-drop-last"),
    ],
)
def test_what_an_evaluation_is_to_do_instead(more: dict[str, object], rule: str) -> None:
    """Without `drop_last` alone, or shuffled, its metric would be off all the same."""
    (finding,) = examine(42, trains=False, **more)
    assert finding.rule == rule


def test_an_evaluation_in_which_only_the_loader_drops() -> None:
    """The samples go round the ranks: no sampler pads."""
    drops = {"drop_last": True, "sampler_drop_last": False, "total_size": 42, "batch_size": 5}
    (finding,) = examine(40, trains=False, length=42, **drops)
    assert finding.rule == "loader-drop-last"


def test_training_in_order_leaves_out_the_same_every_time() -> None:
    assert examine(42)


def test_shuffled_training_with_a_small_tail() -> None:
    assert not examine(42, shuffled=True)


def test_shuffled_training_that_leaves_out_much() -> None:
    assert examine(30, shuffled=True)


def test_shuffled_training_that_leaves_out_others_in_each_epoch() -> None:
    assert not examine(30, shuffled=True, shifts=(0, 5, 11))
    assert examine(30, shuffled=True, shifts=(0, 0, 0))


def test_what_a_sampler_of_ones_own_leaves_out() -> None:
    """The loader drops nothing: what each rank was given fills its batches."""
    mine = {"own_order": True, "sampler_length": 16, "sampler_drop_last": False, "drop_last": True}
    assert not examine(32, **mine)
    assert examine(42, **{**mine, "sampler_length": 23})


def test_batches_that_are_given() -> None:
    given = {"own_order": True, "sampler_length": 23, "sampler_drop_last": False}
    (finding,) = examine(42, **given, drop_last=True, batches_given=True)
    assert finding.rule == "loader-drop-last"


def test_sampler_and_loader_drop() -> None:
    """42 of 43 go round, 21 to each rank; batches of 8 leave 5 of these."""
    (finding,) = examine(32, trains=False, total_size=42, batch_size=8, drop_last=True)
    (alone,) = examine(42, trains=False, batch_size=7, drop_last=True)
    assert finding.related[0] == Related("sampler made here", alone.location)


def tail(rank: int, data: int, *, trains: bool = False) -> list[Event]:
    """A loader that reads the last sample, through a `Subset` of data set number `data`."""
    layers = (Layer(data=8 + rank, indices=pack([42])), Layer(data=data))
    place = {"site": 4, "loop_site": 4, "dataset": "Subset", "length": 1, "layers": layers}
    return loader(1, [[0]], trains=trains, **place)  # type: ignore[arg-type]


def test_a_tail_that_another_loader_reads() -> None:
    def ranks(data: int, *, trains: bool = False) -> list[list[Event]]:
        whole = (Layer(data=5),)
        evaluated = [part(r, 42, trains=False, layers=whole) for r in range(2)]
        return [[*evaluated[r], *tail(r, data, trains=trains)] for r in range(2)]

    assert not found(SamplerDropsTail(), run_of(*ranks(5)))
    assert found(SamplerDropsTail(), run_of(*ranks(6)))


def test_nothing_left_out() -> None:
    assert not examine(44, length=44)


def test_an_epoch_that_was_left_early() -> None:
    assert not examine(42, ends={"exhausted": False})


def test_unread_samples_without_drop_last() -> None:
    assert not examine(42, sampler_drop_last=False)


def shares(rank: int, *, each: int = 2, yields: int = 48, **more: object) -> list[Event]:
    """A rank's share of 96 samples, of whose batches of 4 every second one is delivered."""
    mine = list(range(rank, 96, 2))
    batches = [mine[n : n + 4] for n in range(0, 48, 4)]
    read = [i for batch in batches[rank % each :: each] for i in batch]
    fields: dict[str, object] = {"length": 96, "distributed": True, "replicas": 2, "batch_size": 4,
                                 "sampler_rank": rank, "total_size": 96, "sampler_site": 1,
                                 "sampler": "DistributedSampler", "sampler_length": yields,
                                 "batch_sampler": "BatchSamplerShard"}  # fmt: skip
    return loader(0, [read, read[::-1]], **fields | more)  # type: ignore[arg-type]


def examine_shares(**more: object) -> list[Finding]:
    versions = more.pop("versions", {})
    program = ProgramSeen(at=0, files={}, versions=versions)  # type: ignore[arg-type]
    ranks = ([*shares(rank, **more), program] for rank in range(2))  # type: ignore[arg-type]
    return found(SamplerDropsTail(), run_of(*ranks))


def test_shares_that_are_divided_once_more() -> None:
    (finding,) = examine_shares()
    assert (finding.rule, finding.ranks) == ("divided-twice", (0, 1))
    assert finding.severity is Severity.WARNING
    assert finding.location is not None and finding.location.line == 10
    (finding,) = examine_shares(versions={"accelerate": "1.10"})
    assert "Accelerator.prepare" in finding.fix


def test_batch_samplers_that_leave_out_what_they_like() -> None:
    assert not examine_shares(batch_sampler="")
    assert not examine_shares(each=1), "everything is read"
    assert not examine_shares(each=4), "some of its own choice"
    assert not examine_shares(exhausted=False)
    assert not examine_shares(yields=96, each=1), "a sampler that tells the length of the data"
    assert not examine_shares(replicas=-1, distributed=False)
