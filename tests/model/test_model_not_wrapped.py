"""DDP305: trained on several ranks, synchronised by nothing."""

import msgspec
import pytest
from ddpdoctor.checks.drift.parameter_drift import ParameterDrift
from ddpdoctor.checks.model.model_not_wrapped import ModelNotWrapped
from recordings import make_run, site, steps
from replicas import digests, replica
from wraps import codes, group, parameters

from ddpdoctor.events import (
    Bypassed,
    CallBlock,
    CallRun,
    CallSite,
    Edited,
    ExceptionRaised,
    ObjectsGathered,
    OptimizerSeen,
    Place,
    Signature,
    Unwrapped,
    UnwrappedState,
)
from ddpdoctor.events.pack import pack
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Severity

CHECK = ModelNotWrapped()


def loose(*states, layers=("body", "head"), ranks=(0, 1)):
    event = Unwrapped(at=0, optimizer=0, kind="Net", parameters=parameters(layers), site=1)
    made = site(1, "train.py", 3, "net = Net()")
    return [made, group(ranks), event, *states, *steps(9)]


def state(step, gradients, values, exchanged=""):
    return UnwrappedState(
        at=0, optimizer=0, step=step, gradients=gradients, parameters=values, exchanged=exchanged
    )


def test_ranks_that_apply_their_own_gradients():
    run = make_run({r: loose(state(0, 10 + r, 7), state(1, 20 + r, 30 + r)) for r in (0, 1)})
    (found,) = CHECK.examine(run)
    assert found.severity.value == "error"
    assert found.location.line == 3
    assert found.evidence["parameters differ at"] == [1]


@pytest.mark.parametrize(("within", "internal", "severity"), [
    ("Net", False, "note"),
    ("Loss", False, "error"),  # the loss gathers features of models that should be wrapped
    ("Net", True, "error"),
])  # fmt: skip
def test_a_layer_whose_forward_exchanges_values(within, internal, severity):
    """Its classes may be divided among the ranks."""
    gathers = CallSite(at=0, id=3, places=(Place(1),), within=within, internal=internal)
    ranks = {r: loose(gathers, state(0, 10 + r, 7), state(1, 20 + r, 30 + r)) for r in (0, 1)}
    (found,) = CHECK.examine(make_run(ranks))
    assert found.severity.value == severity


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("arc_loss = Net(10)", "`arc_loss = DistributedDataParallel(arc_loss)`"),
        ("self.net = nets.Net(", "`self.net = DistributedDataParallel(self.net)`"),
        ("return Net()", ""),
        ("trainer = Trainer(Net())", ""),
        ("a, b = Net(), Net()", ""),
    ],
)
def test_the_advice_names_what_the_program_does(line, code):
    here = site(1, "train.py", 3, f"    {line}")
    run = make_run({r: [here, *loose(state(0, 10 + r, 7))[1:]] for r in (0, 1)})
    (found,) = CHECK.examine(run)
    assert found.rule == "never-wrapped"
    assert found.fix.startswith(code) if code else "`" not in found.fix


def test_only_its_own_steps_count():
    events = {r: [*loose(state(0, 10 + r, 7)), *steps(50, optimizer=1)] for r in (0, 1)}
    (found,) = CHECK.examine(make_run(events))
    assert (found.steps.first, found.steps.count) == (0, 9)


def test_a_look_after_the_last_step_is_of_no_step():
    states = {r: [state(0, 10 + r, 7), state(9, 20 + r, 30 + r)] for r in (0, 1)}
    (found,) = CHECK.examine(make_run({r: loose(*s) for r, s in states.items()}))
    assert (found.steps.last, found.steps.count) == (8, 9)


@pytest.mark.parametrize(("taken", "told"), [(0, []), (1, ["DDP305 error"])])
def test_a_step_that_raises_proves_nothing(taken, told):
    raised = ExceptionRaised(at=9, kind="RuntimeError", message="no getFuture", frames=())
    looks = {r: [state(n, 10 * n + r, 7 + n * r) for n in range(taken + 1)] for r in (0, 1)}
    every = {r: [*loose(*looks[r])[:-9], *steps(taken), raised] for r in (0, 1)}
    assert codes(make_run(every), CHECK) == told


def test_one_step_is_enough():
    assert codes(make_run({r: loose(state(0, 10 + r, 7)) for r in (0, 1)}), CHECK) == [
        "DDP305 error"
    ]


