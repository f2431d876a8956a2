"""README and CONTRIBUTING say what the code does."""

from __future__ import annotations

import readme


def test_generated_parts_are_fresh() -> None:
    text = readme.README.read_text()
    assert text == readme.updated(text), "type `make readme`"


def test_the_table_of_layers_is_fresh() -> None:
    text = readme.CONTRIBUTING.read_text()
    assert text == readme.contributing(text), "type `make readme`"


def test_every_check_is_listed() -> None:
    text = readme.README.read_text()
    assert all(f"`{check.name}`" in text for check in readme.registry.all_checks())
