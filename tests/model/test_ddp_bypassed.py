"""DDP304: steps on gradients that went around the wrapper."""

import sys
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import torch
from ddpdoctor.checks.model.ddp_bypassed import DdpBypassed
from recordings import make_run, site, steps
from wraps import codes, group, rank, wrap

from ddpdoctor.events import Bypassed, GroupDestroyed, RankExiting, SyncPattern, Wrapped
from ddpdoctor.events.drift import UNHELD
from ddpdoctor.probe.source.call_resolver import call_in_frames
from ddpdoctor.probe.watchers.graph import wrapper_bypass
from ddpdoctor.probe.watchers.graph.wrapper_bypass import WrapperBypass
from ddpdoctor.probe.watchers.manual_sync.exchanges import Exchanges

CHECK = DdpBypassed()


def bypassed(step=0, count=1, **more):
    values = {"model": 0, "optimizer": 0, "forwards": 0, "site": 51, **more}
    return Bypassed(at=0, step=step, count=count, **values)


def test_the_line_of_the_call_once_it_is_known():
    call = site(60, "train.py", 6, "loss = model.module.loss(x)")
    run = make_run({r: rank(call, bypassed(), bypassed(3, 4, call_site=60)) for r in (0, 1)})
    (found,) = CHECK.examine(run)
    assert found.location.line == 6
    assert (found.steps.first, found.steps.last, found.steps.count) == (0, 3, 4)
    assert found.ranks == (0, 1)


def test_who_has_left_the_group_goes_around_nothing():
    left = GroupDestroyed(at=0)
    for between, told in (((), True), ((left,), False), ((left, group((0, 1))), True)):
        events = rank(*between, bypassed(), bypassed(3, 4))
        assert bool(list(CHECK.examine(make_run({0: events, 1: events})))) is told


def test_a_call_that_was_seen_later_replaces_one_that_was_guessed():
    guess = site(60, "train.py", 6, "loss = model.module.loss(x)")
    seen = site(61, "train.py", 9, "loss = model.module(x)")
    events = rank(guess, seen, bypassed(call_site=60), bypassed(3, 4, call_site=61))
    (found,) = CHECK.examine(make_run({0: events, 1: events}))
    assert found.location.line == 9


def searched(other, model):
    found = []

    def look():
        frame, code = sys._getframe(1), searched.__code__
        found.append(call_in_frames(frame, lambda c: c is code, lambda called: called is model))

    if other:
        look()
        model and model(1)
    else:
        look()
    return found[0]


def test_a_call_in_another_arm_than_the_one_that_runs_was_not_made():
    first = searched.__code__.co_firstlineno
    model = Mock()
    assert searched(True, model).line == first + 9
    assert searched(False, model) is None


def test_the_backward_where_the_call_was_not_found():
    (found,) = CHECK.examine(make_run({r: rank(bypassed()) for r in (0, 1)}))
    assert found.location.line == 8


def test_one_process_is_right():
    assert codes(make_run({0: rank(bypassed(), ranks=(0,))}), CHECK) == []


def test_a_rank_that_goes_on_alone_after_the_wrapper_is_gone():
    run = make_run({0: rank(bypassed(9, discarded=True)), 1: rank()})
    assert codes(run, CHECK) == []


def test_a_wrapper_that_nobody_kept():
    run = make_run({r: rank(bypassed(discarded=True)) for r in (0, 1)})
    (found,) = CHECK.examine(run)
    assert found.rule == "wrapper-discarded"


def test_the_line_that_took_the_model_out_of_a_wrapper_that_is_gone():
    lines = [
        site(60, "train.py", 4, "net = unwrap(net)"),
        site(61, "tools.py", 9, "return model.module"),
        site(62, "train.py", 7, "loss = net(x)"),
    ]
    event = bypassed(call_site=62, named_site=60, taken_site=61, discarded=True)
    (found,) = CHECK.examine(make_run({r: rank(*lines, event) for r in (0, 1)}))
    assert (found.location.file, found.location.line) == ("train.py", 4)
    assert [r.location.line for r in found.related[:2]] == [9, 7]
    kept = msgspec.structs.replace(event, discarded=False)
    (found,) = CHECK.examine(make_run({r: rank(*lines, kept) for r in (0, 1)}))
    assert found.location.line == 7
    assert [r.location.line for r in found.related[:2]] == [9, 4]


