"""The parking lot: requests that wait for a chunk, or for a place in the window of active streams.

Only the scheduler's thread moves requests. `ParkingLot` is the one place where that is written down.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

Request = Any


class Lane:
    """Requests in order of their coming, found by request id."""

    __slots__ = ("_requests",)

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._requests: dict[str, Request] = {}
        self.extend(requests)

    def append(self, request: Request) -> None:
        """Put at the end; a request of the same id is replaced where it stands."""
        self._requests[request.request_id] = request

    def extend(self, requests: Iterable[Request]) -> None:
        """Put all at the end."""
        for request in requests:
            self.append(request)

    def pop(self, request_id: str) -> Request | None:
        """Take out by id; None where it is not here."""
        return self._requests.pop(request_id, None)

    def popleft(self) -> Request:
        """Take the first. Raises IndexError where there is none."""
        if not self._requests:
            raise IndexError("the lane is empty")
        return self._requests.pop(next(iter(self._requests)))

    def remove(self, request: Request) -> None:
        """Take out. Raises ValueError where it is not here."""
        if request not in self:
            raise ValueError(f"{request.request_id} is not in the lane")
        del self._requests[request.request_id]

    def clear(self) -> None:
        """Take out all."""
        self._requests.clear()

    def has(self, request_id: str) -> bool:
        """Whether a request of this id is here."""
        return request_id in self._requests

    def __contains__(self, request: object) -> bool:
        return self._requests.get(getattr(request, "request_id", None)) is request  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Iterable) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Lane({list(self._requests)})"


class StallClock(MutableMapping[str, float]):
    """Since when each request has been waiting (seconds, monotonic), the longest first."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def start(self, request_id: str, now: float) -> None:
        """From now on, unless it waits already."""
        if request_id not in self._since:
            self[request_id] = now

    def earliest(self) -> float | None:
        """Since when the longest wait has lasted; None where nobody waits."""
        return next(iter(self._since.values()), None)

    def expire(self, now: float, limit_s: float) -> set[str]:
        """Stop the clocks of those that have waited longer than the limit, and return them."""
        expired: set[str] = set()
        while self._since:
            request_id, since = next(iter(self._since.items()))
            if now - since <= limit_s:
                break
            del self._since[request_id]
            expired.add(request_id)
        return expired

    def __getitem__(self, key: str) -> float:
        return self._since[key]

    def __setitem__(self, key: str, value: float) -> None:
        self._since.pop(key, None)
        latest = next(reversed(self._since.values()), value)
        self._since[key] = value
        if value < latest:
            self._since = dict(sorted(self._since.items(), key=lambda item: item[1]))

    def __delitem__(self, key: str) -> None:
        del self._since[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._since)

    def __len__(self) -> int:
        return len(self._since)


class ParkingLot:
    """Who is parked, on which side, since when, and which streams are active.

    `waiting` and `running`: parked out of the scheduler's queue of that name; `held`: running requests outside the
    window; `stalled`: running ones whose own consumer has no room. `active`: streams in the window, oldest first.
    `origin`: the status that a parked request goes back to. `slot_freed`: a place in the window has become free since
    requests were last promoted.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.waiting = Lane()
        self.running = Lane()
        self.held = Lane()
        self.stalled = Lane()
        self.active: dict[str, Request] = {}
        self.origin: dict[str, Any] = {}
        self.clock = StallClock()
        self.slot_freed = False

    def __len__(self) -> int:
        return sum(len(lane) for lane in self.lanes)

    @property
    def lanes(self) -> tuple[Lane, Lane, Lane, Lane]:
        """All of them."""
        return self.waiting, self.running, self.held, self.stalled

    def has(self, request_id: str) -> bool:
        """Whether a request is parked."""
        return any(lane.has(request_id) for lane in self.lanes)

    def ensure_active(self, request: Request) -> bool:
        """Give the request a place in the window if it has none. False where all are taken."""
        if not self.window or request.request_id in self.active:
            return True
        if len(self.active) >= self.window:
            return False
        self.active[request.request_id] = request
        return True

    def take(self, request_id: str) -> tuple[Request | None, Lane | None]:
        """Take a request out, and say from which lane; (None, None) where it is not parked."""
        for lane in self.lanes:
            request = lane.pop(request_id)
            if request is not None:
                return request, lane
        return None, None

    def forget(self, request_id: str) -> None:
        """The request is over: out of every lane, the window and the clock. Its origin goes, too."""
        for lane in self.lanes:
            lane.pop(request_id)
        if self.active.pop(request_id, None) is not None:
            self.slot_freed = True
        self.clock.pop(request_id, None)
        self.origin.pop(request_id, None)

    def strangers(self, known: Any) -> list[str]:
        """Ids of parked requests that are not in the container `known`."""
        return [r.request_id for lane in self.lanes for r in lane if r.request_id not in known]
