"""What to try first on a machine with GPUs, and a table of how it went (make gpu).

    python tests/first_hour.py [--only NAME,NAME] [--device cuda]

With another device than `cuda` it rehearses what does not need one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from sampling import ROOT, Sample, collect, device_samples, lacking_on_device, launched, on_device

from ddpdoctor.launch.devices import visible_gpus
from ddpdoctor.report.findings import Report

LIMIT_S = 180.0
TIMEOUT_S = 30
PAIR = "--nproc-per-node", "2"
HANGS = "hang/rank_missing", "hang/rank_exited_early", "hang/collective_mismatch"
ONE_IN = 24
"""One in so many of the samples, so that the list takes an hour at most."""

RECORDERS = """
import torch, torch.distributed as dist, torch._C._distributed_c10d as c, json, os
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
value = torch.ones(4, device="cuda")
for _ in range(8):
    dist.all_reduce(value)
torch.cuda.synchronize()
for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
    dump = getattr(c, name, None)
    text = dump(includeCollectives=True, onlyActive=False) if dump else b"{}"
    print(name, dump is not None, len(json.loads(text).get("entries", ())))
dist.destroy_process_group()
"""

CAPTURE = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
rank = int(os.environ["LOCAL_RANK"])
os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
inputs = torch.randn(16, 64, device="cuda")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    model = DDP(torch.nn.Linear(64, 8).cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(11):
        optimizer.zero_grad(set_to_none=True)
        model(inputs).pow(2).mean().backward()
        optimizer.step()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    optimizer.zero_grad(set_to_none=True)
    model(inputs).pow(2).mean().backward()
    optimizer.step()
for _ in range(20):
    graph.replay()
torch.cuda.synchronize()
print("weights", float(model.module.weight.double().sum()), flush=True)
del graph
dist.destroy_process_group()
"""

OUTSTANDING = """
import os, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
value = torch.ones(4, device="cuda")
dist.all_reduce(value)
torch.cuda.synchronize()
if rank == 0:
    dist.all_reduce(value)
    raise ValueError("with a collective outstanding")
import time
time.sleep(8)
"""


class Trial:
    """One thing to try; what it yields are lines of the table: what, and whether it went well."""

    def __init__(self, device: str, gpus: int, folder: Path) -> None:
        self.device, self.gpus, self.folder = device, gpus, folder
        self.ranks = max(1, min(2, gpus))

    def script(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def run(self, *words: str) -> tuple[int, str, float]:
        began = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", *words], cwd=self.folder, timeout=LIMIT_S,
                capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124, f"not over within {LIMIT_S:g} s", LIMIT_S
        return done.returncode, done.stdout + done.stderr, time.monotonic() - began

    def recorders(self) -> Iterator[tuple[str, bool]]:
        """Which of torch's flight recorders has entries."""
        path = self.script("recorders.py", RECORDERS)
        status, said, _ = self.run(
            "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", str(path)
        )
        for line in dict.fromkeys(re.findall(r"_dump_\w+ \w+ \d+", said)):
            yield line, status == 0
        if status:
            yield said[-300:], False

    def samples(self) -> Iterator[tuple[str, bool]]:
        """Samples on the device: the verdict, and whether the doctor waits for it."""
        if self.device == "cuda":
            yield (
                "tests of tests/memory/test_on_gpu.py",
                not self.run(
                    "pytest", "-q", "-m", "gpu", str(ROOT / "tests/memory/test_on_gpu.py")
                )[0],
            )
        watch = ("--watch-syncs",) if self.device == "cuda" else ()
        for sample in device_samples()[::ONE_IN]:
            yield self.verdict(sample.name, on_device(sample, self.device, *watch))

    def verdict(self, what: str, sample: Sample) -> tuple[str, bool]:
        """Whether a sample is judged as it says."""
        try:
            report = self.examine(sample)
        except AssertionError as error:
            return f"{what}: {str(error)[-300:]}", False
        lacking = lacking_on_device(sample, report)
        return f"{what} {'; '.join(lacking)}".strip(), not lacking

    def examine(self, sample: Sample) -> Report:
        out = Path(tempfile.mkdtemp(dir=self.folder))
        return launched(sample, out, limit_s=LIMIT_S)[1]

    def capture(self) -> Iterator[tuple[str, bool]]:
        """A whole iteration of DDP as a CUDA graph, without and with the doctor."""
        path = self.script("capture.py", CAPTURE)
        options = ("--standalone", f"--nproc-per-node={self.ranks}", str(path))
        plain = self.run("torch.distributed.run", *options)
        ours = self.run("ddpdoctor", "run", *options)
        found = [re.findall(r"weights (\S+)", said) for _, said, _ in (plain, ours)]
        yield f"without the doctor: {found[0] or plain[1][-200:]}", bool(found[0])
        yield f"with it: {found[1] or ours[1][-200:]}", bool(found[1]) and found[0] == found[1]

    def hangs(self) -> Iterator[tuple[str, bool]]:
        """Hangs on NCCL, before its watchdog ends them and after."""
        if self.gpus < 2 and self.device != "cpu":
            return
        for sample in (s for s in collect() if s.name in HANGS):
            early = replace(sample, command=(*PAIR, "--hang-after", "5", "--on-hang", "stop"))
            yield self.verdict(f"{sample.name}, stopped", on_device(early, self.device))
            if self.device != "cpu":
                late = replace(sample, command=(*PAIR, "--on-hang", "report"))
                late = on_device(late, self.device, "--timeout-s", str(TIMEOUT_S))
                yield self.verdict(f"{sample.name}, ended by the watchdog", late)

    def outstanding(self) -> Iterator[tuple[str, bool]]:
        """An exception while a collective is outstanding: the rank is to end as fast as without."""
        if self.gpus < 2:
            return
        path = self.script("outstanding.py", OUTSTANDING)
        options = ("--standalone", "--nproc-per-node=2", str(path))
        plain = self.run("torch.distributed.run", *options)[2]
        _, _, took = self.run("ddpdoctor", "run", *options)
        yield f"without the doctor {plain:.0f} s, with it {took:.0f} s", took < plain + 5

    def overhead(self) -> Iterator[tuple[str, bool]]:
        """What the doctor costs, by its own account and as estimated for the device."""
        (sample,) = (s for s in collect() if s.name == "model/unused_parameter_clean")
        cost = self.examine(on_device(sample, self.device)).overhead
        yield f"{cost.measured_percent} % of the run, {cost.device_s} s of the device", True


TRIALS: dict[str, Callable[[Trial], Iterator[tuple[str, bool]]]] = {
    name: getattr(Trial, name)
    for name in ("recorders", "samples", "capture", "hangs", "outstanding", "overhead")
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", default=",".join(TRIALS))
    options.add_argument("--device", default="cuda")
    asked = options.parse_args()
    gpus = visible_gpus()
    if not gpus and asked.device == "cuda":
        print("there is no GPU here: nothing was tried")
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(asked.device, gpus, Path(folder))
        for name in asked.only.split(","):
            for what, well in TRIALS[name](trial):
                failed += not well
                print(f"{'ok    ' if well else 'FAILED'} {name}: {what}", flush=True)
    print(f"{gpus} GPUs; {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
