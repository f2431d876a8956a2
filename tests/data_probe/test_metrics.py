"""Which compared numbers are recorded, and which of them decide what is saved."""

import os
import shutil
import sys
import time
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader

from ddpdoctor.events import (
    ComparedValue,
    EndDecided,
    ResultWritten,
    SaveDecided,
    WeightsKept,
    decode,
)
from ddpdoctor.probe.collectives.sync_points import SyncPoints
from ddpdoctor.probe.recording import hooks, patching, recorder
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.watchers.data.loaders import Loaders
from ddpdoctor.probe.watchers.data.metrics import SAVES_AT_MOST, ComparedValues
from ddpdoctor.probe.watchers.process.files import Files
from ddpdoctor.storage.run_folder import EventWriter


@pytest.fixture
def recorded(tmp_path):
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder.current.recorder = Recorder(writer, tmp_path, "rank-0", {})
    Loaders.begin()
    ComparedValues.begin()

    def events(*kinds):
        patching.restore()
        writer.close()
        lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines()
        return [e for e in map(decode, lines) if isinstance(e, kinds)]

    yield events
    patching.restore()
    hooks.forget()
    recorder.current.recorder = None


def run(path, metrics):
    train, held_out = DataLoader(range(4)), DataLoader(range(2))
    best = -1.0
    for given in metrics:
        list(train)
        metric = 0
        for _ in held_out:
            metric = given
        if metric > best:
            best = metric
            torch.save({}, path)
    list(train)


def test_numbers_that_change_with_an_evaluation(recorded, tmp_path):
    run(tmp_path / "best.pt", [0.5, torch.tensor(0.25), 0.75])
    values = [e for e in recorded(ComparedValue, SaveDecided) if e.name == "metric"]
    saved = [e.value for e in values if isinstance(e, SaveDecided)]
    assert saved == [0.5, 0.75]
    changed = [(e.value, e.loader) for e in values if isinstance(e, ComparedValue)]
    assert changed == [(0.5, 1), (0.25, 1), (0.75, 1)]


def hard_link(last, best):
    best.unlink(missing_ok=True)
    os.link(last, best)


KEEPS = {
    "copyfile": lambda last, best: shutil.copyfile(last, best),
    "copy": lambda last, best: shutil.copy(last, best),
    "copy2": lambda last, best: shutil.copy2(last, best),
    "move": lambda last, best: shutil.move(last, best),
    "rename": lambda last, best: os.rename(last, best),
    "replace": lambda last, best: last.replace(best),
    "link": hard_link,
    "symlink": lambda last, best: best.with_name(f"{time.monotonic_ns()}").symlink_to(last),
}


@pytest.mark.parametrize("name", KEEPS)
def test_a_checkpoint_that_is_put_in_place_to_be_the_best(recorded, tmp_path_factory, name):
    SyncPoints.begin()
    Files.begin()
    folder, best = tmp_path_factory.mktemp("kept"), -1.0
    held_out, last = DataLoader(range(2)), folder / "last.pt"
    for given in (0.5, 0.25, 0.75):
        torch.save({}, last)
        for _ in held_out:
            metric = given
        if metric > best:
            best = metric
            KEEPS[name](last, folder / "best.pt")
    found = recorded(SaveDecided, ResultWritten)
    assert [e.value for e in found if e.name == "metric"] == [0.5, 0.75]


def test_weights_that_are_kept_in_memory(recorded):
    model, held_out, best = torch.nn.Sequential(torch.nn.Linear(2, 2)), DataLoader(range(2)), -1.0
    for given in (0.5, 0.25, 0.75):
        for _ in held_out:
            metric = given
        model.state_dict()
        if metric > best:
            best, kept = metric, {k: v.clone() for k, v in model.state_dict().items()}
    assert kept
    assert [e.value for e in recorded(WeightsKept) if e.name == "metric"] == [0.5, 0.75]


def keep(state, path, is_best):
    torch.save(state, path / "last.pt")
    if is_best:
        shutil.copyfile(path / "last.pt", path / "best.pt")


def test_a_copy_holds_what_was_written_before(recorded, tmp_path_factory):
    """What its callers were given is not written by it."""
    SyncPoints.begin()
    Files.begin()
    path = tmp_path_factory.mktemp("kept")
    for _ in range(2):
        for _ in DataLoader(range(2)):
            metric = 0.5
        keep({"metric": metric}, path, metric > 0.3)
    assert {type(e) for e in recorded(SaveDecided, ResultWritten)} == {SaveDecided}


@pytest.fixture
def safetensors(monkeypatch):
    """A package of that name, imported by the program, that remembers the files it has written."""
    module = ModuleType("safetensors.torch")
    module.written = []
    module.save_file = lambda tensors, path: module.written.append(path.name)
    monkeypatch.setitem(sys.modules, "safetensors.torch", module)
    return module


def test_weights_that_are_saved_by_safetensors(safetensors, recorded, tmp_path):
    held_out = DataLoader(range(2))
    for given in (0.5, 0.25):
        for _ in held_out:
            metric = given
        if metric > 0.3:
            safetensors.save_file({}, tmp_path / "best.safetensors")
    assert [e.value for e in recorded(SaveDecided) if e.name == "metric"] == [0.5]
    assert safetensors.written == ["best.safetensors"]


class Lazy:
    """An object whose attributes are computed: to ask for one would run the program's code."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        if name == "asked":
            raise AttributeError
        self.asked.append(name)
        return lambda: 1

    def __gt__(self, other):
        return True


def test_objects_of_the_program_are_not_asked(recorded, tmp_path):
    lazy = Lazy()
    run(tmp_path / "best.pt", [lazy])
    recorded(ComparedValue)
    assert lazy.asked == []


def test_a_line_that_saves_often(recorded, tmp_path):
    run(tmp_path / "best.pt", [n / 10 for n in range(20)])
    assert len(recorded(SaveDecided)) == SAVES_AT_MOST


def train_until(target, steps, rounds=3):
    held_out = DataLoader(range(2))
    for _ in range(rounds):
        recorder.current.recorder.step += steps
        for _ in held_out:
            metric = 0.5
        if metric > target:
            break


@pytest.mark.parametrize(("steps", "values"), [(4, [0.5]), (0, [])])
def test_a_loop_that_trains_and_is_left_by_a_metric(recorded, steps, values):
    """One that only evaluates, with other settings each time, is no training."""
    train_until(0.75, steps)
    assert [e.value for e in recorded(EndDecided) if e.name == "metric"] == values


def test_a_loop_of_one_round(recorded):
    train_until(0.75, 4, rounds=1)
    assert recorded(EndDecided) == []


def write_results(path, rounds):
    for _ in range(rounds):
        rows = [2 * x for x in DataLoader(range(4))]
        with open(path, "w") as file:
            file.write(str(rows))
        with open(path.with_suffix(".settings"), "w") as file:
            file.write(str(rounds))


def test_results_that_are_written_to_a_file(recorded, tmp_path_factory):
    SyncPoints.begin()
    Files.begin()
    path = tmp_path_factory.mktemp("results") / "rows.txt"
    write_results(path, rounds=2)
    (result,) = recorded(ResultWritten)  # one line, and one loop
    assert (result.name, result.loader, result.path) == ("rows", 0, str(path))
