"""With and without the doctor: the same output, status, weights and random streams, bit by bit."""

from __future__ import annotations

import sys
from pathlib import Path

import leaving
import pytest
from sampling import ROOT, Sample, collect, inherited, run

WITNESS = ROOT / "tests" / "witness.py"
FEW = (
    "data/sampler_missing_clean",
    "numerics/skipped_step_checkpointed_clean",
)
"""In every test run; the others where `-m exhaustive` asks for them (make no-harm)."""

FORKED = FEW[1]
"""With and without the doctor in forks of one Python; all others in new processes."""

NOT_COMPARABLE = ("exec", "--module", "-m", "--no-python")


def comparable() -> list[object]:
    clean = [
        s
        for s in collect()
        if s.clean and not s.gpus and not set(s.command) & {*NOT_COMPARABLE}
        # Under plain torchrun each rank would start ranks of its own.
        if "mp.spawn(" not in s.path.read_text()
    ]
    return [
        pytest.param(s, id=s.name, marks=() if s.name in FEW else pytest.mark.exhaustive)
        for s in clean
    ]


def launcher_options(sample: Sample) -> list[str]:
    """The sample's options that torchrun knows too."""
    from ddpdoctor.cli.split import split

    return list(split([*sample.command, "script.py"]).launcher)


def seen(words: list[str], folder: Path, forked: bool) -> tuple[int, list[str], dict[str, str]]:
    folder.mkdir()
    status, printed = run(
        words,
        cwd=folder,
        environment=inherited(WITNESS=str(folder), PYTHONHASHSEED="0"),
        forked=forked,
    )
    digests = {p.name: p.read_text() for p in folder.glob("witness-*.txt")}
    assert digests, printed[-3000:]
    return status, printed.splitlines(), digests


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("sample", comparable())
def test_the_doctor_changes_nothing(sample: Sample, tmp_path: Path) -> None:
    options = launcher_options(sample)
    forked = sample.name == FORKED
    script = [str(WITNESS), str(sample.path)]
    if not any(o.startswith(("--nnodes", "--rdzv", "--standalone")) for o in options):
        options = ["--standalone", *options]
    if not any(o.startswith("--nproc") for o in options):
        options += ["--nproc-per-node", "2"]
    plain = [sys.executable, "-m", "torch.distributed.run", *options, *script]
    doctor = [sys.executable, "-m", "ddpdoctor", "run", "--out", "run", *sample_options(sample)]
    without = seen(plain, tmp_path / "without", forked)
    with_doctor = seen([*doctor, *options, *script], tmp_path / "with", forked)
    if with_doctor[2] != without[2] != seen(plain, tmp_path / "again", forked)[2]:
        pytest.skip("computes something else each time without the doctor, too")
    assert with_doctor[2] == without[2]
    if without[0] == 0:  # torch itself aborts now and then when correct scripts leave
        assert with_doctor[0] == 0
    # What the ranks print is all there, whatever the doctor adds on stderr.
    lines = "\n".join(with_doctor[1])
    assert not [line for line in stable(without[1]) if not printed(line, lines)]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", leaving.PROGRAMS)
def test_ranks_do_not_die_more_often_while_they_leave(program: str) -> None:
    ends = leaving.measured(100, program, fresh=False)
    alone, watched = (
        sum(n for status, n in ends[side].items() if status) for side in (False, True)
    )
    assert [e.total() for e in ends.values()] == [200, 200]
    assert watched - alone <= 3 * (watched + alone + 1) ** 0.5, ends


def printed(line: str, text: str) -> bool:
    """Whether a text has a line, or the two that ranks wrote into one at the same time."""
    return line in text or any(line[:k] in text and line[k:] in text for k in range(len(line)))


def sample_options(sample: Sample) -> list[str]:
    """The sample's options that are the doctor's own."""
    from ddpdoctor.cli.split import split

    return [
        word
        for name, value in split([*sample.command, "script.py"]).doctor.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def stable(lines: list[str]) -> list[str]:
    """Lines that say the same in every run: no clock, no pid, no port."""
    return [x for x in lines if x.strip() and not x.startswith(("[", "W", "*", "Setting", "E"))]
