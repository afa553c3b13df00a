"""Fixtures of the launcher's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from triptych.launch.ports import Reservations


@pytest.fixture
def ports() -> Iterator[Reservations]:
    with Reservations() as reserved:
        yield reserved
