"""What the adapter needs of a connector.

A connector is one object in each stage process. It carries chunks from this stage to the next (`put`) and from the
stage before to this one (`get`). A chunk's key is `{stream}_{n}`: the stream is `{external id}_{stage that sends}`,
any text at all, and `n` counts from 0. A key without such a number is a stream of its own with one chunk, 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class ConnectorSpec:
    """Names and configures one connector: `name` is looked up in the registry, `extra` goes to its constructor."""

    name: str
    extra: dict[str, Any] = field(default_factory=dict)


class Mark(NamedTuple):
    """What travels beside a chunk so that its receiver can tell a complete stream from a cut one.

    `generation`: a number of the sender's own, another one whenever the same stream name is begun anew; at most 2**63.
    `terminal`: this is the last chunk; the stream has `n + 1` of them, `n` being the number in the chunk's key.
    """

    generation: int = 0
    terminal: bool = False


NO_MARK = Mark()


class Events(Protocol):
    """What a connector tells its adapter. Called on the connector's own thread: quick, never blocking."""

    def ready(self, stream: str) -> None:
        """`get` has something for this watched stream: a chunk, its end, or its failure."""

    def writable(self, stream: str) -> None:
        """A stream whose `put` raised `WouldBlock` has credit again, or has ended (and the next `put` says how)."""

    def stopped(self, stream: str, reason: str, generation: int | None = None) -> None:
        """The consumer does not want the rest of this stream. `generation`: of the mark that its chunks were put with;
        the name may have been begun anew since. None where nothing says."""


class Statistics(NamedTuple):
    """A connector's state, for metrics and for tests that nothing is left."""

    sending: int  # streams of this process with a chunk not yet consumed, or not ended
    watching: int  # streams of others that this process watches
    bytes_held: int  # memory that chunks of this process occupy
    peers: int  # connections


class Connector(ABC):
    """Carries objects by key. What the adapter asks of any connector, also one that has to be polled."""

    stage_id: int
    config: Mapping[str, Any]

    @abstractmethod
    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: object
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Publish an object. Returns whether it was, its size in bytes, and what a remote reader would need to know."""

    @abstractmethod
    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: Mapping[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """Take an object: itself and its size in bytes, once; None where it is not there yet.

        `metadata` is None or `{"source_host": str, "source_port": int}`: the replica that sends.

        Raises:
            WireError: it is there and does not decode. It is consumed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; peers are told. May be called twice."""


class StreamConnector(Connector):
    """A connector that tells when something happens instead of being asked, and that pushes back stream by stream.

    All methods are safe on any thread and none blocks on a peer.
    """

    @property
    @abstractmethod
    def _pending_keys(self) -> Collection[str]:
        """Keys of own chunks that no receiver has consumed and that were not withdrawn."""

    @abstractmethod
    def listen(self, events: Events) -> None:
        """Where to report. Before this call events are dropped."""

    @abstractmethod
    def put(
        self, from_stage: str, to_stage: str, put_key: str, data: object, mark: Mark = NO_MARK
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Publish a chunk of a stream. It stays until its receiver has consumed it or `discard` withdraws it.

        Raises:
            WouldBlock: the stream's credit is used up.
            BrokenStream: the consumer has stopped the stream; the text says why.
            ClosedError: the connector is closed.
            WireError: the object has no wire form.
        """

    @abstractmethod
    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: Mapping[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """Take a chunk: itself and its size in bytes, once; None where it is not there yet.

        Without a `watch` before it, it asks the peers itself and waits for their answer a moment, at most 1 s.

        Raises:
            EndOfStream: the terminal chunk had a lower number.
            BrokenStream: the sender failed, was aborted, died, or began the stream anew; also a gap in the numbers.
            WireError: the chunk does not decode. It is consumed.
        """

    @abstractmethod
    def watch(self, from_stage: str, to_stage: str, stream: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Ask for a stream's chunks as they are made; `Events.ready` tells of each. Idempotent."""

    @abstractmethod
    def unwatch(self, stream: str, reason: str | None = None) -> None:
        """No more of this stream: chunks not taken are dropped. With a reason, a sender that has not finished is told
        (`Events.stopped`). A later `watch` of the same name gets only a later generation, where the sender had not
        finished."""

    @abstractmethod
    def fail(self, from_stage: str, to_stage: str, stream: str, reason: str) -> None:
        """End an own stream as broken: the receiver gets what was put before, then `BrokenStream(reason)`."""

    @abstractmethod
    def discard(self, keys: Iterable[str]) -> int:
        """Withdraw own chunks that were not consumed, by their exact keys. Returns how many were withdrawn."""

    @abstractmethod
    def reap(self) -> None:
        """Bring `_pending_keys` up to date with what receivers have consumed, as far as they have told by now."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """Counts of what is held now."""
