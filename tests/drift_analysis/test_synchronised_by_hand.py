"""DDP402 without a wrapper, on literal events: gradients that the program exchanges by hand."""

import msgspec
import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from recordings import make_run, site, steps
from wraps import group, parameters

from ddpdoctor.events import Hyperparameters, Unwrapped, UnwrappedState

STEPS = 12


def states(rank, *, apart=range(0), local=(), odd=range(0), averaged=(), count=STEPS, looks=None):
    """One look before every step: copies differ at the steps `apart`, gradients are not exchanged
    at `local` and differ at `odd`, parameters are averaged before `averaged`."""
    done = mean = 0
    for n in range(count + 1):
        mean += n in averaged
        last = n == count
        complete = not last and n not in local
        differ = n in odd or n in local
        if looks is None or n in looks or last:
            yield UnwrappedState(
                at=0,
                optimizer=0,
                step=n,
                gradients=100 + n + (1000 * rank if differ else 0),
                parameters=200 + n + (1000 * rank if n in apart else 0),
                exchanged="gradients",
                complete=complete,
                completed=done,
                averaged=mean,
                last=last,
            )
        done += complete


def run_of(tables, *, aside=-1, told=1, world_size=None):
    """`aside`: a rank that trains other parameters."""
    made = [site(1, "train.py", 3, "net = Net()"), site(2, "train.py", 9, "optimizer.step()")]
    events = {}
    for n, rows in tables.items():
        held = parameters(("aux",) if n == aside else ("body", "head"))
        event = Unwrapped(at=0, optimizer=0, kind="Net", site=1, step_site=2, parameters=held)
        events[n] = [*made, group(tuple(tables)), *[event] * told, *rows, *steps(STEPS)]
    return make_run(events, world_size=world_size)


def found_in(ranks=(0, 1), **kwargs):
    return list(ParameterDrift().examine(run_of({n: states(n, **kwargs) for n in ranks})))


def test_copies_that_stay_equal():
    run = run_of({n: states(n) for n in (0, 1)})
    assert list(ParameterDrift().examine(run)) == []
    assert ParameterDrift().unobserved(run) is None


def test_a_step_whose_gradients_were_not_exchanged():
    (found,) = found_in(local=(5,), apart=range(6, 13))
    assert found.severity.value == "error"
    assert (found.steps.first, found.location.line, found.ranks) == (6, 9, (0, 1))
    assert found.evidence["steps_in_between_not_synchronised"] == [
        {"rank": 0, "steps": 1}, {"rank": 1, "steps": 1},
    ]  # fmt: skip


def test_the_rank_that_leaves_it_out_is_named():
    tables = {n: states(n, local=(5,) if n == 2 else (), apart=range(6, 13)) for n in range(3)}
    (found,) = ParameterDrift().examine(run_of(tables))
    assert found.rule == "step-not-synced"
    assert found.evidence["steps_in_between_not_synchronised"] == [{"rank": 2, "steps": 1}]


def test_an_edit_on_one_rank():
    tables = {n: states(n, apart=range(5, 13) if n == 2 else ()) for n in range(3)}
    (found,) = ParameterDrift().examine(run_of(tables))
    assert found.ranks == (2,)


def test_gradients_that_are_made_different_after_the_exchange():
    (found,) = found_in(odd=range(4, 12), apart=range(5, 13))
    assert found.rule == "edit-after-sync"


def test_a_rate_that_the_ranks_change_at_different_steps():
    def rates(changed):
        for step, lr in ((0, 0.1), (changed, 0.05)):
            sites = {"lr": 1} if step else {}
            yield Hyperparameters(
                at=0, optimizer=0, step=step, groups=({"lr": lr},), set_sites=sites
            )

    looks = [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]
    tables = {n: [*rates(5 + n), *states(n, apart=range(6, 20), looks=looks)] for n in range(2)}
    (found,) = ParameterDrift().examine(run_of(tables))
    assert found.rule == "unequal-options"
    assert [place.location.line for place in found.related] == [3, 3]


