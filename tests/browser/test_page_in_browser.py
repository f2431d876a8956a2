"""The page in a real browser: nothing hostile runs, filters and pictures work, it fits a phone."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recordings import START
from tapes import CallLog, run_of, stall, stood
from toys import ToyHostile, ToyStep

from ddpdoctor.events import Site, StepDone
from ddpdoctor.render import page
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.storage.call_ring import State

pytestmark = pytest.mark.browser
EVIL = (
    "</script><script>window.owned=1</script><img src=x onerror='window.owned=1'>"
    '</text></svg>"><svg onload=window.owned=1> javascript:window.owned=1 \u202e\x00'
)


def text_of(tmp_path: Path) -> str:
    """A page with findings, pictures and maps, in which everything that can be is hostile."""
    made = {rank: CallLog(rank, 3) for rank in range(3)}
    for rank, log in made.items():
        log.events += [
            Site(at=START, id=900, file=f"/home/user/project/{EVIL}", line=1, function=EVIL,
                 text=EVIL),
            *(StepDone(at=START + 2 + n / 10, optimizer=0, step=n, site=900, wall_s=0.1,
                       backward_s=0.04) for n in range(30)),
        ]  # fmt: skip
        for n in range(5):
            log.call(line=9, at=START + 4 + n / 10 + 0.02 * rank, lasts=0.06)
        if rank != 1:
            log.call(line=9, text=EVIL, state=State.BEGUN, at=START + 5)
    seen = [stood(1, 33, EVIL), stall(START + 50, START + 5)]
    run = run_of(tmp_path, made, nodes={0: seen}, ended=dict.fromkeys(made, -15))
    report = diagnose(run, (ToyHostile(), ToyStep()), folder=EVIL)
    found = tuple(
        msgspec.structs.replace(f, summary=EVIL, check=EVIL, ranks=(n,))
        for n, f in enumerate(report.findings)
    )
    return page.html(msgspec.structs.replace(report, findings=found), run)


class Opened:
    """A page that is open, and what the browser had to say about it."""

    def __init__(self, browser: Any, path: Path, width: int = 1000, **how: str) -> None:
        self.trouble: list[str] = []
        self.asked: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 800}, **how)
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("dialog", lambda dialog: self.trouble.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def value(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(text_of(tmp_path))
    return path


def test_nothing_hostile_runs_and_nothing_is_fetched(browser: Any, file: Path) -> None:
    seen = Opened(browser, file)
    assert seen.value("window.owned") is None
    assert seen.trouble == []
    assert seen.asked == [file.as_uri()]
    assert seen.value("document.images.length") == 0
    assert seen.value("document.scripts.length") == 1
    assert seen.value("document.querySelectorAll('svg.waits, svg.lanes, .map svg').length") >= 3


def test_the_policy_stops_what_would_get_through(browser: Any, file: Path) -> None:
    """Were a text ever not escaped, its script would not run and its image not load."""
    file.write_text(file.read_text().replace("<main>", f"<main>{EVIL}"))
    seen = Opened(browser, file)
    assert seen.value("window.owned") is None
    assert any("Content Security Policy" in line for line in seen.trouble)


def test_findings_are_filtered_and_a_link_brings_one_back(browser: Any, file: Path) -> None:
    seen = Opened(browser, file).page
    shown = "Array.from(document.querySelectorAll('.finding')).filter((f) => !f.hidden).length"
    assert seen.evaluate(shown) == 2
    seen.fill("[name=rank]", "0")
    assert seen.evaluate(shown) == 1
    assert seen.input_value("[name=rank]") == "0"
    seen.fill("[name=rank]", "")
    seen.uncheck("[value=error]")
    assert seen.evaluate(shown) == 1
    assert seen.evaluate("document.querySelector('[name=shown]').value") == "1 of 2 shown"
    seen.evaluate("location.hash = '#DDP997-1'")
    seen.wait_for_function(f"{shown} === 2")


def test_pictures_answer_the_keyboard(browser: Any, file: Path) -> None:
    seen = Opened(browser, file).page
    area = "#timeline-last .wide"
    seen.focus(area)
    width = f"document.querySelector('{area} svg').getBoundingClientRect().width"
    before = seen.evaluate(width)
    seen.keyboard.press("+")
    assert seen.evaluate(width) == pytest.approx(2 * before)
    seen.keyboard.press("0")
    assert seen.evaluate(width) == pytest.approx(before)
    seen.focus("#map-steps svg")
    seen.keyboard.press("ArrowRight")
    said = "document.querySelector('#map-steps output').value"
    assert seen.evaluate(said) == "rank 0, step 1: 0.1 s"


@pytest.mark.parametrize("width", [320, 375, 1400])
def test_nothing_is_wider_than_the_screen(browser: Any, file: Path, width: int) -> None:
    seen = Opened(browser, file, width)
    assert seen.value("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("width", "form"), [(390, "small"), (1280, "large")])
def test_who_waits_is_seen_without_scrolling(
    browser: Any, file: Path, width: int, form: str
) -> None:
    seen = Opened(browser, file, width)
    assert seen.page.locator("svg.waits:visible").count() == 1
    box = seen.page.locator(f"svg.waits.{form}").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    overlong = (
        f"Array.from(document.querySelectorAll('svg.waits.{form} g')).some((g) =>"
        " Array.from(g.querySelectorAll('text')).some((t) => t.getBBox().width + 20 >"
        " g.querySelector('rect').getBBox().width))"
    )
    assert not seen.value(overlong), "text stays in its box"


@pytest.mark.parametrize("which", [".wide:has(table)", ".source ol"])
def test_nothing_but_the_timeline_is_scrolled_on_a_phone(
    browser: Any, file: Path, which: str
) -> None:
    seen = Opened(browser, file, 390)
    seen.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    found = f"Array.from(document.querySelectorAll('{which}'))"
    assert seen.value(f"{found}.length") > 0
    assert not seen.value(f"{found}.some((one) => one.scrollWidth > one.clientWidth)")


def test_everything_can_be_read_without_a_script(browser: Any, file: Path) -> None:
    seen = browser.new_context(java_script_enabled=False).new_page()
    seen.goto(file.as_uri())
    assert seen.locator(".finding").count() == 2
    assert seen.locator("#filter").is_hidden() and seen.locator(".tools").first.is_hidden()
    assert seen.locator("svg.lanes").first.is_visible()


def test_light_dark_and_paper(browser: Any, file: Path) -> None:
    light = "getComputedStyle(document.body).backgroundColor"
    assert Opened(browser, file, color_scheme="light").value(light) == "rgb(253, 253, 252)"
    dark = Opened(browser, file, color_scheme="dark")
    assert dark.value(light) == "rgb(21, 24, 27)"
    dark.page.emulate_media(media="print")
    assert dark.value(light) == "rgb(255, 255, 255)"
    assert not dark.page.locator("nav").is_visible()
    dark.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert dark.value("document.querySelectorAll('details:not([open])').length") == 0


def test_pictures_have_words_and_controls_have_names(browser: Any, file: Path) -> None:
    seen = Opened(browser, file)
    assert seen.value(
        "Array.from(document.querySelectorAll('svg[role=img]')).every((s) =>"
        " s.getAttribute('aria-label') || s.getAttribute('aria-labelledby'))"
    )
    assert seen.value(
        "Array.from(document.querySelectorAll('button, input, select')).every((c) =>"
        " c.ariaLabel || c.textContent.trim() || (c.labels && c.labels.length))"
    )
    assert seen.value("document.querySelectorAll('h1').length") == 1
    seen.page.keyboard.press("Tab")
    assert seen.value("document.activeElement.className") == "skip"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_barrier(browser: Any, file: Path, scheme: str) -> None:
    """The rules of axe-core: names, roles, headings, tables, contrast, landmarks."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    seen = Opened(browser, file, color_scheme=scheme).page
    seen.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    violations = axe.Axe().run(seen).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"]) for v in violations] == []


def test_in_the_frame_of_a_notebook_links_lead_to_their_parts(
    browser: Any, file: Path, tmp_path: Path
) -> None:
    frame = f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(file.read_text())}"></iframe>'
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<h1>a notebook</h1>{frame}")
    seen = Opened(browser, notebook)
    inside = seen.page.frames[1]
    inside.locator("nav a", has_text="Timeline").click()
    assert inside.evaluate("document.getElementById('timeline').getBoundingClientRect().top") < 50
    assert inside.evaluate("window.owned") is None and seen.trouble == []
