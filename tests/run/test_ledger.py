"""The time ledger: accounts that add up, and for whom ranks wait."""

from __future__ import annotations

import pytest
from ledgers import LedgerOf
from recordings import START, make_run

from ddpdoctor.events import Account, TimeLedger
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.run.ledger import ACCOUNTS, ledger_of
from ddpdoctor.storage.call_ring import Phase

ROUNDS = 8


def two_ranks(*, late: float = 0.5, also: float = 0.0):  # type: ignore[no-untyped-def]
    """Rank 0 is late once in each of eight stretches; rank 1, in the same ones, too."""
    ranks = [LedgerOf(), LedgerOf()]
    for n in range(1, ROUNDS + 1):
        ranks[0].steps(8 * n, forward=0.1, outside=late, waits=also + 0.01)
        ranks[1].steps(8 * n, forward=0.1, outside=also, waits=late + 0.01)
    return make_run({r: one.events for r, one in enumerate(ranks)})


def test_accounts_add_up_to_the_wall_time() -> None:
    one = LedgerOf(start_s=3.0)
    one.steps(
        8, loading=1, forward=2, backward=4, optimizer=0.5, outside=0.25, evaluation=5,
        checkpoint=6, leaving=0.125, waits=7, doctor=0.0625,
    )  # fmt: skip
    time = ledger_of(make_run({0: one.events}).ranks).ranks[0]
    assert set(time.accounts) == set(ACCOUNTS)
    assert sum(time.accounts.values()) == pytest.approx(time.wall_s)
    assert time.accounts["outside"] == 0.375
    assert (time.accounts["evaluation"], time.accounts["checkpoint"]) == (5, 6)
    assert time.accounts["start-up"] == 3


def test_no_account_is_negative() -> None:
    one = LedgerOf().steps(8, forward=1.0, optimizer=-0.25, doctor=0.5)
    time = ledger_of(make_run({0: one.events}).ranks).ranks[0]
    assert (time.accounts["optimizer"], time.accounts["doctor"]) == (0.0, 0.25)
    assert sum(time.accounts.values()) == pytest.approx(time.wall_s)


def test_waiting_that_is_counted_twice_leaves_no_account_negative() -> None:
    one = LedgerOf().steps(8, forward=4.0, backward=-1.0, waits=3.0, doctor=0.5)
    time = ledger_of(make_run({0: one.events}).ranks).ranks[0]
    assert all(seconds >= 0 for seconds in time.accounts.values())
    assert time.accounts["communication"] == 2.5
    assert sum(time.accounts.values()) == pytest.approx(time.wall_s)


def test_what_all_ranks_wait_is_communication_and_the_rest_is_for_the_last_one() -> None:
    ledger = ledger_of(two_ranks().ranks)
    assert ledger.ranks[1].waited_for == {0: pytest.approx(ROUNDS * 0.5)}
    assert ledger.ranks[0].waited_for == {}
    for rank in ledger.ranks.values():
        assert rank.accounts["communication"] == pytest.approx(ROUNDS * 0.01)
        assert sum(rank.accounts.values()) == pytest.approx(rank.wall_s)
    assert ledger.lost_for(0) == pytest.approx(4.0)


def test_ranks_that_are_late_in_turn_within_a_stretch_wait_for_no_one() -> None:
    ledger = ledger_of(two_ranks(also=0.5).ranks)
    assert not any(rank.waited_for for rank in ledger.ranks.values())


def test_the_work_of_fewer_ranks() -> None:
    words = ledger_of(two_ranks().ranks).efficiency()
    assert words == (
        "2 ranks did the work of 1.1: they worked for 57 % of their time, 41 % was lost waiting "
        "for rank 0"
    )


def test_waiting_that_is_not_timed_is_no_work() -> None:
    """DDP waits inside backwards, which are not timed where steps are short."""
    ranks = [LedgerOf(), LedgerOf()]
    for one in ranks:
        one.steps(8, forward=1.0, backward=4.0, timed=False)
    words = ledger_of(make_run({r: one.events for r, one in enumerate(ranks)}).ranks).efficiency()
    assert "not timed" in words
    assert "did the work" not in words


