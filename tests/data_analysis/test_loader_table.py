"""What the loaders delivered, in the table that stands above the findings."""

from __future__ import annotations

import pytest
from ddpdoctor.checks.data.data_overlap import DataOverlap
from readers import found, loader, run_of, shuffled

from ddpdoctor.events import Event, Payload


def test_the_table_tells_what_was_read_even_when_all_is_well() -> None:
    run = run_of(
        *(
            loader(0, [list(range(r, 100, 2))] * 3, content=1, distributed=True, replicas=2,
                   sampler_rank=r, total_size=100)
            for r in range(2)
        )
    )  # fmt: skip
    assert not found(DataOverlap(), run)
    (table,) = DataOverlap().tables(run)
    assert table.rows == (
        ("train.py:11 (training)", "0-2", "0-1", "100", "100", "0", "0", "sequential"),
    )


def test_loaders_that_the_table_cannot_tell_apart_are_told_once() -> None:
    def folds(rank: int) -> list[Event]:
        kinds = {"distributed": True, "replicas": 2, "sampler_rank": rank}
        return [
            event
            for n, length in enumerate((100, 100, 100, 60))
            for event in loader(n, [list(range(rank, length, 2))], length=length, made=n,
                                payloads=(Payload(name="x", kind="other", length=9, order=n),),
                                **kinds)  # type: ignore[arg-type]
        ]  # fmt: skip

    (table,) = DataOverlap().tables(run_of(*map(folds, range(2))))
    assert [row[0] for row in table.rows] == [
        "train.py:11 (training) x3",
        "train.py:11 (training)",
    ]


def test_loaders_that_one_line_makes_are_numbered() -> None:
    def grows(rank: int) -> list[Event]:
        return [
            event
            for n, length in enumerate((60, 100))
            for event in loader(n, [list(range(rank, length, 2))], length=length, made=n,
                                distributed=True, replicas=2, sampler_rank=rank)
        ]  # fmt: skip

    (table,) = DataOverlap().tables(run_of(*map(grows, range(2))))
    assert [row[0] for row in table.rows] == [
        "train.py:11 (training) #1",
        "train.py:11 (training) #2",
    ]


@pytest.mark.parametrize(("same", "told"), [(True, "unchanged"), (False, "changed")])
def test_the_order_of_an_epoch_that_was_left(same: bool, told: str) -> None:
    orders = [shuffled(1, 0), shuffled(1, 0 if same else 1)[:12]]
    ranks = [loader(0, orders, content=1, ends={"exhausted": [True, False]}) for _ in range(2)]
    (table,) = DataOverlap().tables(run_of(*ranks))
    assert [row[-1] for row in table.rows] == ["shuffled", f"{told}, stopped early"]


def test_all_was_read_though_the_loop_never_found_the_end() -> None:
    ranks = [loader(0, [list(range(r, 100, 2))], exhausted=False, distributed=True, replicas=2,
                    sampler_rank=r) for r in range(2)]  # fmt: skip
    (table,) = DataOverlap().tables(run_of(*ranks))
    assert table.rows[0][6] == "0"


@pytest.mark.parametrize("count", [8, 12])
def test_the_table_leaves_no_epoch_out(count: int) -> None:
    """Each epoch is left after another number of samples, so that no two share a row."""
    ranks = [loader(0, [list(range(r, 2 * n, 2)) for n in range(4, 4 + count)],
                    distributed=True, replicas=2, sampler_rank=r) for r in range(2)]  # fmt: skip
    (table,) = DataOverlap().tables(run_of(*ranks))
    told = [r[1] for r in table.rows]
    assert told == [*map(str, range(8))] if count == 8 else [*"012345", "6-10", "11"]


def test_the_table_does_not_guess_what_a_loader_is_for() -> None:
    """The run failed at the first batch."""
    ranks = [loader(0, [range(4 * r)], trains=False, exhausted=False) for r in (1, 0)]
    (table,) = DataOverlap().tables(run_of(*ranks))
    assert table.rows[0][0] == "train.py:11"