def skipping(rank, *, after=100, skips=(), apart=range(0), looks=None, ends=True, alone=0):
    """States of a rank that exchanges in every round and leaves these steps out; `alone`: numbers
    that it exchanges besides in each step."""
    taken, edited = 0, states(rank, apart=apart, count=STEPS - len(skips), looks=looks)
    rounds = [n for n in range(STEPS) if n not in skips]
    for row in edited:
        done = STEPS - 1 if row.last else rounds[row.step]
        mean = sum(n < done for n in skips)
        taken = row.step
        if not row.last or ends:
            yield msgspec.structs.replace(
                row, elements=after * done + alone * taken, averaged=mean if done else 0
            )


@pytest.mark.parametrize("ends", [True, False])
def test_a_step_that_a_rank_leaves_out_after_the_exchange(ends):
    apart = range(6, 13)
    tables = {
        n: skipping(n if n == 1 else 0, skips=(5,) if n == 1 else (), apart=apart, ends=ends)
        for n in range(3)
    }
    (found,) = ParameterDrift().examine(run_of(tables))
    assert (found.ranks, found.steps.first, found.location.line) == ((1,), 6, 9)
    assert (found.rule, found.severity.value) == ("skipped-step-manual-sync", "error")


def test_a_step_that_a_rank_leaves_out_after_the_last_look():
    looks = (0, 1, 2, 4)
    tables = {0: list(skipping(0, apart=(12,), looks=looks)),
              1: list(skipping(1, skips=(9,), apart=(11,), looks=looks))}  # fmt: skip
    (found,) = ParameterDrift().examine(run_of(tables))
    assert (found.ranks, found.steps) == ((1,), None)
    same = [msgspec.structs.replace(e, parameters=1) if e.last else e for e in tables[1]]
    even = [msgspec.structs.replace(e, parameters=1) if e.last else e for e in tables[0]]
    assert list(ParameterDrift().examine(run_of({0: even, 1: same}))) == []


def test_who_exchanges_more_in_every_step_has_left_nothing_out():
    apart = range(6, 13)
    tables = {n: skipping(n, apart=apart, alone=100 * n) for n in range(2)}
    (found,) = ParameterDrift().examine(run_of(tables))
    assert found.rule == "unequal-updates"


def test_an_exchange_that_stops_midway():
    (found,) = found_in(local=range(8, 12), apart=range(9, 13))
    assert found.severity.value == "error"
    assert (found.steps.first, found.steps.last, found.steps.count) == (9, 11, 3)


def early(change=None, ended=True, **kwargs):
    """Copies whose exchange stops after four steps of twelve; `change`: of all states since."""
    settings = {"local": range(4, 12), "apart": range(5, 13), **kwargs}
    tables = {n: list(states(n, **settings)) for n in (0, 1)}
    for rows in tables.values():
        rows[6:] = [msgspec.structs.replace(s, **change or {}) for s in rows[6:]]
        rows[3] = msgspec.structs.replace(rows[3], exchange_site=3)
        del rows[len(rows) - (not ended) :]
        rows.insert(0, site(3, "train.py", 7, "dist.all_reduce(flat)"))
    return list(ParameterDrift().examine(run_of(tables)))


def test_an_exchange_that_stops_early():
    (found,) = early()
    assert (found.severity.value, found.confidence.value) == ("error", "suspected")
    assert (found.steps.first, found.steps.last, found.location.line) == (5, 11, 9)
    assert found.rule == "sync-stopped"
    assert [r.location.line for r in found.related] == [7, 3]


@pytest.mark.parametrize("kwargs", [
    pytest.param({"change": {"elements": 50}}, id="as much is exchanged later by other means"),
    pytest.param({"change": {"averaged": 1}}, id="the parameters are averaged"),
    pytest.param({"change": {"exchanged": "parameters"}}, id="they are, in the end"),
    pytest.param({"change": {"gradients": 1}}, id="the gradients agree all the same"),
    pytest.param({"apart": range(5, 12)}, id="equal again at the end"),
    pytest.param({"apart": [5, 6, 8, 9, 10, 11, 12]}, id="equal again in between"),
    pytest.param({"local": (1, *range(4, 12))}, id="not exchanged in every step before"),
    pytest.param({"local": (4, 5, *range(7, 12))}, id="exchanged once more"),
    pytest.param({"ended": False}, id="the end is not on record"),
])  # fmt: skip
def test_an_early_end_of_the_exchange_that_says_nothing(kwargs):
    assert early(**kwargs) == []