def test_a_rank_without_records_is_left_out() -> None:
    ranks = two_ranks().ranks
    ledger = ledger_of(make_run({0: list(ranks[0]), 1: []}).ranks)
    assert list(ledger.ranks) == [0]
    assert ledger.efficiency() == ""


def test_a_rank_whose_records_end_early() -> None:
    """It was killed: what it had recorded counts, and the accounts of the others add up."""
    ranks = [LedgerOf(), LedgerOf()]
    ranks[0].steps(8, outside=0.5).steps(16, outside=0.5)
    ranks[1].steps(8, waits=0.5)
    ledger = ledger_of(make_run({r: one.events for r, one in enumerate(ranks)}).ranks)
    assert ledger.ranks[1].waited_for == {0: 0.5}
    assert sum(ledger.ranks[1].accounts.values()) == pytest.approx(ledger.ranks[1].wall_s)


def test_what_the_report_says() -> None:
    ranks = [LedgerOf(), LedgerOf()]
    ranks[0].steps(8, outside=7.0)
    ranks[1].steps(8, outside=1.0, waits=6.0)
    report = diagnose(make_run({r: one.events for r, one in enumerate(ranks)}), [])
    assert [row.rank for row in report.ledger] == [0, 1]
    assert report.ledger[1].waiting_for == {"0": 6.0}
    assert sum(report.ledger[1].accounts.values()) == pytest.approx(report.ledger[1].wall_s)
    (table,) = report.tables
    assert table.columns == ("rank", "all", "start-up", "other code", "waiting", "rest")
    assert table.rows == (
        ("0", "8.0", "1.0", "7.0", "0.0", "0.0"),
        ("1", "8.0", "1.0", "1.0", "6.0", "0.0"),
    )
    assert "57 % of their time, 43 % was lost waiting for rank 0" in table.title
    assert report.lost in table.title and report.lost.startswith("2 ranks did the work of")


def test_what_is_lost_is_said_where_it_is_much() -> None:
    ranks = [LedgerOf(), LedgerOf()]
    for one in ranks:
        one.steps(8, outside=7.0, waits=0.8)
    little = diagnose(make_run({r: one.events for r, one in enumerate(ranks)}), [])
    assert "lost" in little.tables[0].title and little.lost == ""
    for one in ranks:
        one.steps(16, outside=1.0, waits=4.0, backward=30.0, timed=False)
    untimed = diagnose(make_run({r: one.events for r, one in enumerate(ranks)}), [])
    assert untimed.lost == "", "nobody knows what was lost in these backwards"


def test_a_short_run_has_rows_and_no_table() -> None:
    report = diagnose(make_run({0: LedgerOf().steps(8, forward=1.0).events}), [])
    assert report.ledger and not report.tables


def test_a_rank_that_never_trains_is_not_starting_all_the_time() -> None:
    """An actor, or a server of others: it answers them from the moment it joined them."""
    learner, actor = LedgerOf().steps(8, forward=4.0), LedgerOf()
    actor.events.append(actor_record(waited=3.0, own=1.0))
    ledger = ledger_of(make_run({0: learner.events, 1: actor.events}).ranks)
    time = ledger.ranks[1]
    assert time.accounts["start-up"] == 1.0
    assert time.accounts["outside"] == 1.0
    assert time.accounts["waiting"] + time.accounts["communication"] == 3.0
    assert "ended earlier" not in ledger.efficiency()


def actor_record(*, waited: float, own: float) -> TimeLedger:
    return TimeLedger(
        at=START + 5,
        step=0,
        wall_s=5.0,
        doctor_s=0.0,
        accounts=(Account(Phase.START, -1, 1.0, 0.0), Account(Phase.USER, -1, own, waited)),
    )


@pytest.mark.parametrize(
    ("start_s", "forward", "said"),
    [(9.0, 2.0, "0.8 as ranks began training later"), (1.0, 2.0, "0.8 as ranks ended earlier")],
)
def test_ranks_that_are_there_for_a_part_of_the_time(
    start_s: float, forward: float, said: str
) -> None:
    ranks = [LedgerOf().steps(8, forward=10.0), LedgerOf(start_s).steps(8, forward=forward)]
    told = ledger_of(make_run({r: one.events for r, one in enumerate(ranks)}).ranks).efficiency()
    assert said.partition(" ")[2] in told and "40 % was lost" in told
