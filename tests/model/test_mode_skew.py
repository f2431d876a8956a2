"""DDP312 on literal events, and how modes are recorded."""

from types import SimpleNamespace

import pytest
import torch
from ddpdoctor.checks.model.mode_skew import ModeSkew
from recordings import make_run, site, steps
from torch import nn
from wraps import FORWARD, rank, wrap

from ddpdoctor.events import Digests, TrainingMode, decode
from ddpdoctor.probe.recording import patching, recorder
from ddpdoctor.probe.training.wrapped_models import WrappedModels
from ddpdoctor.probe.watchers.graph import training_modes
from ddpdoctor.probe.watchers.graph.training_modes import TrainingModes
from ddpdoctor.report.findings import Severity
from ddpdoctor.storage.run_folder import EventWriter

EVAL = 60
DROPOUT, NORM = {"drop": "Dropout"}, {"norm": "BatchNorm1d"}


def modes(backward=0, evaluating=(), **fields):
    evaluating = dict(evaluating)
    return TrainingMode(
        at=0, model=0, backward=backward, forwards=backward + 1,
        evaluating=evaluating, count=len(evaluating), forward_site=FORWARD,
        **{"step": backward, "whole": False, "total": 2, "site": EVAL, **fields},
    )  # fmt: skip


def evaluation():
    return Digests(
        at=0, model=0, optimizer=-1, kind="parameters", point="eval", keys=(6,), strides=(1,),
        counts=(0,), values="",
    )  # fmt: skip


def run_of(*ranks, taken=12):
    numbers = range(len(ranks))
    return make_run(
        {
            n: [
                site(EVAL, "train.py", 20, "model.eval()"),
                *rank(*events, ranks=tuple(numbers), wrapped=wrap(kind="Net")),
                *(steps(taken if isinstance(taken, int) else taken[n])),
            ]
            for n, events in enumerate(ranks)
        }
    )


def findings_of(*ranks, **fields):
    return list(ModeSkew().examine(run_of(*ranks, **fields)))


TRAINS = (modes(),)
STAYS = (modes(), modes(6, DROPOUT | NORM, whole=True))


def test_a_rank_that_does_not_come_back_to_training():
    (finding,) = findings_of(STAYS, TRAINS)
    assert (finding.rule, finding.severity) == ("modes-differ", Severity.ERROR)
    assert (finding.ranks, finding.location.line) == ((0,), 20)
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (6, 11, 6)
    assert finding.subjects == ("drop", "norm")


def test_until_it_comes_back():
    (finding,) = findings_of((*STAYS, modes(9)), TRAINS)
    assert (finding.steps.first, finding.steps.last, finding.steps.count) == (6, 8, 3)


def test_ranks_in_evaluation_mode_are_named_though_they_are_more():
    everyone_evaluates = [(modes(), modes(6)), STAYS, STAYS, STAYS]
    (finding,) = findings_of(*everyone_evaluates)
    assert finding.ranks == (1, 2, 3)


def test_a_rank_that_freezes_other_modules():
    frozen = (modes(0, NORM),)
    (finding,) = findings_of(frozen, frozen, frozen, TRAINS)
    assert (finding.ranks, finding.subjects, finding.location.line) == ((3,), ("norm",), 20)
    (finding,) = findings_of(frozen, TRAINS)
    assert finding.ranks == (0,)


def test_a_mode_of_unknown_effect_is_a_warning():
    (finding,) = findings_of((modes(0, DROPOUT, unsure=("drop",)),), (modes(unsure=("drop",)),))
    assert finding.severity is Severity.WARNING


def test_the_same_modules_frozen_on_all_ranks():
    assert findings_of((modes(0, NORM),), (modes(0, NORM),)) == []


def test_a_run_that_ends_before_all_ranks_have_recorded():
    assert findings_of(STAYS, TRAINS, taken=6) == []
    assert findings_of(STAYS, TRAINS, taken=(7, 6)) == []


def test_a_record_that_ended():
    assert findings_of((*STAYS,), (modes(0, last=True),)) == []


