"""The shape of the code, kept by tests: who may import whom, what stands where, what is left."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import layers
import pytest
from layers import CHECKS, PACKAGE
from sampling import ROOT, SAMPLES, inherited, read

from ddpdoctor.probe.bootstrap.install import watchers
from ddpdoctor.probe.recording.watcher import Watcher, in_order
from ddpdoctor.report.findings import Check, Severity
from ddpdoctor.report.registry import FAMILIES, all_checks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ONLY_IN: dict[str, set[str]] = {
    "torch": {"probe", "launch", "embedded"},
    "rich": {"render"},
    "jinja2": {"render"},
    "markupsafe": {"render"},
    "rich_argparse": {"cli"},
    "pynvml": {"monitor", "launch"},
}
"""Foreign package to the parts of `ddpdoctor` that may import it."""

NOT_IN_CHECKS = {
    "os", "sys", "io", "time", "datetime", "pathlib", "subprocess", "socket", "logging", "random",
    "threading", "tempfile", "shutil", "pickle", "json",
}  # fmt: skip
"""Checks and what they ask are pure: no files, no clock, no environment."""

LONG_MODULE = 500
LONGER: dict[str, str] = {
    "ddpdoctor/probe/recording/torch_compat.py": "all that is private in torch has one place",
}
"""Modules that are longer, with the reason that a reviewer has accepted: a thought that is cut
where a number of lines is reached is harder to read than a long module."""

MOST_MODULES = 22
"""In one folder."""

HEADINGS = ["What it finds", "How it knows", "Why it hurts", "How to fix it", "When it stays quiet"]
FAMILY_DIGIT = {family: str(number) for number, family in enumerate(FAMILIES, 1)}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", layers.sources(), ids=name_of)
def test_imports_follow_the_layers(path: Path) -> None:
    package = layers.package_of(layers.module_of(path))
    assert package in layers.MAY_IMPORT, f"say in tests/layers.py what {package} may import"
    for name in layers.imports(path):
        part = name.partition(".")[0]
        if part == "ddpdoctor":
            target = layers.package_of(name)
            assert layers.allowed(package, target), f"{package} may not import {name}"
        else:
            among = ONLY_IN.get(part, {package.partition(".")[0]})
            assert package.partition(".")[0] in among, f"{package} may not import {part}"


def test_the_layers_are_one_way() -> None:
    """No package may import, however indirectly, one that may import it."""
    every = layers.MAY_IMPORT
    graph = {p: {o for o in every if o != p and layers.allowed(p, o)} for p in every}
    assert list(TopologicalSorter(graph).static_order())


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports in functions and for annotations are counted in."""
    ours = layers.MODULES
    graph = {n: {m for m in layers.imports(p) if m in ours and m != n} for n, p in ours.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_no_folder_is_crowded() -> None:
    folders = {path.parent for path in layers.sources()}
    crowded = {name_of(f) for f in folders if len(list(f.glob("*.py"))) > MOST_MODULES + 1}
    assert not crowded, f"more than {MOST_MODULES} modules: merge small ones, or make a package"


def test_checks_are_pure_and_stand_alone() -> None:
    for path in [*CHECKS.rglob("*.py"), *(PACKAGE / "analysis").rglob("*.py")]:
        for name in layers.imports(path):
            part = name.partition(".")[0]
            assert part not in NOT_IN_CHECKS, f"{name_of(path)} imports {part}"
            assert not name.startswith("ddpdoctor.checks"), f"{name_of(path)} imports a check"


def test_long_modules_have_a_reason() -> None:
    long = {name_of(p) for p in layers.sources() if len(p.read_text().splitlines()) > LONG_MODULE}
    assert long == LONGER.keys(), "cut it where a reader would, or say in LONGER why it is whole"


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


def test_nothing_is_decided_by_a_name_that_is_written_twice() -> None:
    """Evidence that another check reads has a constant for a name: one that is renamed on one side
    only would disarm the other."""
    reads = re.compile(r"""evidence(\.get\(|\[)["'](?!.*\] = )""")
    for path in [*CHECKS.rglob("*.py"), *(PACKAGE / "analysis").rglob("*.py")]:
        assert not [n for n, line in enumerate(path.open(), 1) if reads.search(line)
                    and not line.rstrip().endswith("= [")], name_of(path)  # fmt: skip


def test_codes_and_names_are_unique() -> None:
    checks = all_checks()
    assert len({c.code for c in checks}) == len({c.name for c in checks}) == len(checks)


def test_consequences_are_of_checks_and_rules_that_exist() -> None:
    rules = {check.name: {*check.rules, check.name} for check in all_checks()}
    for check in all_checks():
        for effect in check.effects:
            assert rules.keys() >= {*effect.checks} - {check.name}, check.name
            assert rules[check.name] >= {*effect.of}, check.name
            assert set.union(*(rules[name] for name in effect.checks)) >= {*effect.rules}, (
                check.name
            )


IMPORT_PROGRAM = """
import sys
import ddpdoctor
assert "torch" not in sys.modules and "rich" not in sys.modules and "msgspec" not in sys.modules
from ddpdoctor.report import registry, diagnose, postmortem
from ddpdoctor import render, monitor, cli, launch
registry.all_checks()
assert "torch" not in sys.modules, "reading a report imports torch"
"""


def test_reports_are_read_without_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_PROGRAM], check=True, env=inherited(), timeout=60)


def test_every_watcher_is_found_and_says_what_is_lost_without_it() -> None:
    probe = PACKAGE / "probe"
    texts = [p.read_text() for p in probe.rglob("*.py")]
    declared = {n for text in texts for n in re.findall(r"^class (\w+)\(Watcher\)", text, re.M)}
    assert {watcher.__name__ for watcher in watchers()} == declared
    for watcher in watchers():
        assert watcher.lost, watcher


def test_watchers_that_wait_for_each_other_or_for_an_unknown_one_are_refused() -> None:
    class First(Watcher):
        lost = "nothing"

    class Second(Watcher):
        lost = "nothing"
        after = (First,)

    assert in_order([Second, First]) == [First, Second]
    with pytest.raises(ValueError, match="not found: First"):
        in_order([Second])
    First.after = (Second,)
    with pytest.raises(ValueError, match="no order"):
        in_order([First, Second])
    First.after, First.before = (), (Second,)
    assert in_order([Second, First]) == [First, Second]


UNINSTALL_PROGRAM = """
import faulthandler
faulthandler.dump_traceback_later(90, exit=True)
import os, sys, signal, types, multiprocessing.process
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import torch.distributed.fsdp, torch.distributed.optim, torch.multiprocessing, torch.amp
from ddpdoctor.probe.bootstrap import activation

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


def test_no_two_test_modules_share_a_name() -> None:
    """pytest imports them by their bare names."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()
