"""DDP301: what is unused on all ranks, with the cause, and what must stay silent."""

import weakref
from types import SimpleNamespace

import msgspec
import pytest
import torch
from ddpdoctor.checks.model.unused_parameter import UnusedParameter
from recordings import make_run, steps
from wraps import BRANCH, codes, rank, skipped, unused, use, wrap

from ddpdoctor.events import CallSite, Edited, GatheredWhole, OptimizerSeen, Place, Wrapped
from ddpdoctor.probe.training.tracked_model import Model
from ddpdoctor.probe.watchers.graph import unused_parameters
from ddpdoctor.probe.watchers.graph.unused_parameters import CallWatch, UnusedParameterWatch
from ddpdoctor.report.findings import Severity

ALL = ("body", "head", "aux")


def find(*events, count=2):
    run = make_run({r: rank(*events, ranks=range(count)) for r in range(count)})
    return list(UnusedParameter().examine(run))


def test_a_layer_that_is_never_called():
    (found,) = find(unused([4, 5], called=("", "body", "head")), use(1, {4: 1, 5: 1}))
    assert found.severity is Severity.ERROR
    assert found.subjects == ("aux.weight", "aux.bias")
    assert (found.location.file, found.location.line) == ("net.py", 12)
    assert found.ranks == (0, 1)
    assert [r.label for r in found.related] == ["wrapped here", "backward without it"]


@pytest.mark.parametrize(("indices", "before", "told"), [
    ([2, 3, 4, 5], True, True),
    ([4, 5], True, False),  # a head that the loss does not use, and something gathered for the log
    ([2, 3, 4, 5], False, False),
])  # fmt: skip
def test_a_gradient_that_ends_where_tensors_are_gathered(indices, before, told):
    """To freeze the modules would hide that nothing learns."""
    gathers = [
        CallSite(at=0, id=7, places=(Place(BRANCH),)),
        GatheredWhole(at=0, call_site=7, by="accelerate.accelerator"),
    ]
    looked = [unused(indices, called=("", *ALL)), use(1, dict.fromkeys(indices, 1))]
    (found,) = find(*((*gathers, *looked) if before else (*looked, *gathers)))
    assert found.rule == "output-not-in-loss"
    assert found.fix.startswith("let its gradient reach the loss") is told
    assert any("no gradient passes" in r.label for r in found.related) is told


def test_of_several_modules_all_are_named():
    every = dict.fromkeys(range(2, 6), 1)
    (found,) = find(unused([2, 3, 4, 5], called=("", "body")), use(1, every))
    (found,) = find(unused([2, 3, 4, 5], called=("", "body", "aux")), use(1, every))
    assert found.rule == "never-called"


def test_a_model_that_was_wrapped_before_anybody_watched():
    events = rank(unused([4, 5]), use(1, {4: 1, 5: 1}))
    events = [
        msgspec.structs.replace(e, adopted=True) if isinstance(e, Wrapped) else e for e in events
    ]
    (found,) = UnusedParameter().examine(make_run({0: events, 1: events}))
    assert found.related[0].label == "examined from here on, wrapped before"


def test_an_output_that_does_not_reach_the_loss():
    (found,) = find(unused([4, 5], called=("", *ALL)), use(1, {4: 1, 5: 1}))
    assert found.rule == "output-not-in-loss"


def test_a_module_that_is_called_under_no_grad_alone():
    event = unused([4, 5], called=("", *ALL), blind=("aux",), branches={"aux": 53})
    (found,) = find(event, use(1, {4: 1, 5: 1}))
    assert [r.label for r in found.related] == ["wrapped here", "backward without it"]


@pytest.mark.parametrize("grad", [True, False])
def test_with_what_a_module_is_called_is_seen(grad):
    module = torch.nn.Linear(2, 1)
    model = Model(0, module, list(module.parameters()), [0, 1])
    watch = CallWatch.start(model)
    with torch.set_grad_enabled(grad):
        module(torch.ones(1, 2))
    assert watch.stop() == {""}
    assert watch.called_with_grad == ({""} if grad else set())
    assert not module._forward_pre_hooks


