"""DDP402 between two steps: copies that are evaluated, and those of the end."""

from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from replicas import LINE, digests, equal, run_of

from ddpdoctor.events import Loaded
from ddpdoctor.events.drift import AGAIN
from ddpdoctor.report.findings import Severity

SAME, APART = [1, 2, 3, 4], [1, 2, 30, 4]
LOADED = Loaded(at=0, what="weights", model=0, step=0, site=LINE)


def test_a_difference_at_the_end_only_is_a_note():
    ranks = {
        0: [equal("parameters"), digests("parameters", {4: [1, 2, 3, 4]}, point="end")],
        1: [equal("parameters"), digests("parameters", {4: [1, 2, 3, 5]}, point="end")],
    }
    (finding,) = ParameterDrift().examine(run_of(ranks))
    assert finding.severity is Severity.NOTE


def test_a_difference_at_evaluation_is_an_error():
    ranks = {
        0: [digests("parameters", {0: [1, 2, 3, 4]}, point="eval", optimizer=-1)],
        1: [digests("parameters", {0: [1, 2, 3, 5]}, point="eval", optimizer=-1)],
    }
    (finding,) = ParameterDrift().examine(run_of(ranks))
    assert finding.severity is Severity.ERROR


def evaluations(*rows, forwards=4):
    """Of the parameters, after so many forwards with gradients: the first one, and those that
    follow without training in between."""
    first, *others = rows
    again = {AGAIN * forwards + n: row for n, row in enumerate(others, 1)}
    return [
        digests("parameters", {forwards: first}, point="eval", optimizer=-1),
        *([digests("parameters", again, point="again", optimizer=-1)] if again else []),
    ]


def test_weights_that_one_rank_goes_back_to_before_it_evaluates_again():
    ranks = {0: [*evaluations(SAME), LOADED, *evaluations(SAME, APART)[1:]]}
    ranks[1] = evaluations(SAME, SAME)
    (finding,) = ParameterDrift().examine(run_of(ranks))
    assert finding.severity is Severity.ERROR
    assert (finding.location.line, finding.ranks) == (33, (0,))


def test_a_rank_that_evaluates_more_often_may_hold_other_weights_for_it():
    ranks = {0: evaluations(SAME, APART, SAME), 1: evaluations(SAME, SAME)}
    assert list(ParameterDrift().examine(run_of(ranks))) == []


def test_each_rank_evaluates_a_checkpoint_of_its_own():
    ranks = {
        n: [*evaluations(SAME), LOADED, *evaluations(SAME, (SAME, APART)[n])[1:]] for n in range(2)
    }
    assert list(ParameterDrift().examine(run_of(ranks))) == []


def test_who_evaluates_alone_before_all_load_other_weights():
    ranks = {0: evaluations(SAME, APART), 1: evaluations(APART)}
    assert list(ParameterDrift().examine(run_of(ranks))) == []


def test_who_evaluates_alone_with_weights_that_the_others_never_have():
    ranks = {0: evaluations(SAME, SAME), 1: evaluations(APART)}
    (finding,) = ParameterDrift().examine(run_of(ranks))
    assert finding.severity is Severity.ERROR