def test_all_ranks_train_on_in_evaluation_mode():
    (finding,) = findings_of((*STAYS, evaluation()), STAYS)
    assert (finding.rule, finding.severity) == ("never-back-to-training", Severity.NOTE)
    assert (finding.ranks, finding.location.line) == ((0, 1), 20)
    assert finding.steps.count == 6


@pytest.mark.parametrize(
    "events",
    [
        STAYS,
        (modes(0, DROPOUT | NORM, whole=True), evaluation()),
        (modes(), modes(6, NORM), evaluation()),
        (
            evaluation(),
            *(modes(n, DROPOUT if n % 2 else (), step=n // 2, whole=bool(n % 2)) for n in range(9)),
            modes(9, step=5),
        ),
        (modes(), modes(6, DROPOUT, whole=True, unsure=("drop",)), evaluation()),
    ],
    ids=["no evaluation", "from the start", "frozen later", "in every step", "effect unknown"],
)
def test_all_ranks_in_evaluation_mode_on_purpose(events):
    assert findings_of(events, events) == []


def test_without_a_model_whose_mode_matters():
    assert ModeSkew().unobserved(run_of((), ())) is not None


class Drops(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.p = p

    def forward(self, x):
        return nn.functional.dropout(x, self.p, training=self.training)


class Checkpointed(nn.Module):
    gradient_checkpointing = False

    def forward(self, x):
        return x.clone() if self.gradient_checkpointing and self.training else x


@pytest.mark.parametrize(
    ("module", "matters"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.BatchNorm1d(2), True),
        (nn.BatchNorm1d(2, track_running_stats=False), False),
        (nn.LayerNorm(2), False),
        (nn.LSTM(2, 2), False),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), True),
        (nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0), False),
        (nn.TransformerEncoderLayer(4, 2, 4), True),
        (Drops(), True),
        (Drops(0.0), False),
        (Checkpointed(), False),
    ],
)
def test_modules_whose_mode_matters(module, matters):
    assert bool(list(training_modes._modal(nn.Sequential(module)))) is matters


class Model:
    """What the probe knows of a wrapped model, as far as the watcher asks for it."""

    def __init__(self, module):
        self.number = self.synced_backwards = self.forwards = 0
        self.pending, self.pending_sync = 1, True
        self.inner = lambda: module


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A model, a function that trains one step, and one that reads what was recorded."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
    model = Model(module)
    path = tmp_path / "rank-0.jsonl"
    now = recorder.Recorder(EventWriter(path), tmp_path, "rank-0", {})
    monkeypatch.setattr(recorder.current, "recorder", now)
    monkeypatch.setattr(training_modes.optimizer_models, "steps_of", lambda model: 0)
    TrainingModes.begin()
    watcher = TrainingModes.current
    monkeypatch.setattr(WrappedModels.current, "live", lambda: [model])

    def step(*, backward=True, due=False):
        model.forwards += 1
        forward = SimpleNamespace(model=model, grad_enabled=torch.is_grad_enabled(), site=1)
        if watcher.looking[0].enabled:
            watcher._forward_begins(now, forward)
        if due:
            watcher._forward_due(now, forward)
        if backward:
            if watcher.settling[0].enabled:
                watcher._backward_begins(now, SimpleNamespace())
            model.synced_backwards += 1

    def recorded():
        events = map(decode, path.read_bytes().splitlines())
        return [(e.backward, e.whole, e.count) for e in events if isinstance(e, TrainingMode)]

    yield module, step, recorded
    patching.restore()


def test_changes_are_recorded_once(trained):
    module, step, recorded = trained
    step(due=True)
    module.eval()
    step()
    step()
    module.train()
    module[2].eval()
    step()
    assert recorded() == [(0, False, 0), (1, True, 2), (3, False, 1)]


def test_a_mode_that_was_set_directly_is_seen_when_sampled(trained):
    module, step, recorded = trained
    step(due=True)
    module[1].training = False
    step()
    step(due=True)
    assert recorded() == [(0, False, 0), (2, False, 1)]


def test_an_evaluation_leaves_no_record(trained):
    module, step, recorded = trained
    step(due=True)
    module.eval()
    step(backward=False)
    with torch.no_grad():
        step(backward=False)
    module.train()
    step()
    assert recorded() == [(0, False, 0)]