class Generator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("read", "unread", "called"):
            module = torch.nn.BatchNorm1d(2) if name == "called" else torch.nn.Module()
            module.register_buffer("values", torch.ones(2))
            setattr(self, name, module)

    def forward(self, x, fixed=False):
        noise = self.unread.values if fixed else torch.randn(2)
        return self.called(x) * self.read.values + noise


@pytest.mark.parametrize(("broadcast", "unread"), [(False, ("unread",)), (True, ())])
def test_modules_whose_buffers_no_forward_reads(broadcast, unread):
    module, told = Generator(), []
    model = Model(0, module, list(module.parameters()), [0, 1])
    recorder = SimpleNamespace(emit=told.append)
    forward = SimpleNamespace(
        model=model, grad_enabled=True, error=None,
        wrapper=SimpleNamespace(broadcast_buffers=broadcast),
    )  # fmt: skip
    watcher = UnusedParameterWatch()
    for _ in range(2):
        watcher._forward_begins(recorder, forward)
        module(torch.ones(4, 2))
        watcher._forward_ends(recorder, forward)
    assert [(e.names, e.unread) for e in told] == [((), unread)]


def test_a_parameter_beside_used_ones_is_told_as_such():
    (found,) = find(unused([5], called=("", *ALL)), use(1, {5: 1}))
    assert found.subjects == ("aux.bias",)


@pytest.mark.parametrize("option", ["find_unused", "static_graph"])
def test_the_parameter_alone_is_frozen_where_the_rest_of_its_module_is_used(option):
    (found,) = find(unused([5], called=("", *ALL), **{option: True}), use(1, {5: 1}))
    assert found.rule == "one-parameter"
    (found,) = find(unused([4, 5], called=("", *ALL), **{option: True}), use(1, {4: 1, 5: 1}))
    assert found.rule == "output-not-in-loss"


@pytest.mark.parametrize("times", [9, 8])
def test_of_the_first_step_alone_only_where_it_is_not_always_so(times):
    (found,) = find(unused([4, 5], find_unused=True), use(9, {4: 9, 5: times}))
    assert found.rule == "not-in-loss"


def test_a_branch_that_is_taken_in_some_steps_says_how_often():
    events = [
        unused([]),
        *steps(4),
        unused([4, 5], backward=5, step=4, branches={"aux": 53}),
        use(5, {4: 1, 5: 1}),
    ]
    (found,) = find(*events)
    assert found.evidence["unused in"] == "1 of 5 backwards examined"
    assert found.related[0].location.line == 20
    assert found.related[0].label == "skipped here", "be it by `continue`"
    assert found.steps.first == 4


@pytest.mark.parametrize(("times", "called"), [(2, "no"), (1, "in some steps")])
def test_what_is_not_called_at_first_and_later_is(times, called):
    event = unused([4, 5], called=("", "body", "head"), find_unused=True)
    (found,) = find(event, *steps(2), use(2, {4: times, 5: times}))
    assert found.evidence["modules"][0]["called"] == called


def test_what_is_called_and_left_out_in_some_steps_is_not_found_by_a_search_of_the_output():
    late = unused([5], backward=5, step=4, called=("", *ALL))
    (found,) = find(unused([]), *steps(4), late, use(5, {5: 1}))
    assert found.rule == "parameter-in-some-steps"


def test_another_backward_over_the_same_forward_brings_the_rest():
    first = unused([2, 3, 4, 5], called=("", *ALL))
    assert find(first, unused([]), use(1)) == []
    (found,) = find(first, unused([4, 5], called=("", *ALL)), use(1, {4: 1, 5: 1}))
    assert found.subjects == ("aux.weight", "aux.bias")


