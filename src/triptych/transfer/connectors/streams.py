"""The life of a stream at both of its ends: two tables, and the only function that follows them.

Sans-IO. `Life.on(event)` changes the state and returns what is to be done; whoever asked does it. An event that a table
does not have in a state is a fault, and the error says whose: `ConnectorError` is our caller's, `WireError` the peer's.

A sender's stream:

    OPEN      chunks are put
    ENDED     its last chunk was put; some are not consumed yet
    FAILED    it was failed or withdrawn; what was put before may still be consumed
    STOPPED   its consumer has stopped it, or died; kept until the sender acknowledges that
    DROPPED   its consumer has gone away without a word: what is put is thrown away
    OVER      nothing is left of it

A receiver's stream:

    WATCHING  nothing has come yet
    FLOWING   bound to one sender and one generation
    ENDING    all of its chunks are here, some not taken yet
    BREAKING  it failed; chunks from before that are not taken yet
    BROKEN    the next `get` says why
    COMPLETE  all of it was taken
    GONE      unwatched
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Final, Generic, NamedTuple, TypeVar

from triptych.transfer.errors import ConnectorError, TransferError, WireError


class Sending(StrEnum):
    """States of a stream at its sender."""

    OPEN = "open"
    ENDED = "ended"
    FAILED = "failed"
    STOPPED = "stopped"
    DROPPED = "dropped"
    OVER = "over"


class SendEvent(StrEnum):
    """What happens to a stream at its sender."""

    PUT = "a chunk is put"
    LAST = "the last chunk is put"
    FAIL = "the sender fails it"
    WITHDRAW = "the sender withdraws chunks"
    RENEW = "its name is begun anew"
    STOP = "the consumer stops it, or died"
    DROP = "the consumer goes away"
    DRAINED = "nothing is left to consume"
    EXPIRE = "nobody wants it any more"


class SendAct(StrEnum):
    """What follows at its sender."""

    NOTHING = "—"
    ACCEPT = "keep the chunk, send it to its watcher"
    REFUSE = "raise BrokenStream"
    SWALLOW = "throw the chunk away"
    TELL = "tell the watcher that it is broken"
    FREE = "free its chunks"
    REPORT = "free its chunks, tell the adapter"
    FORGET = "forget it"


class Receiving(StrEnum):
    """States of a stream at its receiver."""

    WATCHING = "watching"
    FLOWING = "flowing"
    ENDING = "ending"
    BREAKING = "breaking"
    BROKEN = "broken"
    COMPLETE = "complete"
    GONE = "gone"


class ReceiveEvent(StrEnum):
    """What happens to a stream at its receiver."""

    CHUNK = "a chunk comes"
    LAST = "the last chunk comes"
    FAIL = "the sender says that it is broken"
    LOST = "the sender is gone"
    TAKEN = "all that came was taken"
    UNWATCH = "it is unwatched"


class ReceiveAct(StrEnum):
    """What follows at its receiver."""

    NOTHING = "—"
    KEEP = "keep the chunk, tell the adapter"
    CUT = "drop the chunks that are void, tell the adapter"
    BREAK = "drop its chunks, tell the adapter"
    FINISH = "remember only that it is complete"
    LEAVE = "drop its chunks, tell its senders"


_S, _E, _A = Sending, SendEvent, SendAct
_R, _V, _D = Receiving, ReceiveEvent, ReceiveAct

# States and events are text, whose hash is kept with it: that of an Enum is computed anew for every chunk.
SENDING: Final[Mapping[tuple[Sending, SendEvent], tuple[Sending, SendAct]]] = {
    (_S.OPEN, _E.PUT): (_S.OPEN, _A.ACCEPT),
    (_S.OPEN, _E.LAST): (_S.ENDED, _A.ACCEPT),
    (_S.OPEN, _E.FAIL): (_S.FAILED, _A.TELL),
    (_S.OPEN, _E.WITHDRAW): (_S.FAILED, _A.TELL),
    (_S.OPEN, _E.RENEW): (_S.FAILED, _A.TELL),
    (_S.OPEN, _E.STOP): (_S.STOPPED, _A.REPORT),
    (_S.OPEN, _E.DROP): (_S.DROPPED, _A.FREE),
    (_S.OPEN, _E.DRAINED): (_S.OPEN, _A.NOTHING),
    (_S.OPEN, _E.EXPIRE): (_S.OVER, _A.FREE),
    (_S.ENDED, _E.FAIL): (_S.ENDED, _A.NOTHING),
    (_S.ENDED, _E.WITHDRAW): (_S.FAILED, _A.TELL),
    (_S.ENDED, _E.RENEW): (_S.ENDED, _A.NOTHING),
    (_S.ENDED, _E.STOP): (_S.OVER, _A.FREE),
    (_S.ENDED, _E.DROP): (_S.OVER, _A.FREE),
    (_S.ENDED, _E.DRAINED): (_S.OVER, _A.FORGET),
    (_S.ENDED, _E.EXPIRE): (_S.OVER, _A.FREE),
    (_S.FAILED, _E.PUT): (_S.FAILED, _A.REFUSE),
    (_S.FAILED, _E.LAST): (_S.FAILED, _A.REFUSE),
    (_S.FAILED, _E.FAIL): (_S.FAILED, _A.NOTHING),
    (_S.FAILED, _E.WITHDRAW): (_S.FAILED, _A.TELL),
    (_S.FAILED, _E.RENEW): (_S.FAILED, _A.TELL),
    (_S.FAILED, _E.STOP): (_S.OVER, _A.FREE),
    (_S.FAILED, _E.DROP): (_S.OVER, _A.FREE),
    (_S.FAILED, _E.DRAINED): (_S.OVER, _A.FORGET),
    (_S.FAILED, _E.EXPIRE): (_S.OVER, _A.FREE),
    (_S.STOPPED, _E.PUT): (_S.STOPPED, _A.REFUSE),
    (_S.STOPPED, _E.LAST): (_S.OVER, _A.REFUSE),
    (_S.STOPPED, _E.FAIL): (_S.OVER, _A.FORGET),
    (_S.STOPPED, _E.WITHDRAW): (_S.OVER, _A.FORGET),
    (_S.STOPPED, _E.EXPIRE): (_S.OVER, _A.FREE),
    (_S.DROPPED, _E.PUT): (_S.DROPPED, _A.SWALLOW),
    (_S.DROPPED, _E.LAST): (_S.OVER, _A.SWALLOW),
    (_S.DROPPED, _E.FAIL): (_S.OVER, _A.FORGET),
    (_S.DROPPED, _E.WITHDRAW): (_S.OVER, _A.FORGET),
    (_S.DROPPED, _E.EXPIRE): (_S.OVER, _A.FREE),
}

RECEIVING: Final[Mapping[tuple[Receiving, ReceiveEvent], tuple[Receiving, ReceiveAct]]] = {
    (_R.WATCHING, _V.CHUNK): (_R.FLOWING, _D.KEEP),
    (_R.WATCHING, _V.LAST): (_R.ENDING, _D.KEEP),
    (_R.WATCHING, _V.FAIL): (_R.BROKEN, _D.BREAK),
    (_R.WATCHING, _V.LOST): (_R.BROKEN, _D.BREAK),
    (_R.WATCHING, _V.UNWATCH): (_R.GONE, _D.LEAVE),
    (_R.FLOWING, _V.CHUNK): (_R.FLOWING, _D.KEEP),
    (_R.FLOWING, _V.LAST): (_R.ENDING, _D.KEEP),
    (_R.FLOWING, _V.FAIL): (_R.BREAKING, _D.CUT),
    (_R.FLOWING, _V.LOST): (_R.BROKEN, _D.BREAK),
    (_R.FLOWING, _V.TAKEN): (_R.FLOWING, _D.NOTHING),
    (_R.FLOWING, _V.UNWATCH): (_R.GONE, _D.LEAVE),
    (_R.ENDING, _V.FAIL): (_R.BREAKING, _D.CUT),
    (_R.ENDING, _V.LOST): (_R.ENDING, _D.NOTHING),
    (_R.ENDING, _V.TAKEN): (_R.COMPLETE, _D.FINISH),
    (_R.ENDING, _V.UNWATCH): (_R.GONE, _D.LEAVE),
    (_R.BREAKING, _V.FAIL): (_R.BREAKING, _D.CUT),
    (_R.BREAKING, _V.LOST): (_R.BROKEN, _D.BREAK),
    (_R.BREAKING, _V.TAKEN): (_R.BROKEN, _D.NOTHING),
    (_R.BREAKING, _V.UNWATCH): (_R.GONE, _D.LEAVE),
    (_R.BROKEN, _V.LOST): (_R.BROKEN, _D.NOTHING),
    (_R.BROKEN, _V.UNWATCH): (_R.GONE, _D.LEAVE),
}

# Events that the other end brings about: not to be in a table is its fault, not our caller's.
_OF_THE_PEER: Final = frozenset((_E.STOP, _E.DROP, _V.CHUNK, _V.LAST, _V.FAIL))

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
Act = TypeVar("Act", bound=Enum)


class Life(Generic[State, Event, Act]):
    """One stream's state. Nothing but `on` changes it."""

    __slots__ = ("_table", "state")

    def __init__(self, table: Mapping[tuple[State, Event], tuple[State, Act]], start: State) -> None:
        self._table = table
        self.state = start

    def on(self, event: Event) -> Act:
        """Follow the table: what is to be done now.

        Raises:
            ConnectorError: our caller may not do this now.
            WireError: the peer may not.
        """
        try:
            self.state, act = self._table[self.state, event]
        except KeyError:
            kind: type[TransferError] = WireError if event in _OF_THE_PEER else ConnectorError
            raise kind(f"{event.value}, and it is {self.state.value}") from None
        return act


def sending() -> Life[Sending, SendEvent, SendAct]:
    """The life of a stream that is sent."""
    return Life(SENDING, Sending.OPEN)


def receiving() -> Life[Receiving, ReceiveEvent, ReceiveAct]:
    """The life of a stream that is received."""
    return Life(RECEIVING, Receiving.WATCHING)


class Row(NamedTuple):
    """One line of a table, in words, for the docs."""

    state: str
    event: str
    then: str
    act: str


def rows(table: Mapping[tuple[State, Event], tuple[State, Act]]) -> list[Row]:
    """A table in words, in its own order."""
    return [Row(s.value, e.value, then.value, act.value) for (s, e), (then, act) in table.items()]


def split_key(key: str) -> tuple[str, int, bool]:
    """A chunk's key as (stream, number, whether the key had a number). Keys without one are streams of one chunk."""
    stream, mark, number = key.rpartition("_")
    # Only digits that are written as `join_key` writes them, so that no two keys are one chunk.
    if mark and number.isascii() and number.isdigit() and len(number) < 19 and (number == "0" or number[0] != "0"):
        return stream, int(number), True
    return key, 0, False


def join_key(stream: str, number: int) -> str:
    """The key of a stream's chunk."""
    return f"{stream}_{number}"
