"""What the sender's half keeps of each stream, and what it has to tell. No decisions here: see `outbound`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triptych.transfer.connectors.streams import join_key, sending

if TYPE_CHECKING:
    from triptych.transfer.connectors.peers import Peer, Stored


class Credit(NamedTuple):
    """What may be on its way of one stream: chunks not consumed, bytes not given back."""

    chunks: int = 8
    nbytes: int = 64 << 20


class Watching:
    """A peer's watch of a name: bound to a stream, or waiting for one."""

    __slots__ = ("name", "number", "peer", "stream")

    def __init__(self, peer: Peer, number: int, name: str) -> None:
        self.peer = peer
        self.number = number
        self.name = name
        self.stream: Stream | None = None


class Loan(NamedTuple):
    """Memory that a peer may read until it gives it back."""

    stream: Stream
    stored: Stored


class Held:
    """A chunk that was put and not consumed. `loan`: its number with the watcher's peer, 0 where it was not lent."""

    __slots__ = ("loan", "number", "sent", "stored", "terminal")

    def __init__(self, number: int, stored: Stored, *, terminal: bool) -> None:
        self.number = number
        self.stored = stored
        self.terminal = terminal
        self.sent = False
        self.loan = 0


class Stream:
    """One generation of a stream of ours."""

    __slots__ = (
        "blocked", "chunks", "generation", "life", "name", "nbytes", "numbered", "put", "reason", "stage", "told",
        "void", "watching", "writing",
    )  # fmt: skip

    def __init__(self, name: str, generation: int | None, stage: str, *, numbered: bool = True) -> None:
        self.name = name
        self.generation = generation  # None: failed before its first chunk
        self.stage = stage  # that it goes to
        self.numbered = numbered
        self.life = sending()
        self.chunks: dict[int, Held] = {}
        self.put = 0  # chunks so far
        self.nbytes = 0  # of chunks in memory, lent ones too
        self.watching: Watching | None = None
        self.blocked = False
        self.writing = False
        self.reason = ""
        self.void: int | None = None  # chunks from this number on cannot be delivered
        self.told = False  # the watcher knows that it failed

    def key(self, number: int) -> str:
        """The key that a chunk was put with."""
        return join_key(self.name, number) if self.numbered else self.name


class Stopped(NamedTuple):
    """News: the consumer wants no more of a generation of this stream; None for one of which nothing was put."""

    stream: str
    reason: str
    generation: int | None


class Writable(NamedTuple):
    """News: credit is there again."""

    stream: str


class Ready(NamedTuple):
    """News: there is something to take."""

    stream: str


News = Stopped | Writable | Ready
