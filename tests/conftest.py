"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import golden
import preloaded
import pytest

REAL = {
    "broken_probe", "test_alive", "test_architecture", "test_chaos", "test_checkup",
    "test_cli_preflight", "test_fail_open", "test_launch", "test_no_harm", "test_preloaded",
    "test_real", "test_routine", "test_samples", "test_spawning", "test_tracebacks",
    "test_two_nodes", "test_users_objects",
}  # fmt: skip
"""Modules that start ranks. torch itself aborts at teardown now and then, ports are taken, a busy
machine stalls: one run of such a test proves nothing, so a failing one is tried again."""

TRIES = 3


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Tests that start ranks are tried again, and come first, so that the workers end together;
    exhaustive ones and those of frameworks or a browser run only where `-m` names them."""
    for item in items:
        if starts_ranks(item):
            item.add_marker(pytest.mark.flaky(reruns=TRIES - 1))
    items.sort(key=lambda i: (i.get_closest_marker("slow") is None, not starts_ranks(i)))
    asked = config.option.markexpr
    unasked = [name for name in ("exhaustive", "frameworks", "browser") if name not in asked]
    left = [i for i in items if any(i.get_closest_marker(name) for name in unasked)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [i for i in items if i not in left]


def starts_ranks(item: pytest.Function) -> bool:
    return item.module.__name__.rpartition(".")[2] in REAL


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="write the golden reports anew")
    parser.addoption("--fresh", action="store_true", help="start every Python anew, fork none")


def pytest_configure(config: pytest.Config) -> None:
    golden.watch()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: `nohup`
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Processes are not forked where a test is tried again, so that no test fails by that."""
    again = getattr(item, "execution_count", 1) > 1
    preloaded.fresh = again or item.config.getoption("fresh")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """After each test: what checks found in it is what its golden report says."""
    golden.collected.clear()
    result = yield
    if pyfuncitem.get_closest_marker("flaky") is None:
        folder = pyfuncitem.funcargs.get("tmp_path", "/no/folder")
        said = golden.said(golden.collected, str(folder))
        path = golden.file_of(pyfuncitem)
        if pyfuncitem.config.getoption("golden"):
            golden.results.setdefault(str(path), {})[pyfuncitem.name] = said
        else:
            before = golden.kept(path).get(pyfuncitem.name, "")
            here = pyfuncitem.path.relative_to(pyfuncitem.config.rootpath)
            assert said == before, (
                "what checks say changed: read it, then type "
                f"`.venv/bin/python -m pytest -n 0 --golden {here}` (or `make golden` for all)"
            )
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:  # a worker of xdist: the controller writes
        output["golden"] = golden.results
        return
    for path, found in golden.results.items():
        golden.write(Path(path), found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tests did not pass at once: one that a doctor misjudges now and then is seen."""
    again: dict[str, list[str]] = {}
    for report in terminalreporter.getreports("rerun"):
        again.setdefault(report.nodeid, []).append(reason(report))
    if again:
        tests = "1 test was" if len(again) == 1 else f"{len(again)} tests were"
        terminalreporter.line(f"{tests} run again:")
    for name, reasons in sorted(again.items()):
        times = f" ({len(reasons)} times)" if len(reasons) > 1 else ""
        terminalreporter.line(f"  {name}{times}: {'; '.join(dict.fromkeys(reasons))}")


def reason(report: pytest.TestReport) -> str:
    """What failed, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr or "?").splitlines()
    return f"{report.when}: " * (report.when != "call") + " ".join(lines[:3])[:200]


def pytest_testnodedown(node: Any, error: object) -> None:
    for path, found in getattr(node, "workeroutput", {}).get("golden", {}).items():
        golden.results.setdefault(path, {}).update(found)
