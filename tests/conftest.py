"""What every test gets."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TRIPTYCH_ variable of whoever runs the tests changes no test."""
    for name in list(os.environ):
        if name.startswith("TRIPTYCH_"):
            monkeypatch.delenv(name)