def test_an_exchange_that_goes_on_by_other_means():
    tables = {n: list(states(n, local=range(8, 12), apart=range(9, 13))) for n in (0, 1)}
    for rows in tables.values():
        rows[9:] = [msgspec.structs.replace(s, exchanged="point-to-point") for s in rows[9:]]
    assert list(ParameterDrift().examine(run_of(tables))) == []


def once(change=None, ended=True, **kwargs):
    """Copies that part after the first step; `change`: of all states since."""
    settings = {"local": range(1, 12), "apart": range(2, 13), "looks": (0, 1, 2, 4, 8), **kwargs}
    tables = {n: list(states(n, **settings)) for n in (0, 1)}
    for rows in tables.values():
        rows[2:] = [msgspec.structs.replace(s, **change or {}) for s in rows[2:]]
        del rows[len(rows) - (not ended) :]
    return list(ParameterDrift().examine(run_of(tables)))


@pytest.mark.parametrize("kwargs", [{}, {"ended": False}, {"looks": None}])
def test_an_exchange_of_the_first_step_only(kwargs):
    (found,) = once(**kwargs)
    assert (found.severity.value, found.confidence.value) == ("error", "suspected")
    assert (found.steps.first, found.location.line) == (2, 9)


def test_an_exchange_of_the_first_step_only_that_is_made_inside_the_backward():
    tables = {n: list(states(n, local=range(1, 12), apart=range(2, 13))) for n in (0, 1)}
    for n, rows in tables.items():
        tables[n] = [
            msgspec.structs.replace(
                s, exchanged="in backward", complete=False, completed=0, inside=s.completed
            )
            for s in rows
        ]
    run = run_of(tables)
    assert ParameterDrift().unobserved(run) is None
    (found,) = ParameterDrift().examine(run)
    assert found.steps.first == 2


@pytest.mark.parametrize("kwargs", [
    pytest.param({"change": {"elements": 50}}, id="as much is exchanged later by other means"),
    pytest.param({"change": {"averaged": 1}}, id="the parameters are averaged"),
    pytest.param({"change": {"late": 3}}, id="exchanged after the step"),
    pytest.param({"apart": range(2, 12)}, id="equal again at the end"),
    pytest.param({"apart": [2, 8, 12]}, id="equal again in between"),
    pytest.param({"apart": range(13)}, id="never equal"),
    pytest.param({"apart": range(1, 13)}, id="the first step parts them"),
    pytest.param({"odd": [0]}, id="the gradients of the first step differ"),
    pytest.param({"local": range(12)}, id="not exchanged"),
    pytest.param({"local": range(2, 12)}, id="a synchronised warm-up of two steps"),
    pytest.param({"local": [n for n in range(12) if n % 6]}, id="in every sixth step"),
    pytest.param({"looks": (0, 1, 2, 4)}, id="a short run"),
])  # fmt: skip
def test_first_steps_that_say_nothing(kwargs):
    assert once(**kwargs) == []


def test_few_looks_place_it_less_well():
    (found,) = found_in(local=(5,), apart=range(6, 13), looks=(0, 1, 2, 4, 8))
    assert found.evidence["last_equal_at_step"] == 4
    (found,) = found_in(apart=range(6, 13), looks=(0, 1, 2, 4, 8))


def test_only_the_last_step_left_out_is_a_note():
    (found,) = found_in(local=(11,), apart=(12,))
    assert found.severity.value == "note"


@pytest.mark.parametrize("kwargs", [
    pytest.param({"apart": (12,)}, id="another model is loaded when the run is over"),
    pytest.param({"local": (5,), "apart": range(6, 10)}, id="equal again later"),
    pytest.param({"local": (5,), "apart": range(6, 12)}, id="equal again at the end"),
    pytest.param({"local": (5,), "apart": range(6, 13), "averaged": (9,)}, id="set right"),
    pytest.param(
        {"local": (4, 5, 7, 8, 10, 11), "apart": range(5, 13)}, id="mostly apart from then on"
    ),
    pytest.param({"local": range(12), "apart": range(1, 13)}, id="never exchanged"),
    pytest.param({"apart": range(13)}, id="never equal"),
    pytest.param({"apart": range(1, 13)}, id="equal only before the first step"),
    pytest.param({"local": (0, 1, 2), "apart": range(3, 13)}, id="equal without the exchange"),
])  # fmt: skip
def test_traps(kwargs):
    assert found_in(**kwargs) == []