@pytest.mark.parametrize("means", [
    "gradients", "gradients of a group", "parameters", "in backward", "point-to-point",
    "all-to-all", "unseen",
])  # fmt: skip
def test_anything_that_is_exchanged_speaks_against_it(means):
    states = {r: [state(0, 10 + r, 7), state(4, 20 + r, 30 + r, means)] for r in (0, 1)}
    assert codes(make_run({r: loose(*s) for r, s in states.items()}), CHECK) == []


def anew(*states, **options):
    """The same parameters in an optimizer that was made later."""
    _, _, first, *_ = loose(**options)
    later = Unwrapped(at=1, optimizer=1, kind=first.kind, parameters=first.parameters, site=1)
    return [later, *(msgspec.structs.replace(s, optimizer=1) for s in states)]


def test_parameters_averaged_between_rounds_that_have_an_optimizer_each():
    run = make_run({
        r: [*loose(state(0, 10 + r, 7), state(1, 20 + r, 30 + r)),
            *anew(state(0, 40 + r, 50, "parameters"))]
        for r in (0, 1)
    })  # fmt: skip
    assert codes(run, CHECK) == []


def test_another_model_that_is_averaged_excuses_nothing():
    run = make_run({
        r: [*loose(state(0, 10 + r, 7)),
            *anew(state(0, 40 + r, 50, "parameters"), layers=("aux",))]
        for r in (0, 1)
    })  # fmt: skip
    assert codes(run, CHECK) == ["DDP305 error"]


@pytest.mark.parametrize("kept", [True, False])
def test_another_optimizer_that_keeps_the_rest_of_the_model_equal(kept):
    def events(rank):
        both = [
            *loose(*(state(n, 10 * n + rank, 7 + n * rank) for n in range(3)), layers=("head",)),
            *anew(
                *(state(n, 50 * n + rank, 90 + n * (not kept) * rank) for n in range(3)),
                layers=("body",),
            ),
        ]
        both = [msgspec.structs.replace(e, root=0) if isinstance(e, Unwrapped) else e for e in both]
        made = site(2, "train.py", 5, "adam = AdamW(net.head.parameters())")
        return [*both, made, OptimizerSeen(at=0, optimizer=0, kind="AdamW", site=2)]

    found, *_ = CHECK.examine(make_run({r: events(r) for r in (0, 1)}))
    rule, line = ("other-optimizer-synced", 5) if kept else ("never-wrapped", 3)
    assert (found.rule, found.location.line) == (rule, line)


def in_its_own_step(elements, looks=(0, 1, 2, 4), equal=(0, 1, 2)):
    """The optimizer's step makes the parameters at `equal` equal, of 4 with 40 elements."""

    def told(rank):
        for n in looks:
            gradients = [10 * n + i + 1000 * rank for i in range(1, 5)]
            values = [20 * n + i + 1000 * rank * (n and i not in equal) for i in range(4)]
            both = state(n, sum(gradients), sum(values))
            each = pack([*gradients, *values])
            yield msgspec.structs.replace(both, elements=elements * max(0, n - 1), each=each)

    return list(CHECK.examine(make_run({r: loose(*told(r)) for r in (0, 1)})))


@pytest.mark.parametrize(("equal", "names"), [
    ((0, 1, 2), ("head.bias",)), ((0, 2), ("body.bias", "head.bias")),
])  # fmt: skip
def test_what_the_optimizers_own_step_leaves_out(equal, names):
    (found,) = in_its_own_step(36, equal=equal)
    assert (found.subjects, found.severity.value) == (names, "error")


@pytest.mark.parametrize("kwargs", [
    pytest.param({"elements": 2}, id="equal by chance, only losses are exchanged"),
    pytest.param({"elements": 36, "looks": (0, 1)}, id="a first update that is the same"),
    pytest.param({"elements": 36, "equal": ()}, id="none stays equal"),
])  # fmt: skip
def test_steps_that_keep_nothing_equal_for_sure(kwargs):
    (found,) = in_its_own_step(**kwargs)
    assert len(found.subjects) == 4


