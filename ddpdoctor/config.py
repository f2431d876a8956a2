"""The doctor's options: one table that the command line, the environment and the file share."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .report.findings import Severity
from .report.suppression import Ignored, Unwanted, read_baseline

NEVER = "never"
FAIL_ON = (*(s.value for s in Severity), NEVER)
ON_HANG = ("auto", "report", "stop")
_PREFIX = "DDPDOCTOR_"
_INTERNAL = tuple(
    _PREFIX + name for name in ("AGENT", "DEBUG", "DIR", "HOME", "OWNER", "PROBE", "SPAWNED")
)
"""What the doctor's own processes tell each other, and DEBUG, by which it shows its defects."""
DEBUG_LEVELS = ("off", "info", "detail")

_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")

N = TypeVar("N", int, float)


class ConfigError(Exception):
    """An option has a value it cannot have. One line that says what to give instead."""


@dataclass(frozen=True)
class Options:
    """What the user asked of the doctor.

    Attributes:
        out: the run folder; None for one named after the time and the script.
        fail_on: `error | warning | note | never`.
        hang_after: seconds without progress; None to learn it from the run (`auto`).
        on_hang: `auto | report | stop`.
        budget: percent of the run's time.
        every: steps between two examinations of tensors; None to follow the budget (`auto`).
        max_steps: optimizer steps after which training ends; None for never.
        debug_level: `off | info | detail`.
        export: exporters, `NAME` or `NAME=TARGET`.
        live: show the run while it goes on; None for yes, unless another process has the terminal.
        baseline: a `findings.json`; what it has does not count.
        ignored: the entries `[[tool.ddpdoctor.ignore]]`.
    """

    out: Path | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = NEVER
    hang_after: float | None = None
    on_hang: str = "auto"
    budget: float = 1.0
    every: int | None = None
    max_steps: int | None = None
    debug_level: str = "info"
    json: Path | None = None
    html: Path | None = None
    export: tuple[str, ...] = ()
    live: bool | None = None
    quiet: bool = False
    baseline: Path | None = None
    ignored: tuple[Ignored, ...] = ()

    def unwanted(self) -> Unwanted:
        """What is not to be counted.

        Raises:
            ConfigError: the baseline cannot be read.
        """
        if self.baseline is None:
            return Unwanted(self.ignored)
        try:
            known = read_baseline(self.baseline)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no findings.json"
            raise ConfigError(
                f"--baseline: cannot read {self.baseline} ({why}); give the findings.json of a run"
            ) from error
        return Unwanted(self.ignored, known, f"baseline {self.baseline}")

    def fails(self, worst: Severity | None) -> bool:
        """Whether `--fail-on` is reached by the worst finding."""
        return (
            worst is not None
            and self.fail_on != NEVER
            and worst.rank <= Severity(self.fail_on).rank
        )


@dataclass(frozen=True)
class Setting:
    """One option: how it is spelled and read. `metavar` is empty for a switch."""

    name: str
    metavar: str
    help: str
    parse: Callable[[object], object]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return _PREFIX + self.name.upper()


def words(value: object, expected: str = "names of checks") -> tuple[str, ...]:
    """`A,B` or a list of these."""
    texts = [p for p in _listed(value) if isinstance(p, str)]
    if len(texts) < len(_listed(value)):
        raise ValueError(f"{expected}, separated by commas")
    return tuple(w for text in texts for w in (s.strip() for s in text.split(",")) if w)


def _exports(value: object) -> tuple[str, ...]:
    return words(value, "exporters, such as tensorboard=runs/a")


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _path(value: object) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("a path")
    return Path(value).expanduser()


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in (*_YES, *_NO):
        return value.lower() in _YES
    raise ValueError("true or false")


