"""Exporters by name: the built-in ones where their packages are installed, and entry points."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from commands import Caught, refused
from ledgers import SITES, LedgerOf
from recordings import site, steps, write_folder
from toys import only_toys

from ddpdoctor import exporters
from ddpdoctor.cli import main
from ddpdoctor.config import resolve
from ddpdoctor.exporters import dispatch
from ddpdoctor.report.findings import Report

__all__ = ["only_toys"]

pytestmark = pytest.mark.usefixtures("only_toys")


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    events = [site(1, "train.py", 88, "optimizer.step()"), *steps(10, site=1)]
    times = {n: LedgerOf().steps(10, forward=0.4 + n / 10).events for n in (0, 1)}
    both = {n: [*SITES[1:], *events, *times[n]] for n in (0, 1)}
    return write_folder(tmp_path / "good", both).path


class Entry:
    """An entry point of another package."""

    def __init__(self, name: str, function: exporters.Exporter) -> None:
        self.name, self._function = name, function

    def load(self) -> exporters.Exporter:
        return self._function


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Where the exporter `notes` of another package was asked to write; `broken` raises."""
    asked: list[tuple[str, str]] = []

    def notes(report: Report, target: str) -> str:
        print("of the exporter")
        asked.append((report.findings[0].code, target))
        return "there"

    def broken(report: Report, target: str) -> str:
        raise SystemExit("the disk is full\nof the second line nothing is told")

    entries = [Entry("notes", notes), Entry("broken", broken)]
    monkeypatch.setattr(
        dispatch.metadata, "entry_points", lambda group: entries if group == exporters.GROUP else []
    )
    return asked


def test_another_packages_exporter(
    good: Path, others: list[tuple[str, str]], capsys: Caught
) -> None:
    words = ["report", str(good), "--format", "json"]
    assert main([*words, "--export", "notes=a/b", "--export", "notes"]) == 0
    out, err = capsys.readouterr()
    assert others == [("DDP997", "a/b"), ("DDP997", str(good / "notes"))]
    assert json.loads(out)["findings"], "stdout is the report, and nothing else"
    assert err.count("ddpdoctor: exported to notes: there") == 2


def test_what_fails_changes_nothing(
    good: Path,
    others: list[tuple[str, str]],
    capsys: Caught,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["report", str(good), "--export", "broken,notes"]) == 0
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "ddpdoctor: cannot export to broken: the disk is full"
    assert len([line for line in err if line.startswith("ddpdoctor:")]) == 2
    assert main(["report", str(good), "--export", "broken", "--fail-on", "error"]) == 3
    monkeypatch.setattr(dispatch, "LIMIT_S", 0.05)
    monkeypatch.setattr(dispatch, "_load", lambda name: lambda *of: threading.Event().wait(20))
    assert main(["report", str(good), "--export", "notes"]) == 0
    assert "took too long" in capsys.readouterr().err


def test_a_bad_name_is_told_before_anything_runs(
    good: Path, tmp_path: Path, capsys: Caught, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    for command in (("report", good), ("run",), ("exec",)):
        rest = {"run": ["train.py"], "exec": ["--", "python", "x"]}.get(str(command[0]), [])
        said = refused(capsys, *command, "--export", "tensorbord=x", *rest)
        assert said.strip().endswith("did you mean tensorboard?")
    assert "known are opentelemetry, tensorboard, wandb" in refused(
        capsys, "report", good, "--export", "zzz"
    )
    monkeypatch.setattr(dispatch, "_installed", lambda package: False)
    assert "pip install 'ddpdoctor[wandb]'" in refused(capsys, "report", good, "--export", "wandb")
    with pytest.raises(ValueError, match="no exporter is called 'zzz'"):
        import ddpdoctor

        ddpdoctor.examine(export="zzz")


def test_the_option_is_read_everywhere(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.ddpdoctor]\nexport = ["wandb", "a=b"]\n')
    assert resolve({}, environ={}, cwd=tmp_path).export == ("wandb", "a=b")
    said = resolve({}, environ={"DDPDOCTOR_EXPORT": "tensorboard=x,wandb"}, cwd=tmp_path).export
    assert said == ("tensorboard=x", "wandb")


def test_tensorboard(good: Path, tmp_path: Path, capsys: Caught) -> None:
    pytest.importorskip("tensorboard", reason="make frameworks")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(["report", str(good), "--export", f"tensorboard={tmp_path / 'tb'}"]) == 0
    assert f"tensorboard --logdir {tmp_path / 'tb'}" in capsys.readouterr().err
    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    forward = read.Scalars("ddpdoctor/seconds/forward")
    assert [(e.step, round(e.value, 6)) for e in forward] == [(0, 0.4), (1, 0.5)]
    assert read.Scalars("ddpdoctor/findings/error")[0].value == 1
    (event,) = read.Tensors("ddpdoctor/report")
    assert b"DDP997" in event.tensor_proto.string_val[0]
    assert read.PluginAssets("text") is not None


def test_opentelemetry(good: Path, tmp_path: Path, capsys: Caught) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="make frameworks")
    assert main(["report", str(good), "--export", "opentelemetry"]) == 0
    file = good / "opentelemetry.jsonl"
    assert str(file) in capsys.readouterr().err
    spans = {s["name"]: s for s in map(json.loads, file.read_text().splitlines())}
    assert set(spans) == {"training run", "rank 0", "rank 1"}
    root = spans["training run"]
    assert root["status"]["status_code"] == "ERROR"
    assert root["events"][0]["attributes"]["ddpdoctor.code"] == "DDP997"
    assert spans["rank 1"]["parent_id"] == root["context"]["span_id"]
    assert spans["rank 1"]["attributes"]["ddpdoctor.seconds.forward"] == 0.5


def test_opentelemetry_to_a_collector(good: Path, capsys: Caught) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="not installed")
    got: list[int] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = f"http://127.0.0.1:{server.server_port}"
        for path in ("v1/traces", "elsewhere"):
            words = ["report", str(good), "--export", f"opentelemetry={place}/{path}"]
            assert main(words) == 0
    finally:
        server.shutdown()
    assert got and got[0] > 200
    err = capsys.readouterr().err
    assert f"exported to opentelemetry: {place}/v1/traces" in err
    assert f"cannot export to opentelemetry: {place}/elsewhere did not accept the trace" in err


@pytest.mark.slow
def test_wandb_offline(
    good: Path, tmp_path: Path, capsys: Caught, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="make frameworks")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert main(["report", str(good), "--export", f"wandb={tmp_path / 'w'}"]) == 0
    out, err = capsys.readouterr()
    (folder,) = (tmp_path / "w" / "wandb").glob("offline-run-*")
    assert f"wandb sync {folder}" in err
    tables = [json.loads(p.read_text()) for p in folder.rglob("*.table.json")]
    assert {t["columns"][0] for t in tables} == {"code", "figure"}
    assert [r[:3] for t in tables for r in t["data"] if r[0] == "DDP997"]
    assert "DDP997" in out
