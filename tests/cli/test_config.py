"""Options: command line over environment over file, and one line for each mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import ddpdoctor
from ddpdoctor import config
from ddpdoctor.config import SETTINGS, ConfigError, Options, resolve
from ddpdoctor.report.findings import Severity

INTERNAL = {"DDPDOCTOR_DIR", "DDPDOCTOR_PROBE", "DDPDOCTOR_OWNER", "DDPDOCTOR_HOME"}


def write(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.ddpdoctor]\n{text}\n")


def test_defaults(tmp_path: Path) -> None:
    assert resolve({}, environ={}, cwd=tmp_path) == Options()


def test_every_option_has_a_setting_and_none_is_internal() -> None:
    # Entries of the file alone have no option.
    assert {s.name for s in SETTINGS} | {"ignored"} == set(Options.__dataclass_fields__)
    assert not INTERNAL & {s.variable for s in SETTINGS}


def test_order(tmp_path: Path) -> None:
    write(tmp_path, 'budget = 2\nhang-after = 30\nselect = ["drift", "DDP5"]\nquiet = true')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    environ = {"DDPDOCTOR_BUDGET": "3", "DDPDOCTOR_EVERY": "7", "DDPDOCTOR_PROBE": "{}"}
    options = resolve({"budget": "4"}, environ=environ, cwd=below)
    assert options.budget == 4
    assert options.every == 7
    assert options.hang_after == 30
    assert options.select == ("drift", "DDP5")
    assert options.quiet is True
    assert resolve({}, environ=environ, cwd=below).budget == 3
    assert resolve({}, environ={}, cwd=below).budget == 2


def test_auto_beats_the_file(tmp_path: Path) -> None:
    write(tmp_path, "every = 5")
    assert resolve({"every": "auto"}, environ={}, cwd=tmp_path).every is None


def test_nearest_section_counts_and_other_files_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "budget = 2")
    below = tmp_path / "sub"
    below.mkdir()
    (below / "pyproject.toml").write_text("this is = = not toml")
    assert resolve({}, environ={}, cwd=below).budget == 2


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("budget", "0", "percentage"),
        ("budget", "nan", "percentage"),
        ("budget", "200", "percentage"),
        ("every", "1.5", "whole number"),
        ("every", "0", "whole number"),
        ("hang_after", "soon", "number of seconds"),
        ("hang_after", "-1", "number of seconds"),
        ("hang_after", "inf", "number of seconds"),
        ("fail_on", "fatal", "error, warning, note, never"),
        ("on_hang", "kill", "auto, report, stop"),
        ("debug_level", "all", "off, info, detail"),
        ("out", "", "path"),
    ],
)
def test_bad_values(name: str, value: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        resolve({name: value}, environ={}, cwd=tmp_path)
    text = str(caught.value)
    assert text.startswith("--" + name.replace("_", "-"))
    assert repr(value) in text
    assert "\n" not in text


def test_bad_variable_and_bad_file_name_their_origin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^DDPDOCTOR_LIVE: 'maybe'"):
        resolve({}, environ={"DDPDOCTOR_LIVE": "maybe"}, cwd=tmp_path)
    write(tmp_path, "budget = true")
    with pytest.raises(ConfigError, match=r"^budget in .*pyproject\.toml: True"):
        resolve({}, environ={}, cwd=tmp_path)
    write(tmp_path, "bugdet = 1")
    with pytest.raises(ConfigError, match="did you mean 'budget'"):
        resolve({}, environ={}, cwd=tmp_path)
    write(tmp_path, "budget = = 1")
    with pytest.raises(ConfigError, match="not valid TOML"):
        resolve({}, environ={}, cwd=tmp_path)


def test_variables_that_mean_nothing_are_told() -> None:
    assert (
        config.unknown_variables({"DDPDOCTOR_LIVE": "1", "DDPDOCTOR_DIR": "x", "PATH": "/"}) == ""
    )
    told = config.unknown_variables({"DDPDOCTOR_FAILON": "error", "DDPDOCTOR_FOO": "1"})
    assert told == (
        "no option is read from DDPDOCTOR_FAILON (did you mean DDPDOCTOR_FAIL_ON?), DDPDOCTOR_FOO"
    )


def test_what_the_doctor_sets_itself_is_no_unknown_variable() -> None:
    package = Path(config.__file__).parent
    named = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r"\bDDPDOCTOR_[A-Z]+\b", path.read_text())
    }
    assert config.unknown_variables(dict.fromkeys(named, "")) == ""


def test_fail_on() -> None:
    assert not Options().fails(Severity.ERROR)
    assert Options(fail_on="warning").fails(Severity.ERROR)
    assert Options(fail_on="warning").fails(Severity.WARNING)
    assert not Options(fail_on="warning").fails(Severity.NOTE)
    assert not Options(fail_on="note").fails(None)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"rais_on": "error"}, "did you mean 'raise_on'"),
        ({"evry": 3}, "did you mean 'every'"),
        ({"colour": "red"}, "options: raise_on, "),
        ({"select": ["drfit"]}, "did you mean drift"),
        ({"raise_on": "fault"}, "'fault' is not one of"),
        ({"every": 0}, "^every: 0 is not a whole number"),
    ],
)
def test_a_checkup_refuses_what_it_does_not_know(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ddpdoctor.checkup(**asked)
