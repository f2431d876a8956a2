"""Where the script begins, and which options are whose."""

from __future__ import annotations

import pytest

from ddpdoctor.cli.split import TORCHRUN, UsageError, split
from ddpdoctor.config import SETTINGS


def test_no_doctor_option_shadows_one_of_torchrun() -> None:
    assert not {s.flag for s in SETTINGS} & set(TORCHRUN)


def test_doctor_options_anywhere_before_the_script() -> None:
    parts = split(
        [
            *("--nproc-per-node", "4", "--budget", "2", "--standalone", "--out=x"),
            *("train.py", "--out", "y", "--json", "--help"),
        ]
    )
    assert parts.doctor == {"budget": "2", "out": "x"}
    assert parts.launcher == ("--nproc-per-node", "4", "--standalone")
    assert parts.command == ("train.py", "--out", "y", "--json", "--help")
    assert parts.flags == {"--nproc-per-node", "--standalone"}
    assert not parts.help


@pytest.mark.parametrize(
    ("line", "launcher", "command"),
    [
        ("--nproc_per_node=2 t.py", ("--nproc_per_node=2",), ("t.py",)),
        ("--nproc_per_node 2 t.py", ("--nproc_per_node", "2"), ("t.py",)),
        ("--nnod 2 t.py", ("--nnodes", "2"), ("t.py",)),
        ("--nproc=2 t.py", ("--nproc-per-node=2",), ("t.py",)),
        ("-r 3 -t3 t.py", ("-r", "3", "-t3"), ("t.py",)),
        ("-m pkg.mod --quiet", ("-m",), ("pkg.mod", "--quiet")),
        ("--no_python ./prog -x", ("--no_python",), ("./prog", "-x")),
        ("--log-dir logs t.py", ("--log-dir", "logs"), ("t.py",)),
        ("--from-the-future=1 t.py", ("--from-the-future=1",), ("t.py",)),
        ("--standalone -- t.py -- -x", ("--standalone",), ("t.py", "--", "-x")),
        ("--local-ranks-filter -1 t.py", ("--local-ranks-filter", "-1"), ("t.py",)),
    ],
)
def test_torchruns_own_spelling(
    line: str, launcher: tuple[str, ...], command: tuple[str, ...]
) -> None:
    parts = split(line.split())
    assert (parts.launcher, parts.command, parts.doctor) == (launcher, command, {})


@pytest.mark.parametrize(
    "line",
    [
        "--nproc-per-node 2 t.py -x",
        "--nproc_per_node=2 --tee 3 -r3 t.py --tee 1",
        "-m --nnodes 1 pkg.mod -m",
        "--standalone --no-python prog --nnodes 9",
        "--max-restarts 2 --rdzv-conf a=1,b=2 --rdzv_id 7 t.py",
    ],
)
def test_torchrun_agrees(line: str) -> None:
    run = pytest.importorskip("torch.distributed.run")
    theirs = run.parse_args(line.split())
    parts = split(line.split())
    assert parts.command == (theirs.training_script, *theirs.training_script_args)


def test_switches_and_repeated_selections() -> None:
    parts = split(["--select", "a", "--select=b,c", "--no-live", "--quiet", "t.py"])
    assert parts.doctor == {"select": "a,b,c", "live": False, "quiet": True}


def test_a_torchrun_option_is_a_value_where_one_is_expected() -> None:
    assert split(["--out", "--standalone", "t.py"]).doctor == {"out": "--standalone"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--budgte 3 t.py", "did you mean --budget?"),
        ("--nprocs 3 t.py", "did you mean --nproc-per-node?"),
        ("-n 3 t.py", "did you mean --nproc-per-node?"),
        ("--num_processes=3 t.py", "did you mean --nproc-per-node?"),
        ("--zzz t.py", "options of the script come after the script"),
        ("--out", "--out needs a value"),
        ("--nnodes", "--nnodes needs a value"),
        ("--quiet=1 t.py", "takes no value"),
        ("--rdzv x t.py", "--rdzv-backend or --rdzv-conf"),
    ],
)
def test_mistakes(line: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        split(line.split())
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_exec_takes_no_torchrun_option() -> None:
    parts = split(["--quiet", "--", "torchrun", "--nnodes", "1", "t.py"], launcher={})
    assert parts.command == ("torchrun", "--nnodes", "1", "t.py")
    with pytest.raises(UsageError, match="unknown option --nnodes"):
        split(["--nnodes=1", "--", "t.py"], launcher={})