def test_frozen_later():
    (found,) = find(unused([4, 5], frozen=(4, 5)), use(1, {4: 1, 5: 1}))
    assert found.rule == "frozen-after-wrap"


FROZEN_FOR_A_STEP = (
    unused([4, 5], frozen=(4, 5), frozen_site=BRANCH, called=("", *ALL)),
    use(1, {4: 1, 5: 1}, thawed=(4, 5)),
)


def test_frozen_for_a_step_is_not_to_be_frozen_before_the_wrap():
    (found,) = find(*FROZEN_FOR_A_STEP)
    assert found.rule == "frozen-in-some-steps"
    assert found.location.line == 20
    assert "find_unused_parameters=True" in found.fix
    assert "requires_grad_(False)" not in found.fix


def test_frozen_for_a_step_where_a_framework_wraps():
    wrapped = wrap(by="lightning.pytorch.trainer.trainer")
    run = make_run({r: rank(*FROZEN_FOR_A_STEP, wrapped=wrapped) for r in range(2)})
    (found,) = UnusedParameter().examine(run)
    assert found.fix == '`Trainer(strategy="ddp_find_unused_parameters_true")`'


def test_frozen_for_a_step_where_ddp_expects_it():
    event, summary = FROZEN_FOR_A_STEP
    (found,) = find(msgspec.structs.replace(event, find_unused=True), summary)
    assert found.severity is Severity.NOTE
    assert "requires_grad_(False)" not in found.fix


@pytest.mark.parametrize("thawed", [(), (4,)])
def test_what_stays_frozen_in_part_is_frozen(thawed):
    event, _ = FROZEN_FOR_A_STEP
    (found,) = find(event, use(1, {4: 1, 5: 1}, thawed=thawed))
    assert found.rule == "frozen-after-wrap"


@pytest.mark.parametrize("option", ["find_unused", "static_graph"])
def test_where_ddp_expects_it_it_is_a_note(option):
    (found,) = find(unused([4, 5], **{option: True}), use(1, {4: 1, 5: 1}))
    assert found.severity is Severity.NOTE


def test_the_steps_end_where_the_set_is_empty_again():
    events = [unused([4, 5]), *steps(3), unused([], backward=4, step=3), *steps(5, first=3)]
    (found,) = find(*events)
    assert (found.steps.first, found.steps.last, found.steps.count) == (0, 2, 3)


def test_steps_in_which_others_are_unused_in_their_stead_do_not_count():
    events = [unused([4, 5]), *steps(3), unused([0], backward=4, step=3), *steps(5, first=3)]
    (found,) = find(*events)
    assert (found.steps.first, found.steps.last, found.steps.count) == (0, 2, 3)


def test_a_note_names_all_that_are_unused_at_some_time():
    parts = [unused([4, 5], find_unused=True), *steps(3)]
    parts += [unused([0, 4], backward=4, step=3, find_unused=True), *steps(5, first=3)]
    (found,) = find(*parts)
    assert found.subjects == ("aux.weight", "aux.bias", "body.weight")
    assert found.steps.count == 8
    assert [row["module"] for row in found.evidence["modules"]] == ["aux", "body"]


def test_a_model_all_of_whose_parameters_are_used():
    assert find(unused([]), use(9), *steps(9)) == []


def test_ranks_that_differ_belong_to_another_check():
    run = make_run({0: rank(unused([4, 5])), 1: rank(unused([]))})
    assert codes(run, UnusedParameter()) == []


def test_another_rank_of_which_nothing_is_known_does_not_hide_it():
    run = make_run({0: rank(unused([4, 5])), 1: []})
    assert codes(run, UnusedParameter()) == ["DDP301 error"]


def test_no_model_no_verdict():
    run = make_run({0: steps(3), 1: steps(3)})
    assert UnusedParameter().unobserved(run)


