"""What the tests of shared memory have in common: connectors that are closed, and events to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triptych.transfer.connectors.shm import SharedMemoryConnector

PATIENCE = 20.0
"""Seconds until a test gives up on an event: the machine may be busy."""


class Recorder:
    """Events, kept in order, and waited for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.seen: list[tuple[str, ...]] = []

    def _note(self, *what: str) -> None:
        with self._changed:
            self.seen.append(what)
            self._changed.notify_all()

    def ready(self, stream: str) -> None:
        self._note("ready", stream)

    def writable(self, stream: str) -> None:
        self._note("writable", stream)

    def stopped(self, stream: str, reason: str, generation: int | None = None) -> None:
        self._note("stopped", stream, reason)

    def wait(self, kind: str, stream: str, count: int = 1) -> tuple[str, ...]:
        """The `count`-th event of a kind for a stream."""
        found: list[tuple[str, ...]] = []

        def there() -> bool:
            found[:] = [seen for seen in self.seen if seen[:2] == (kind, stream)]
            return len(found) >= count

        with self._changed:
            assert self._changed.wait_for(there, PATIENCE), f"no {kind} of {stream}: {self.seen}"
        return found[count - 1]


class Bench:
    """Makes connectors of one deployment and closes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: list[SharedMemoryConnector] = []

    def make(self, stage: int = 0, **options: Any) -> SharedMemoryConnector:
        connector = SharedMemoryConnector(
            {"stage_id": stage, "runtime_dir": str(self.folder), "tensors": "view", **options}
        )
        self._made.append(connector)
        return connector

    def told(self, stage: int = 0, **options: Any) -> tuple[SharedMemoryConnector, Recorder]:
        connector, recorder = self.make(stage, **options), Recorder()
        connector.listen(recorder)
        return connector, recorder

    def close(self) -> None:
        for connector in self._made:
            connector.close()


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for what no event tells of: a count that another thread brings down."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.002)


def take(connector: SharedMemoryConnector, events: Recorder, key: str) -> Any:
    """A chunk of a watched stream, once it is there."""
    stream = key.rpartition("_")[0]
    end = time.monotonic() + PATIENCE
    count = 0
    while True:
        found = connector.get("0", "1", key)
        if found is not None:
            return found[0]
        assert time.monotonic() < end, f"no chunk {key}"
        count += 1
        events.wait("ready", stream, count)