def with_hooks(within, looks=(0, 1, 2, 4), kept=(0, 1, 2), begin=0, scheme="in backward"):
    """Hooks exchange the gradients at `kept` in the backward, of 4 with 40 elements."""

    def told(rank):
        for n in looks:
            own = [1000 * rank * (i not in kept) for i in range(4)]
            gradients = [10 * n + i + 1 + own[i] for i in range(4)]
            values = [20 * n + i + own[i] * (n > 0 or begin) for i in range(4)]
            each = pack([*gradients, *values])
            both = state(n, sum(gradients), sum(values), scheme)
            yield msgspec.structs.replace(both, each=each, within=within)

    return list(CHECK.examine(make_run({r: loose(*told(r)) for r in (0, 1)})))


@pytest.mark.parametrize(("kept", "within", "names"), [
    ((0, 1, 2), 36, ("head.bias",)), ((0,), 16, ("body.bias", "head.weight", "head.bias")),
])  # fmt: skip
def test_parameters_without_the_hook_that_others_have(kept, within, names):
    (found,) = with_hooks(within, kept=kept)
    assert (found.subjects, found.severity.value) == (names, "error")
    assert (found.rule, found.location.line) == ("parameters-without-hook", 3)


@pytest.mark.parametrize("kwargs", [
    pytest.param({"within": 40, "kept": (0, 1, 2, 3)}, id="hooks on all"),
    pytest.param({"within": 50}, id="activations are among it"),
    pytest.param({"within": 0, "kept": ()}, id="nothing is equal"),
    pytest.param({"within": 36, "begin": 1}, id="parts that differ from the start"),
    pytest.param({"within": 36, "looks": (0, 1)}, id="too short"),
    pytest.param({"within": 36, "scheme": "all-to-all"}, id="experts"),
])  # fmt: skip
def test_collectives_in_the_backward_that_may_be_of_something_else(kwargs):
    assert with_hooks(**kwargs) == []


def test_ranks_that_agree_without_exchanging_anything_are_a_note():
    run = make_run({r: loose(state(0, 1, 2), state(1, 3, 4), state(2, 5, 6)) for r in (0, 1)})
    assert codes(run, CHECK) == ["DDP305 note"]


def test_ranks_that_agree_and_exchange_as_much_as_gradients_do():
    def rows(elements):
        last = msgspec.structs.replace(state(2, 5, 6), elements=elements)
        return [state(0, 1, 2), state(1, 3, 4), last]

    def run(elements):
        return make_run({r: loose(*rows(elements)) for r in (0, 1)})

    assert codes(run(2), CHECK) == ["DDP305 note"], "a logged loss"
    assert codes(run(80), CHECK) == []


def agreeing(elements, **fields):
    """Ranks that agree at every look, and hand over so many numbers beside it."""
    rows = [state(0, 1, 2), state(1, 3, 4), state(2, 5, 6)]
    rows[-1] = msgspec.structs.replace(rows[-1], elements=elements)
    return make_run({r: [*loose(*rows)[:-9], *steps(9, **fields)] for r in (0, 1)})


def test_what_ranks_that_agree_exchange_is_said():
    (alone,) = CHECK.examine(agreeing(0))
    assert alone.rule == "equal-replicas"
    (logged,) = CHECK.examine(agreeing(2))
    assert logged.rule == "equal-replicas"


def test_gradients_that_no_backward_makes_come_of_what_is_exchanged():
    """Evolution strategies gather the rewards of all ranks."""
    assert codes(agreeing(2, backwards=0), CHECK) == []
    assert codes(agreeing(0, backwards=0), CHECK) == ["DDP305 note"], "torch.autograd.grad"


def exchanging(op, times=9, entries=None, numel=-1, **fields):
    """Ranks that agree, and make such a call in so many of nine steps."""
    plain = agreeing(0, **fields)
    calls = [
        Signature(at=0, id=0, op=op, numel=numel),
        CallBlock(at=0, id=0, codes=(0, 0)),
        CallRun(at=0, group=0, first=0, block=0, repeat=times, step=0),
        *([] if entries is None else [ObjectsGathered(at=0, call_site=0, entries=entries)]),
    ]
    for rank in plain.ranks.values():
        for event in calls:
            rank.add(event)
    return plain


