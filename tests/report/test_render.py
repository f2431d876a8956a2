"""What a report looks like, and that no data in it can do harm."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from recordings import make_run, site, steps, torch_loaded
from rich.cells import cell_len
from toys import HOSTILE, ToyBlind, ToyHostile, ToyPartly, ToyQuiet, ToyStep

from ddpdoctor import render
from ddpdoctor.events import StepDone
from ddpdoctor.render import page, report_text, safe_text
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.report.findings import Finding, Overhead, Related, Report, Table
from ddpdoctor.run import Location, Run


def report_of(*checks: object, ranks: int = 2, count: int = 100, **more: object) -> Report:
    events = [torch_loaded(), site(1, "train.py", 88, "opt.step()"), *steps(count, site=1)]
    run = make_run(dict.fromkeys(range(ranks), events), **more)  # type: ignore[arg-type]
    return diagnose(run, checks, folder="runs/a")  # type: ignore[arg-type]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_anatomy_of_a_finding() -> None:
    text = render.text(report_of(ToyStep()))
    expected = """\
error[DDP997] toy-step: rank-local gradients reach `optimizer.step()` on all 2
  ranks
  --> train.py:88 in main   ranks 0-1   first seen at step 4, in 25 of 100 steps
 88 |     with ddp.no_sync():
    |     ^^^^^^^^^^^^^^^^^^^ still open here
101 |     opt.step()
    |     ---------- steps here
   = concerns: net.0.weight, net.1.weight, net.2.weight, net.3.weight,
       net.4.weight, net.5.weight and 39 more
   = cause: the context is still open on the micro-batch that steps
   = help (check before use): step at the end:

           if (i + 1) % n == 0:
               optimizer.step()
   = follows from it: DDP606 first-failure: rank 1 raised
   = evidence: grad norm:
       rank     norm
       0-2,4-7  4
       3        5
   = explain: ddpdoctor explain DDP997
