"""What the doctor costs: the same loops with and without it, in alternating pairs of runs.

    python benchmarks/overhead.py [--pairs 3] [--steps 400] [--after 150] [--loops mlp,conv]
        [--device cuda --ranks 1]

Prints a Markdown table. Wall time is what users wait for, run against run. What is added is CPU
time of the training thread: run against run, where two plain runs may differ by more than the
doctor costs; and between windows of one run with the doctor's hooks and without, which leaves out
what the debug level that the doctor sets costs in torch itself. "own account" is what the doctor
measured in the examined runs and prints in its report.

The steps before `--after` are not counted: in the first 128 the doctor looks closely, whatever it
costs, and in some hundred more it looks more often than later.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
LOOPS = ("mlp", "tensors", "transformer", "conv")
LIMIT_S = 600


@dataclass
class Series:
    """Means and medians of one loop, a number per run, in milliseconds."""

    mean: list[float] = field(default_factory=list)
    median: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    switched: list[float] = field(default_factory=list)
    weights: set[str] = field(default_factory=set)

    def add(self, path: Path) -> None:
        told = json.loads(path.read_text())
        self.mean.append(1000 * statistics.mean(told["wall"]))
        self.median.append(1000 * statistics.median(told["wall"]))
        self.cpu.append(1000 * statistics.mean(told["cpu"]))
        self.weights.add(told["weights"])
        if "with" in told:
            added = trimmed_mean(told["with"]) - trimmed_mean(told["without"])
            self.switched.append(1000 * added)


def trimmed_mean(values: list[float]) -> float:
    """Without the largest twentieth, which is the machine's."""
    return statistics.mean(sorted(values)[: len(values) - len(values) // 20])


def run(
    loop: str, asked: argparse.Namespace, steps: int, folder: Path, doctor: Path | None,
    how: str = "",
) -> Path:  # fmt: skip
    """One run of a loop; where its figures are."""
    out = folder / "figures.json"
    script = [
        str(HERE / "loops.py"),
        loop,
        str(steps),
        str(out),
        how,
        str(asked.after),
        asked.device,
    ]
    ranks = ["--standalone", "--nproc-per-node", str(asked.ranks)]
    if doctor is None:
        words = [sys.executable, "-m", "torch.distributed.run", *ranks, *script]
    else:
        options = ["--quiet", "--no-live", "--out", str(doctor)]
        words = [sys.executable, "-m", "ddpdoctor", "run", *options, *ranks, *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out.unlink(missing_ok=True)
    # torch aborts now and then when an interpreter ends; the figures are written by then.
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=LIMIT_S, env=environment, cwd=folder
    )
    if not out.exists():
        raise SystemExit(f"the loop {loop} left no figures:\n{done.stderr}")
    return out


def own_ms(folder: Path, counted: int) -> float:
    """The doctor's own account of its time on rank 0, in milliseconds per step that is counted."""
    steps = 0
    known: list[tuple[int, float]] = [(0, 0.0)]
    for line in (folder / "rank-0.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            steps = event["step"] + 1
        if event["event"] == "probe-cost":
            known.append((steps, event["own_s"]))
    # It is told after the first 128 steps, every few seconds, and at the end.
    last, end = known[-1]
    at, begin = max(k for k in known if k[0] <= last - counted or k[0] == 0)
    return 1000 * (end - begin) / (last - at)


def measure(loop: str, asked: argparse.Namespace, steps: int) -> str:
    """One row of the table."""
    plain, examined, switched, own = Series(), Series(), Series(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for pair in range(asked.pairs):
            order = (False, True) if pair % 2 == 0 else (True, False)
            for with_doctor in order:
                records = folder / f"run-{pair}" if with_doctor else None
                figures = run(loop, asked, steps, folder, records)
                (examined if with_doctor else plain).add(figures)
                if records is not None:
                    own.append(own_ms(records, steps))
            records = folder / f"switched-{pair}"
            switched.add(run(loop, asked, steps, folder, records, "switch"))
    same = len(plain.weights | examined.weights | switched.weights) == 1
    extra = [b - a for a, b in zip(plain.cpu, examined.cpu, strict=True)]
    step, added = statistics.median(plain.median), statistics.median(switched.switched)
    return (
        f"| {loop} | {step:.1f} | {statistics.median(plain.mean):.1f} "
        f"| {statistics.median(examined.median):.1f} | {statistics.median(examined.mean):.1f} "
        f"| {statistics.median(extra):+.2f} | {added:+.2f} | {100 * added / step:+.1f} % "
        f"| {statistics.median(own):.2f} | {'yes' if same else 'NO'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--after", type=int, default=150)
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(
        "| loop | step, median (ms) | mean | with the doctor, median | mean "
        "| CPU time added (ms), run against run | within a run | of a step "
        "| own account (ms) | weights identical |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for loop in options.loops.split(","):
        steps = options.steps * (5 if loop == "mlp" else 1)  # its steps take a millisecond
        print(measure(loop, options, steps), flush=True)


if __name__ == "__main__":
    main()
