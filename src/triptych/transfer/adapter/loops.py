"""Two threads and what passes between them, the connector and the scheduler: the frame of an adapter.

The receive thread takes chunks from the connector, the save thread hands chunks to it. Both sleep on a condition,
without a period, until there is something to do or the nearest deadline has come.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from triptych.transfer.connectors.base import Connector, StreamConnector

JOIN_S: Final = 10.0
_EDGE: Final = re.compile(r"stage \d+ -> \d+: ")

logger = logging.getLogger(__name__)


def nobody() -> None:
    """The wake-up of an adapter whose scheduler does not sleep."""


def is_streamed(request: Any) -> bool:
    """Whether a request takes part: an external id names its streams. Others go through a stage as they came."""
    return getattr(request, "external_req_id", None) is not None


def at_edge(sender: int, reason: str) -> str:
    """A reason with the edge where it came about, unless it names that already."""
    return reason if _EDGE.search(reason) else f"stage {sender} -> {sender + 1}: {reason}"


class Told(NamedTuple):
    """Of an own stream: it has credit again, or, with a reason, nobody wants the rest of it."""

    stream: str
    stopped: str | None = None
    generation: int | None = None


class Doorbell:
    """`Events` of a connector, put down where the adapter's threads find them. Never waits for anything but them."""

    def __init__(self, adapter: TransferLoops) -> None:
        self._adapter = adapter

    def ready(self, stream: str) -> None:
        """For the receive thread."""
        self._adapter.ring_receiver(stream)

    def writable(self, stream: str) -> None:
        """For the save thread."""
        self._adapter.ring_sender(Told(stream))

    def stopped(self, stream: str, reason: str, generation: int | None = None) -> None:
        """For the save thread. `generation`: of the mark that the stopped chunks were put with, where that is known."""
        self._adapter.ring_sender(Told(stream, reason, generation))


class TransferLoops:
    """Queues, failures, threads and the end of both; what is done with them is the subclasses'.

    `wake` is called on any thread whenever there is something for the scheduler to act upon.
    """

    wake: Callable[[], None]
    rung: deque[str]
    told: deque[Told]

    def __init__(self, config: Any) -> None:
        self.config = config
        self._pending_load_reqs: deque[Any] = deque()
        self._finished_load_reqs: set[str] = set()
        self._pending_save_reqs: deque[Any] = deque()
        self._send_failures: dict[str, str] = {}
        self._send_failure_lock = threading.Lock()
        self._receive_failures: dict[str, str] = {}
        self._receive_failure_lock = threading.Lock()
        self.stop_event = threading.Event()
        self._recv_cond = threading.Condition()
        self._save_cond = threading.Condition()

    # The connector.

    @property
    def connector(self) -> Connector:
        """Whoever sets it is heard by it from then on, where it tells events."""
        return self._connector

    @connector.setter
    def connector(self, connector: Connector) -> None:
        self._connector = connector
        self._streams = connector if isinstance(connector, StreamConnector) else None
        if self._streams is not None:
            self._streams.listen(Doorbell(self))

    def ring_receiver(self, stream: str) -> None:
        """A watched stream has something. On the connector's thread."""
        self.rung.append(stream)
        self._notify_receiver()

    def ring_sender(self, told: Told) -> None:
        """Something about an own stream. On the connector's thread."""
        self.told.append(told)
        self._notify_sender()

    def _notify_receiver(self) -> None:
        with self._recv_cond:
            self._recv_cond.notify()

    def _notify_sender(self) -> None:
        with self._save_cond:
            self._save_cond.notify()

    def _news(self) -> None:
        """There is something for the scheduler. What its wake-up raises must not end a thread of ours."""
        try:
            self.wake()
        except Exception:
            logger.exception("the scheduler was not woken")

    # Failures: the first reason of a request is the one that is told.

    def _record_send_failure(self, request_id: str, reason: str) -> None:
        with self._send_failure_lock:
            self._send_failures.setdefault(request_id, reason)
        self._news()

    def _record_receive_failure(self, request_id: str, reason: str) -> None:
        with self._receive_failure_lock:
            self._receive_failures.setdefault(request_id, reason)
        self._news()

    def collect_failed_send_request_ids(self) -> dict[str, str]:
        """Requests whose chunks could not be sent, with the reason; each once."""
        with self._send_failure_lock:
            failures = dict(self._send_failures)
            self._send_failures.clear()
        return failures

    def collect_failed_receive_request_ids(self) -> dict[str, str]:
        """Requests whose next chunk will not come or is wrong, with the reason; each once."""
        with self._receive_failure_lock:
            failures = dict(self._receive_failures)
            self._receive_failures.clear()
        return failures

    # Threads.

    def start(self) -> None:
        """Start the threads; once. Before this, chunks are queued and not moved."""
        if self._threads or self.stop_event.is_set():
            return
        for name, loop in (("save", self.save_loop), *self._receive_loops()):
            thread = threading.Thread(target=loop, name=f"triptych-chunk-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the threads, then the connector. May be called twice; waits at most 10 s for the threads."""
        self.stop_event.set()
        self._notify_receiver()
        self._notify_sender()
        threads, self._threads = self._threads, []
        deadline = time.monotonic() + JOIN_S
        for thread in threads:
            if thread is threading.current_thread():
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.error("the thread %s is still in its connector after %.0f s", thread.name, JOIN_S)
        self._connector.close()

    _threads: list[threading.Thread]
    _connector: Connector
    _streams: StreamConnector | None

    def _receive_loops(self) -> Iterable[tuple[str, Callable[[], None]]]:
        """Name and function of each thread that receives."""
        raise NotImplementedError

    def save_loop(self) -> None:
        """What the save thread does until `stop_event`."""
        raise NotImplementedError