def _one_of(allowed: tuple[str, ...]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if isinstance(value, str) and value.lower() in allowed:
            return value.lower()
        raise ValueError(f"one of {', '.join(allowed)}")

    return parse


def _number(kind: type[N], least: N, most: float, expected: str) -> Callable[[object], N]:
    def parse(value: object) -> N:
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError
            number = kind(value)
            exact = isinstance(value, str) or number == value
        except (ValueError, OverflowError):
            raise ValueError(expected) from None
        if not exact or not math.isfinite(number) or not least <= number <= most:
            raise ValueError(expected)
        return number

    return parse


def _or_auto(parse: Callable[[object], N]) -> Callable[[object], N | None]:
    def read(value: object) -> N | None:
        return None if isinstance(value, str) and value.lower() == "auto" else parse(value)

    return read


SETTINGS = (
    Setting(
        "out",
        "DIR",
        "the run folder (default: ddpdoctor-runs/<date>-<time>-<script>)",
        _path,
    ),
    Setting("select", "A,B", "only these checks: names, codes, code prefixes, families", words),
    Setting("ignore", "A,B", "not these checks", words),
    Setting(
        "fail_on",
        "SEVERITY",
        "exit 3 for a finding that is that bad or worse (a run: only where training itself ended "
        "with 0): error, warning, note or never (default: never)",
        _one_of(FAIL_ON),
    ),
    Setting(
        "hang_after",
        "SECONDS",
        "how long without progress is a stall; auto learns it from the run (default: auto)",
        _or_auto(_number(float, 0.001, math.inf, "a number of seconds above 0, or auto")),
    ),
    Setting(
        "on_hang",
        "ACTION",
        "auto stops a proven deadlock and only reports a suspected one; "
        "report never stops, stop always does (default: auto)",
        _one_of(ON_HANG),
    ),
    Setting(
        "budget",
        "PERCENT",
        "most of the run's time the doctor may take (default: 1)",
        _number(float, 0.001, 100, "a percentage above 0, up to 100"),
    ),
    Setting(
        "every",
        "N",
        "examine tensors for drift every N steps; auto follows the budget (default: auto)",
        _or_auto(_number(int, 1, math.inf, "a whole number of steps, 1 or more, or auto")),
    ),
    Setting(
        "max_steps",
        "N",
        "end training with status 0 after N optimizer steps, on every rank: a smoke test "
        "(default: never)",
        _number(int, 1, math.inf, "a whole number of steps, 1 or more"),
    ),
    Setting(
        "debug_level",
        "LEVEL",
        "TORCH_DISTRIBUTED_DEBUG of the ranks: off, info or detail; "
        "a value you exported wins (default: info)",
        _one_of(DEBUG_LEVELS),
    ),
    Setting("json", "FILE", "also write the findings there, as JSON", _path),
    Setting("html", "FILE", "also write the report there, as a page", _path),
    Setting(
        "export",
        "NAME[=TARGET]",
        "also hand the report to tensorboard, wandb (offline) or opentelemetry; TARGET is a path "
        "or an address (default: in the run folder)",
        _exports,
    ),
    Setting("baseline", "FILE", "a findings.json: only what is new counts", _path),
    Setting(
        "live",
        "",
        "while running, findings as they are made and a live table (default: on a terminal; "
        "elsewhere a line every 30 s without findings)",
        _switch,
    ),
    Setting("quiet", "", "nothing on the console but findings", _switch),
)

BY_NAME = {setting.name: setting for setting in SETTINGS}


def resolve(
    given: Mapping[str, object],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    in_python: bool = False,
) -> Options:
    """Command line over environment over file.

    Args:
        given: what stands on the command line, by field of `Options`, unread.
        in_python: it stands in a call instead.

    Raises:
        ConfigError: a value cannot be used, or the file names an option that does not exist.
    """
    values: dict[str, object] = {}
    file, section = find_section(cwd or _here())
    for key, raw in section.items():
        setting = BY_NAME.get(key.replace("-", "_"))
        if setting is None:
            raise ConfigError(f"{file}: [tool.ddpdoctor] {_unknown(key)}")
        if setting.name == "ignore" and any(isinstance(entry, dict) for entry in _listed(raw)):
            values["ignored"] = _ignored(_listed(raw), str(file))
            continue
        values[setting.name] = _read(setting, raw, f"{key} in {file}")
    variables = os.environ if environ is None else environ
    for setting in SETTINGS:
        if text := variables.get(setting.variable):
            values[setting.name] = _read(setting, text, setting.variable)
    for name, raw in given.items():
        values[name] = _read(BY_NAME[name], raw, name if in_python else BY_NAME[name].flag)
    return Options(**values)  # type: ignore[arg-type]


def unknown_variables(environ: Mapping[str, str]) -> str:
    """One line about variables that look like the doctor's and mean nothing; empty for none."""
    known = {*(s.variable for s in SETTINGS), *_INTERNAL}
    unknown = []
    for name in sorted(n for n in environ if n.startswith(_PREFIX) and n not in known):
        near = difflib.get_close_matches(name[len(_PREFIX) :].lower(), BY_NAME, 1)
        unknown.append(f"{name} (did you mean {BY_NAME[near[0]].variable}?)" if near else name)
    return f"no option is read from {', '.join(unknown)}" if unknown else ""


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise ConfigError("this folder has been deleted; type cd to go to another one") from error


def find_section(folder: Path) -> tuple[Path | None, dict[str, object]]:
    """The nearest `pyproject.toml` upwards that has a `[tool.ddpdoctor]`, and what it says.

    Raises:
        ConfigError: such a file is not TOML, or the section is not a table.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    for place in (folder, *folder.parents):
        path = place / "pyproject.toml"
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if b"ddpdoctor" not in content:  # somebody else's file, however broken it may be
            continue
        try:
            tool = tomllib.loads(content.decode()).get("tool", {})
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid TOML: {_first_line(error)}") from error
        section = tool.get("ddpdoctor") if isinstance(tool, dict) else None
        if isinstance(section, dict):
            return path, section
        if section is not None:
            raise ConfigError(f"{path}: [tool.ddpdoctor] must be a table")
    return None, {}


def _read(setting: Setting, raw: object, origin: str) -> object:
    try:
        return setting.parse(raw)
    except ValueError as error:
        raise ConfigError(f"{origin}: {raw!r} is not {error}") from None


def _ignored(entries: list[object], file: str) -> tuple[Ignored, ...]:
    """The entries of `[[tool.ddpdoctor.ignore]]`.

    Raises:
        ConfigError: one is no table with the texts `check` and `reason`.
    """
    found = []
    for entry in entries:
        given = entry if isinstance(entry, dict) else {}
        check, reason = given.get("check"), given.get("reason")
        if not (isinstance(check, str) and isinstance(reason, str)) or len(given) > 2:
            raise ConfigError(
                f'{file}: each [[tool.ddpdoctor.ignore]] needs check = "..." and reason = "..."'
            )
        found.append(Ignored(check.strip(), reason.strip(), file))
    return tuple(found)


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), BY_NAME, 1)
    names = [name.replace("_", "-") for name in near or BY_NAME]
    hint = f"did you mean {names[0]!r}?" if near else f"options are {', '.join(names)}"
    return f"has no option {key!r}; {hint}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