@pytest.mark.parametrize(
    ("argument", "others", "fix"),
    [
        ("net.module", [7, 5], "`net`, not `net.module`"),
        ("inner", [7, 4], "not `inner`"),
    ],
)
def test_the_line_that_passes_the_model_on_without_its_wrapper(argument, others, fix):
    lines = [
        site(60, "train.py", 4, "inner = net.module"),
        site(61, "train.py", 9, f"loss = losses({argument}, x)"),
        site(62, "tools.py", 7, "return model(x)"),
    ]
    guess, seen = bypassed(call_site=51, named_site=60, taken_site=60), bypassed(1, 2, call_site=62)
    seen = msgspec.structs.replace(seen, handed=argument, handed_site=61)
    (found,) = CHECK.examine(make_run({r: rank(*lines, guess, seen) for r in (0, 1)}))
    assert (found.location.file, found.location.line) == ("train.py", 9)
    assert [r.location.line for r in found.related[:2]] == others
    assert found.fix.startswith("pass the wrapper on") and fix in found.fix
    gone = msgspec.structs.replace(seen, discarded=True)
    (found,) = CHECK.examine(make_run({r: rank(*lines, guess, gone) for r in (0, 1)}))
    assert found.location.line == 4
    assert "pass the wrapper on" not in found.fix


def test_a_wrapper_that_a_framework_made():
    made = wrap(by="accelerate.accelerator")
    run = make_run({r: rank(bypassed(discarded=True), wrapped=made) for r in (0, 1)})
    (found,) = CHECK.examine(run)
    assert "`accelerator.prepare(...)`" in found.fix
    assert "DistributedDataParallel(" not in found.fix


def test_nothing_recorded():
    assert codes(make_run({r: rank() for r in (0, 1)}), CHECK) == []


def test_what_a_closure_brings_is_judged_when_it_is_over(monkeypatch):
    judged = []
    monkeypatch.setattr(
        WrapperBypass.current, "_judge_step", lambda recorder, step: judged.append(step.closure)
    )
    for closure in (True, False):
        WrapperBypass.current._step_begins(None, SimpleNamespace(closure=closure))
    assert judged == [False]


def pattern(step, **more):
    return SyncPattern(at=0, model=0, optimizer=0, step=step, **more)


LOCAL = pattern(2, unsynced=1, reason="second backward")


@pytest.mark.parametrize(
    ("events", "last", "count"),
    [
        pytest.param([LOCAL], 8, 7, id="to the end"),
        pytest.param([LOCAL, pattern(7, synced=1)], 6, 5, id="until the wrapper is called again"),
        pytest.param(
            [LOCAL, RankExiting(at=9, how="done")], 5, 4, id="a rank that left told the last one"
        ),
        pytest.param([pattern(2, synced=1, unsynced=1, reason="x")], 5, 4, id="not known to be"),
        pytest.param([], 5, 4, id="nothing known of the others"),
    ],
)
def test_the_steps_of_a_rank_that_was_stopped(events, last, count):
    told = [bypassed(2), bypassed(3, 2), bypassed(5, 4)]
    run = make_run({0: rank(*steps(9)), 1: rank(*told, *steps(9), *events)})
    (found,) = CHECK.examine(run)
    assert (found.steps.first, found.steps.last, found.steps.count) == (2, last, count)
    assert found.evidence["steps without synchronisation"] == count


def test_gradients_that_the_program_itself_applies():
    told = (
        bypassed(3, 1, optimizer=UNHELD),
        bypassed(9, 7, optimizer=UNHELD),
        RankExiting(at=0, how="return"),
    )
    (found,) = CHECK.examine(make_run({r: rank(*told) for r in (0, 1)}))
    assert found.rule == "manual-update"


def test_parameters_that_move_though_no_optimizer_holds_them(monkeypatch):
    told, looks = [], iter([[1], [2], [2], [3], [4]])
    model = SimpleNamespace(parameters=[], sampled=[], ddp=lambda: model)
    known, suspect = wrapper_bypass.Bypass(), wrapper_bypass.Suspect(0, 51, {}, 0)
    monkeypatch.setattr(WrapperBypass.current, "_emit", lambda *args: told.append(args[4:]))
    monkeypatch.setattr(wrapper_bypass, "digests", lambda tensors: next(looks))
    monkeypatch.setattr(Exchanges.current, "values_exchanged", lambda parameters: False)
    for _ in range(5):
        WrapperBypass.current._detect_manual_update(None, model, known, suspect)
    assert told == [(UNHELD, 3)]


