"""Checks are found among whatever else their modules hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from ddpdoctor.report import registry


class Alias:
    """What `list[int]` is in Python 3.10: it says that it is a class, and is none."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type


@pytest.fixture
def anew() -> Iterator[None]:
    registry.all_checks.cache_clear()
    yield
    registry.all_checks.cache_clear()


@pytest.mark.usefixtures("anew")
def test_aliases_of_types_beside_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [check.code for check in registry.all_checks()]
    module = sys.modules[type(registry.all_checks()[0]).__module__]
    monkeypatch.setattr(module, "Rows", Alias(), raising=False)
    registry.all_checks.cache_clear()
    assert [check.code for check in registry.all_checks()] == before
