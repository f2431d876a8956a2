"""A headless Chromium for the tests of this folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        own = [] if os.geteuid() else ["--no-sandbox"]
        yield (made := play.chromium.launch(executable_path=shutil.which("chromium"), args=own))
        made.close()
