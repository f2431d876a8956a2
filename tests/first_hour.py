"""What to try first on a machine with GPUs, and a table of how it went (make gpu).

    python tests/first_hour.py [--only NAME,NAME] [--device cuda] [--every 24] [--keep DIR]

With another device than `cuda` it rehearses what does not need one. Two ranks share a GPU where
there is only one: NCCL takes them for ranks of two hosts (`NCCL_HOSTID`).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import sampling
from sampling import ROOT, Sample, collect, command, device_samples, lacking_on_device, on_device

from ddpdoctor.launch.devices import visible_gpus
from ddpdoctor.report.findings import Report

LIMIT_S = 180.0
TIMEOUT_S = 30
HANG_AFTER_S = "12"
PAIR = "--nproc-per-node", "2"
HANGS = "hang/rank_missing", "hang/rank_exited_early", "hang/collective_mismatch"
SHARED = "DDP203", "DDP204", "DDP705"
"""What is true of ranks that share a GPU, whatever they run."""

BEGIN = """
import json, os, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
if torch.cuda.device_count() < ranks:
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.cuda.set_device(rank % torch.cuda.device_count())
"""

RECORDERS = (
    BEGIN
    + """
import torch._C._distributed_c10d as c
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
)

CAPTURE = (
    BEGIN
    + """
os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
dist.init_process_group("nccl")
torch.manual_seed(0)
inputs = torch.randn(16, 64, device="cuda")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    model = DDP(nn.Linear(64, 8).cuda())
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
)

GRAPHED = (
    BEGIN
    + """
dist.init_process_group("nccl")
torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
inputs = torch.randn(16, 64, device="cuda")
if HOW == "callables":
    inner = torch.cuda.make_graphed_callables(inner, (inputs,))
model = DDP(inner)
if HOW == "compiled":
    model = torch.compile(model, mode="reduce-overhead")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
for step in range(60):
    optimizer.zero_grad()
    loss = model(inputs).pow(2).mean()
    loss.backward()
    optimizer.step()
print("weights", float(sum(p.double().sum() for p in model.parameters())), flush=True)
dist.destroy_process_group()
"""
)

ALIKE = (
    BEGIN
    + """
import hashlib
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.use_deterministic_algorithms(True)
dist.init_process_group("nccl")
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(16, 16, 3, 2),
    nn.Flatten(), nn.Linear(144, 10)).cuda().to(memory_format=torch.channels_last)
