"""In whatever way a rank comes to torch, it is observed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sampling import inherited, run

from ddpdoctor.launch.environment import PACKAGE
from ddpdoctor.report.coverage import unobserved
from ddpdoctor.run import load
from ddpdoctor.storage.run_folder import RunFolder

TRAIN = """
import os
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "0")

def train():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
"""

ASKED_FIRST = """
import importlib.util
assert importlib.util.find_spec("torch") and importlib.util.find_spec("torch")
train()
"""

LAZY = """
import importlib.util, sys
spec = importlib.util.find_spec("torch")
spec.loader = importlib.util.LazyLoader(spec.loader)
torch = sys.modules["torch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch)
import wave  # looking for another module does not import this one
assert "torch.nn" not in sys.modules
train()
"""

IN_A_THREAD = """
import importlib.util, threading
def work():
    import torch
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
importlib.util.find_spec("torch")
for thread in threads: thread.join()
train()
"""

IN_A_FORKED_CHILD = """
import importlib.util, multiprocessing
assert importlib.util.find_spec("torch")
child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
assert child.exitcode == 0
"""

IN_A_SPAWNED_CHILD = """
import importlib.util, multiprocessing
if __name__ == "__main__":
    assert importlib.util.find_spec("torch")
    child = multiprocessing.get_context("spawn").Process(target=train)
    child.start()
    child.join()
    assert child.exitcode == 0
"""

BY_ANOTHER_FINDER = """
import sys
from importlib.machinery import PathFinder
class Finder:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path) if name.partition(".")[0] == "torch" else None
sys.meta_path.insert(0, Finder())
from torch.nn.parallel import DistributedDataParallel
import wave
train()
"""

BY_FINDERS_THAT_ASK_EACH_OTHER = """
import importlib.util, sys
class Finder:
    asking = False
    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.asking:
            return None
        self.asking = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.asking = False
sys.meta_path.insert(0, Finder())
sys.meta_path.append(Finder())
train()
"""

BEHIND_A_FINDER_THAT_COMES_AND_GOES = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        assert here, "it was taken away"
here = True
sys.meta_path.insert(0, Finder())
import torch
assert isinstance(sys.meta_path.pop(0), Finder)
here = False
train()
"""

WAYS = {
    "asked-first": ASKED_FIRST,
    "lazy": LAZY,
    "in-a-thread": IN_A_THREAD,
    "in-a-forked-child": IN_A_FORKED_CHILD,
    "in-a-spawned-child": IN_A_SPAWNED_CHILD,
    "by-another-finder": BY_ANOTHER_FINDER,
    "behind-a-finder-that-comes-and-goes": BEHIND_A_FINDER_THAT_COMES_AND_GOES,
    "by-finders-that-ask-each-other": BY_FINDERS_THAT_ASK_EACH_OTHER,
}


def launched(program: str, folder: Path, *, rank: bool = True) -> RunFolder:
    """Run a program as the launcher does; what was recorded."""
    script, out = folder / "train.py", folder / "run"
    script.write_text(TRAIN + program)
    out.mkdir()
    environment = inherited(PYTHONPATH=str(PACKAGE / "shim"), DDPDOCTOR_DIR=str(out))
    environment["DDPDOCTOR_HOME"] = str(PACKAGE.parent)
    if rank:
        environment.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    status, printed = run([sys.executable, str(script)], cwd=folder, environment=environment)
    assert status == 0, printed
    assert list(out.glob("probe-errors*")) == []
    return RunFolder(out)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_is_observed(way: str, tmp_path: Path) -> None:
    folder = launched(WAYS[way], tmp_path, rank=not way.endswith("child"))
    seen = load([folder])
    assert unobserved(seen) == []
    assert [rank.steps for rank in seen.ranks.values()] == [3]


USED_BEFORE = """
import sys
from importlib.machinery import PathFinder
class Finder:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path) if name.partition(".")[0] == "torch" else None
sys.meta_path.insert(0, Finder())
train()
"""


def test_a_rank_whose_torch_was_found_late_is_not_called_observed(tmp_path: Path) -> None:
    """Torch is found as DistributedDataParallel imports something else, while it is made."""
    seen = load([launched(USED_BEFORE, tmp_path)])
    (told,) = unobserved(seen)
    assert told.ranks == (0,)
    assert "noticed only after init_process_group" in told.reason
