"""The shape of the code, kept by tests: who may import whom, what stands where, what is left."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sampling import ROOT, SAMPLES, inherited, read

from ddpdoctor.findings import Check, Severity
from ddpdoctor.registry import FAMILIES, all_checks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = ROOT / "ddpdoctor"
CHECKS = ROOT / "checks"

VOCABULARY = {"events", "findings", "run"}
READING = {
    *VOCABULARY,
    "__init__",
    "alive",
    "comparison",
    "coverage",
    "diagnose",
    "equipment",
    "postmortem",
    "ranks",
    "registry",
    "runfolder",
    "whereabouts",
}

MAY_IMPORT: dict[str, set[str]] = {
    "jsontext": set(),
    "events": {"jsontext"},
    "held": set(),
    "runfolder": {"events", "held", "jsontext"},
    "ring": {"held"},
    "findings": {"jsontext", "run"},
    "run": {
        "events",
        "findings",
        "joining",
        "naming",
        "numbering",
        "ranks",
        "ring",
        "runfolder",
        "worlds",
    },
    "ranks": set(),
    "naming": {"events", "run"},
    "numbering": {"events", "run"},
    "worlds": {"events", "run"},
    "joining": {"events", "run", "runfolder"},
    "alive": {"events", "run"},
    "checks": VOCABULARY,
    "registry": {"findings"},
    "coverage": {"events", "findings", "ranks", "run"},
    "diagnose": {
        *VOCABULARY,
        "alive",
        "coverage",
        "equipment",
        "stepcounts",
        "whereabouts",
        "__init__",
    },
    "postmortem": {*VOCABULARY, "alive", "coverage", "runfolder", "diagnose", "registry"},
    "equipment": {"events", "run"},
    "stepcounts": {"events", "findings", "run"},
    "whereabouts": {"events", "run"},
    "comparison": {*VOCABULARY, "postmortem"},
    "config": {"findings"},
    "machine": set(),
    "verdicts": {*READING, "held", "jsontext"},
    "stacks": {"events"},
    "standing": {*READING, "config", "machine", "ring", "stacks"},
    "monitor": {*READING, "config", "machine", "stacks", "standing", "verdicts"},
    "render": READING,
    "launch": {*READING, "config", "machine", "monitor", "render"},
    "cli": {*READING, "config", "machine", "monitor", "render", "launch"},
    "probe": {"events", "held", "ring", "runfolder"},
    "shim": {"probe", "__init__"},
    "embedded": {*READING, "config", "monitor", "verdicts", "render", "launch", "probe"},
    "__main__": {"cli"},
    "__init__": {"embedded", "findings"},
}
"""Part (module or folder of `ddpdoctor`) to the parts that it may import."""

ONLY_IN: dict[str, set[str]] = {
    "torch": {"probe", "launch", "embedded"},
    "rich": {"render"},
    "rich_argparse": {"cli"},
    "pynvml": {"machine", "launch"},
}
"""Foreign package to the parts that may import it."""

NOT_IN_CHECKS = {
    "os", "sys", "io", "time", "datetime", "pathlib", "subprocess", "socket", "logging", "random",
    "threading", "tempfile", "shutil", "pickle", "json",
}  # fmt: skip
"""Checks are pure: no files, no clock, no environment."""

LONGEST_MODULE = 450
HEADINGS = ["What it finds", "How it knows", "Why it hurts", "How to fix it", "When it stays quiet"]
FAMILY_DIGIT = {family: str(number) for number, family in enumerate(FAMILIES, 1)}


def sources() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *CHECKS.rglob("*.py")])


def part_of(path: Path) -> str:
    if path.is_relative_to(CHECKS):
        return "checks"
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[list[str]]:
    """The dotted names that a module imports, relative ones made absolute."""
    inside = path.is_relative_to(CHECKS)
    place = ["ddpdoctor", *path.relative_to(ROOT if inside else PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = place[: len(place) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            helpers = all(alias.name.startswith("_") for alias in node.names)
            if base == ["ddpdoctor"] or not node.module or helpers:
                yield from ([*base, alias.name] for alias in node.names)
            else:
                yield base


def parts() -> set[str]:
    return {part_of(path) for path in sources()}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_follow_the_layers(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT, f"say in MAY_IMPORT what {part} may import"
    for name in imported(path):
        if name[0] == "ddpdoctor":
            target = name[1] if len(name) > 1 and name[1] in parts() else "__init__"
            allowed = {part, *MAY_IMPORT[part]}
            assert target in allowed, f"{part} may not import {'.'.join(name)}"
        else:
            allowed = ONLY_IN.get(name[0], {part})
            assert part in allowed, f"{part} may not import {name[0]}"


def test_checks_are_pure_and_stand_alone() -> None:
    for path in CHECKS.rglob("*.py"):
        for name in imported(path):
            assert name[0] not in NOT_IN_CHECKS, f"{name_of(path)} imports {name[0]}"
            if name[:2] == ["ddpdoctor", "checks"]:
                helper = name[-1].startswith("_") or any(n.startswith("_") for n in name)
                same_family = name[2:3] == [path.parent.name]
                assert helper and same_family, f"{name_of(path)} imports another check"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_module_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) < LONGEST_MODULE


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent for p in PACKAGE.rglob("__init__.py")}
    families = {p.parent for p in CHECKS.rglob("__init__.py")}
    expected = {".".join(p.relative_to(ROOT).parts) for p in folders} | {
        ".".join(["ddpdoctor", *p.relative_to(ROOT).parts]) for p in families
    }
    assert set(settings["packages"]) == expected
    assert settings["package-dir"]["ddpdoctor.checks"] == "checks"
    assert all(f.is_dir() for f in (CHECKS / family for family in FAMILIES))


def check_files() -> list[Path]:
    return [p for p in sorted(CHECKS.glob("*/*.py")) if not p.name.startswith("_")]


def check_in(path: Path) -> type[Check]:
    module = sys.modules[f"ddpdoctor.checks.{path.parent.name}.{path.stem}"]
    found = [
        c
        for _, c in inspect.getmembers(module, inspect.isclass)
        if issubclass(c, Check) and c.__module__ == module.__name__ and hasattr(c, "code")
    ]
    assert len(found) == 1, f"{name_of(path)} must hold exactly one check"
    return found[0]


@pytest.mark.parametrize("path", check_files(), ids=name_of)
def test_a_check_is_what_its_file_says(path: Path) -> None:
    all_checks()  # imports them
    check = check_in(path)
    family = path.parent.name
    assert check.name == path.stem.replace("_", "-")
    assert check.family == family
    assert re.fullmatch(rf"DDP{FAMILY_DIGIT[family]}\d\d", check.code)
    assert isinstance(check.severity, Severity)
    page = inspect.getdoc(check) or ""
    assert re.findall(r"^## (.*)$", page, re.M) == HEADINGS
    for heading in HEADINGS:
        after = page.partition(f"## {heading}")[2].partition("## ")[0]
        assert len(after.split()) >= 5, f"{check.name}: nothing under `{heading}`"


@pytest.mark.parametrize("path", check_files(), ids=name_of)
def test_a_check_has_a_sample_a_clean_twin_and_a_test(path: Path) -> None:
    family, stem = path.parent.name, path.stem
    all_checks()
    faulty, clean = (SAMPLES / family / f"{stem}{end}.py" for end in ("", "_clean"))
    assert check_in(path).code in {e.code for e in read(faulty).expected}
    assert read(clean).clean
    assert (ROOT / "tests" / family / f"test_{stem}.py").exists()


def test_codes_and_names_are_unique() -> None:
    checks = all_checks()
    assert len({c.code for c in checks}) == len({c.name for c in checks}) == len(checks)


IMPORT_PROGRAM = """
import sys
import ddpdoctor
assert "torch" not in sys.modules and "rich" not in sys.modules and "msgspec" not in sys.modules
from ddpdoctor import registry, diagnose, postmortem, render, monitor, cli, launch
registry.all_checks()
assert "torch" not in sys.modules, "reading a report imports torch"
"""


def test_reports_are_read_without_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_PROGRAM], check=True, env=inherited(), timeout=60)


UNINSTALL_PROGRAM = """
import faulthandler
faulthandler.dump_traceback_later(90, exit=True)
import os, sys, signal, types, multiprocessing.process
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import torch.distributed.fsdp, torch.distributed.optim, torch.multiprocessing, torch.amp
from ddpdoctor.probe import activation

