"""Who stands apart, where not all ranks looked at what differs first."""

import pytest
from ddpdoctor.checks.drift.gradient_drift import GradientDrift
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from replicas import digests, run_of

SAME = {n: [4 * n + i + 10 for i in range(4)] for n in range(4)}


def rows(*steps, **other):
    """Of these steps; `at_2=7` is another digest of the first tensor at step 2."""
    return {n: [other.get(f"at_{n}", SAME[n][0]), *SAME[n][1:]] for n in steps}


def told(ranks, *, check=GradientDrift):
    (finding,) = check().examine(run_of({n: list(e) for n, e in ranks.items()}))
    return finding


def gradients(**by_rank):
    return {int(n[1:]): [digests("gradients", table)] for n, table in by_rank.items()}


def test_a_later_look_of_the_gradients_tells_who_is_apart():
    finding = told(gradients(
        r0=rows(0, 2, 3), r1=rows(0, 1, 3), r2=rows(0, 1, 2, 3, at_1=7, at_3=7)
    ))  # fmt: skip
    assert (finding.ranks, finding.steps.first) == ((2,), 1)
    assert finding.evidence["distinct_gradients"] == "ranks 0-1 | rank 2"
    assert finding.evidence["not_compared_at_first"] == "rank 0"
    assert finding.evidence["groups_according_to"] == "gradients at step 3"


@pytest.mark.parametrize(("point", "key"), [("step", 2), ("end", 4)])
def test_parameters_of_the_same_names_tell_who_is_apart(point, key):
    ranks = gradients(r0=rows(0), r1=rows(0, 1), r2=rows(0, 1, at_1=7))
    for n, mine in ranks.items():
        mine.append(digests("parameters", {key: [5 + (n == 2), 6, 7, 8]}, point=point))
    finding = told(ranks)
    assert (finding.ranks, finding.steps.first, finding.steps.count) == ((2,), 1, 1)
    when = "at the end" if point == "end" else "at step 2"
    assert finding.evidence["groups_according_to"] == f"parameters {when}"
    if point == "step":
        (effect,) = ParameterDrift().examine(run_of(ranks))
        assert effect.ranks == (2,)
        assert GradientDrift().explains(finding, effect)


def test_parameters_of_other_names_do_not():
    ranks = gradients(r0=rows(0), r1=rows(0, 1), r2=rows(0, 1, at_1=7))
    for n, mine in ranks.items():
        mine.append(digests("parameters", {2: [5, 6, 7, 8 + (n == 2)]}))
    finding = told(ranks)
    assert finding.ranks == (1, 2)
    assert "groups_according_to" not in finding.evidence
    assert finding.evidence["not_compared_at_first"] == "rank 0"


@pytest.mark.parametrize("later", [
    {},
    {"r0": 6, "r1": 7, "r2": 8},  # every rank by itself
    {"r0": 8},  # another one than those that parted
    {"r0": 8, "r2": 8, "r1": 9},  # another one, and step 3 says that it is the other
], ids=["none", "all", "other", "contrary"])  # fmt: skip
def test_where_other_looks_do_not_agree_none_is_blamed(later):
    at_3 = {"r2": 7} if later.get("r1") == 9 else {}
    tables = {
        name: rows(
            *steps,
            2,
            3,
            at_1=7 if name == "r2" else SAME[1][0],
            at_2=later.get(name, SAME[2][0]),
            at_3=at_3.get(name, SAME[3][0]),
        )
        for name, steps in {"r0": (0,), "r1": (0, 1), "r2": (0, 1)}.items()
    }
    finding = told(gradients(**tables))
    assert finding.ranks == (1, 2)
    assert finding.evidence["distinct_gradients"] == "rank 1 | rank 2"


@pytest.mark.parametrize("whole", [True, False])
def test_two_halves_stay_halves(whole):
    """Ranks 2 and 3 are apart from 0 and 1; a look that lacks one of them has a majority."""
    tables = {
        f"r{n}": rows(
            *(() if n in (0, 3) else (1,)),
            *(() if n == 3 and not whole else (2,)),
            at_1=7 if n > 1 else SAME[1][0],
            at_2=7 if n > 1 else SAME[2][0],
        )
        for n in range(4)
    }
    finding = told(gradients(**tables))
    assert finding.ranks == (1, 2)
    finding = told(gradients(**{n: rows(1, at_1=7 if n > "r1" else 9) for n in tables}))
    assert finding.ranks == (0, 1, 2, 3)
    assert "not_compared_at_first" not in finding.evidence


def test_what_the_first_look_tells_stays():
    tables = {f"r{n}": rows(0, 1, 2, at_1=7 if n == 2 else 9, at_2=n + 30) for n in range(3)}
    finding = told(gradients(**tables))
    assert finding.ranks == (2,)
    assert not {"groups_according_to", "not_compared_at_first"} & {*finding.evidence}


def test_of_two_ranks_both_stay():
    tables = {"r0": rows(0, 1, 2, at_1=7, at_2=7), "r1": rows(0, 1, 2)}
    assert told(gradients(**tables)).ranks == (0, 1)


def test_parameters_are_told_by_their_later_looks_too():
    tables = {"r0": rows(0, 2, 3), "r1": rows(0, 1, 3), "r2": rows(0, 1, 3, at_1=7, at_3=7)}
    ranks = {int(n[1:]): [digests("parameters", t)] for n, t in tables.items()}
    finding = told(ranks, check=ParameterDrift)
    assert (finding.ranks, finding.steps.first) == ((2,), 1)
