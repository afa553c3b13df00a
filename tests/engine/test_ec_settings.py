"""Settings of the EC connector, as they come from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.engine.ec_settings import EcSettings
from triptych.engine.ec_store import StoreLimits


def test_only_the_path_is_wanted() -> None:
    settings = EcSettings.parse({"shared_storage_path": "/dev/shm/x"})
    assert settings == EcSettings(Path("/dev/shm/x"))
    assert settings.limits == StoreLimits()
    assert (settings.wait_s, settings.namespace, settings.width) == (0.0, None, None)


def test_every_setting_is_taken() -> None:
    extra = {
        "shared_storage_path": "/x",
        "namespace": "n",
        "wait_s": 1,
        "metadata_wait_s": 2.5,
        "max_bytes": 10,
        "max_items": 3,
        "lease_s": 4,
        "width": 64,
    }
    settings = EcSettings.parse(extra)
    assert settings == EcSettings(Path("/x"), "n", 1.0, 2.5, 10, 3, 4.0, 64)
    assert settings.limits == StoreLimits(10, 3, 4.0)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "shared_storage_path"),
        ({"shared_storage_path": "relative"}, "shared_storage_path"),
        ({"shared_storage_path": 3}, "shared_storage_path"),
        ({"shared_storage_path": "/x", "max_byte": 1}, "max_byte"),
        ({"shared_storage_path": "/x", "max_bytes": 0}, "max_bytes"),
        ({"shared_storage_path": "/x", "max_bytes": 1.5}, "max_bytes"),
        ({"shared_storage_path": "/x", "max_items": True}, "max_items"),
        ({"shared_storage_path": "/x", "wait_s": -1}, "wait_s"),
        ({"shared_storage_path": "/x", "wait_s": float("inf")}, "wait_s"),
        ({"shared_storage_path": "/x", "wait_s": float("nan")}, "wait_s"),
        ({"shared_storage_path": "/x", "lease_s": "60"}, "lease_s"),
        ({"shared_storage_path": "/x", "namespace": 1}, "namespace"),
    ],
)
def test_a_fault_names_the_setting(extra: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        EcSettings.parse(extra)
