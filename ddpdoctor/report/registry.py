"""Finds the checks: every module of `ddpdoctor.checks`, and the entry points of other packages."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from importlib import metadata

from .findings import Check

FAMILIES = ("launch", "memory", "model", "drift", "data", "hang", "performance", "numerics")


class SelectionError(Exception):
    """A name given to --select or --ignore fits no check. One line."""


class RegistryError(Exception):
    """Two checks share a code or a name, or the checks are not installed."""


@cache
def all_checks() -> tuple[Check, ...]:
    """One instance of every check, by code.

    Raises:
        RegistryError: the package is not installed, or two checks share a code or a name.
    """
    try:
        package = importlib.import_module("ddpdoctor.checks")
    except ModuleNotFoundError as error:
        raise RegistryError(
            "the checks are not installed: type `pip install -e .` in the source folder"
        ) from error
    classes: list[type[Check]] = []
    for module in pkgutil.walk_packages(package.__path__, "ddpdoctor.checks."):
        if module.ispkg:
            continue
        loaded = importlib.import_module(module.name)
        classes += [
            c
            for c in vars(loaded).values()
            if _is_class(c) and issubclass(c, Check)
            if c.__module__ == module.name and hasattr(c, "code")
        ]
    for entry in metadata.entry_points(group="ddpdoctor.checks"):
        classes.append(entry.load())
    checks = sorted((c() for c in classes), key=lambda c: c.code)
    for attribute in ("code", "name"):
        values = [getattr(c, attribute) for c in checks]
        for value in values:
            if values.count(value) > 1:
                raise RegistryError(f"two checks have the {attribute} {value}")
    return tuple(checks)


def _is_class(value: object) -> bool:
    """`list[int]` says that it is one in Python 3.10, and `issubclass` refuses it."""
    return issubclass(type(value), type)


def select(chosen: tuple[str, ...] = (), ignored: tuple[str, ...] = ()) -> tuple[Check, ...]:
    """The checks that `--select` and `--ignore` leave.

    Raises:
        SelectionError: a word is no check's name, code, code prefix or family.
    """
    for word in (*chosen, *ignored):
        if not any(fits(check, word) for check in all_checks()):
            raise SelectionError(f"no check is called {word!r}; {_near(word)}")
    return tuple(
        check
        for check in all_checks()
        if (not chosen or any(fits(check, w) for w in chosen))
        and not any(fits(check, w) for w in ignored)
    )


def others(chosen: Iterable[Check]) -> tuple[Check, ...]:
    """The checks that were not chosen."""
    names = {check.name for check in chosen}
    return tuple(check for check in all_checks() if check.name not in names)


def _near(word: str) -> str:
    known = [c.name for c in all_checks()] + list(FAMILIES)
    close = difflib.get_close_matches(word.lower(), known, 1, 0.7)
    close += [c.code for c in all_checks() if word.isdecimal() and c.code.endswith(word)]
    more = "`ddpdoctor explain` lists names, codes and families"
    return f"did you mean {close[0]}? ({more})" if close else more


def find(word: str) -> Check | None:
    """The check with that name or code."""
    return next((c for c in all_checks() if word.lower() == c.name or word.upper() == c.code), None)


def fits(check: Check, word: str) -> bool:
    """Whether a word is the name, the code, the begin of the code, or the family of a check."""
    upper = word.upper()
    prefix = upper.startswith("DDP") and check.code.startswith(upper)
    return prefix or word.lower() in (check.name, check.family)