def train():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    dist.all_reduce(torch.ones(2))
    torch.save(model.module.state_dict(), os.path.join(os.environ["DDPDOCTOR_DIR"], "w.pt"))
    dist.destroy_process_group()

def ours(value):
    seen = 0
    while callable(value) and seen < 9:
        if getattr(value, "__ddpdoctor__", None) is True:
            return True
        code = getattr(value, "__code__", None)
        if isinstance(code, types.CodeType) and os.sep + "ddpdoctor" + os.sep in code.co_filename:
            return True
        value, seen = getattr(value, "__wrapped__", None), seen + 1
    return False

def wrapped():
    found, modules = [], [
        m for n, m in list(sys.modules.items())
        if m is not None and n.partition(".")[0] not in ("ddpdoctor", "__main__", "msgspec")
    ]
    for module in modules:
        for name, value in list(vars(module).items()):
            # torch.compile's own copy of Module.__init__, taken when it was imported.
            if ours(value) and name != "unpatched_nn_module_init":
                found.append(f"{module.__name__}.{name}")
            if isinstance(value, type) and value.__module__ == module.__name__:
                held = list(vars(value).items())
                found += [f"{value.__qualname__}.{k}" for k, v in held if ours(v)]
    from torch.optim import optimizer
    from torch.nn.modules import module as modules_
    for registry in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks,
                     modules_._global_forward_hooks, modules_._global_forward_pre_hooks,
                     modules_._global_backward_hooks):
        found += [f"hook {v}" for v in registry.values() if ours(v)]
    return found

before = signal.getsignal(signal.SIGTERM), sys.excepthook, os._exit, sys.exit
assert not wrapped(), wrapped()
activation.torch_loaded()
assert wrapped(), "nothing was wrapped: this test sees nothing"
train()
activation.uninstall()
assert not wrapped(), wrapped()
assert (signal.getsignal(signal.SIGTERM), sys.excepthook, os._exit, sys.exit) == before
print("clean")
"""


def test_nothing_of_torch_stays_wrapped(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-c", UNINSTALL_PROGRAM],
        env=inherited(DDPDOCTOR_DIR=str(tmp_path)),
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert out.stdout.strip().endswith("clean"), out.stderr[-2000:]
    assert list(tmp_path.glob("rank-0.jsonl"))
