"""DDP302: used sets compared backward by backward, also where ranks hang."""

import msgspec
import pytest
from ddpdoctor.checks.model.rank_dependent_graph import RankDependentGraph
from ddpdoctor.checks.model.unused_parameter import UnusedParameter
from recordings import make_run, site, steps
from wraps import WRAP, codes, rank, skipped, unused, use, wrap

from ddpdoctor.analysis.models import wrapped_models as models
from ddpdoctor.analysis.models.wrapped_models import Part
from ddpdoctor.events import Submodule, Tensor
from ddpdoctor.report.findings import Steps


def find(ranks, **more):
    return list(RankDependentGraph().examine(make_run(ranks, **more)))


def test_one_rank_skips_a_branch():
    branch = {"aux": 53}
    (found,) = find(
        {0: rank(unused([])), 1: rank(unused([4, 5], branches=branch), skipped(["aux"]))}
    )
    assert found.ranks == (1,)
    assert found.subjects == ("aux.weight", "aux.bias")
    assert (found.location.file, found.location.line) == ("net.py", 20)
    assert found.evidence["use"] == [
        {"parameters": "aux", "class": "Linear", "rank 0": "used", "rank 1": "unused"}
    ]


def test_without_a_branch_in_sight_it_is_the_line_of_the_module():
    (found,) = find({0: rank(unused([])), 1: rank(unused([4, 5]))})
    assert found.location.line == 12


def test_it_comes_out_although_the_other_rank_hangs_in_its_first_backward():
    ended = {0: -9, 1: 1}
    (found,) = find({0: rank(skipped()), 1: rank(unused([4, 5]), skipped(["aux"]))}, ended=ended)
    assert found.ranks == (1,)


def test_a_late_branch_where_the_other_rank_stands_in_that_backward():
    waiting = rank(unused([]), *steps(20), use(16))
    raising = rank(
        unused([]), *steps(21), use(16), unused([4, 5], backward=21, step=20, by_torch=True)
    )
    (found,) = find({0: waiting, 1: raising}, ended={0: -9, 1: 1})
    assert found.ranks == (1,)


def test_a_rank_that_went_on_had_it_unused_too():
    # Killed by the launcher before it could say so: it did take the step, so it did not wait.
    went_on = rank(unused([]), *steps(21), use(16))
    raising = rank(
        unused([]), *steps(21), use(16), unused([4, 5], backward=21, step=20, by_torch=True)
    )
    run = make_run({0: went_on, 1: raising}, ended={0: -15, 1: 1})
    assert codes(run, RankDependentGraph()) == []
    assert codes(run, UnusedParameter()) == ["DDP301 error"]


def test_all_ranks_alike_is_another_check():
    run = make_run({r: rank(unused([4, 5])) for r in (0, 1)})
    assert codes(run, RankDependentGraph()) == []


def test_different_parts_on_different_ranks():
    (found,) = find({0: rank(unused([2, 3])), 1: rank(unused([4, 5]))})
    assert found.ranks == (0, 1)
    assert len(found.evidence["use"]) == 2


def test_one_module_of_which_each_rank_uses_its_own_parameters():
    adapters = ("lora.a", "lora.b")
    listed = tuple(
        Tensor(name=n, shape=(4, 4), dtype="float32", trainable=True, site=i)
        for i, n in enumerate(adapters)
    )
    kinds = (Submodule(name="", kind="Net"), Submodule(name="lora", kind="ParameterDict", site=2))
    net = msgspec.structs.replace(wrap(listed=listed), modules=kinds)
    (found,) = find({r: rank(unused([r]), wrapped=net) for r in (0, 1)})
    assert found.evidence["use"] == [
        {"parameters": "lora.a", "class": "ParameterDict", "rank 0": "unused", "rank 1": "used"},
        {"parameters": "lora.b", "class": "ParameterDict", "rank 0": "used", "rank 1": "unused"},
    ]
    assert (found.location.line, found.label) == (10, "not used in the loss on rank 0")


def test_what_no_rank_used_needs_the_same():
    (found,) = find({0: rank(unused([2, 3])), 1: rank(unused([2, 3, 4, 5]))})
    assert found.subjects == ("aux.weight", "aux.bias")
    assert found.evidence["unused on all ranks"] == "head"


def test_with_the_option_it_is_a_note():
    run = make_run(
        {0: rank(unused([], find_unused=True)), 1: rank(unused([4, 5], find_unused=True))}
    )
    assert codes(run, RankDependentGraph()) == ["DDP302 note"]


