"""The page: what stands where, and that nothing in a run can become part of it."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser

import msgspec
import pytest
from recordings import make_run, site, steps, torch_loaded
from toys import HOSTILE, ToyBlind, ToyHostile, ToyQuiet, ToyStep

from ddpdoctor.render import page
from ddpdoctor.render.page import findings
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Report, Table

EVIL = (
    "</script><img src=x onerror=alert(1)>\"'` \u202e\x1b[31m\x00\u2066 &amp; "
    "{{ 1231*1231 }} {% raw %}"
)


class Parts(HTMLParser):
    """The elements of a page with their attributes, and what its script and style hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside = [tag]

    def handle_endtag(self, tag: str) -> None:
        self.inside = []

    def handle_data(self, data: str) -> None:
        for tag in self.inside:
            self.texts[tag] = self.texts.get(tag, "") + data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def report_of(*checks: object, ranks: int = 2, **more: object) -> Report:
    events = [torch_loaded(), site(1, "train.py", 88, "opt.step()"), *steps(9, site=1)]
    run = make_run(dict.fromkeys(range(ranks), events), **more)  # type: ignore[arg-type]
    return diagnose(run, checks, folder="runs/a")  # type: ignore[arg-type]


def hostile(text: str) -> Report:
    """A report with that text wherever a run folder can put one."""
    report = report_of(ToyHostile(), ToyStep())
    (first, second) = report.findings
    related = tuple(
        msgspec.structs.replace(
            r, label=text, location=msgspec.structs.replace(r.location, file=text, source=text)
        )
        for r in first.related
    )
    evil = msgspec.structs.replace(
        first,
        code=text,
        check=text,
        summary=text,
        cause=text,
        fix=f"{text}\n\n    {text}",
        subjects=(text,),
        related=related,
        label=text,
        rule=text,
        evidence={text: [{text: text}], "block": f"{text}\n{text}"},
    )
    run = msgspec.structs.replace(report.run, command=(text,), torch=text, folder=text)
    ranks = tuple(msgspec.structs.replace(r, last=text, state=text) for r in report.ranks)
    tables = (Table(title=text, columns=(text,), rows=((text,),)),)
    return msgspec.structs.replace(
        report, run=run, ranks=ranks, tables=tables, findings=(evil, second)
    )


def test_the_verdict_stands_first_and_leads_to_its_finding() -> None:
    text = page.html(report_of(ToyStep()))
    assert text.index('class="verdict error"') < text.index('id="findings"')
    assert "<strong>The run completed: 1 error.</strong>" in text
    assert 'href="#DDP997-1"' in text and 'id="DDP997-1"' in text


def test_a_clean_run_says_so_and_an_unseen_one_does_not() -> None:
    assert 'class="verdict well"' in page.html(report_of(ToyQuiet()))
    assert "No faults found: examined 1 check" in page.html(report_of(ToyQuiet()))
    assert 'class="verdict well"' not in page.html(report_of(ToyBlind()))
    assert 'class="verdict well"' not in page.html(report_of(ToyQuiet(), ended={1: 1}))


def test_it_is_said_once_from_where_steps_are_counted() -> None:
    assert page.html(report_of(ToyStep())).count("ranks and steps are counted from 0") == 1


def test_a_cell_of_a_table_names_its_column_where_the_head_is_hidden() -> None:
    cells = Parts(page.html(report_of(ToyStep()))).of("td")
    assert {"rank", "state", "last activity"} <= {cell.get("data-of") for cell in cells}


def test_findings_of_one_code_have_names_of_their_own() -> None:
    report = report_of(ToyStep())
    twice = msgspec.structs.replace(report, findings=report.findings * 2)
    assert findings.finding_names(twice.findings) == ["DDP997-1", "DDP997-2"]


def test_lines_stand_in_order_with_what_is_wrong_there() -> None:
    (view,) = findings.views(report_of(ToyStep()))
    (excerpt,) = view.excerpts
    assert [(line.number, line.label, line.main) for line in excerpt.lines] == [
        (88, "still open here", True),
        (101, "steps here", False),
    ]


def test_code_in_a_text_is_code() -> None:
    assert findings.pieces("call `x()` once") == (
        findings.Piece("call "),
        findings.Piece("x()", True),
        findings.Piece(" once"),
    )
    text, code = findings.blocks("step at the end:\n\n    if a:\n        b()\n")
    assert (text.code, code.code) == (False, True)
    assert code.pieces[0].text == "if a:\n    b()"


def test_what_can_be_filtered_is_said_of_each_finding() -> None:
    (article,) = Parts(page.html(report_of(ToyStep()))).of("article")
    assert article["data-ranks"] == "0-1"
    assert article["data-severity"] == "error"
    assert article["data-check"] == "toy-step"


def test_what_was_not_examined_is_said() -> None:
    text = page.html(report_of(ToyStep(), ToyBlind()))
    assert "<code>toy-blind</code>: no GPU" in text


@pytest.mark.parametrize("text", [HOSTILE, EVIL, "\"><svg onload='x'>", "\u2028--><!--]]>"])
def test_nothing_in_a_run_becomes_part_of_the_page(text: str) -> None:
    usual, shown = Parts(page.html(hostile("harmless"))), Parts(page.html(hostile(text)))
    assert {tag for tag, _ in shown.elements} <= {tag for tag, _ in usual.elements}
    assert len(shown.of("script")) == 1
    assert shown.texts["script"] == usual.texts["script"]
    names = {name for _, attributes in shown.elements for name in attributes}
    assert not [name for name in names if name.startswith("on")]
    written = page.html(hostile(text))
    assert not [c for c in set(written) if not c.isprintable() and c != "\n"]
    assert "1515361" not in written


def test_the_page_runs_its_own_script_only_and_reaches_no_network() -> None:
    text = page.html(report_of(ToyStep()))
    parts = Parts(text)
    policy = next(m["content"] for m in parts.of("meta") if "http-equiv" in m) or ""
    digest = base64.b64encode(hashlib.sha256(parts.texts["script"].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "http://" not in text and "https://" not in text
    assert not [a for a in (parts.of("link"), parts.of("img"), parts.of("iframe")) if a]
    assert all((a["href"] or "").startswith("#") for a in parts.of("a"))
    assert "url(" not in parts.texts["style"] and "@import" not in parts.texts["style"]


def test_every_link_in_the_page_leads_somewhere() -> None:
    parts = Parts(page.html(report_of(ToyStep(), ToyBlind())))
    names = [a["id"] for _, a in parts.elements if "id" in a]
    assert len(names) == len(set(names))
    assert {a["href"] for a in parts.of("a")} <= {f"#{name}" for name in names}


def test_a_node_that_has_some_of_the_records_says_which() -> None:
    run = make_run({1: steps(9)}, world_size=3)
    text = page.html(report_of(ToyStep(), ranks=3), run)
    assert "The pictures show rank 1: the records of the others are not here." in text
    assert "The pictures show" not in page.html(report_of(ToyStep()))