"""
    assert expected in text


@pytest.mark.parametrize("write", [render.text, render.markdown, page.html])
def test_findings_come_before_the_tables(write: Callable[[Report], str]) -> None:
    text = write(report_of(ToyStep()))
    assert text.index("DDP997") < text.index("last activity")


def test_long_evidence_is_cut_and_said_to_be() -> None:
    report = report_of(ToyStep())
    finding = msgspec.structs.replace(
        report.findings[0], evidence={f"value {n}": n for n in range(12)}
    )
    text = render.text(msgspec.structs.replace(report, findings=[finding]))
    assert "= evidence: value 7: 7" in text
    assert "value 8" not in text
    assert "4 more lines: see `--html` or findings.json" in text


def test_evidence_that_the_first_line_says_is_left_to_the_page() -> None:
    report = report_of(ToyStep())
    of_calls = {"group": "the default group", "call_number": 83, "differs": ["op"], "kept": 1}
    (finding,) = report.findings
    finding = msgspec.structs.replace(finding, evidence=of_calls)
    report = msgspec.structs.replace(report, findings=(finding,))
    text = render.text(report)
    assert "evidence: kept: 1" in text and "evidence: group" not in text and "differs" not in text
    assert "<dt>differs</dt>" in page.html(report)
    assert "evidence: differs: op" in render.findings_text([finding], 80, whole=True)
    alone = msgspec.structs.replace(finding, evidence={"differs": ["indices"]})
    assert "evidence: differs: indices" in render.findings_text([alone], 80)


def test_a_line_with_several_labels_is_shown_once() -> None:
    (finding,) = report_of(ToyStep()).findings
    line = Location(file="train.py", line=9, source="trainer.fit(model)")
    related = tuple(Related(label, line) for label in ("made here", "iterated here", "made here"))
    finding = msgspec.structs.replace(finding, location=line, label="wrong", related=related)
    text = render.findings_text([finding], 80)
    assert text.count("trainer.fit(model)") == 1
    assert "wrong; made here; iterated here" in text


MACHINES = ("Python 3.11.7, torch 2.13.0+cpu, Linux-6.18", "vm: 2 cores, 24 GB", "NCCL_DEBUG=INFO")


def test_what_it_ran_on_comes_last_and_in_one_line_where_nothing_was_found() -> None:
    def lines(*checks: object) -> list[str]:
        report = report_of(*checks)
        run = msgspec.structs.replace(report.run, machine=MACHINES)
        return render.text(msgspec.structs.replace(report, run=run)).splitlines()

    assert lines(ToyStep())[-3:] == [*MACHINES]
    clean = lines(ToyQuiet())
    assert clean[-1].startswith("vm: 2 cores, 24 GB; NCCL_DEBUG=INFO; Python 3.11.7, torch")
    assert len(clean[-1]) <= 80 and not any("vm: 2 cores" in line for line in clean[:-1])


def test_head_and_foot() -> None:
    text = render.text(report_of(ToyStep(), ToyBlind(), ended={1: -9}))
    assert text.startswith("ddpdoctor 0.1.0: ddpdoctor run train.py\nkilled")
    assert "2 ranks, torch 2.13.0" in text
    assert re.search(r"^1 +killed \(SIGKILL\) +100 +100 ms|^1 +killed \(SIGKILL\) +100", text, re.M)
    assert "step 99 at train.py:88" in text
    assert "\n1 error\n" in text
    assert "not examined: no GPU (toy-blind)" in text
    assert "the doctor's own time was not measured" in text


def test_what_a_check_leaves_out_is_said() -> None:
    report = report_of(ToyPartly(), ToyQuiet())
    assert report.coverage.examined == ("toy-partly", "toy-quiet")
    assert [(s.check, s.reason) for s in report.coverage.partly] == [("toy-partly", "3 parameters")]
    assert "left out: 3 parameters (toy-partly)" in render.text(report)


def test_a_clean_run_says_on_what_grounds() -> None:
    text = render.text(report_of(ToyQuiet(), ranks=4, count=120))
    assert "no faults found: examined 1 check over 4 ranks, 120 steps" in text
    assert "not observed" not in text


LOST = "4 ranks did the work of 2.1: they worked for 52 % of their time, 31 % was lost otherwise"


@pytest.mark.parametrize("write", [render.text, render.markdown, page.html])
def test_time_that_was_lost_stands_beside_no_faults_found(write: Callable[[Report], str]) -> None:
    report = msgspec.structs.replace(report_of(ToyQuiet(), ranks=4, count=120), lost=LOST)
    text = " ".join(html.unescape(write(report)).split())
    assert f"o faults found; {LOST}" in text
    assert "xamined 1 check over 4 ranks, 120 steps" in text
    found = msgspec.structs.replace(report_of(ToyStep()), lost=LOST)
    assert "no faults found" not in write(found)


def test_never_clean_without_evidence() -> None:
    assert "not observed: no optimizer step seen" in render.text(report_of(ToyQuiet(), count=0))
    nothing = render.text(report_of(ToyBlind()))
    assert "nothing was examined" in nothing
    assert "no faults found" not in nothing
    killed = render.text(report_of(ToyQuiet(), ended={0: -9}))
    assert "no faults found" not in killed
    assert "was killed" in killed
    assert "no end on record" in render.text(report_of(ToyQuiet(), ended=None))


def test_quiet_prints_findings_only() -> None:
    out = io.StringIO()
    render.console(report_of(ToyStep()), stream=out, quiet=True)
    assert out.getvalue().startswith("error[DDP997]")
    assert "the doctor" not in out.getvalue()
    clean = io.StringIO()
    render.console(report_of(ToyQuiet()), stream=clean, quiet=True)
    assert clean.getvalue() == ""


def test_plain_and_80_columns_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    render.console(report_of(ToyStep()), stream=out)
    assert "\x1b" not in out.getvalue()
    assert max(cell_len(line) for line in out.getvalue().split("\n")) <= 80


def test_colours_on_a_terminal_unless_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = Terminal()
    render.console(report_of(ToyStep()), stream=coloured, width=100)
    assert "\x1b[1;31m" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    refused = Terminal()
    render.console(report_of(ToyStep()), stream=refused, width=100)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", refused.getvalue())


def test_large_worlds_fold_equal_ranks() -> None:
    text = render.text(report_of(ToyQuiet(), ranks=20, ended={7: 1}))
    assert re.search(r"^0-6,8-19 +finished", text, re.M)
    assert re.search(r"^7 +failed \(exit 1\)", text, re.M)
    assert len(report_text.rank_grid(report_of(ToyQuiet(), ranks=16)).rows) == 16


def test_missing_ranks_have_a_row() -> None:
    text = render.text(report_of(ToyQuiet(), ranks=2, world_size=4))
    assert re.search(r"^2-3 +no record", text, re.M)
    assert "missing: ranks 2-3 were not observed: no record" in text


def test_ranks_stand_in_order_also_those_without_a_record() -> None:
    report = report_of(ToyQuiet(), ranks=3)
    report = msgspec.structs.replace(report, ranks=report.ranks[1:])
    assert [row[0] for row in report_text.rank_grid(report).rows] == ["0", "1", "2"]


def test_a_narrow_terminal_shows_the_ranks() -> None:
    lines = render.text(report_of(ToyQuiet(), ended={1: 1}), 30).splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("rank  state"))
    assert [line[0] for line in lines[head + 1 : head + 3]] == ["0", "1"]


def test_tables_of_the_report() -> None:
    table = Table(title="consumed", columns=("rank", "samples"), rows=(("0", "64"), ("1", "60")))
    report = msgspec.structs.replace(report_of(ToyQuiet()), tables=(table,))
    assert "consumed\nrank  samples\n0     64\n1     60\n" in render.text(report)
    assert '<td data-of="samples">64</td>' in page.html(report)
    assert "| 0 | 64 |" in render.markdown(report)


def _hostile() -> Report:
    report = report_of(ToyHostile())
    run = msgspec.structs.replace(report.run, command=(HOSTILE,), torch=HOSTILE, folder=HOSTILE)
    ranks = tuple(msgspec.structs.replace(r, last=HOSTILE, state=HOSTILE) for r in report.ranks)
    tables = (Table(title=HOSTILE, columns=(HOSTILE,), rows=((HOSTILE,),)),)
    return msgspec.structs.replace(report, run=run, ranks=ranks, tables=tables)


@pytest.mark.parametrize(
    "show", [render.text, page.html, *(f for n, f in render.FORMATS.items() if n != "json")]
)
def test_hostile_data_is_harmless_and_short(show: object) -> None:
    text = show(_hostile())  # type: ignore[operator]
    assert not [c for c in set(text) if not c.isprintable() and c != "\n"]
    assert len(text) < 60_000


def test_hostile_data_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    render.console(_hostile(), stream=out, width=100)
    text = out.getvalue()
    assert "[bold red]x[/]" in text  # markup is shown, not obeyed
    assert not re.findall(r"\x1b(?!\[[0-9;]*m)", text)
    assert "\x1b[31mred" not in text


def test_markdown_holds_no_markup_of_the_data() -> None:
    outside_code = re.sub(
        r"`[^`\n]*`|^    .*$|^      .*$", "", render.markdown(_hostile()), flags=re.M
    )
    assert "<script>" not in outside_code


def test_ascii_streams_lose_characters_not_the_report() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    render.console(_hostile(), stream=out)
    assert b"warning[DDP998]" in raw.getvalue()


def test_a_closed_stream_is_survived() -> None:
    out = io.StringIO()
    out.close()
    render.console(report_of(ToyStep()), stream=out)


def test_files(tmp_path: Path) -> None:
    report = report_of(ToyStep())
    render.write_json(report, tmp_path / "new" / "a.json")
    page.write(report, tmp_path / "a.html")
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == report.to_dict()
    assert (tmp_path / "a.html").read_text() == page.html(report)
    with pytest.raises(OSError):
        render.write_json(report, tmp_path / "a.html" / "below")


def test_wrapping_keeps_code_and_long_words_whole() -> None:
    text = "set `torch.cuda.set_device(local_rank)` before the wrap " + "x" * 50
    lines = safe_text.wrap(text, 40)
    assert any("`torch.cuda.set_device(local_rank)`" in line for line in lines)
    assert lines[-1] == "x" * 50
    assert " ".join(lines) == text
    wide = safe_text.wrap("漢字 " * 30, 20)
    assert max(cell_len(line) for line in wide) <= 20


def test_values_as_people_write_them() -> None:
    assert safe_text.some(range(45)) == "0, 1, 2, 3, 4, 5, 6, 7 and 37 more"
    assert safe_text.clean("a" * 400).endswith("(100 more characters)")
    assert [safe_text.duration(s) for s in (None, 0.0032, 0.1, 12.34, 125, 9000)] == [
        "",
        "3.2 ms",
        "0.1 s",
        "12.3 s",
        "2 min 5 s",
        "2 h 30 min",
    ]
    assert safe_text.figure({"a": None, "b": [True, 0.5]}) == "a (none), b (yes, 0.5)"


def test_empty_evidence_is_left_out() -> None:
    (finding,) = report_of(ToyStep()).findings
    empty = {"rows": (), "names": "", "mapping": {}, "none": None, "steps": 0, "same": False}
    told = report_text.proofs(msgspec.structs.replace(finding, evidence=empty))
    assert [(p.name, p.line) for p in told] == [("steps", "0"), ("same", "no")]


def test_unequal_rows_are_not_folded() -> None:
    rows = [{"rank": 0, "n": 1}, {"rank": 1, "n": 2}, {"rank": 2, "n": 1}]
    (proof,) = report_text.proofs(
        msgspec.structs.replace(report_of(ToyStep()).findings[0], evidence={"t": rows})
    )
    assert proof.grid
    assert proof.grid.rows == (("0,2", "1"), ("1", "2"))


def test_one_rank_of_a_wide_row_is_no_plural() -> None:
    report = report_of(ToyStep())
    rows = [{"ranks": who, "reported": "wordy " * 20} for who in ("0", "1-2")]
    (one, *_) = report.findings
    one = msgspec.structs.replace(one, evidence={"t": rows})
    text = render.text(msgspec.structs.replace(report, findings=(one,)))
    assert " rank 0, reported" in text and " ranks 1-2, reported" in text


def test_last_thing_is_the_exception_not_the_leaving() -> None:
    from ddpdoctor.events import ExceptionRaised, RankExiting

    raised = ExceptionRaised(at=0, kind="ValueError", message="no\nmore")
    leaving = RankExiting(at=0, how="exception", status=1)
    run = make_run({0: [*steps(2), raised, leaving], 1: [*steps(2), leaving]})
    rows = diagnose(run, []).ranks
    assert [r.last for r in rows] == ["raised ValueError: no", "leaving (exception, status 1)"]
    assert [r.last for r in diagnose(make_run({0: [], 1: steps(2)}), []).ranks] == [
        "started",
        "step 1",
    ]
    unseen = [*steps(2), RankExiting(at=0, how="return")]  # `raise SystemExit(7)`
    rows = diagnose(make_run({0: unseen, 1: unseen}, ended={0: 7, 1: 0}), []).ranks
    assert [r.last for r in rows] == ["leaving (status 7)", "leaving (return)"]


def test_last_thing_is_no_worker_that_torch_ends() -> None:
    from ddpdoctor.events import ExceptionRaised, RankExiting, SignalSent

    raised = ExceptionRaised(at=0, kind="ValueError", message="no")
    ends = SignalSent(at=0, pid=99999, signal=15)
    leaving = RankExiting(at=0, how="return", status=0)
    run = make_run({0: [*steps(2), raised, ends], 1: [*steps(2), leaving, ends]}, ended={0: 1})
    assert [r.last for r in diagnose(run, []).ranks] == [
        "raised ValueError: no",
        "leaving (return, status 0)",
    ]


@pytest.mark.parametrize(
    ("done", "told"),
    [
        (100, "first seen at step 4, in 25 of 100 steps"),
        (4, "in step 4"),
        (None, "first seen at step 4, in 25 steps"),
    ],
)
def test_a_step_that_no_rank_completed(done: int | None, told: str) -> None:
    (finding,) = report_of(ToyStep()).findings
    of_all = msgspec.structs.replace(finding.steps, total=done)
    assert report_text.whereabouts(msgspec.structs.replace(finding, steps=of_all))[-1] == told


class OfOne(ToyStep):
    """Told of the optimizer 0."""

    optimizers: tuple[int, ...] = (0,)

    def examine(self, run: Run) -> Iterable[Finding]:
        for finding in super().examine(run):
            yield msgspec.structs.replace(finding, optimizers=self.optimizers)


def totals(*ranks: list[StepDone]) -> list[int | None]:
    """Among how many steps a finding is told: of an unknown optimizer, and of the first."""
    run = make_run(dict(enumerate(ranks)))
    told = [f for check in (ToyStep(), OfOne()) for f in diagnose(run, [check]).findings]
    return [f.steps.total for f in told if f.steps]


def test_the_steps_of_a_finding_are_among_those_of_its_optimizer() -> None:
    both = [steps(n, optimizer=i, backward_s=0.05) for i, n in enumerate((13, 20))]
    turns = [*both[0], *both[1]]
    assert [r.steps for r in diagnose(make_run({0: turns}), []).ranks] == [33]
    assert totals(turns, both[1]) == [None, 13]
    together = [e for pair in zip(*both, strict=False) for e in pair]
    assert totals(together) == [13, 13]
    longer = [*together, *both[1][13:]]
    assert totals(longer) == [None, 13]
    assert [r.steps for r in diagnose(make_run({0: longer}), []).ranks] == [20]


def test_a_table_too_wide_for_the_page_names_no_cells_that_are_empty() -> None:
    columns, row = ("loader", "once", "never", "order"), ("train.py:" + 70 * "1", "-", "", "new")
    report = msgspec.structs.replace(
        report_of(), tables=(Table(title="consumed", columns=columns, rows=(row,)),)
    )
    text = " ".join(render.text(report).split())
    assert "1, order new" in text and "once" not in text and "never" not in text


def test_long_whereabouts_are_wrapped() -> None:
    report = report_of(ToyStep())
    (finding,) = report.findings
    place = msgspec.structs.replace(
        finding.location, file="a/rather/long/path/to/the/script/train.py"
    )
    long = msgspec.structs.replace(
        report, findings=(msgspec.structs.replace(finding, location=place),)
    )
    text = render.text(long)
    assert "\n      first seen at step 4, in 25 of 100 steps\n" in text
    assert max(cell_len(line) for line in text.split("\n")) <= 80


@pytest.mark.parametrize(
    ("outcome", "by", "told"),
    [
        ("hung", "the doctor", "hung until the doctor stopped it"),
        ("killed", "Ctrl-C", "killed by Ctrl-C (exit 1)"),
        ("failed", "", "failed (exit 1)"),
    ],
)
def test_how_the_run_ended(outcome: str, by: str, told: str) -> None:
    report = report_of(ToyQuiet())
    run = msgspec.structs.replace(report.run, outcome=outcome, stopped_by=by, exit_code=1)
    assert report_text.ending(msgspec.structs.replace(report, run=run)) == told


@pytest.mark.parametrize(
    ("measured", "later", "said"),
    [
        (0.4, 0.3, "the doctor took 0.4 % of the run's time (budget 1 %)"),
        (5.0, 0.9, ", 0.9 % after the first 128 steps (budget 1 %)"),
        (5.0, None, ", most of it early on"),
    ],
)
def test_what_it_took_above_the_budget_is_explained(
    measured: float, later: float | None, said: str
) -> None:
    cost = Overhead(budget_percent=1.0, measured_percent=measured, later_percent=later)
    report = SimpleNamespace(overhead=cost)
    assert report_text.overhead(report).endswith(said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own_s", "wall_s", "start_s", "said"),
    [
        (
            0.4,
            1.2,
            0.31,
            "the doctor took 0.4 s of 1.2 s, 0.31 s of it to start",
        ),
        (0.04, 8.0, 0.03, "the doctor took 40 ms of 8 s (budget 1 %)"),
        (0.4, 80.0, 0.3, "the doctor took 0.5 % of the run's time (budget 1 %)"),
    ],
)
def test_of_a_short_run_times_are_told(
    own_s: float, wall_s: float, start_s: float, said: str
) -> None:
    cost = Overhead(
        budget_percent=1.0,
        measured_percent=100 * own_s / wall_s,
        own_s=own_s,
        wall_s=wall_s,
        start_s=start_s,
    )
    report = SimpleNamespace(overhead=cost)
    assert report_text.overhead(report) == said  # type: ignore[arg-type]
