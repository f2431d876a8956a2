"""DDP409 on literal events, and what the user's lines say."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from ddpdoctor.checks.drift.double_averaging import DoubleAveraging
from recordings import make_run, steps
from replicas import BACKWARD, LINE, STEP, replica, run_of
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

from ddpdoctor.events import (
    Edited,
    GradientReduced,
    LossCounted,
    LossMultiplied,
    LossScaled,
    ReducedInGraph,
    Replica,
)
from ddpdoctor.probe.recording.torch_compat import averages
from ddpdoctor.probe.source.division import divided_by_world_size
from ddpdoctor.probe.watchers.gradients.manual_edits import ManualEdits
from ddpdoctor.probe.watchers.gradients.second_reduction import SecondReduction
from ddpdoctor.probe.watchers.losses import loss_scaling
from ddpdoctor.probe.watchers.losses.loss_scaling import LossScaling
from ddpdoctor.probe.watchers.losses.reductions import mean_divisor
from ddpdoctor.report.findings import Severity

SCALED = LossScaled(
    at=0, model=0, step=0, divisor=2, site=LINE, backward_site=BACKWARD, expression="world"
)


def edit(ratio, divisor="", changed=True, functions=(), step=0, beside=False, besides=0.0):
    return Edited(
        at=0, model=0, optimizer=0, kind="gradients", step=step, changed=changed, ratio=ratio,
        site=LINE, divisor=divisor, functions=functions, beside=beside,
        besides=besides,
    )  # fmt: skip


def reduced(call, op="SUM"):
    return GradientReduced(at=0, model=0, op=op, step=call, site=LINE, call=call)


def judge(*events):
    return list(DoubleAveraging().examine(run_of({n: list(events) for n in range(2)})))


COUNTED = LossCounted(
    at=0, model=0, step=0, count=117, size=2, site=LINE, count_site=LINE, backward_site=BACKWARD
)


def test_a_loss_that_is_divided_by_a_count_of_all_ranks():
    (finding,) = judge(COUNTED)
    assert (finding.rule, finding.severity) == ("counted-loss", Severity.ERROR)
    assert finding.location.line == 33
    (finding,) = judge(msgspec.structs.replace(COUNTED, site=-1))
    assert finding.location.line == 33, "where it was counted"
    assert judge(COUNTED, edit(2.0)) == [], "the gradients are multiplied afterwards"


MULTIPLIED = LossMultiplied(
    at=0, model=0, step=0, size=2, site=LINE, backward_site=BACKWARD, expression="world"
)


def test_a_mean_that_is_multiplied_by_the_world_size():
    (finding,) = judge(MULTIPLIED)
    assert (finding.rule, finding.severity) == ("multiplied-loss", Severity.WARNING)
    assert (finding.ranks, finding.location.line) == ((0, 1), 33)
    assert judge(MULTIPLIED, edit(0.5, divisor="world_size")) == [], "divided afterwards"
    (finding,) = judge(MULTIPLIED, edit(0.1, functions=("clip_grad_norm_",)))
    assert finding.rule == "multiplied-loss"
    ranks = {0: [MULTIPLIED], 1: []}
    assert not list(DoubleAveraging().examine(run_of(ranks))), "the others add nothing"


def test_a_divided_loss():
    (finding,) = judge(SCALED)
    assert (finding.severity, finding.location.line) == (Severity.ERROR, 33)


@pytest.mark.parametrize(("linear", "backward"), [(True, BACKWARD), (False, BACKWARD), (True, 7)])
def test_a_divided_loss_that_was_summed_over_the_ranks(linear, backward):
    summed = ReducedInGraph(
        at=0, model=0, step=0, size=2, shape=(), site=STEP, backward_site=backward, linear=linear
    )
    (finding,) = judge(SCALED, summed)
    told = linear and backward == BACKWARD
    assert ("loss.detach().clone()" in finding.fix) is told
    assert ("sums the losses of all ranks" in [r.label for r in finding.related]) is told


def test_a_divided_term_of_the_loss():
    (finding,) = judge(msgspec.structs.replace(SCALED, of_a_term=True))
    assert finding.severity is Severity.ERROR
    assert finding.summary.startswith("a term of the loss is divided by the world size (2)")


@pytest.mark.parametrize(("loss", "divided"), [
    (lambda a, b: a.mean() + 0.3 * (b.mean() / 2), True),
    (lambda a, b: sum(t.mean() / 2 for t in (a, b)), True),
    (lambda a, b: torch.stack([a.mean(), b.sum() / 2]).sum(), True),
    (lambda a, b: a.mean() + b.mean() / 2 * 2, False),
    (lambda a, b: a.mean() + b.mean() / 3, False),
    (lambda a, b: a.mean() + (b / 2).mean(), False),
    (lambda a, b: a.mean() * (b.mean() / 2), False),
])  # fmt: skip
def test_terms_that_are_divided_by_the_world_size(loss, divided):
    a, b = (torch.ones(4, 3, requires_grad=True) * 1.5 for _ in range(2))
    found = loss_scaling._divided_terms(loss(a, b).grad_fn, {2: "model"})
    assert {(divisor, model) for _, divisor, model in found} == (
        {(2.0, "model")} if divided else set()
    )


def test_gradients_divided_by_hand():
    (finding,) = judge(edit(0.5, divisor="world_size"))
    assert finding.location.line == 33
    (finding,) = judge(edit(0.125, divisor="world_size"))
    assert "2 times too small" in finding.summary, "by the accumulated backwards as well"


def test_gradients_divided_by_hand_in_a_loop_that_clips():
    """The norm was small enough: what is left of them is the division."""
    clips = {"functions": ("clip_grad_norm_",), "beside": True}
    (finding,) = judge(edit(0.5, divisor="world_size", **clips))
    assert finding.location.line == 33
    assert judge(edit(0.5, **clips)) == [], "no line says so"
    size = {"divisor": "world_size", **clips}
    for bites in (edit(0.0, besides=0.5, **size), edit(0.1, besides=0.5, **size)):
        (finding,) = judge(bites)
        assert finding.evidence["measured_ratio"] == 0.5
    assert judge(edit(0.5, besides=0.3, **size)) == [], "by something else"


@pytest.mark.parametrize("event", [
    edit(0.5), edit(0.3, divisor="world_size"), edit(2.0, divisor="world_size"),
    edit(0.25), edit(0.5, functions=("clip_grad_norm_",)),
])  # fmt: skip
def test_other_edits(event):
    assert judge(event) == []


def test_the_first_of_the_same_edits_is_the_first_step():
    (finding,) = judge(edit(1.0, step=2), edit(0.5, step=3), edit(0.5, divisor="world", step=5))
    assert finding.steps.first == 3


def test_divided_in_some_steps():
    found = [edit(0.5, divisor="world", step=s) for s in (0, 2)]
    others = [edit(0.0, changed=False, step=s) for s in (1, 3)]
    run = run_of({n: sorted([*found, *others], key=lambda e: e.step) for n in range(2)}, count=6)
    (finding,) = DoubleAveraging().examine(run)
    assert (finding.steps.first, finding.steps.count) == (0, 2)


def test_a_communication_hook_that_may_not_average():
    ranks = {n: [*replica(), edit(0.5, divisor="world"), *steps(4, site=STEP)] for n in range(2)}
    assert list(DoubleAveraging().examine(make_run(ranks)))
    ranks = {
        n: [msgspec.structs.replace(e, averages=False) if isinstance(e, Replica) else e for e in es]
        for n, es in ranks.items()
    }
    assert not list(DoubleAveraging().examine(make_run(ranks)))


def test_torchs_own_communication_hooks_average():
    class Wrapper:
        def __init__(self, *hooks):
            self._comm_hooks = [(hook, None) for hook in hooks]

    def mine(state, bucket):
        pass

    halved, wrapped = default_hooks.fp16_compress_hook, default_hooks.bf16_compress_wrapper
    assert averages(Wrapper()) and averages(Wrapper(halved)) and averages(Wrapper(wrapped(halved)))
    for other in (mine, wrapped(mine), debugging_hooks.noop_hook):
        assert not averages(Wrapper(other))


def test_summed_by_hand_again():
    (finding,) = judge(edit(2.0), reduced(0), reduced(1))
    assert (finding.rule, finding.severity) == ("summed-again", Severity.ERROR)


@pytest.mark.parametrize("events", [[edit(1.0)], [edit(0.0, changed=False)], []])
def test_averaged_by_hand_again_changes_nothing(events):
    (finding,) = judge(*events, reduced(0, "AVG"), reduced(1, "AVG"))
    assert finding.severity is Severity.WARNING
    if events:
        (summed,) = judge(*events, reduced(0), reduced(1))
        assert summed.rule == "reduced-again"


def test_copies_that_change_nothing_are_a_note():
    copies = [msgspec.structs.replace(reduced(n), copied=True) for n in (0, 1)]
    (unchanged,) = judge(edit(0.0, changed=False), *copies)
    assert unchanged.severity is Severity.NOTE
    (summed,) = judge(edit(2.0), *copies)
    assert summed.severity is Severity.ERROR


@pytest.mark.parametrize("apart", [1, 2])
def test_begun_late_the_first_look_is_a_step_after_it(apart):
    steps = [300, 300 + apart]
    events = [edit(0.0, changed=False), *(reduced(s) for s in steps)]
    looks = [edit(0.0, changed=False, step=301)] if apart == 2 else []
    (finding,) = judge(*events, *looks, edit(2.0, step=steps[1]))
    assert finding.severity is Severity.ERROR


def test_reduced_once_may_be_a_start():
    assert judge(reduced(0)) == []


@pytest.mark.parametrize(("clips", "severity", "rule"), [
    ({"ratio": 0.61}, Severity.WARNING, "reduced-again"),
    ({"ratio": 0.0}, Severity.WARNING, "reduced-again"),
    ({"ratio": 0.61, "beside": True, "besides": 1.0}, Severity.WARNING, "reduced-again"),
    ({"ratio": 1.22, "beside": True, "besides": 2.0}, Severity.ERROR, "summed-again"),
])  # fmt: skip
def test_clipped_by_torch_after_it(clips, severity, rule):
    edits = [edit(**clips, functions=("clip_grad_norm_",), step=s) for s in range(4)]
    (finding,) = judge(*edits, reduced(0), reduced(1))
    assert (finding.rule, finding.severity) == (rule, severity)


def test_clipped_by_hand_after_it_nobody_knows_what_the_all_reduce_made_of_them():
    """0.61 is what clipping makes of the mean, or of the sum."""
    copies = [msgspec.structs.replace(reduced(n), copied=True) for n in (0, 1)]
    (finding,) = judge(edit(0.61), edit(0.64, step=1), *copies)
    assert finding.severity is Severity.NOTE
    (once,) = judge(edit(0.61), edit(0.0, changed=False, step=1), *copies)
    assert once.rule == "reduced-again"
    assert judge(edit(0.0), *copies) == [], "each by another number"


def test_what_is_made_of_them_in_other_steps_says_nothing():
    """Scaled in every step, reduced in every second one."""
    scaled = [edit(2.0 if s % 2 == 0 else 0.25, step=s) for s in range(4)]
    (finding,) = judge(*scaled, reduced(1), reduced(3))
    assert finding.severity is Severity.WARNING


def test_the_steps_are_those_in_which_it_is_reduced():
    calls = [msgspec.structs.replace(reduced(s), call=n) for n, s in ((0, 4), (1, 9), (9, 49))]
    run = run_of(dict.fromkeys(range(2), calls), count=50)
    (finding,) = DoubleAveraging().examine(run)
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (4, 49, 10)


def test_the_last_step_of_a_line_is_told(monkeypatch):
    monkeypatch.setattr(SecondReduction, "current", SecondReduction())
    monkeypatch.setattr(ManualEdits.current, "look_now", lambda model: None)
    told = []
    recorder = SimpleNamespace(step=0, emit=told.append, site=lambda: 3)
    for recorder.step in (*range(100), 99):
        SecondReduction.current._emit_reduced(
            recorder, SimpleNamespace(number=0), "SUM", copied=False
        )
    assert [e.call for e in told] == [*range(20), 32, 64]
    SecondReduction.current._leaving(recorder, None)
    assert (told[-1].call, told[-1].step) == (99, 99)
    SecondReduction.current._leaving(recorder, None)
    assert len(told) == 23


def test_two_lines_of_one_step_may_be_a_start():
    assert judge(reduced(0), msgspec.structs.replace(reduced(0), site=STEP)) == []


@pytest.mark.parametrize("line", [
    "loss = loss / dist.get_world_size()",
    "loss /= world_size",
    "loss = loss.div(self.world_size)",
    "loss = criterion(out, y) / float(args.n_gpus)",
    "size = dist.get_world_size(); loss = loss / size",
    "rank, n = dist.get_rank(), dist.get_world_size(); loss = loss / n",
    "loss = loss * (1.0 / world_size)",
    "loss = loss / opt['world_size']",
    "loss = loss / float(opt.get('world_size', 1))",
    "opt = {'n': dist.get_world_size()}; loss = loss / opt['n']",
    "opt = dict(n=dist.get_world_size()); loss /= opt.get('n')",
    "opt['n'] = int(os.environ['WORLD_SIZE']); loss = loss / opt['n']",
    "W = [dist.get_world_size()]; loss = loss / W[0]",
    'loss = loss / int(os.environ["WORLD_SIZE"])',
])  # fmt: skip
def test_lines_that_divide_by_the_world_size(line, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"import os\n{line}\n")
    assert divided_by_world_size(str(path), 2)


@pytest.mark.parametrize("line", [
    "loss = (a + b) / 2",
    "loss = loss / accumulation_steps",
    "loss = loss / num_micro_batches",
    "loss = loss * 0.5",
    "loss = loss * world_size",
    "accum = 2; loss = loss / accum",
    "loss = loss / (",
    "loss = loss / (accum * world_size)",
    "opt = {'n': dist.get_world_size()}; loss = loss / n",
    "opt = {'n': 2, 'm': dist.get_world_size()}; loss = loss / opt['n']",
    "W = [dist.get_world_size(), 2]; loss = loss / W[1]",
    "W = [dist.get_world_size()]; loss = loss / V[0]",
    "loss = loss / counts[0]",
    "loss = loss / opt['accum_per_world']",
])  # fmt: skip
def test_lines_that_divide_by_something_else(line, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"\n{line}\n")
    assert not divided_by_world_size(str(path), 2)


@pytest.mark.parametrize("given, line, named", [
    ("share = 1.0 / dist.get_world_size()", "loss = loss * share", True),
    ("self.share = 1 / world", "loss *= self.share", True),
    ("share = 1 / world", "p.grad.mul_(share)", True),
    ("share = 1 / accum", "loss = loss * share", False),
    ("share = 1 / world; share = 1 / accum", "loss = loss * share", False),
    ("share = 1 / world; share += 1", "loss = loss * share", False),
    ("share = 1 / world\ndef scaled(loss, share):", "    return loss * share", False),
])  # fmt: skip
def test_a_name_for_a_quotient(given, line, named, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"{given}\n{line}\n")
    assert bool(divided_by_world_size(str(path), given.count("\n") + 2)) is named


def test_a_product_with_the_world_size(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("(loss / (2 * accum * world)).backward()\n(loss / (2 * accum)).backward()\n")
    assert divided_by_world_size(str(path), 1, product=True) == "world"
    assert not divided_by_world_size(str(path), 2, product=True)


def test_a_name_for_a_product_with_the_world_size(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("whole = size * world; part = size * accum\nloss / whole\nloss / part\n")
    assert divided_by_world_size(str(path), 2, product=True) == "world"
    assert not divided_by_world_size(str(path), 3, product=True)
    assert not divided_by_world_size(str(path), 2)


@pytest.mark.parametrize(("divisor", "told"), [(16.0, True), (8.0, False), (32.0, False)])
def test_a_sum_divided_by_more_than_it_is_over(monkeypatch, divisor, told):
    """16 is that of the eight on each of two ranks; eight may be of all that was gathered."""
    monkeypatch.setattr(loss_scaling, "group_size", lambda model: 2)
    given = []
    monkeypatch.setattr(LossScaling.current, "_suspect", lambda *all_: given.append(all_))
    loss = torch.ones(8, requires_grad=True).sum() / divisor
    model = SimpleNamespace(number=0, expected=[], parameters=[])
    LossScaling.current._walk(None, None, loss.grad_fn, [model])
    monkeypatch.undo()
    ((_, _, divided, averaging),) = given
    lines = (None, ['File "train.py", line 5, in main'])

    def written(file, line, product=False):
        return "world" * product

    found = suspecting(
        monkeypatch, lines, written, *[[d for _, d, _ in divided]] * 2, averaging=averaging
    )
    assert bool(found) is told


def test_what_the_mean_of_a_sum_is_divided_by():
    x = torch.ones(4, 3, requires_grad=True)
    classes = torch.nn.functional.cross_entropy(x, torch.zeros(4).long(), reduction="sum")
    squares = torch.nn.functional.mse_loss(x, torch.zeros(4, 3), reduction="sum")
    for loss, averaging in ((classes, 4), (squares, 12), (x.sum(), 12)):
        assert mean_divisor(loss.grad_fn, "sum") == averaging
    assert mean_divisor(x.mean().grad_fn, "mean") == 1


def test_a_loss_whose_function_divides_by_a_plain_number(monkeypatch):
    """`cross_entropy` of probabilities; the program divides what it returns by two."""
    monkeypatch.setattr(loss_scaling, "group_size", lambda model: 2)
    given = []
    monkeypatch.setattr(LossScaling.current, "_suspect", lambda *all_: given.append(all_))
    model = SimpleNamespace(number=0, expected=[], parameters=[])
    loss = torch.nn.functional.cross_entropy(
        torch.ones(2, 3, requires_grad=True), torch.full((2, 3), 1 / 3)
    )
    LossScaling.current._walk(None, None, loss.grad_fn, [model])
    assert not given
    LossScaling.current._walk(None, None, (loss / 2).grad_fn, [model])
    ((_, _, divided, _),) = given
    assert [divisor for _, divisor, _ in divided] == [2.0]


def suspecting(monkeypatch, lines, written, *loops, averaging=1):
    """What is told of divisions, outermost first, that the lines make: in two backwards, or in
    those of the loops that divide by such numbers."""
    made = iter(lines)
    monkeypatch.setattr(LossScaling, "current", LossScaling())
    monkeypatch.setattr(loss_scaling, "made_at", lambda node: next(made))
    monkeypatch.setattr(loss_scaling, "classify", lambda file: "user")
    monkeypatch.setattr(loss_scaling, "group_size", lambda model: 2)
    monkeypatch.setattr(loss_scaling, "divided_by_world_size", written)
    told = []
    sites = SimpleNamespace(place=lambda file, line, function: line)
    backward, model = SimpleNamespace(site=3, frame=None), SimpleNamespace(number=0)
    for step, divisors in enumerate(loops or [[2.0] * (len(lines) // 2)] * 2, 4):
        recorder = SimpleNamespace(step=step, emit=told.append, sites=sites)
        divided = [(None, divisor, model) for divisor in divisors]
        LossScaling.current._suspect(recorder, backward, divided, averaging)
    return told


def test_a_division_is_told_from_the_step_on_in_which_it_was_suspected(monkeypatch):
    lines = (None, ['File "train.py", line 5, in main'])
    (event,) = suspecting(monkeypatch, lines, lambda *place, product=False: "world")
    assert (event.step, event.site) == (4, 5)


def test_the_world_size_is_not_the_outermost_number_that_equals_it(monkeypatch):
    lines = [[f'File "train.py", line {n}, in main'] for n in (6, 5)]
    written = {6: "", 5: "world"}
    (event,) = suspecting(
        monkeypatch, (None, None, *lines), lambda file, line, product=False: written[line]
    )
    assert event.site == 5


def test_a_division_that_begins_later_beside_one_by_another_equal_number(monkeypatch):
    """By the steps of accumulation, say: that its line is cleared says nothing of the next one."""
    world, steps = (['File "train.py", line 5, in main'], ['File "train.py", line 4, in main'])
    (event,) = suspecting(
        monkeypatch,
        (None, steps, None, None, world, steps),
        lambda file, line, product=False: "world" if line == 5 else "",
        *([[4.0]] * 3),
        *([[2.0, 4.0]] * 3),
    )
    assert (event.step, event.site, event.divisor) == (7, 5, 2)


def test_a_loss_that_is_made_in_another_way_is_looked_at_at_once(monkeypatch):
    monkeypatch.setattr(LossScaling, "current", LossScaling())
    loss = torch.ones(4, requires_grad=True).mean()
    roots = (loss, loss / 1, loss, loss / 2, loss / 2 / 2)
    backwards = (SimpleNamespace(site=3, roots=(root,)) for root in roots)
    assert [LossScaling.current._new_graph(b) for b in backwards] == [
        True,
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(("line", "expression"), [("loss / world", "world"), ("loss / 2", "")])
def test_without_a_second_backward_the_function_says_what_divides(
    monkeypatch, tmp_path, line, expression
):
    path = tmp_path / "train.py"
    path.write_text(f"def step(loss, world):\n    loss = {line}\n    loss.backward()\n")
    code = compile(path.read_text(), str(path), "exec").co_consts[0]
    monkeypatch.setattr(LossScaling, "current", LossScaling())
    monkeypatch.setattr(loss_scaling, "made_at", lambda node: None)
    monkeypatch.setattr(loss_scaling, "group_size", lambda model: 2)
    told = []
    recorder = SimpleNamespace(
        step=0, emit=told.append, sites=SimpleNamespace(number=lambda code, line: line)
    )
    frame = SimpleNamespace(f_code=code, f_lineno=3)
    backward, model = SimpleNamespace(site=3, frame=frame), SimpleNamespace(number=0)
    LossScaling.current._suspect(recorder, backward, [(None, 2.0, model)], averaging=1)
    assert not told
    LossScaling.current._leaving(recorder, None)
    (event,) = told
    assert (event.step, event.divisor, event.expression) == (0, 2, expression)
    assert event.site == (2 if expression else -1)


@pytest.mark.parametrize(
    ("event", "count", "decided"),
    [
        (msgspec.structs.replace(SCALED, site=-1, expression=""), 1, False),
        (msgspec.structs.replace(edit(0.5), site=-1), 1, False),
        (reduced(0), 1, False),
        (reduced(0), 2, True),
        (edit(0.3), 1, True),
        (SCALED, 1, True),
    ],
)
def test_a_run_too_short_to_tell_is_not_called_examined(event, count, decided):
    run = run_of({n: [event] for n in range(2)}, count=count)
    assert (DoubleAveraging().unobserved(run) is None) is decided


def test_the_steps_are_those_of_the_models_own_optimizer():
    both = [e for n in range(4) for e in (*steps(1, first=n, optimizer=1), *steps(1, first=n))]
    scaled = [msgspec.structs.replace(SCALED, step=total) for total in (1, 4)]
    ranks = {n: [*replica(), *both] for n in range(2)}
    for event, first in zip(scaled, (0, 2), strict=True):
        run = make_run({n: [*events, event] for n, events in ranks.items()})
        (finding,) = DoubleAveraging().examine(run)
        assert finding.steps.first == first


def test_a_model_that_is_frozen_in_this_backward_is_not_the_one(monkeypatch):
    def model(number, trainable):
        parameter = torch.nn.Parameter(torch.ones(1), requires_grad=trainable)
        held = [lambda: parameter]
        return SimpleNamespace(number=number, expected=[0], parameters=held)

    told = []
    monkeypatch.setattr(loss_scaling, "group_size", lambda model: 2)
    monkeypatch.setattr(LossScaling.current, "_suspect", lambda *given: told.append(given[2]))
    loss = torch.ones(4, requires_grad=True).mean() / 2
    LossScaling.current._walk(None, None, loss.grad_fn, [model(0, True), model(1, False)])
    assert [found.number for _, _, found in told[0]] == [0]
