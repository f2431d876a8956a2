"""How a command refuses."""

from __future__ import annotations

import pytest

from ddpdoctor.cli import main

Caught = pytest.CaptureFixture[str]


def refused(caught: Caught, *argv: object) -> str:
    """The one line on stderr; nothing on stdout, status 2."""
    assert main([str(a) for a in argv]) == 2
    out, err = caught.readouterr()
    assert out == ""
    assert err.startswith("ddpdoctor: ")
    assert err.count("\n") == 1
    return err
