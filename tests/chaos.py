"""Random faults on a random rank at a random step, and whether the doctor says which it was.

    python tests/chaos.py --seeds 40        # or `make chaos`

Each run is a small training loop that one fault is put into; the verdict has to name the fault's
check, the right rank and, where one is to blame, the right line. Prints a table by kind of fault.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from sampling import inherited, run

FAULTS: dict[str, tuple[str, ...]] = {
    "kill": ("DDP605",),
    "stop": ("DDP603",),
    "sleep": ("DDP603",),
    "loop": ("DDP603",),
    "exception": ("DDP606",),
    "exit": ("DDP606",),
    "leave": ("DDP604",),
    "skip": ("DDP601",),
    "extra": ("DDP601",),
    "barrier": ("DDP601",),
    "swap": ("DDP601",),
    "shape": ("DDP602",),
    "dtype": ("DDP602",),
    "reduce_op": ("DDP602",),
    "group": ("DDP607",),
    "none": (),
}
"""Kind of fault to the codes that name it."""

PATIENT = """
import os, signal, sys, time
import torch
import torch.distributed as dist

FAULT, CULPRIT, STEP = {fault!r}, {culprit}, {step}

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
weight = torch.randn(8, 8, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
for step in range({steps}):
    mine = rank == CULPRIT and step == STEP
    loss = (torch.randn(4, 8) @ weight).pow(2).mean()
    loss.backward()
    if FAULT == "kill" and mine:
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stop" and mine:
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "sleep" and mine:
        time.sleep(1000)
    while FAULT == "loop" and mine:
        pass
    if FAULT == "exception" and mine:
        raise ValueError("chaos")
    if FAULT == "exit" and mine:
        sys.exit(7)
    if FAULT == "leave" and mine:
        break
    if FAULT == "group" and mine:
        dist.new_group([rank])
    if FAULT == "extra" and mine:
        dist.all_reduce(torch.zeros(3))
    if FAULT == "barrier" and mine:
        dist.barrier()
    gradient = weight.grad
    if mine and FAULT == "shape":
        gradient = torch.zeros(9, 9)
    if mine and FAULT == "dtype":
        gradient = weight.grad.to(torch.int32)
    op = dist.ReduceOp.MAX if mine and FAULT == "reduce_op" else dist.ReduceOp.SUM
    if not (mine and FAULT == "skip"):
        dist.all_reduce(gradient, op=op)
    first, second = loss.detach().clone(), loss.detach() * 2
    if mine and FAULT == "swap":
        dist.all_reduce(second)
        dist.all_reduce(first)
    else:
        dist.all_reduce(first)
        dist.all_reduce(second)
    optimizer.step()
    optimizer.zero_grad()
if not (FAULT == "leave" and rank == CULPRIT):
    dist.barrier()
    dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Trial:
    """One fault, drawn by a seed."""

    fault: str
    culprit: int
    step: int
    world: int

    @classmethod
    def draw(cls, seed: int, faults: tuple[str, ...] = tuple(FAULTS)) -> Trial:
        dice = random.Random(seed)
        world = dice.choice((2, 2, 3))
        return cls(faults[seed % len(faults)], dice.randrange(world), dice.randrange(1, 15), world)


@dataclass
class Score:
    """How well one kind of fault was told."""

    runs: int = 0
    kind: int = 0
    rank: int = 0
    alarms: int = 0
    seconds: list[float] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)


def attempt(trial: Trial, folder: Path) -> tuple[list[dict[str, object]], float]:
    """The errors and warnings the doctor reported, and the seconds to its verdict."""
    script = folder / "patient.py"
    script.write_text(
        PATIENT.format(fault=trial.fault, culprit=trial.culprit, step=trial.step, steps=20)
    )
    words = [
        sys.executable, "-m", "ddpdoctor", "run", "--out", str(folder / "run"), "--quiet",
        "--hang-after", "5", "--on-hang", "stop", "--nproc-per-node", str(trial.world),
        "--select", "hang", str(script),
    ]  # fmt: skip
    run(words, cwd=folder, environment=inherited(OMP_NUM_THREADS="1"))
    said = json.loads((folder / "run" / "findings.json").read_text())
    found = [f for f in said["findings"] if f["severity"] != "note"]
    verdict = next((f["evidence"].get("time_to_verdict_s") for f in found), None)
    return found, float(verdict) if verdict is not None else -1.0


def judge(trial: Trial, found: list[dict[str, object]], score: Score, seconds: float) -> None:
    """Compare what was said with what was done."""
    expected = FAULTS[trial.fault]
    codes = [str(f["code"]) for f in found]
    score.runs += 1
    if not expected:
        score.kind += not codes
        score.rank += not codes
        score.alarms += len(codes)
    else:
        mine = [f for f in found if f["code"] in expected]
        score.kind += bool(mine)
        ranks: list[list[int]] = [list(f["ranks"]) for f in mine]  # type: ignore[call-overload]
        # With two ranks nobody can tell who is right about an order or a call.
        fair = trial.world == 2 and codes[:1] in (["DDP601"], ["DDP602"], ["DDP607"])
        right = any(trial.culprit in r and (fair or r == [trial.culprit]) for r in ranks)
        right = right or (fair and bool(mine))
        score.rank += right
        score.alarms += len(codes) - len(mine)
        if not right:
            score.misses.append(f"{trial}: {[(f['code'], f['ranks']) for f in found]}")
    if seconds >= 0:
        score.seconds.append(seconds)


def table(scores: dict[str, Score]) -> str:
    """The scores, one line for each kind of fault."""
    lines = ["fault       runs  kind  rank  other errors  verdict after (s, worst)"]
    for fault, score in scores.items():
        worst = f"{max(score.seconds):.1f}" if score.seconds else "-"
        told = f"{score.runs:>4}  {score.kind:>4}  {score.rank:>4}  {score.alarms:>12}"
        lines.append(f"{fault:<11} {told}  {worst:>6}")
    runs = sum(s.runs for s in scores.values())
    kind, rank = sum(s.kind for s in scores.values()), sum(s.rank for s in scores.values())
    lines.append(
        f"{'all':<11} {runs:>4}  {kind:>4}  {rank:>4}  {sum(s.alarms for s in scores.values()):>12}"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=2 * len(FAULTS))
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    scores = {fault: Score() for fault in FAULTS}
    began = time.monotonic()
    for seed in range(given.first, given.first + given.seeds):
        trial = Trial.draw(seed)
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        try:
            found, seconds = attempt(trial, folder)
            judge(trial, found, scores[trial.fault], seconds)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            scores[trial.fault].runs += 1
            scores[trial.fault].misses.append(f"{trial}: {str(error)[:300]}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{time.monotonic() - began:6.0f} s  {trial}", file=sys.stderr, flush=True)
    print(table(scores))
    misses = [m for s in scores.values() for m in s.misses]
    print("\n".join(["", *misses]))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
