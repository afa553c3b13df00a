"""Reading a connector's options: what concerns somebody else is left alone, what concerns it has to be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych.transfer.errors import ConnectorError


def options(config: Mapping[str, Any]) -> dict[str, Any]:
    """A connector's options, from what its constructor was given: also those under "extra", as a spec has them."""
    extra = config.get("extra")
    return {
        **(extra if isinstance(extra, Mapping) else {}),
        **{key: value for key, value in config.items() if key != "extra"},
    }


def integer(given: Mapping[str, Any], key: str, default: int, least: int, most: int) -> int:
    """An option that is a number; text of digits is one too. Raises ConnectorError."""
    value = given.get(key)
    if value is None:
        return default
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConnectorError(f"{key}: {value!r} is not a number from {least} to {most}")
    return value


def text(given: Mapping[str, Any], key: str, default: str) -> str:
    """An option that is text. Raises ConnectorError."""
    value = given.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ConnectorError(f"{key}: {value!r} is not text")
    return value