def test_a_rank_that_left_no_record():
    tables = {n: list(states(n, apart=range(5, 13))) for n in (0, 1)}
    assert list(ParameterDrift().examine(run_of(tables)))
    assert list(ParameterDrift().examine(run_of(tables, world_size=3))) == []


def test_ranks_that_train_other_parameters():
    tables = {n: list(states(n, apart=range(5, 13))) for n in (0, 1)}
    assert list(ParameterDrift().examine(run_of(tables, aside=1))) == []


def test_lists_of_parameters_that_change_are_left_out():
    tables = {n: states(n, apart=range(5, 13)) for n in (0, 1)}
    assert list(ParameterDrift().examine(run_of(tables, told=2))) == []


def test_nothing_to_compare_is_said():
    run = run_of({n: states(n, local=range(12)) for n in (0, 1)})
    assert "wrapped" in ParameterDrift().unobserved(run)


def staged(change=None, **faulty):
    """Two stages of a pipeline, each on two ranks, which exchange in groups of their own and send
    to the other stage; `faulty` are ranks 1 and 3, `change` is of what they do later."""
    tables = {}
    for n in range(4):
        rows = states(n, **(faulty if n % 2 else {}))
        own = {"exchanged": "point-to-point", "group": 1, "partners": (n ^ 1,)}
        own_group = group((n % 2, n % 2 + 2), 1, f"stage {n % 2}")
        tables[n] = [own_group, *(msgspec.structs.replace(s, **own) for s in rows)]
        if n % 2 and change:
            tables[n][8:] = [msgspec.structs.replace(s, **change) for s in tables[n][8:]]
    return list(ParameterDrift().examine(run_of(tables)))


def test_an_exchange_in_a_group_that_leaves_a_step_out():
    assert staged() == []
    (found,) = staged(local=(5,), apart=range(6, 13))
    assert (found.ranks, found.steps.first) == ((1, 3), 6)
    assert (found.severity.value, found.confidence.value) == ("error", "proven")


def test_an_exchange_in_a_group_that_stops_while_the_other_goes_on():
    (found,) = staged(local=range(4, 12), apart=range(5, 13))
    assert (found.ranks, found.steps.first) == ((1, 3), 5)
    assert found.confidence.value == "suspected"


@pytest.mark.parametrize("kwargs", [
    pytest.param({"change": {"elements": 50}}, id="as much is exchanged later by other means"),
    pytest.param({"change": {"averaged": 1}}, id="the parameters are averaged"),
    pytest.param({"change": {"partners": (0, 1, 2, 3)}}, id="they send to each other"),
    pytest.param({"change": {"partners": (-1,)}}, id="they receive from any"),
    pytest.param({"change": {"group": -1}}, id="in another group"),
    pytest.param({"change": {"group": 0}}, id="in the default group"),
    pytest.param({"apart": range(5, 12)}, id="equal again at the end"),
])  # fmt: skip
def test_groups_that_say_nothing(kwargs):
    assert staged(**{"local": range(4, 12), "apart": range(5, 13), **kwargs}) == []


def test_groups_that_part_in_one_step_are_told_together():
    tables = {n: list(states(n, local=(5,), apart=range(6, 13))) for n in range(4)}
    for n, rows in tables.items():
        mine = group((0, 1) if n < 2 else (2, 3), 1, "pair")
        tables[n] = [mine, *(msgspec.structs.replace(s, group=1) for s in rows)]
    (found,) = ParameterDrift().examine(run_of(tables))
    assert found.ranks == (0, 1, 2, 3)


def test_a_group_of_all_ranks_that_is_not_the_default_one():
    tables = {n: list(states(n, local=(5,), apart=range(6, 13))) for n in (0, 1)}
    for n, rows in tables.items():
        own = {"group": 3, "exchanged": "gradients of a group"}
        all_ranks = group((0, 1), 3, "all")
        tables[n] = [all_ranks, *(msgspec.structs.replace(s, **own) for s in rows)]
    (found,) = ParameterDrift().examine(run_of(tables))
    assert found.rule == "step-not-synced"