@pytest.mark.parametrize(("op", "times", "entries", "backwards", "told"), [
    ("all_gather_object", 9, 4, 0, []),  # evolution strategies
    ("all_gather", 9, None, 0, []),  # of seeds
    ("all_gather_object", 1, 4, 0, ["DDP305 note"]),
    ("barrier", 9, None, 0, ["DDP305 note"]),
    ("all_gather_object", 9, 4, 1, ["DDP305 note"]),  # metrics
    ("all_gather_object", 9, 80, 1, []),  # gradients, perhaps
    ("broadcast_object_list", 9, None, 1, []),
])  # fmt: skip
def test_what_is_exchanged_in_each_step_may_be_what_keeps_ranks_equal(
    op, times, entries, backwards, told
):
    assert codes(exchanging(op, times, entries, backwards=backwards), CHECK) == told


def test_what_else_ranks_that_agree_exchange_is_said():
    (found,) = CHECK.examine(exchanging("all_gather_object", entries=4, backwards=1))
    (found,) = CHECK.examine(exchanging("all_reduce", numel=1, backwards=1))
    (found,) = CHECK.examine(exchanging("barrier", backwards=1))
    assert found.rule == "equal-replicas"


def test_copies_of_what_a_wrapper_averages_are_not_told_of():
    """One flat parameter, or copies in another precision: DDP averages what they are made of."""
    for averaged, found in ((3, []), (0, ["DDP305 note"])):
        last = msgspec.structs.replace(state(2, 5, 6), wrapped=averaged)
        run = make_run({r: loose(state(1, 3, 4), last) for r in (0, 1)})
        assert codes(run, CHECK) == found


def test_gradients_that_agree_are_synchronised_somehow():
    run = make_run({r: loose(state(0, 1, 20 + r), state(1, 3, 30 + r)) for r in (0, 1)})
    assert codes(run, CHECK) == []


def test_parameters_that_are_equal_again_are_synchronised_somehow():
    values = {0: (7, 30, 50, 70), 1: (7, 31, 50, 71)}
    rows = {r: [state(n, 10 * n + r, v) for n, v in enumerate(values[r])] for r in values}
    assert codes(make_run({r: loose(*s) for r, s in rows.items()}), CHECK) == []


def test_gradients_that_the_optimizer_exchanges_in_its_own_step():
    run = make_run({r: loose(state(0, 10 + r, 7), state(1, 20 + r, 30)) for r in (0, 1)})
    assert codes(run, CHECK) == []


def test_training_on_one_rank_only():
    run = make_run({0: loose(state(0, 1, 2)), 1: [group((0, 1))]})
    assert codes(run, CHECK) == []


def test_ranks_that_hold_different_parts():
    run = make_run({0: loose(state(0, 1, 2)), 1: loose(state(0, 3, 4), layers=("aux",))})
    assert codes(run, CHECK) == []


def test_one_rank_is_no_distributed_run():
    assert CHECK.unobserved(make_run({0: loose(state(0, 1, 2), ranks=(0,))}))


def test_gradients_that_are_exchanged_once_they_are_applied():
    def told(rank):
        rows = [state(0, 10 + rank, 7), state(1, 20 + rank, 30 + rank)]
        late = [msgspec.structs.replace(s, late=s.step) for s in rows]
        made, group_, event, *rest = loose(*late)
        line = site(2, "train.py", 8, "optimizer.step()")
        return [made, line, group_, msgspec.structs.replace(event, step_site=2), *rest]

    (found,) = CHECK.examine(make_run({r: told(r) for r in (0, 1)}))
    assert found.location.line == 8


def beside(begin, means="gradients of a group"):
    """Ranks 0 and 1 average gradients in a group, rank 2 steps alone."""

    def rows(rank):
        alone = 1000 * (rank == 2)
        exchanged = "" if alone else means
        first = state(0, 10 + alone, begin[rank], exchanged)
        return [first, *(state(n, 20 * n + alone, 30 * n + alone, exchanged) for n in (1, 2, 4))]

    events = {r: loose(*rows(r), ranks=(0, 1, 2)) for r in range(3)}
    return list(CHECK.examine(make_run(events)))


def test_a_rank_that_the_group_of_the_others_leaves_out():
    (found,) = beside(begin=(7, 7, 7))
    assert (found.ranks, found.severity) == ((2,), Severity.WARNING)


def test_a_rank_that_began_with_values_of_its_own_trains_another_model():
    assert beside(begin=(7, 7, 8)) == []


def test_a_rank_beside_others_that_exchange_on_the_default_group_is_not_judged():
    assert beside(begin=(7, 7, 7), means="gradients") == []


