"""Modules that are watched once the program imports them, and files that are torch's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.probe.recording import patching, recorder
from ddpdoctor.probe.recording.import_hooks import when_imported
from ddpdoctor.probe.watchers.process.files import Files
from ddpdoctor.storage.run_folder import EventWriter


@pytest.fixture(autouse=True)
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that is a rank, and can import a module of its own."""
    (tmp_path / "fallible.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "written_in_rust.py").write_text("def save(path): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    writer = EventWriter(tmp_path / "rank-0.jsonl", tmp_path / "rank-0.log")
    recorder.set_recorder(recorder.Recorder(writer, tmp_path, "rank-0", {}))
    finders = list(sys.meta_path)
    yield
    patching.restore()
    recorder.set_recorder(None)
    writer.close()
    sys.modules.pop("written_in_rust", None)
    assert sys.meta_path == finders


def test_a_module_is_watched_once_it_is_imported() -> None:
    seen = []
    when_imported("written_in_rust", lambda module: seen.append(module.save), lost="")
    assert not seen
    module = importlib.import_module("written_in_rust")
    assert seen == [module.save]
    when_imported("written_in_rust", lambda module: seen.append(module.save), lost="")
    assert len(seen) == 2


def test_several_may_wait_for_one_module() -> None:
    seen = []
    for number in range(3):
        when_imported("written_in_rust", lambda module, number=number: seen.append(number), lost="")
    importlib.import_module("written_in_rust")
    assert seen == [0, 1, 2]


def test_what_fails_in_us_or_in_the_module_is_as_it_was() -> None:
    when_imported("written_in_rust", lambda module: module.no_such_function, lost="")
    importlib.import_module("written_in_rust")
    when_imported("fallible", lambda module: None, lost="")
    when_imported("not_there", lambda module: None, lost="")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        importlib.import_module("fallible")
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        importlib.import_module("not_there")


def test_files_that_torch_writes_for_itself() -> None:
    assert Files.current._path("/tmp/mine.pt") == "/tmp/mine.pt"
    assert Files.current._path("/tmp/pytorch-errorfile-a1b2") == ""
    assert Files.current._path("/tmp/torchelastic_ab/none_x/attempt_0/0/error.json") == ""
