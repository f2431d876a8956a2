"""DDP407 on literal events."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from ddpdoctor.checks.drift.unsynced_step import ANOTHER, FLAG_FIXES, REASONS, UnsyncedStep
from ddpdoctor.checks.hang.first_failure import FirstFailure
from recordings import make_run, site, steps
from replicas import BACKWARD, LINE, OTHER, STEP, digests, replica, run_of

from ddpdoctor.events import CommHook, Edited, KeptBack, Replica, SyncPattern
from ddpdoctor.probe.training import backwards
from ddpdoctor.probe.training.optimizers import Optimizers
from ddpdoctor.probe.watchers.gradients import gradient_sync
from ddpdoctor.probe.watchers.gradients.gradient_sync import GradientSync
from ddpdoctor.probe.watchers.graph import fsdp_no_sync
from ddpdoctor.probe.watchers.graph.fsdp_no_sync import FSDPNoSync
from ddpdoctor.probe.watchers.manual_sync.exchanges import Exchanges
from ddpdoctor.report.errors import error_kinds


def pattern(step=0, reason="no_sync", synced=0, unsynced=1, talked=False, optimizer=0, **more):
    return SyncPattern(
        at=0, model=0, optimizer=optimizer, step=step, synced=synced, unsynced=unsynced,
        reason=reason, site=LINE, backward_site=BACKWARD, talked=talked, **more,
    )  # fmt: skip


def local(*values):
    return digests("local", {0: values})


@pytest.mark.parametrize("reason", REASONS)
def test_every_way_to_step_without_averaging(reason):
    run = run_of({n: [pattern(reason=reason), local(1, 2, 3, n)] for n in range(2)})
    (finding,) = UnsyncedStep().examine(run)
    assert (finding.rule, finding.ranks) == (REASONS[reason].rule, (0, 1))
    assert finding.location.line == 33
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (0, 3, 4)


@pytest.mark.parametrize(("reason", "averages", "hooked"), [
    ("not reduced", False, True),
    ("not reduced", True, False),
    ("no_sync", False, False),
])  # fmt: skip
def test_a_communication_hook_that_does_not_communicate(reason, averages, hooked):
    """One of torch's that averages is not to blame."""
    hook = CommHook(at=0, model=0, name="__main__.mine", site=8)
    events = [site(8, "train.py", 5, "model.register_comm_hook(None, mine)"), hook]
    rows = {
        n: [*replica(), *events, pattern(reason=reason), local(1, 2, 3, n), *steps(4, site=STEP)]
        for n in range(2)
    }
    for n, row in rows.items():
        rows[n] = [
            msgspec.structs.replace(e, averages=averages) if isinstance(e, Replica) else e
            for e in row
        ]
    (finding,) = UnsyncedStep().examine(make_run(rows))
    assert (finding.location.line == 5) is (finding.rule == "communication-hook") is hooked


def half_sent(more=()):
    """A hook that sends nothing at step 0, and some of the gradients at the later three."""
    hook = CommHook(at=0, model=0, name="__main__.mine", site=8)
    later = pattern(step=1, reason="", synced=1, unsynced=0)
    rows = {}
    for n in range(2):
        members = [
            msgspec.structs.replace(e, averages=False) if isinstance(e, Replica) else e
            for e in replica()
        ]
        apart = digests("gradients", {k: [5 + k, 9 + n, 7, 8] for k in range(1, 4)})
        rows[n] = [
            *members, site(8, "train.py", 5, "model.register_comm_hook(None, mine)"), hook,
            pattern(reason="not reduced"), local(1, 2, 3, n), later, *more, apart,
            *steps(4, site=STEP),
        ]  # fmt: skip
        more = ()
    return list(UnsyncedStep().examine(make_run(rows)))


def test_a_communication_hook_that_sends_only_some_later():
    (finding,) = half_sent()
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (0, 3, 4)


def test_gradients_that_a_rank_edits_are_not_the_hook_s():
    edit = Edited(
        at=0, model=0, optimizer=0, kind="gradients", step=1, changed=True, site=OTHER
    )  # fmt: skip
    (finding,) = half_sent([edit])
    assert finding.steps.count == 1