model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
scaler = torch.amp.GradScaler("cuda")
data = TensorDataset(torch.randn(256, 3, 16, 16), torch.randint(10, (256,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler, num_workers=2, pin_memory=True)
number = 0
for epoch in range(24):
    sampler.set_epoch(epoch)
    model.train()
    for images, labels in loader:
        images = images.cuda(non_blocking=True).to(memory_format=torch.channels_last)
        labels = labels.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        total = loss.detach().clone()
        dist.all_reduce(total)
weights = hashlib.sha256(b"".join(v.cpu().numpy().tobytes() for v in model.state_dict().values()))
print("weights", weights.hexdigest(), torch.cuda.get_rng_state().sum().item(),
      torch.get_rng_state().sum().item(), flush=True)
dist.destroy_process_group()
"""
)

LAUNCHES = (
    BEGIN
    + """
from torch.profiler import ProfilerActivity, profile
dist.init_process_group("nccl")
torch.manual_seed(0)
model = DDP(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
inputs = torch.randn(64, 512, device="cuda")
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
for before in (0, 40, 400, 2000):
    train(before)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        train(40)
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [e for e in events if "Memcpy" in e.name]
    kernels = [e for e in events if "Mem" not in e.name]
    took = sum(e.device_time_total for e in events)
    began = time.perf_counter()
    train(400)
    ms = (time.perf_counter() - began) / 0.4
    if rank == 0:
        told = len(kernels) / 40, len(copies) / 40, took / 40, ms
        print("launches", *(f"{number:.2f}" for number in told), flush=True)
dist.destroy_process_group()
"""
)

SCENE = (
    BEGIN
    + """
import datetime
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=30))
torch.manual_seed(0)
model = DDP(nn.Linear(64, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total = torch.zeros((), device="cuda")
for step in range(40):
    if step == 20 and rank == 1 and SCENE == "asleep":
        time.sleep(1000)
    if step == 20 and rank == 1 and SCENE == "uneven":
        break
    optimizer.zero_grad()
    loss = model(torch.randn(16, 64, device="cuda")).pow(2).mean()
    loss.backward()
    optimizer.step()
    if step == 20 and SCENE == "mismatch":
        if rank == 0:
            dist.all_reduce(total)
        else:
            dist.broadcast(total, src=0)
    if step == 20 and SCENE == "skipped" and rank == 0:
        dist.all_reduce(total)
    total += loss.item()
dist.destroy_process_group()
"""
)

SCENES = {
    "asleep": ("DDP603", "time.sleep(1000)"),
    "uneven": ("DDP604", ""),
    "mismatch": ("DDP601", "dist.all_reduce(total)"),
    "skipped": ("DDP601", ""),
}
"""Hangs on tensors of the device: the code that is to be found, and its line where it is one."""

OUTSTANDING = (
    BEGIN
    + """
dist.init_process_group("nccl")
value = torch.ones(4, device="cuda")
dist.all_reduce(value)
torch.cuda.synchronize()
if rank == 0:
    dist.all_reduce(value)
    raise ValueError("with a collective outstanding")
time.sleep(8)
"""
)


Lines = Iterator[tuple[str, bool]]


def stopped(sample: Sample) -> tuple[str, ...]:
    """The command of a sample that is stopped where it hangs; NCCL takes seconds to begin."""
    return tuple(sampling.stopping(("--hang-after", HANG_AFTER_S, *_without_limit(sample.command))))


def _without_limit(words: tuple[str, ...]) -> tuple[str, ...]:
    at = words.index("--hang-after") if "--hang-after" in words else len(words)
    return (*words[:at], *words[at + 2 :])


class Trial:
    """One thing to try; what it yields are lines of the table: what, and whether it went well."""

    def __init__(
        self, device: str, gpus: int, folder: Path, *, jobs: int, every: int, match: str = ""
    ) -> None:
        self.device, self.gpus, self.folder = device, gpus, folder
        self.jobs, self.every, self.match = jobs, every, re.compile(match)
        self.shared = device != "cpu" and gpus < 2
        self.share = ("--share",) if self.shared else ()

    def device_samples(self) -> list[Sample]:
        return [s for s in device_samples() if self.match.search(s.name)]

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

    def both(self, path: Path, pattern: str, ranks: int = 2) -> list[tuple[list[str], str, float]]:
        """What a script prints of a pattern without and with the doctor; all it prints; seconds."""
        options = ("--standalone", f"--nproc-per-node={ranks}", str(path))
        out = self.folder / f"{path.stem}-{ranks}"
        told = []
        for words in (("torch.distributed.run",), ("ddpdoctor", "run", "--out", str(out))):
            _, said, took = self.run(*words, *options)
            told.append((list(dict.fromkeys(re.findall(pattern, said))), said, took))
        (self.folder / f"{path.stem}-{ranks}.txt").write_text(told[1][1])
        return told

    def alike(self, path: Path, ranks: int = 2) -> tuple[str, bool]:
        """Whether the weights of a script are the same with the doctor."""
        (plain, said, _), (ours, told, _) = self.both(path, r"weights (.+)", ranks)
        alarms = re.findall(r"DDP\d{3} (?:error|warning).*", told)
        alarms = [a for a in alarms if not (self.shared and a.startswith(SHARED))]
        well = bool(plain) and plain == ours and not alarms
        return (
            f"{path.stem}, {ranks} ranks: {plain or said[-300:]} {ours or told[-300:]} {alarms}",
            well,
        )

    def recorders(self) -> Lines:
        """Which of torch's flight recorders has entries."""
        path = self.script("recorders.py", RECORDERS)
        status, said, _ = self.run(
            "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)
        )
        for line in dict.fromkeys(re.findall(r"_dump_\w+ \w+ \d+", said)):
            yield line, status == 0
        if status:
            yield said[-600:], False

    def samples(self) -> Lines:
        """Samples on the device: the verdict, and whether the doctor waits for it."""
        if self.device == "cuda":
            status, said, _ = self.run("pytest", "-q", str(ROOT / "tests/memory/test_on_gpu.py"))
            yield f"tests/memory/test_on_gpu.py: {said[-200:]}", not status
        watch = ("--watch-syncs",) if self.device == "cuda" else ()
        tried = self.device_samples()[:: self.every]
        yield from self.judged({s.name: on_device(s, self.device, *watch) for s in tried})

    def judged(self, samples: dict[str, Sample]) -> Lines:
        """Whether samples are judged as they say."""
        with ThreadPoolExecutor(self.jobs) as pool:
            yield from pool.map(self.verdict, samples, samples.values())

    def verdict(self, what: str, sample: Sample) -> tuple[str, bool]:
        """Whether a sample is judged as it says."""
        try:
            report, printed = self.examine(what, sample)
        except AssertionError as error:
            return f"{what}: {str(error)[-300:]}", False
        if not report.ranks:
            return f"{what}: no rank was observed", False
        lacking = lacking_on_device(sample, report)
        excused = [d for d in sampling.differences(sample, report) if d not in lacking]
        what = f"{what} (excused: {len(excused)})" if excused else what
        if self.shared:
            lacking = [
                w for w in lacking if not w.startswith(tuple(f"not expected: {c}" for c in SHARED))
            ]
        lacking += sorted(set(re.findall("the doctor waits for the device.*", printed)))
        lacking += [f"DDP001 {f.summary}" for f in report.findings if f.code == "DDP001"]
        return f"{what} {'; '.join(lacking)}".strip(), not lacking

    def examine(self, what: str, sample: Sample) -> tuple[Report, str]:
        out = Path(tempfile.mkdtemp(dir=self.folder, prefix=what.replace("/", ".") + "-"))
        words = command(sample, out / "run")
        if not any(w.startswith(("--nnodes", "--rdzv", "--standalone", "--master")) for w in words):
            words.insert(words.index("run") + 1, "--standalone")  # so that no two want one port
        _, printed = sampling.run(words, cwd=out, limit_s=LIMIT_S)
        (out / "printed.txt").write_text(printed)
        findings = out / "run" / "findings.json"
        assert findings.exists(), f"no findings.json: {printed}"
        return msgspec.json.decode(findings.read_bytes(), type=Report), printed

    def nccl(self) -> Lines:
        """Samples whose two ranks speak NCCL, also on one GPU."""
        others = [s for s in self.device_samples() if not s.name.startswith("hang/")]
        tried = others[7 % len(others) :: self.every]
        yield from self.judged({s.name: on_device(s, self.device, *self.share) for s in tried})

    def capture(self) -> Lines:
        """A whole iteration of DDP as a CUDA graph, without and with the doctor."""
        yield self.alike(self.script("capture.py", CAPTURE), 1)
        yield self.alike(self.script("capture.py", CAPTURE))
        for how in ("callables", "compiled"):
            yield self.alike(self.script(f"{how}.py", f"HOW = {how!r}\n{GRAPHED}"))

    def no_harm(self) -> Lines:
        """Mixed precision, workers, pinned memory, SyncBatchNorm: the same numbers."""
        yield self.alike(self.script("alike.py", ALIKE))

    def launches(self) -> Lines:
        """Kernels, copies, microseconds of the device and milliseconds per step."""
        path = self.script("launches.py", LAUNCHES)
        (plain, _, _), (ours, told, _) = self.both(path, r"launches (.+)", 1)
        yield f"{plain}", bool(plain)
        yield f"with it: {ours or told[-300:]}", bool(ours)

    def hangs(self) -> Lines:
        """Hangs on NCCL, before its watchdog ends them and after."""
        tried = {}
        for sample in (s for s in self.device_samples() if s.name.startswith("hang/")):
            early = sample if sample.clean else replace(sample, command=stopped(sample))
            factories = ("--factories",) * ("DataLoader" not in sample.path.read_text())
            options = (*self.share, *factories)
            tried[f"{sample.name}, stopped"] = on_device(early, self.device, *options)
            if self.device != "cpu" and sample.name in HANGS:
                late = replace(sample, command=(*PAIR, "--on-hang", "report"))
                late = on_device(late, self.device, *options, "--timeout-s", str(TIMEOUT_S))
                tried[f"{sample.name}, ended by the watchdog"] = late
        yield from self.judged(tried)

    def scenes(self) -> Lines:
        """Hangs of tensors on the device: early, and after NCCL's watchdog."""
        tried = [(s, e) for s in SCENES for e in (True, False) if self.match.search(f"{s} {e}")]
        with ThreadPoolExecutor(self.jobs) as pool:
            yield from pool.map(self.scene, *zip(*tried, strict=True))

    def scene(self, name: str, early: bool) -> tuple[str, bool]:
        when = "early" if early else "late"
        path = self.script(f"{name}_{when}.py", f"SCENE = {name!r}\n{SCENE}")
        options: tuple[str, ...] = ("--on-hang", "report")
        if early:
            options = ("--hang-after", HANG_AFTER_S, "--on-hang", "stop")
        out = self.folder / path.stem
        words = "ddpdoctor", "run", "--out", str(out), *options, "--standalone", *PAIR, str(path)
        _, said, took = self.run(*words)
        (self.folder / f"{path.stem}.txt").write_text(said)
        found = re.findall(r"(?:error|warning)\[(?!DDP203)(DDP\d+)\] (.*)", said)
        code, line = SCENES[name]
        well = [c for c, _ in found] == [code] and line in said
        return f"{name}, {when}, {took:.0f} s: {found}", well

    def outstanding(self) -> Lines:
        """An exception while a collective is outstanding: the rank is to end as fast as without."""
        path = self.script("outstanding.py", OUTSTANDING)
        (_, _, plain), (_, _, took) = self.both(path, "ValueError")
        yield f"without the doctor {plain:.0f} s, with it {took:.0f} s", took < plain + 5

    def overhead(self) -> Lines:
        """What the doctor costs, by its own account and as estimated for the device."""
        (sample,) = (s for s in collect() if s.name == "model/unused_parameter_clean")
        cost = self.examine("overhead", on_device(sample, self.device))[0].overhead
        yield f"{cost.measured_percent} % of the run, {cost.device_s} s of the device", True


TRIALS = (
    "recorders", "capture", "no_harm", "launches", "outstanding", "scenes", "hangs", "samples",
    "nccl", "overhead",
)  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", default=",".join(TRIALS))
    options.add_argument("--device", default="cuda")
    options.add_argument("--jobs", type=int, default=4, help="so many samples at a time")
    options.add_argument("--every", type=int, default=24, help="one in so many of the samples")
    options.add_argument("--match", default="", help="a regular expression for names of samples")
    options.add_argument("--keep", type=Path, help="a folder for what the runs leave")
    asked = options.parse_args()
    gpus = visible_gpus()
    if not gpus and asked.device == "cuda":
        print("there is no GPU here: nothing was tried")
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        kept = asked.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        trial = Trial(
            asked.device,
            gpus,
            kept.resolve(),
            jobs=asked.jobs,
            every=asked.every,
            match=asked.match,
        )
        for name in asked.only.split(","):
            for what, well in getattr(trial, name)():
                failed += not well
                print(f"{'ok    ' if well else 'FAILED'} {name}: {what}", flush=True)
    print(f"{gpus} GPUs; {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
