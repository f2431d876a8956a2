"""Reads what a sample says of itself and runs it through the real command.

A sample's docstring has one `run:` line (options of `ddpdoctor run`, or `exec OPTIONS -- COMMAND`
with `{}` for the sample and `python` for this Python) and one `finds:` line for every fault:

    run: --nproc-per-node 2
    finds: DDP301 error at `self.spare = nn.Linear(32, 4)`

The line of code may be left out, and `finds: nothing` means neither an error nor a warning. A
`needs: 2 gpus` line keeps it from machines that have fewer.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from preloaded import FORKED_LIMIT_S, preloaded

from ddpdoctor.report.findings import Finding, Report, Severity
from ddpdoctor.report.registry import all_checks

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "samples"
LIMIT_S = 100
"""No sample may take longer, on however busy a machine."""

NOTHING = "nothing"

_FINDS = re.compile(r"(DDP\d{3}) (error|warning|note)(?: at `(.+)`)?")


class SampleError(Exception):
    """A sample's docstring does not say what to run or what to expect."""


@dataclass(frozen=True)
class Expected:
    code: str
    severity: Severity
    source: str | None

    def is_met_by(self, finding: Finding) -> bool:
        line = finding.location.source.strip() if finding.location else None
        return (
            (finding.code, finding.severity) == (self.code, self.severity)
            and self.source in (None, line)
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.code} {self.severity.value}" + (
            f" at `{self.source}`" if self.source else ""
        )


@dataclass(frozen=True)
class Sample:
    path: Path
    command: tuple[str, ...]
    expected: tuple[Expected, ...]
    gpus: int = 0

    @property
    def name(self) -> str:
        return str(self.path.relative_to(SAMPLES).with_suffix(""))

    @property
    def clean(self) -> bool:
        return all(e.severity is Severity.NOTE for e in self.expected)


def collect() -> list[Sample]:
    """Every script that says what it finds; others are modules that samples share."""
    return [
        read(path)
        for path in sorted(SAMPLES.rglob("*.py"))
        if not path.name.startswith("_")
    ]  # fmt: skip


def read(path: Path) -> Sample:
    """What a sample says of itself.

    Raises:
        SampleError: its docstring cannot be understood.
    """
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    said = [line.partition(":") for line in text.splitlines()]
    runs = [value.strip() for key, _, value in said if key.strip() == "run"]
    finds = [value.strip() for key, _, value in said if key.strip() == "finds"]
    if len(runs) != 1 or not finds:
        raise SampleError(f"{path}: the docstring needs one `run:` and at least one `finds:` line")
    expected = () if finds == [NOTHING] else tuple(_expected(path, line) for line in finds)
    needs = [value.split() for key, _, value in said if key.strip() == "needs"]
    gpus = [int(words[0]) for words in needs if words[-1].startswith("gpu")]
    return Sample(path, tuple(shlex.split(runs[0])), expected, max(gpus, default=0))


def _expected(path: Path, line: str) -> Expected:
    match = _FINDS.fullmatch(line)
    if not match:
        raise SampleError(f"{path}: `finds: {line}` is not `DDPxxx severity at `source line``")
    return Expected(match[1], Severity(match[2]), match[3])


def command(sample: Sample, out: Path) -> list[str]:
    """What to type to run a sample under the doctor."""
    doctor = [sys.executable, "-m", "ddpdoctor"]
    if sample.command[:1] == ("exec",):
        meant = {"{}": str(sample.path), "python": sys.executable}
        words = [meant.get(w, w) for w in sample.command[1:]]
        return [*doctor, "exec", "--out", str(out), *words]
    return [*doctor, "run", "--out", str(out), *sample.command, str(sample.path)]


def on_device(sample: Sample, device: str, *more: str) -> Sample:
    """The sample on another device, see `samples/_on_device.py`."""
    runner = str(SAMPLES / "_on_device.py")
    return replace(sample, command=(*sample.command, runner, "--device", device, *more))


def device_samples() -> list[Sample]:
    """Samples that say the same on every device: not about the launch, or about devices."""
    return [
        s for s in collect()
        if s.command[0] != "exec" and not s.gpus and not s.name.startswith("launch/")
        and '"gloo"' in s.path.read_text() and "spawn" not in s.path.read_text()
    ]  # fmt: skip