def test_of_two_forwards_around_the_wrapper_the_one_whose_gradients_are_applied(monkeypatch):
    for name, value in (
        ("_find_call", -1),
        ("_still_there", True),
        ("_meant_to_synchronise", True),
        ("_detect_manual_update", None),
        ("_arm", None),
    ):
        owner = WrapperBypass.current if hasattr(WrapperBypass, name) else wrapper_bypass
        monkeypatch.setattr(owner, name, lambda *args, value=value: value)
    monkeypatch.setattr(Exchanges.current, "gradients_exchanged", lambda parameters: False)
    monkeypatch.setattr(WrapperBypass.current, "_known", {})
    parameter, recorder = Mock(), Mock(step=1)
    model = Mock(parameters=[lambda: parameter], expected=[], forwards=0, forward_step=1)
    model.forwards_in_step = 1  # a call has to be known
    known = WrapperBypass.current._known[model] = wrapper_bypass.Bypass()
    for passed, line in ((67, 68), (49, 56)):
        known.call_site = passed
        backward = Mock(number=line, site=line, unannounced=[(model, False)])
        WrapperBypass.current._backward_unannounced(recorder, backward)
    known.calls[56] = 50  # as the source seemed to say
    optimizer = Mock(param_groups=[{"params": [parameter]}])
    WrapperBypass.current._judge_step(recorder, Mock(optimizer=lambda: optimizer, number=3))
    (event,) = (call.args[0] for call in recorder.emit.call_args_list)
    assert (event.site, event.call_site, known.calls) == (56, 49, {56: 49})


class Chooses:
    """Calls helpers that are given a model, and knows its wrapper."""

    def __init__(self, wrapper, net):
        self.wrapper, self.net = wrapper, net

    def helper(self, x, model):
        return plain(model, x)

    def chooses(self):
        model = self.net
        return self.helper(1, model)

    def given(self, net):
        return self.helper(1, net)

    def given_with_the_wrapper(self, net):
        wrapper = self.wrapper
        return self.helper(wrapper and 1, net)


def plain(model, x):
    kinds = SimpleNamespace(kind=lambda code: "user" if code.co_filename == __file__ else "own")
    frame = WrapperBypass.current._caller(SimpleNamespace(sites=kinds), sys._getframe())
    return frame and frame.f_code.co_name


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda made: made.chooses(), "chooses"),
        (lambda made: made.given(made.net), "<lambda>"),
        (lambda made: made.given_with_the_wrapper(made.net), "given_with_the_wrapper"),
        (lambda made: plain(made.net, 1), "<lambda>"),
        (lambda made: made.helper(1, made.wrapper), "plain"),
    ],
)
def test_who_chose_to_call_the_model_is_not_who_was_given_it(monkeypatch, call, named):
    net, wrapper = torch.nn.Linear(2, 2), torch.nn.Linear(1, 1)
    monkeypatch.setattr(WrapperBypass.current, "modules", weakref.WeakSet([net]))
    monkeypatch.setattr(WrapperBypass.current, "model", SimpleNamespace(ddp=lambda: wrapper))
    assert call(Chooses(wrapper, net)) == named


def test_a_wrapped_module_without_a_forward_cannot_be_called():
    events = [
        msgspec.structs.replace(e, forward=False) if isinstance(e, Wrapped) else e
        for e in rank(bypassed(0, 4))
    ]
    (found,) = CHECK.examine(make_run({0: events, 1: events}))
    assert found.rule == "no-forward"
    assert found.location is not None
    assert "call the wrapper" not in found.fix


def test_a_wrapped_module_of_which_another_one_runs_the_parts():
    within = [
        msgspec.structs.replace(e, within="UNet", within_site=e.site)
        if isinstance(e, Bypassed)
        else e
        for e in rank(bypassed(0, 4))
    ]
    (found,) = CHECK.examine(make_run({0: within, 1: within}))
    assert found.rule == "no-forward"
    assert "`UNet` calls its parts" in found.cause
    assert found.fix.startswith("wrap `UNet`")


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)

    def method(self, x):
        return self.layer(x)


class Around(torch.nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x, how):
        return how(x, self.parts)


@pytest.mark.parametrize(("how", "within"), [
    (lambda x, parts: parts.layer(x), "Around"),
    (lambda x, parts: parts(x), ""),
    (lambda x, parts: parts.method(x), ""),
])  # fmt: skip
def test_the_module_in_which_only_parts_of_the_model_run(monkeypatch, how, within):
    parts = Parts()
    watcher, seen = WrapperBypass.current, []
    monkeypatch.setattr(watcher, "modules", weakref.WeakSet(parts.modules()))
    monkeypatch.setattr(watcher, "model", SimpleNamespace(inner=lambda: parts))
    sites = SimpleNamespace(
        kind=lambda code: "user" if code.co_filename == __file__ else "own",
        number=lambda code, line: line,
    )
    recorder = SimpleNamespace(sites=sites)

    def called(module, args):
        if module in watcher.modules and not seen:
            seen.append(watcher._within(recorder, module, sys._getframe(1)))

    hook = torch.nn.modules.module.register_module_forward_pre_hook(called)
    try:
        Around(parts)(torch.ones(1, 2), how)
        line = sys._getframe().f_lineno - 1
    finally:
        hook.remove()
    assert seen == [(within, line if within else -1)]