def test_a_synchronised_last_backward():
    run = run_of({n: [pattern(reason="", synced=1, unsynced=3)] for n in range(2)})
    assert list(UnsyncedStep().examine(run)) == []


@pytest.mark.parametrize(
    ("reason", "label"),
    [("no_sync", "its forward"), ("second backward", "last forward before it")],
)
def test_a_second_backward_may_be_over_an_earlier_forward(reason, label):
    bad = pattern(reason=reason, forward_site=OTHER)
    (finding,) = UnsyncedStep().examine(run_of({n: [bad, local(n + 1)] for n in range(2)}))
    assert (finding.related[0].label, finding.related[0].location.line) == (label, 35)


def test_some_steps_only():
    events = [pattern(reason="", synced=1), pattern(step=2), pattern(step=3, reason="", synced=1)]
    run = run_of({n: [*events, local(1, 2, 3, n)] for n in range(2)})
    (finding,) = UnsyncedStep().examine(run)
    assert (finding.steps.first, finding.steps.count) == (2, 1)


def test_gradients_averaged_by_hand():
    run = run_of({n: [pattern(talked=True), local(1, 2, 3, 4)] for n in range(2)})
    assert list(UnsyncedStep().examine(run)) == []


def test_gradients_that_agree_after_as_much_as_they_are_was_exchanged():
    """As a matrix of one gradient per task (PCGrad); four parameters of two elements each."""
    for carried, found in ((24, False), (4, False), (3, True), (0, True)):
        run = run_of({n: [pattern(carried=carried), local(1, 2, 3, 4)] for n in range(2)})
        findings = list(UnsyncedStep().examine(run))
        assert bool(findings) is found
    evidence = findings[0].evidence
    assert evidence["collectives_from_backward_to_step"] == "none"


def test_gradients_that_differ_although_something_was_exchanged():
    run = run_of({n: [pattern(carried=24), local(1, 2, 3, n)] for n in range(2)})
    (finding,) = UnsyncedStep().examine(run)
    assert finding.evidence["collectives_from_backward_to_step"] == "of 24 elements"


def test_an_optimizer_that_exchanges_what_it_applies():
    for later, found in (([1, 1, 1, 2], False), ([1, 1, 1, 1], True), (None, True)):
        rows = {0: [1, 1, 1, 1]} | ({1: later} if later else {})
        ranks = {n: [pattern(), local(1, 2, 3, n), digests("parameters", rows)] for n in range(2)}
        assert bool(list(UnsyncedStep().examine(run_of(ranks)))) is found


def test_local_sgd_by_what_the_parameters_do():
    for n_equal in (True, False):
        ranks = {
            n: [pattern(), local(1, 2, 3, n),
                digests("parameters", {1: [1, 1, 1, n], 2: [1, 1, 1, 1 if n_equal else n]})]
            for n in range(2)
        }  # fmt: skip
        assert bool(list(UnsyncedStep().examine(run_of(ranks)))) is not n_equal


def test_what_drifts_later_follows_from_it():
    ranks = {
        n: [pattern(), local(1, 2, 3, n), digests("parameters", {1: [1, 1, 1, n]})]
        for n in range(2)
    }
    run = run_of(ranks)
    (cause,), (effect,) = UnsyncedStep().examine(run), ParameterDrift().examine(run)
    assert UnsyncedStep().explains(cause, effect)


def test_the_left_over_micro_batches_of_an_epoch():
    full, left = pattern(reason="", synced=1, unsynced=3), {"step": 2, "unsynced": 3}
    events = [full, pattern(**left), pattern(step=3, reason="", synced=1, unsynced=3)]
    (finding,) = UnsyncedStep().examine(run_of({n: [*events, local(1, 2, n, n)] for n in range(2)}))
    assert finding.rule == "left-over-group"
    assert [r.location.line for r in finding.related] == [38, 40]


@pytest.mark.parametrize("last", [[], [pattern(step=3, reason="", synced=1, unsynced=1)]])
def test_a_full_group_without_synchronisation_is_not_left_over(last):
    events = [pattern(reason="", synced=1, unsynced=1), pattern(step=2, unsynced=2 if last else 1)]
    run = run_of({n: [*events, *last, local(1, 2, n, n)] for n in range(2)})
    (finding,) = UnsyncedStep().examine(run)
    assert finding.rule == "no-sync"


