"""The README says what the code does."""

from __future__ import annotations

import readme


def test_generated_parts_are_fresh() -> None:
    text = readme.README.read_text()
    assert text == readme.updated(text), "type `make readme`"


def test_every_check_is_listed() -> None:
    text = readme.README.read_text()
    assert all(f"`{check.name}`" in text for check in readme.registry.all_checks())
