"""A folder that holds a run already."""

from pathlib import Path

import pytest

from ddpdoctor.storage.run_folder import FolderError, RunFolder


def test_a_free_name_is_told(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "out")
    (tmp_path / "out" / "run.json").touch()
    (tmp_path / "out-2").mkdir()
    with pytest.raises(FolderError, match=r"already holds a run.*--out .*/out-3`"):
        RunFolder.create(tmp_path / "out")