def shard(
    length: int, order: int, content: int, *, exhausted: bool = True, **more: object
) -> list[Event]:
    """A whole data set of `length`, read in order; `order` and `content` digest its entries."""
    held = Payload(name="x", kind="tensor", length=length, order=order, content=content)
    return loader(0, [list(range(length))], length=length, exhausted=exhausted, payloads=(held,),
                  **more)  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "row"),
    [
        ([shard(30, 1, 5), shard(23, 2, 6)], ("30 / 23 (each rank its own)", "-", "-", "-")),
        ([shard(48, 1, 5), shard(48, 2, 6)], ("48 (each rank its own)", "-", "-", "-")),
        ([shard(48, 1, 5, exhausted=False), shard(48, 2, 6, exhausted=False)],
         ("48 (each rank its own)", "-", "-", "-")),
        ([loader(0, [list(range(n))], length=n) for n in (30, 23)],
         ("30 / 23 (each rank its own)", "-", "-", "-")),
        # the same entries in another order, and the same data; a sampler that divides unlike ones
        ([shard(48, 1, 5), shard(48, 2, 5)], ("48", "0", "48", "0")),
        ([shard(48, 1, 5), shard(48, 1, 5)], ("48", "0", "48", "0")),
        ([shard(48, r, r, distributed=True, replicas=2, sampler_rank=r) for r in range(2)],
         ("48 (each rank its own)", "-", "-", "-")),
    ],
)  # fmt: skip
def test_data_sharded_by_hand_is_told_rank_by_rank(
    ranks: list[list[Event]], row: tuple[str, ...]
) -> None:
    (table,) = DataOverlap().tables(run_of(*ranks))
    assert [r[3:7] for r in table.rows] == [row]


def test_the_table_says_nothing_of_epochs_that_never_ended() -> None:
    ranks = [loader(0, [[1, 2, 3, 4]], ended=False) for _ in range(2)]
    (table,) = DataOverlap().tables(run_of(*ranks))
    (row,) = table.rows
    assert row[4] == "-"


def test_the_table_counts_no_rank_of_which_nothing_is_on_record() -> None:
    """Rank 1 was stopped in its first epoch."""
    ranks = [loader(0, [list(range(12))]), loader(0, [[]], ended=False)]
    (table,) = DataOverlap().tables(run_of(*ranks))
    assert table.rows[0][3:] == ("100, 12 read", "-", "-", "-", "stopped early")


def test_the_table_counts_what_a_single_rank_read_by_the_epoch() -> None:
    epochs = [list(range(12)), list(range(12)), list(range(8))]
    (table,) = DataOverlap().tables(run_of(loader(0, epochs[:2]), []))
    assert table.rows[0][1:5] == ("0-1", "0", "100, 12 read", "-")
    (table,) = DataOverlap().tables(run_of(loader(0, epochs), []))
    assert table.rows[0][3] == "100, 8 to 12 read"


def test_the_table_says_of_epochs_that_were_left_in_what_order_and_not_what_nobody_read() -> None:
    ranks = [shard(48, r, r, exhausted=False) for r in range(2)]
    (table,) = DataOverlap().tables(run_of(*ranks))
    assert table.rows[0][6:] == ("-", "sequential, stopped early")
    ranks = [loader(0, [[0, 1, 2]], length=48, exhausted=False) for _ in range(2)]
    (table,) = DataOverlap().tables(run_of(*ranks))
    assert table.rows[0][6:] == ("-", "sequential, stopped early")


@pytest.mark.parametrize(
    ("epochs", "told"),
    [
        (([0, 2, 4, 6], [1, 3, 5, 0]), "sequential"),
        (([0, 2, 4, 6], [1, 3, 5, 4]), "shuffled"),  # no padding of what is in order
        (([0, 2, 4, 6], [1, 5, 3, 0]), "shuffled"),
        (([0, 2, 4], [1, 3, 0]), "shuffled"),  # nothing is padded
    ],
)
def test_the_order_is_told_without_what_pads_the_end(
    epochs: tuple[list[int], ...], told: str
) -> None:
    length = 7 if len(epochs[0]) == 4 else 6
    (table,) = DataOverlap().tables(run_of(*(loader(0, [e], length=length) for e in epochs)))
    assert [row[-1] for row in table.rows] == [told]
