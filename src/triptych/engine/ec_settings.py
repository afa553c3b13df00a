"""Settings of the EC connector: the object `ec_connector_extra_config` of `--ec-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from triptych.engine.ec_store import StoreLimits

_DEFAULTS = StoreLimits()


@dataclass(frozen=True, slots=True)
class EcSettings:
    """How a connector uses its store. All engines of a deployment must agree on the path and the namespace.

    shared_storage_path: directory of the store; made with mode 0700.
    namespace: keeps deployments and models apart in one directory; by default the name under which the model is served.
    wait_s: how long a request that carries its media waits for an item before the engine encodes by itself.
    metadata_wait_s: how long a request that carries metadata only waits before it fails.
    max_bytes, max_items: bounds of the store.
    lease_s: for how long an item is safe from eviction after it was published or announced.
    width: values per row of encoder output, for a model where the connector's own idea of it is wrong.
    """

    shared_storage_path: Path
    namespace: str | None = None
    wait_s: float = 0.0
    metadata_wait_s: float = 1.0
    max_bytes: int = _DEFAULTS.max_bytes
    max_items: int = _DEFAULTS.max_items
    lease_s: float = _DEFAULTS.lease_s
    width: int | None = None

    @property
    def limits(self) -> StoreLimits:
        """The store's bounds."""
        return StoreLimits(self.max_bytes, self.max_items, self.lease_s)

    @staticmethod
    def parse(extra: Mapping[str, Any]) -> EcSettings:
        """From the configuration's object. Raises ValueError that names the setting at fault."""
        known = {field.name for field in fields(EcSettings)}
        if unknown := sorted(extra.keys() - known):
            raise ValueError(f"ec_connector_extra_config: unknown setting {unknown[0]!r}; there are {sorted(known)}")
        path = extra.get("shared_storage_path")
        if not isinstance(path, str) or not path.startswith("/"):
            raise ValueError("ec_connector_extra_config: shared_storage_path must be an absolute path")
        values: dict[str, Any] = {"shared_storage_path": Path(path)}
        for name, kind, least in _NUMBERS:
            if (value := extra.get(name)) is not None:
                values[name] = _number(name, value, kind, least)
        if (namespace := extra.get("namespace")) is not None:
            if not isinstance(namespace, str):
                raise ValueError("ec_connector_extra_config: namespace must be a string")
            values["namespace"] = namespace
        return EcSettings(**values)


_NUMBERS: tuple[tuple[str, type[int] | type[float], float], ...] = (
    ("wait_s", float, 0),
    ("metadata_wait_s", float, 0),
    ("max_bytes", int, 1),
    ("max_items", int, 1),
    ("lease_s", float, 0),
    ("width", int, 1),
)


def _number(name: str, value: Any, kind: type[int] | type[float], least: float) -> int | float:
    fits = isinstance(value, int) or (kind is float and isinstance(value, float))
    if not fits or isinstance(value, bool) or not least <= value < float("inf"):
        raise ValueError(f"ec_connector_extra_config: {name} must be a number of at least {least}, not {value!r}")
    return kind(value)