def test_gradients_without_a_backward():
    run = run_of({n: [pattern(reason="autograd.grad", unsynced=0), local(n)] for n in range(2)})
    (finding,) = UnsyncedStep().examine(run)
    assert finding.rule == "autograd-grad"
    assert finding.evidence["synchronised_backwards_before_the_step"] == 0


def test_some_ranks_only():
    run = run_of({n: [pattern(), local(n)] if n else [] for n in range(3)})
    (finding,) = UnsyncedStep().examine(run)
    assert (finding.rule, finding.ranks) == ("no-sync", (1, 2))


@pytest.mark.parametrize(
    ("patterns", "accumulates"),
    [
        ([{}], False),
        ([{}, {"step": 2, "reason": "", "synced": 1, "unsynced": 0}], False),
        ([{"synced": 1, "once": 1, "line": OTHER}], False),
        ([{"synced": 1, "once": 1, "line": BACKWARD}], True),
        ([{"unsynced": 2}], True),
        ([{}, {"step": 2, "reason": "", "synced": 1, "unsynced": 1}], True),
    ],
)
def test_a_backward_that_is_no_micro_batch_is_to_synchronise(patterns, accumulates):
    events = [pattern(**p) for p in patterns]
    run = run_of({n: [*events, local(1, 2, 3, n)] for n in range(2)})
    (finding,) = UnsyncedStep().examine(run)
    assert (finding.fix == REASONS["no_sync"].fix) is accumulates


@pytest.mark.parametrize(
    ("armed", "expected", "credited"),
    [(True, True, True), (False, True, False), (False, False, True)],
)
def test_what_the_program_exchanges_in_a_backward_averages_nothing(armed, expected, credited):
    """Under `no_sync` in all forwards, with a loss over gathered outputs."""
    model = SimpleNamespace(armed=armed)
    look = SimpleNamespace(
        model=model, communicated=True, expected=expected, group=object(), touched=True
    )
    backwards._credit([look])
    assert look.communicated is credited


@pytest.mark.parametrize("later", [None, 3])
def test_gradients_that_fully_shard_never_reduces(later):
    def kept(step, applied=False):
        return KeptBack(at=0, optimizer=0, step=step, parameters=7, applied=applied, site=LINE)

    told = [kept(0), *([kept(later, applied=True)] if later else [])]
    found = list(UnsyncedStep().examine(run_of(dict.fromkeys(range(2), told))))
    assert [(f.ranks, f.location.line, f.steps.count) for f in found] == (
        [] if later else [((0, 1), 33, 4)]
    )


def test_what_is_kept_back_until_a_step_has_gradients_that_were_reduced(monkeypatch):
    whole, part = mock.Mock(grad="whole"), mock.Mock(grad=None)
    shard = mock.Mock(sharded_param=part, _unsharded_param=whole, unsharded_accumulated_grad=None)
    known = mock.Mock(notes={fsdp_no_sync.Waiting: fsdp_no_sync.Waiting([shard])})
    monkeypatch.setattr(Optimizers.current, "known", lambda: [known])
    FSDPNoSync.begin()
    FSDPNoSync.current._following.enable()
    events = []
    recorder = mock.Mock(emit=lambda event, vital: events.append((event.step, event.applied)))

    def step(number):
        FSDPNoSync.current._step_begins(recorder, mock.Mock(number=number, known=known))

    step(0)
    step(1)
    part.grad = "zeros of torch's own, to make the state"
    step(2)
    assert events == [(0, False)] and FSDPNoSync.current._following[0].enabled
    whole.grad, part.grad = None, "reduced"
    step(3)
    step(4)
    assert events == [(0, False), (3, True)] and not known.notes
    assert not FSDPNoSync.current._following[0].enabled, "nothing is left to wait for"


