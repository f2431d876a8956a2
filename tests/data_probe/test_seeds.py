"""Which calls that seed a global random generator are recorded."""

import pickle
import random

import numpy
import pytest
import torch

from ddpdoctor.events import Seeded, decode
from ddpdoctor.probe.recording import patching, recorder
from ddpdoctor.probe.recording.recorder import Recorder
from ddpdoctor.probe.watchers.data.seeds import RECORDED, Seeds
from ddpdoctor.storage.run_folder import EventWriter


@pytest.fixture
def recorded(tmp_path):
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    recorder.current.recorder = Recorder(writer, tmp_path, "rank-0", {})
    states = random.getstate(), torch.random.get_rng_state(), numpy.random.get_state()
    Seeds.begin()

    def calls():
        patching.restore()
        writer.close()
        lines = (tmp_path / "rank-0.jsonl").read_bytes().splitlines()
        return [(e.generator, e.seed) for e in map(decode, lines) if isinstance(e, Seeded)]

    yield calls
    patching.restore()
    recorder.current.recorder = None
    random.setstate(states[0])
    torch.random.set_rng_state(states[1])
    numpy.random.set_state(states[2])


def test_each_generator_and_each_number_once(recorded):
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
    random.seed(5)
    numpy.random.seed(seed=6)
    random.seed("words")
    torch.Generator().manual_seed(7)
    drawn = torch.rand(1).item(), random.random(), numpy.random.rand()
    assert recorded() == [("torch", "3"), ("torch", "4"), ("random", "5"), ("numpy", "6")]
    torch.manual_seed(4)
    random.seed("words")
    numpy.random.seed(6)
    assert drawn == (torch.rand(1).item(), random.random(), numpy.random.rand())


def test_torch_s_two_functions_once_there_is_a_compiler(recorded):
    import torch._dynamo

    assert torch._dynamo and torch.manual_seed is not torch.random.manual_seed
    patching.restore()
    Seeds.begin()
    torch.manual_seed(8)
    torch.random.manual_seed(9)
    assert recorded() == [("torch", "8"), ("torch", "9")]


def test_no_more_than_a_few(recorded):
    for seed in range(2 * RECORDED):
        torch.manual_seed(seed)
    assert len(recorded()) == RECORDED


def test_the_functions_can_still_be_pickled(recorded):
    for function in (random.seed, numpy.random.seed, torch.random.manual_seed):
        assert pickle.loads(pickle.dumps(function)) is function


def test_states_that_the_program_restores(recorded):
    """Not those that torch restores by itself, as after a checkpoint of activations."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        drawn = torch.rand(2)
    for _ in range(2):
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
    assert torch.equal(torch.rand(2), drawn)
    assert [name for name, _ in recorded()] == ["torch", "random", "numpy"]
