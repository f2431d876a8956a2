"""The documentation site in a real browser: every link that a page shows is followed, and no page
asks the network for anything."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

import pytest
from sampling import ROOT

from ddpdoctor.report import registry

pytestmark = pytest.mark.browser


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the site is served."""
    pytest.importorskip("material", reason="pip install -e '.[docs]'")
    made = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_site.py")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    folder: Path = ROOT / "build" / "site"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.mark.timeout(400)
def test_every_link_of_the_site_is_followed(browser: Any, address: str) -> None:
    page = browser.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    page.on("console", lambda m: m.type == "error" and wrong.append(f"{page.url}: {m.text}"))
    names: dict[str, set[str]] = {}
    wanted: dict[str, str] = {address: "the start"}
    while left := [url for url in wanted if urldefrag(url)[0] not in names]:
        url = urldefrag(left[0])[0]
        answer = page.goto(url)
        if answer is None or not answer.ok:
            wrong.append(f"{wanted[left[0]]} links to {url}: {answer and answer.status}")
        names[url] = set(page.eval_on_selector_all("[id]", "all => all.map(e => e.id)"))
        for link in page.eval_on_selector_all("a[href]", "all => all.map(e => e.href)"):
            if link.startswith(address) and urldefrag(link)[0].endswith((".html", "/")):
                wanted.setdefault(link, url)
    for url, at in wanted.items():
        base, name = urldefrag(url)
        if name and name not in names[base] and not name.startswith("__"):
            wrong.append(f"{at} links to {url}: no such heading")
    assert wrong == []
    assert len(names) > len(registry.all_checks()) + 10
    assert [url for url in asked if not url.startswith((address, "data:"))] == []


@pytest.mark.timeout(100)
def test_the_search_finds_a_check(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(address)
    page.locator("input[name=query]").press_sequentially("unsynced")
    found = page.locator("a.md-search-result__link", has_text="unsynced-step").first
    found.wait_for(timeout=20_000)
    found.click()
    page.wait_for_url("**/unsynced-step*", timeout=20_000)
