"""A forked process is what a new one would be, as far as a script and the doctor can tell."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
from sampling import inherited, run

from ddpdoctor.run import Recording
from ddpdoctor.storage.run_folder import RunFolder

FACTS = """
import sys
at_first = {
    "modules": sorted(n for n in sys.modules if n.partition(".")[0] in ("torch", "numpy", "json")),
    "finders": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
}
import json, os, random, signal, threading
from pathlib import Path

def frames():
    frame, names = sys._getframe(), []
    while frame:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names

rank = os.environ["RANK"]
said = dict(at_first, frames=frames())
import torch
import torch.distributed as dist
assert torch.ones(2).sum() == 2 and vars(sys.modules["__main__"]) is globals()
with open("/proc/self/environ", "rb") as file:
    block = dict(e.partition(b"=")[::2] for e in file.read().split(b"\\0") if e)
changing = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "DDPDOCTOR_OWNER")
environment = {k: v for k, v in os.environ.items() if k not in changing}
said |= {
    "main": {k: str(v) for k, v in globals().items() if k.startswith("__") and k != "__loader__"},
    "loader": type(__loader__).__name__,
    "torch": sorted(n for n in sys.modules if n.startswith("torch")),
    "dynamo": "_dynamo" in vars(torch),
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "environ": environment,
    "block": block[b"RANK"].decode() == rank and b"DDPDOCTOR_AGENT" not in block,
    "thread": threading.current_thread() is threading.main_thread(),
    "threads": [t.name for t in threading.enumerate()],
    "session": os.getsid(0) == os.getpid(),
    "files": sorted(int(f) for f in os.listdir("/proc/self/fd") if int(f) < 3),
    "out": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering,
            sys.stdout.write_through, sys.stderr.line_buffering],
    "signals": [str(signal.getsignal(s)) for s in (2, 13, 15)],
    "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "level": str(dist.get_debug_level()),
    "orig": [w for w in sys.orig_argv[1:]],
}
with open(f"drawn-{rank}", "w") as file:
    json.dump([os.getpid(), os.getppid(), random.random(), torch.initial_seed()], file)
with open(f"facts-{rank}", "w") as file:
    json.dump(said, file, indent=1)
if "dies" in sys.argv and rank == "0":
    raise LookupError("as it is")
"""


def launched(folder: Path, *, forked: bool, doctor: bool, argument: str) -> tuple[int, str]:
    folder.mkdir()
    (folder / "train.py").write_text(FACTS)
    launcher = ["ddpdoctor", "run", "--out", "run"] if doctor else ["torch.distributed.run"]
    options = ["--standalone", "--nproc-per-node=2", "train.py", argument]
    words = [sys.executable, "-m", *launcher, *options]
    environment = inherited(SAID="here", PYTHONPATH=str(folder.parent))
    return run(words, cwd=folder, environment=environment, forked=forked)


def facts(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"facts-{rank}").read_text().replace(str(folder), "<here>"))


@pytest.mark.slow
@pytest.mark.skipif(not preloaded.POSSIBLE, reason="nothing is forked here")
@pytest.mark.parametrize(("doctor", "argument"), [(True, "a b"), (False, "dies")])
def test_a_fork_is_not_told_from_a_new_process(
    doctor: bool, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloaded, "fresh", False)  # also where it is tried again
    ends, printed = {}, {}
    for forked in (False, True):
        folder = tmp_path / f"forked-{forked}"
        ends[forked], text = launched(folder, forked=forked, doctor=doctor, argument=argument)
        printed[forked] = text.replace(str(folder), "<here>")
    new, fork = tmp_path / "forked-False", tmp_path / "forked-True"
    assert ends[True] == ends[False] == (argument == "dies"), printed[True]
    for rank in (0, 1):
        ours, real = facts(fork, rank), facts(new, rank)
        ours["finders"].remove("Hidden")
        differing = {k: (ours[k], real[k]) for k in ours if ours[k] != real[k]}
        assert not {k: _apart(*pair) for k, pair in differing.items()}
    drawn = [json.loads((fork / f"drawn-{rank}").read_text()) for rank in (0, 1)]
    assert not {*drawn[0][2:]} & {*drawn[1][2:]}
    assert drawn[0][1] == drawn[1][1]  # torchrun is the parent of both
    assert error(printed[True]) == error(printed[False])
    assert error(printed[True]).count("File") == (argument == "dies"), printed[True]
    if doctor:
        ranks = Recording(RunFolder(fork / "run")).refresh().ranks
        assert {r.state for r in ranks.values()} == {"finished"}
        assert [r.started.pid for r in ranks.values() if r.started] == [d[0] for d in drawn]


def _apart(ours: Any, real: Any) -> Any:
    """What is in one of two values alone, where they are lists of names."""
    if all(isinstance(v, list) and all(isinstance(n, str) for n in v) for v in (ours, real)):
        return sorted({*ours} ^ {*real}) or (ours, real)
    return ours, real


def error(text: str) -> str:
    """What the rank said that died."""
    found = re.search(r"^Traceback.*?^LookupError[^\n]*", text, re.M | re.S)
    return found[0] if found else ""
