"""What the tests of the commands find: an empty folder, and one with a good run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from recordings import site, steps, write_folder
from toys import only_toys

__all__ = ["only_toys"]


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, only_toys: object, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, without doctor variables."""
    for name in [n for n in os.environ if n.startswith(("DDPDOCTOR_", "PET_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    events = [site(1, "train.py", 88, "optimizer.step()"), *steps(10, site=1)]
    return write_folder(tmp_path / "good", {0: events, 1: events}).path
