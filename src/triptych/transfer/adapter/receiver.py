"""Streams that this stage receives: one record per request, from its first load to its cleanup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, slots=True)
class LoadEntry:
    """The registration of a request that wants its next chunk; it counts only while it is its record's `entry`.

    `metadata`: where the sender is, for `Connector.get`; `took`: its last poll took a chunk that made nothing ready;
    `delay_s`: how long the last pause between two polls was.
    """

    request: Any
    request_id: str
    external_id: str
    metadata: dict[str, Any] | None
    took: bool = False
    delay_s: float = 0.0


@dataclass(eq=False, slots=True)
class ReceiverStream:
    """What is known of the stream that feeds one request.

    `chunks`: taken so far, so the number of the next; `condition_len`, `condition_seq`: of the last condition where
    the stage keeps a window; `exhausted`: its last chunk was taken; `segment_finished`: its segment's last;
    `ready`: a chunk was published that the scheduler has not scheduled yet; `replaced`: its prompt began anew and was
    not scheduled yet; `failed`: nothing more will be asked for; `reason`: why the request has to end, for its sender;
    `watched`: its stream's name, where it is watched.
    """

    request_id: str
    external_id: str | None = None
    entry: Any = None
    chunks: int = 0
    condition_len: int | None = None
    condition_seq: int | None = None
    exhausted: bool = False
    segment_finished: bool = False
    ready: bool = False
    replaced: bool = False
    failed: bool = False
    reason: str | None = None
    watched: str | None = None


class ReceiverStreams:
    """All streams that feed this stage, by request id, and by stream name where the connector tells events."""

    def __init__(self) -> None:
        self.by_id: dict[str, ReceiverStream] = {}
        self.by_stream: dict[str, ReceiverStream] = {}

    def open(self, request_id: str) -> ReceiverStream:
        """The record of a request, a new one if there is none."""
        record = self.by_id.get(request_id)
        if record is None:
            record = self.by_id[request_id] = ReceiverStream(request_id)
        return record

    def register(self, request: Any) -> LoadEntry | None:
        """A new entry for a request; None where one is outstanding, or where its stream has failed."""
        record = self.open(request.request_id)
        if record.entry is not None or record.failed:
            return None
        record.external_id = request.external_req_id
        record.entry = LoadEntry(request, request.request_id, request.external_req_id, source_of(request))
        entry: LoadEntry = record.entry
        return entry

    def registered(self, entry: LoadEntry) -> ReceiverStream | None:
        """The record that an entry belongs to; None where the entry does not count any more."""
        record = self.by_id.get(entry.request_id)
        return record if record is not None and record.entry is entry else None

    def claim(self, record: ReceiverStream, stream: str) -> str | None:
        """Let the record have a stream. Returns the id of the request that has it already, if another does."""
        owner = self.by_stream.setdefault(stream, record)
        if owner is not record:
            return owner.request_id
        record.watched = stream
        return None

    def close(self, request_id: str) -> ReceiverStream | None:
        """Forget a request; returns its record, if there was one."""
        record = self.by_id.pop(request_id, None)
        if record is not None and record.watched is not None:
            self.by_stream.pop(record.watched, None)
        return record


def source_of(request: Any) -> dict[str, Any] | None:
    """The replica that sends to this request, as `Connector.get` wants it; None where the request names none.

    Raises ValueError where what it names is not a host and a port.
    """
    info = getattr(request, "payload_sender_info", None)
    if not isinstance(info, dict):
        return None
    host, port = info.get("host"), info.get("zmq_port")
    if not isinstance(host, str) or not host or isinstance(port, bool) or not isinstance(port, int):
        raise ValueError(f"payload_sender_info must have a host and a zmq_port, not {info!r}")
    return {"source_host": host, "source_port": port}
