"""From a connector's name to the connector. Others register theirs in the entry point group `triptych.connectors`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any, Final

from triptych.transfer.connectors.base import Connector, ConnectorSpec
from triptych.transfer.errors import ConnectorError

GROUP: Final = "triptych.connectors"
_BUILT_IN: Final = {
    "SharedMemoryConnector": "triptych.transfer.connectors.shm:SharedMemoryConnector",
    "shm": "triptych.transfer.connectors.shm:SharedMemoryConnector",
    "TcpConnector": "triptych.transfer.connectors.tcp:TcpConnector",
    "tcp": "triptych.transfer.connectors.tcp:TcpConnector",
}


class ConnectorFactory:
    """Makes connectors. A class, so that a deployment may put another factory in its place."""

    @staticmethod
    def create_connector(spec: ConnectorSpec) -> Connector:
        """The connector of that name, made with the spec's options.

        Raises:
            ConnectorError: there is none of that name, it cannot be imported, or it refuses its options.
        """
        kind = _find(spec.name)
        connector: Connector = kind(dict(spec.extra))
        return connector


def known() -> list[str]:
    """Names that may be configured, sorted."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def _find(name: str) -> Any:
    where = _BUILT_IN.get(name)
    try:
        if where is not None:
            module, _, attribute = where.partition(":")
            return getattr(importlib.import_module(module), attribute)
        for point in entry_points(group=GROUP, name=name):
            return point.load()
    except (ImportError, AttributeError) as error:
        raise ConnectorError(f"connector {name!r} cannot be imported: {error}") from error
    raise ConnectorError(
        f"there is no connector {name!r}; there are {', '.join(known())}. "
        f"A package of yours can add one under the entry point group {GROUP!r}."
    )
