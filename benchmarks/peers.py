"""What the doctor and TraceML cost: plain torchrun, ddpdoctor and TraceML on the same loops, in
alternating runs.

    pip install traceml-ai
    python benchmarks/peers.py [--rounds 3] [--steps 400] [--after 150] [--loops mlp,conv]

Prints a Markdown table: medians over the rounds, in milliseconds per step. "added" is the median
of the differences from the plain run of the same round. ddpdoctor needs no change of the program;
TraceML needs a context manager around each step of a loop like these, which `loops.py` enters.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from overhead import LIMIT_S, LOOPS, Series

HERE = Path(__file__).parent
TOOLS = ("torchrun", "ddpdoctor", "TraceML")


def command(tool: str, loop: str, steps: int, after: int, figures: Path, folder: Path) -> list[str]:
    script = str(HERE / "loops.py")
    words = [loop, str(steps), str(figures), "traceml" if tool == "TraceML" else "", str(after)]
    words.append("cpu")
    if tool == "torchrun":
        ranks = ["--standalone", "--nproc-per-node", "2"]
        return [sys.executable, "-m", "torch.distributed.run", *ranks, script, *words]
    if tool == "ddpdoctor":
        options = ["--quiet", "--no-live", "--out", str(folder), "--nproc-per-node", "2"]
        return [sys.executable, "-m", "ddpdoctor", "run", *options, script, *words]
    with socket.socket() as probe:  # its default port may still be held by a run that was killed
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = ["--mode", "summary", "--logs-dir", str(folder), "--nproc-per-node", "2"]
    options += ["--aggregator-port", port]
    return [
        *(sys.executable, "-m", "traceml_ai.launcher.cli", "run"),
        *options,
        *(script, "--args", *words),
    ]


def run(tool: str, loop: str, steps: int, after: int, folder: Path) -> Path:
    """One run of a loop; where its figures are."""
    folder.mkdir()
    figures = folder / "figures.json"
    words = command(tool, loop, steps, after, figures, folder / "records")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    if not figures.exists():
        raise SystemExit(f"{tool} left no figures of {loop}:\n{done.stdout}\n{done.stderr}")
    return figures


def measure(loop: str, rounds: int, steps: int, after: int) -> str:
    """One row of the table."""
    series = {tool: Series() for tool in TOOLS}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(rounds):
            order = TOOLS if turn % 2 == 0 else TOOLS[::-1]
            for tool in order:
                series[tool].add(run(tool, loop, steps, after, Path(name) / f"{turn}-{tool}"))
    plain = series["torchrun"]
    cells = [f"{statistics.median(plain.median):.2f}"]
    for tool in TOOLS[1:]:
        for kept in ("median", "cpu"):
            pairs = zip(getattr(plain, kept), getattr(series[tool], kept), strict=True)
            cells.append(f"{statistics.median([b - a for a, b in pairs]):+.2f}")
    weights = set().union(*(one.weights for one in series.values()))
    return f"| {loop} | {' | '.join(cells)} | {'yes' if len(weights) == 1 else 'NO'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--after", type=int, default=150)
    parser.add_argument("--loops", default=",".join(LOOPS))
    options = parser.parse_args()
    if importlib.util.find_spec("traceml_ai") is None:
        parser.error("TraceML is not installed: type `pip install traceml-ai`")
    print(
        "| loop | step of torchrun (ms) | added by ddpdoctor: wall | CPU "
        "| added by TraceML: wall | CPU | weights identical |"
    )
    print("|---|---|---|---|---|---|---|")
    for loop in options.loops.split(","):
        steps = options.steps * (5 if loop == "mlp" else 1)  # its steps take a millisecond
        print(measure(loop, options.rounds, steps, options.after), flush=True)


if __name__ == "__main__":
    main()