def late(by_torch=False):
    """Rank 1 leaves a part out from backward 28 on."""
    return rank(
        unused([]), *steps(40), use(40, {4: 3, 5: 3}),
        unused([4, 5], backward=28, step=27, find_unused=True, by_torch=by_torch),
    )  # fmt: skip


def test_from_a_later_step_on_where_the_other_rank_never_left_anything_out():
    used = rank(unused([]), *steps(40), use(40))
    assert codes(make_run({0: used, 1: late()}), RankDependentGraph()) == ["DDP302 note"]


def test_a_later_step_that_the_other_rank_may_not_have_looked_at():
    short = rank(unused([]), *steps(40), use(16))
    used = rank(unused([]), *steps(40), use(40))
    assert codes(make_run({0: short, 1: late()}), RankDependentGraph()) == []
    assert codes(make_run({0: used, 1: late(by_torch=True)}), RankDependentGraph()) == []


def test_ranks_that_agree():
    run = make_run({r: rank(unused([]), use(9), *steps(9)) for r in (0, 1)})
    assert codes(run, RankDependentGraph()) == []


def test_the_same_change_at_the_same_backward_on_all_ranks():
    events = [unused([]), *steps(3), unused([4, 5], backward=4, step=3, find_unused=True), use(8)]
    run = make_run({r: rank(*events) for r in (0, 1)})
    assert codes(run, RankDependentGraph()) == []


def test_modules_are_spelled_as_code():
    for name, code in (("blocks.0.norm", "model.blocks[0].norm"), ("2", "model[2]"), ("", "model")):
        assert Part(name, "Block", (0,), True).code("model") == code


def test_each_rank_lacks_another_part():
    (found,) = find({0: rank(unused([2, 3])), 1: rank(unused([4, 5]))})
    assert found.ranks == (0, 1)


def test_of_two_models_that_train_in_turn_the_later_one():
    # No rank comes to its next forward, in which torch would tell.
    waiting = rank(unused([]), *steps(21), *steps(20, optimizer=1), use(16))
    went_on = rank(unused([]), *steps(21), *steps(21, optimizer=1), use(16))
    left = unused([4, 5], backward=21, step=20, total=41)
    (found,) = find({0: waiting, 1: [*went_on, left]}, ended={0: -6, 1: -6})
    assert found.ranks == (1,)
    assert found.steps.first == 20


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("net = DDP(Net())", ("net", "model")),
        ("self.ddp = nn.parallel.DistributedDataParallel(self.net, [0])", ("self.ddp", "self.net")),
        ("return DDP(net)", ("model", "net")),
        ("model = wrap(net)", ("model", "model")),
        ("ddp = DDP(net.cuda())", ("ddp", "model")),
    ],
)
def test_the_wrapper_is_called_as_the_program_calls_it(line, names):
    run = make_run({0: [*rank(), site(WRAP, "train.py", 5, f"    {line}")]})
    wrapped = models.wrap_of(run.ranks[0], 0)
    assert models.names_in_code(run.ranks[0], wrapped) == names


def test_steps_that_were_not_looked_at_are_not_counted():
    events = [unused([]), unused([4, 5], backward=10, step=9, find_unused=True), *steps(30)]
    used = rank(unused([]), *steps(30), use(14))
    again = unused([], backward=19, step=18, find_unused=True)
    (found,) = find({0: used, 1: rank(*events, again, use(14, {4: 1, 5: 1}))})
    assert found.steps == Steps(9, 9, 1, 3)
    (found,) = find({0: used, 1: rank(*events, use(14, {4: 3, 5: 3}))})
    assert found.steps == Steps(9, 27, 3, 3)


@pytest.mark.parametrize(("first", "before"), [(9, 7), (3, None)])
def test_the_last_step_that_was_looked_at_before_it(first, before):
    late = unused([4, 5], backward=first + 1, step=first, find_unused=True)
    events = [unused([]), late, *steps(30), use(14, {4: 3, 5: 3})]
    used = rank(unused([]), *steps(30), use(14))
    (found,) = find({0: used, 1: rank(*events)})
    assert found.evidence.get("last step examined before") == before


def test_steps_before_in_which_all_ranks_left_out_the_same_do_not_count():
    def events(later):
        both = unused([4, 5], find_unused=True)
        return rank(both, unused(later, backward=10, step=9, find_unused=True), *steps(30))

    (found,) = find({0: events([2, 3]), 1: events([4])})
    assert found.steps.first == 9
