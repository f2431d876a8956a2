"""DDP408 on literal events."""

from ddpdoctor.checks.drift.redundant_sync import RedundantSync
from recordings import site
from replicas import LINE, OTHER, WRAP, run_of
from wraps import unused

from ddpdoctor.events import SyncPattern
from ddpdoctor.report.findings import Severity


def pattern(step=0, synced=4, once=4, line=LINE, exposed=0.01, **fields):
    return SyncPattern(
        at=0, model=0, optimizer=0, step=step, synced=synced, once=once, line=line,
        exposed_s=exposed, backward_s=0.05, **fields,
    )  # fmt: skip


def test_accumulation_that_averages_every_time():
    (finding,) = RedundantSync().examine(run_of({n: [pattern()] for n in range(2)}))
    assert (finding.severity, finding.location.line) == (Severity.WARNING, 33)
    assert finding.steps.count == 4


def test_without_a_backward_through_a_wrapper():
    assert RedundantSync().unobserved(run_of({n: [] for n in range(2)})) is not None


def test_the_advice_names_the_wrapper_as_the_program_does():
    events = [site(WRAP, "train.py", 10, "self.ddp = DDP(net)"), pattern()]
    (finding,) = RedundantSync().examine(run_of(dict.fromkeys(range(2), events)))
    assert "self.ddp.no_sync()" in finding.fix


def test_no_sync_does_not_go_with_a_static_graph():
    told = unused([], static_graph=True)
    for events, static in (([pattern()], False), ([told, pattern()], True)):
        (finding,) = RedundantSync().examine(run_of(dict.fromkeys(range(2), events)))
        assert ("static graph" in finding.fix) is static


def test_one_averaging_backward_per_step():
    run = run_of({n: [pattern(synced=1, once=1, unsynced=3)] for n in range(2)})
    assert list(RedundantSync().examine(run)) == []


def test_backwards_from_different_lines_are_a_note():
    (finding,) = RedundantSync().examine(run_of({n: [pattern(synced=2, once=1)] for n in range(2)}))
    assert (finding.rule, finding.severity) == ("backwards-of-different-lines", Severity.NOTE)


def test_losses_of_different_parameters():
    run = run_of({n: [pattern(synced=2, once=0, line=-1)] for n in range(2)})
    assert list(RedundantSync().examine(run)) == []


def test_a_single_step_is_too_little():
    events = [pattern(), pattern(step=1, synced=1, once=1, line=OTHER)]
    assert list(RedundantSync().examine(run_of(dict.fromkeys(range(2), events)))) == []


def test_a_saving_beyond_the_step_is_not_claimed():
    for exposed in (0.9, 0.03):  # of 0.1 s: once and four times is more than all of it
        (finding,) = RedundantSync().examine(
            run_of({n: [pattern(exposed=exposed)] for n in (0, 1)})
        )
        assert finding.evidence["saving_percent"] is None
    (finding,) = RedundantSync().examine(run_of({n: [pattern(exposed=0.0)] for n in (0, 1)}))
    assert finding.evidence["saving_percent"] == 0.0


def test_no_sync_around_the_backward_only_is_pointed_at():
    apart = [pattern(synced=4, once=1, late=OTHER)]
    (finding,) = RedundantSync().examine(run_of(dict.fromkeys(range(2), apart)))
    assert finding.severity is Severity.WARNING
    assert len(finding.related) == 1
