"""What all tests share."""

from __future__ import annotations

import pytest

REAL = {
    "broken_probe", "test_alive", "test_architecture", "test_chaos", "test_checkup",
    "test_cli_preflight", "test_fail_open", "test_launch", "test_no_harm", "test_real",
    "test_routine", "test_samples", "test_spawning", "test_tracebacks", "test_users_objects",
}  # fmt: skip
"""Modules that start ranks. torch itself aborts at teardown now and then, ports are taken, a busy
machine stalls: one run of such a test proves nothing, so a failing one is tried again."""

TRIES = 3


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Tests that start ranks are tried again; exhaustive ones and those of frameworks
    run only where `-m` names them."""
    for item in items:
        if item.module.__name__.rpartition(".")[2] in REAL:
            item.add_marker(pytest.mark.flaky(reruns=TRIES - 1))
    asked = config.option.markexpr
    unasked = [name for name in ("exhaustive", "frameworks") if name not in asked]
    left = [i for i in items if any(i.get_closest_marker(name) for name in unasked)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [i for i in items if i not in left]