def test_a_parameter_beside_the_wrapped_model_belongs_into_it():
    def beside(rank):
        made, group_, event, *rest = loose(state(0, 10 + rank, 7), layers=("body",))
        lone = msgspec.structs.replace(event, kind="", parameters=event.parameters[:1], wrapped=1)
        return [made, group_, lone, *rest]

    (found,) = CHECK.examine(make_run({r: beside(r) for r in (0, 1)}))
    assert found.rule == "never-wrapped"


def test_models_that_one_line_makes_are_one_finding():
    def both(r):
        return [*loose(state(0, 10 + r, 7)), *anew(state(0, 20 + r, 7)), *steps(5, optimizer=1)]

    (found,) = CHECK.examine(make_run({r: both(r) for r in (0, 1)}))
    assert found.steps.count == 9


def with_a_wrapped_one(rank, optimizer):
    """Beside it a wrapped model in this optimizer, whose parameters rank 0 edits before step 1."""
    values = {n: [10 * n + i + 100 * (rank == 0 < n) for i in range(4)] for n in range(3)}
    held = {"model": 0, "optimizer": optimizer}
    edit = Edited(at=0, kind="parameters", step=1, changed=True, **held)
    return [
        *loose(state(0, 10 + rank, 7), state(1, 20 + rank, 30 + rank)),
        *replica((0, 1), **held),
        digests("parameters", values, **held),
        *([edit] if rank == 0 else []),
    ]


@pytest.mark.parametrize(("optimizer", "apart"), [(1, True), (0, False)])
def test_drift_of_another_model_is_no_consequence(optimizer, apart):
    run = make_run({r: with_a_wrapped_one(r, optimizer) for r in (0, 1)})
    told = diagnose(run, [CHECK, ParameterDrift()]).findings
    (lone, *others) = told
    assert lone.code == "DDP305"
    assert [f.code for f in others] == ["DDP402"] * apart
    assert len(lone.consequences) == (not apart)


def test_optimizers_that_step_inside_the_backward_are_not_examined():
    seen = OptimizerSeen(at=0, optimizer=0, kind="SGD", site=1, parameters=1, foreign=1)
    run = make_run({r: [group((0, 1)), seen, *steps(3)] for r in (0, 1)})
    assert "inside the backward" in CHECK.unobserved(run)
    held = msgspec.structs.replace(seen, models=(0,), foreign=0)
    run = make_run({r: [group((0, 1)), held, *steps(3)] for r in (0, 1)})
    assert CHECK.unobserved(run) is None
    gone = Bypassed(at=0, model=0, optimizer=0, step=0, count=1, forwards=0, discarded=True)
    run = make_run({r: [group((0, 1)), seen, gone, *steps(3)] for r in (0, 1)})
    assert CHECK.unobserved(run) is None


def test_a_part_of_a_model_that_is_sharded():
    states = [[state(0, 10 + r, 7), state(1, 20 + r, 30 + r)] for r in (0, 1)]
    event = Unwrapped(
        at=0, optimizer=0, kind="Net", parameters=parameters(("a", "b")), site=1, sharded=True
    )
    made = site(1, "train.py", 3, "net = Net()")
    (found,) = CHECK.examine(
        make_run({r: [made, group((0, 1)), event, *states[r], *steps(9)] for r in (0, 1)})
    )
    assert found.rule == "never-wrapped"
    assert "fully_shard" in found.fix and "DistributedDataParallel" not in found.fix


@pytest.mark.parametrize(
    ("handed", "rule"), [((0,), "left-out-of-exchange"), ((), "never-wrapped")]
)
def test_a_small_part_whose_gradients_the_program_exchanges(handed, rule):
    """The gradient of one weight is passed to a collective and is equal; the others are not."""

    def look(rank, step):
        own = [100 * step + 10 * n + rank for n in range(1, 4)]
        gradients = [100 * step + 7 + (0 if handed else rank), *own]
        values = [1000 + step, *(2000 + n + step * (10 + rank) for n in range(3))]
        each = pack([*gradients, *values])
        return UnwrappedState(
            at=0, optimizer=0, step=step, gradients=sum(gradients), parameters=sum(values),
            each=each, handed=pack(handed),
        )  # fmt: skip

    run = make_run({r: loose(*(look(r, n) for n in range(4))) for r in (0, 1)})
    (found,) = CHECK.examine(run)
    assert found.rule == rule
    if handed:
        assert found.severity is Severity.WARNING
        assert found.subjects == ("body.bias", "head.weight", "head.bias")