def stopping(command: tuple[str, ...]) -> tuple[str, ...]:
    """Have a hang end the run: where a device waits, a deadlock is suspected only, and does not."""
    for option, value in (("--hang-after", "5"), ("--on-hang", "stop")):
        if option not in command:
            command = (option, value, *command)
    return command


def lacking_on_device(sample: Sample, report: Report) -> list[str]:
    """`differences`, without those of checks that say that they see nothing there."""
    unseen = {s.check for s in (*report.coverage.skipped, *report.coverage.partly)}
    codes = {c.code for c in all_checks() if c.name in unseen}
    return [d for d in differences(sample, report) if not any(code in d for code in codes)]


def examine(sample: Sample, folder: Path, *, limit_s: float = LIMIT_S) -> Report:
    """Run a sample in an empty folder; what the doctor wrote about it (see `launched`)."""
    return launched(sample, folder, limit_s=limit_s)[1]


def launched(sample: Sample, folder: Path, *, limit_s: float = LIMIT_S) -> tuple[int, Report]:
    """Run a sample in an empty folder; the exit status, and what the doctor wrote about it.

    Raises:
        AssertionError: the doctor wrote nothing; the message is what was printed instead.
    """
    out = folder / "run"
    status, printed = run(command(sample, out), cwd=folder, limit_s=limit_s, forked=True)
    findings = out / "findings.json"
    assert findings.exists(), f"no findings.json, exit status {status}:\n{printed[-4000:]}"
    return status, msgspec.json.decode(findings.read_bytes(), type=Report)


def run(
    words: Sequence[str],
    *,
    cwd: Path,
    environment: dict[str, str] | None = None,
    limit_s: float = LIMIT_S,
    forked: bool = False,
) -> tuple[int, str]:
    """Exit status and output of a command; it and all its children end with the time limit.

    Args:
        forked: from a Python that has torch imported already, where that can be had.
    """
    if forked and (ready := preloaded()):
        whole = inherited() if environment is None else environment
        return ready.run(words, cwd=cwd, environment=whole, limit_s=min(limit_s, FORKED_LIMIT_S))
    with subprocess.Popen(
        list(words),
        cwd=cwd,
        env=inherited() if environment is None else environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # The doctor ends the ranks, which stand in sessions of their own.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                printed, _ = process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                printed = ""
            raise AssertionError(f"still running after {limit_s} s:\n{printed[-4000:]}") from None
    return process.returncode, printed


def inherited(**more: str) -> dict[str, str]:
    """The environment without what a launcher or a doctor around the tests may have set."""
    foreign = ("DDPDOCTOR_", "TORCHELASTIC_", "PET_", "MASTER_", "SLURM_", "OMPI_")
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign) and k not in ranks}
    return {**kept, **more}


def differences(sample: Sample, report: Report) -> list[str]:
    """How the report differs from what the sample promises, in sentences."""
    serious = [f for f in report.findings if f.severity is not Severity.NOTE]
    missing = [e for e in sample.expected if not any(e.is_met_by(f) for f in report.findings)]
    surplus = [f for f in serious if not any(e.is_met_by(f) for e in sample.expected)]
    counted = [sum(e.is_met_by(f) for f in serious) for e in sample.expected]
    return [
        *(f"not found: {e}" for e in missing),
        *(f"the fault of its twin is found: {_told(f)}" for f in _of_the_twin(sample, report)),
        *(f"not expected: {_told(f)}" for f in surplus),
        *(
            f"found {n} times: {e}"
            for n, e in zip(counted, sample.expected, strict=True)
            if n > sum(e == other for other in sample.expected)
        ),
    ]


def _of_the_twin(sample: Sample, report: Report) -> list[Finding]:
    """In a clean twin: what is found of the code that its faulty twin is about, notes too."""
    twin = sample.path.with_name(sample.path.name.replace("_clean.py", ".py"))
    if not sample.path.stem.endswith("_clean") or not twin.exists():
        return []
    fault = read(twin).expected[:1]
    return [
        f
        for f in report.findings
        if f.severity is Severity.NOTE
        and any(f.code == e.code for e in fault)
        and not any(e.is_met_by(f) for e in sample.expected)
    ]


def _told(finding: Finding) -> str:
    place = finding.location
    where = f" at {place} `{place.source.strip()}`" if place else ""
    return f"{finding.code} {finding.severity.value} {finding.check}{where}: {finding.summary}"