@pytest.mark.parametrize(
    ("backward", "changed", "reason"),
    [
        (False, True, "autograd.grad"),
        (False, False, ""),
        ("no_sync", True, "autograd.grad"),
        ("no_sync", False, "no_sync"),
        ("", True, ""),
    ],
)
def test_gradients_taken_after_the_last_backward(monkeypatch, backward, changed, reason):
    """Left over from an epoch that ended amid an accumulation, say. Derivatives may be for the log
    only: then the gradients stay what the backward made."""
    gradients = [(2, 0) if changed else (1, 0)] if backward is not False or changed else [(0, -1)]
    model = mock.Mock(number=0, gradients=lambda: gradients)
    known = gradient_sync.Sync(model)
    if backward is not False:
        made = gradient_sync.Contribution(BACKWARD, not backward, frozenset([0]))
        made.reason, made.blame = backward, OTHER
        known.contributions, known.after = [made], [(1, 0)]
    known.autograd_grad_site = LINE
    monkeypatch.setattr(GradientSync.current, "syncs", {model: known})
    monkeypatch.setattr(gradient_sync, "exposed_seconds", lambda ddp: 0.0)
    monkeypatch.setattr(Exchanges.current, "numbers_passed", 0)
    told = []
    holding = mock.Mock(model=model, optimizer=0, positions=[], parameters=lambda positions: [])
    GradientSync.current._emit_pattern(mock.Mock(emit=told.append), mock.Mock(number=6), holding)
    assert [e.reason for e in told] == ([reason] if backward is not False or changed else [])
    assert [e.site for e in told if e.reason] == [LINE if "grad" in reason else OTHER][
        : bool(reason)
    ]


def test_the_line_of_no_sync_only_where_it_is_open(monkeypatch):
    """Another epoch of the program may set DDP's flag by hand."""

    class Wrapper:
        @contextlib.contextmanager
        def no_sync(self):
            yield

    found = mock.Mock(code=None, line=7)
    monkeypatch.setattr(gradient_sync, "setting_in_frames", lambda *given: found)
    recorder = mock.Mock(site=lambda: 3)
    recorder.sites.number = lambda code, line: line
    wrapper = Wrapper()
    assert GradientSync.current._off_site(recorder, wrapper) == 7
    token = GradientSync.current._no_sync(recorder, (wrapper,), {})
    with contextlib.ExitStack() as stack:
        context = wrapper.no_sync()
        GradientSync.current._no_sync_made(recorder, token, context, None)
        stack.enter_context(context)
        assert GradientSync.current._off_site(recorder, wrapper) == 3
    assert GradientSync.current._off_site(recorder, wrapper) == 7
    assert GradientSync.current._off_site(recorder, wrapper, now=False) == 3
    del context
    assert GradientSync.current._off_site(recorder, wrapper) == 7
    GradientSync.current._set_sites[wrapper] = -1
    assert GradientSync.current._off_site(recorder, wrapper) == 3, "nothing else is known to do it"


@pytest.mark.parametrize("reason", ["no_sync", "forward only"])
def test_a_flag_that_is_set_by_hand(reason):
    line = site(LINE, "train.py", 33, "ddp.require_backward_grad_sync = i % 4 == 3")
    run = run_of({n: [line, pattern(reason=reason), local(1, 2, 3, n)] for n in range(2)})
    (finding,) = UnsyncedStep().examine(run)
    assert finding.fix == FLAG_FIXES[reason]


def test_another_micro_batch_synchronises_than_the_last():
    same = {"line": BACKWARD, "once": 1}
    events = [pattern(unsynced=3), pattern(step=1, synced=1, unsynced=3, **same)]
    events += [pattern(step=n, synced=1, unsynced=3, **same) for n in (2, 3)]
    run = run_of({n: [*events, local(1, 2, 3, n)] for n in range(2)})
    (finding,) = UnsyncedStep().examine(run)
    assert finding.fix == ANOTHER


@pytest.mark.parametrize(
    ("reason", "message", "follows"),
    [
        ("inside forward", "`initialize_buckets` must NOT be called during autograd", True),
        ("inside forward", "a bad batch", False),
        ("no_sync", "`initialize_buckets` must NOT be called during autograd", False),
    ],
)
def test_what_torch_raises_after_a_backward_that_ddp_was_not_ready_for(reason, message, follows):
    run = run_of({n: [pattern(reason=reason), local(1, 2, 3, n)] for n in range(2)})
    (finding,) = UnsyncedStep().examine(run)
    assert finding.rule == reason.replace(" ", "-").replace("_", "-")
    raised = FirstFailure().finding(summary="", cause="", fix="", errors=error_kinds(message))
    assert UnsyncedStep().explains(finding, raised) is follows
