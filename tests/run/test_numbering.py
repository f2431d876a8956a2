"""Ranks that count their models and optimizers differently."""

from ddpdoctor.checks.model.rank_dependent_graph import RankDependentGraph
from recordings import make_run

from ddpdoctor.events import GroupReady, OptimizerSeen, StepDone, UnusedParameters, Wrapped


def group(number, *ranks):
    return GroupReady(
        at=0, group=number, name=str(number), backend="gloo", ranks=ranks, member=True, site=-1
    )


def wrapped(model, of):
    return Wrapped(
        at=0, model=model, wrapper="DistributedDataParallel", kind="Net", group=of, site=-1
    )


def stepped(number, parameters, *models):
    return [
        OptimizerSeen(
            at=0, optimizer=number, kind="SGD", site=-1, models=models, parameters=parameters
        ),
        StepDone(at=0, optimizer=number, step=0, site=-1, wall_s=0.1),
    ]  # fmt: skip


def numbers(run, rank):
    told = run.ranks[rank]
    models = [w.model for w in told.of(Wrapped)]
    return models, [(o.optimizer, o.models) for o in told.of(OptimizerSeen)]


def test_ranks_that_count_alike_are_left_as_they_are():
    events = [group(0, 0, 1), wrapped(0, 0), *stepped(0, 2, 0)]
    run = make_run({0: events, 1: events})
    assert numbers(run, 0) == numbers(run, 1) == ([0], [(0, (0,))])


def test_a_model_and_an_optimizer_that_one_rank_has_besides():
    own = [group(0, 0, 1), group(1, 0), wrapped(0, 1), *stepped(0, 9, 0)]
    run = make_run(
        {
            0: [*own, wrapped(1, 0), *stepped(1, 2, 1)],
            1: [group(0, 0, 1), wrapped(0, 0), *stepped(0, 2, 0)],
        }
    )
    assert numbers(run, 0) == ([0, 1], [(0, (0,)), (1, (1,))])
    assert numbers(run, 1) == ([1], [(1, (1,))])
    assert run.ranks[1].of(StepDone)[0].optimizer == 1


def test_optimizers_of_unequal_parts_keep_their_order():
    run = make_run({n: [group(0, 0, 1), *stepped(0, 2 + n)] for n in range(2)})
    assert [numbers(run, n)[1][0][0] for n in range(2)] == [0, 0]


def test_models_of_different_groups_are_not_compared():
    def unused(*indices):
        return UnusedParameters(at=0, model=0, backward=1, step=0, indices=indices)

    ranks = {n: [group(0, 0, 1), wrapped(0, 0), unused(0)] for n in range(2)}
    ranks |= {n: [group(0, 2, 3), wrapped(0, 0), unused()] for n in (2, 3)}
    assert list(RankDependentGraph().examine(make_run(ranks))) == []