def test_torchs_own_error_is_folded():
    from ddpdoctor.report.errors import error_kinds
    from ddpdoctor.report.findings import Finding

    (mine,) = find(unused([4, 5]))
    other = Finding(
        code="DDP606", check="first-failure", severity=Severity.ERROR, summary="", cause="", fix="",
        errors=error_kinds("Expected to have finished reduction in the prior iteration"),
    )  # fmt: skip
    assert UnusedParameter().explains(mine, other)
    assert skipped() is not None


def test_the_steps_are_those_of_the_models_own_optimizer():
    both = [
        OptimizerSeen(at=0, optimizer=0, kind="Adam", site=-1, models=(1,)),
        *steps(40),
        OptimizerSeen(at=0, optimizer=1, kind="SGD", site=-1, models=(0,)),
        unused([4, 5]),
        *steps(8, optimizer=1),
    ]
    (found,) = UnusedParameter().examine(make_run({r: rank(*both) for r in (0, 1)}))
    assert (found.steps.first, found.steps.last, found.steps.count) == (0, 7, 8)


@pytest.mark.parametrize(("unspent", "called"), [((4, 5), True), ((4,), False), ((), False)])
def test_an_output_that_only_later_is_left_out_of_the_loss(unspent, called):
    event = unused([4, 5], backward=38, step=37, unspent=unspent)
    (found,) = find(unused([]), event, use(12, {4: 1, 5: 1}))
    assert found.evidence["modules"][0]["called"] == ("yes" if called else "not observed")


def allowed(*, held=6, foreign=0, examined=8, times=8, blind=(), more=(), option="find_unused"):
    """A model one of whose modules gets no gradient, and what DDP and the optimizer know of it."""
    optimizer = OptimizerSeen(
        at=1, optimizer=0, kind="AdamW", site=0, models=(0,), parameters=held, foreign=foreign
    )
    event = unused([4, 5], called=("", *ALL), blind=blind, **{option: True})
    return [optimizer, event, *more, use(examined, {4: times, 5: times})]


@pytest.mark.parametrize("option", ["find_unused", "static_graph"])
@pytest.mark.parametrize("blind", [(), ("aux",)])
def test_a_module_that_is_called_and_never_learns(blind, option):
    (found,) = find(*allowed(blind=blind, option=option))
    assert (found.rule, found.severity) == ("never-learns", Severity.ERROR)
    assert "freeze it before the wrap" in found.fix


EDITED = Edited(at=2, model=0, optimizer=0, kind="parameters", step=1, changed=True)


@pytest.mark.parametrize(
    "facts",
    [
        {"held": 4},  # no optimizer is to train it
        {"held": 6, "foreign": 2},
        {"examined": 7, "times": 7},  # too few to tell: a phase of training
        {"examined": 20, "times": 19},  # it learns in other steps
        {"more": (EDITED,)},  # a moving average that the program writes
    ],
)
def test_a_module_that_need_not_learn_is_a_note(facts):
    (found,) = find(*allowed(**facts))
    assert found.severity is Severity.NOTE


def test_a_module_that_learns_on_one_rank_is_no_error():
    learns = rank(*allowed(times=7), ranks=range(2))
    run = make_run({0: rank(*allowed(), ranks=range(2)), 1: learns})
    assert all(f.severity is Severity.NOTE for f in UnusedParameter().examine(run))


@pytest.mark.parametrize("allowed", [True, False])
def test_what_an_unsynchronised_backward_of_the_step_used_is_not_unused(allowed):
    """Unless DDP waits for its gradient, which only the synchronised backward can bring."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    parameters[0].grad, parameters[1].grad = torch.ones(2), torch.zeros(2)
    model = SimpleNamespace(
        find_unused=allowed, static_graph=False, parameters=[weakref.ref(p) for p in parameters]
    )
    left = unused_parameters._without_those_before(model, (0, 1, 2))
    assert left == ((1, 2) if allowed else (0, 1, 2))
