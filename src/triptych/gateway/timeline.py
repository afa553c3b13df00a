"""What happened to a request, when: a record per request, and a ring of the last ones for the admin listener.

Marking a moment reads a clock and stores a float; nothing is formatted until somebody asks. Offsets are seconds since
the request's first byte was handled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

_now = time.monotonic


class LegTiming:
    """One leg of a request. `status` is a word of the contract ("success", "timeout", ...), empty while it runs.

    engine may be set anew for a retry, before `start` is called again; `tried` then keeps the earlier ones.
    """

    __slots__ = (
        "_started_on",
        "bytes_in",
        "bytes_out",
        "ended",
        "engine",
        "first",
        "name",
        "queued",
        "role",
        "started",
        "status",
        "tried",
    )

    def __init__(self, name: str, role: str, engine: str = "") -> None:
        self.name = name
        self.role = role
        self.engine = engine
        self.queued = _now()
        self.started: float | None = None
        self.first: float | None = None
        self.ended: float | None = None
        self.status = ""
        self.bytes_out = 0  # of the body to the engine
        self.bytes_in = 0  # of its answer's body
        self.tried: tuple[str, ...] = ()
        self._started_on = ""

    def start(self) -> None:
        """The call begins, or begins again on another engine."""
        if self.started is not None:
            self.tried += (self._started_on,)
        self.started = _now()
        self._started_on = self.engine

    def first_byte(self) -> None:
        """The engine's response head is there."""
        self.first = _now()

    def received(self, nbytes: int) -> None:
        """Bytes of the answer's body came."""
        self.bytes_in += nbytes

    def end(self, status: str) -> None:
        """The leg is over; the first word on how it ended stays."""
        if self.ended is None:
            self.ended = _now()
            self.status = status

    @property
    def seconds(self) -> float:
        """From the call's first attempt's queueing to its end, or to now."""
        return (self.ended or _now()) - self.queued

    def to_dict(self, origin: float) -> dict[str, Any]:
        out: dict[str, Any] = {"name": self.name, "role": self.role, "engine": self.engine, "status": self.status}
        if self.tried:
            out["tried"] = list(self.tried)
        out |= {k: _offset(getattr(self, k), origin) for k in ("queued", "started", "first", "ended")}
        out |= {"bytes_out": self.bytes_out, "bytes_in": self.bytes_in}
        return out


class Timeline:
    """One request."""

    __slots__ = (
        "_reasons",
        "admitted",
        "api",
        "began",
        "bytes_in",
        "bytes_out",
        "ended",
        "error",
        "first",
        "id",
        "legs",
        "model",
        "plan",
        "status",
        "wall",
    )

    def __init__(self, request_id: str, api: str = "") -> None:
        self.id = request_id
        self.api = api
        self.plan = ""
        self.model = ""
        self.wall = time.time()
        self.began = _now()
        self.admitted: float | None = None
        self.first: float | None = None
        self.ended: float | None = None
        self.status: int | None = None
        self.error = ""
        self.bytes_in = 0
        self.bytes_out = 0
        self.legs: list[LegTiming] = []
        self._reasons: tuple[str, ...] = ()

    def leg(self, name: str, role: str, engine: str = "") -> LegTiming:
        """A new leg, queued now."""
        leg = LegTiming(name, role, engine)
        self.legs.append(leg)
        return leg

    def reason(self, word: str) -> None:
        """Why the plan is less than it could have been, or why the request was refused."""
        self._reasons += (word,)

    @property
    def reasons(self) -> tuple[str, ...]:
        return self._reasons

    def admit(self) -> None:
        self.admitted = _now()

    def first_token(self) -> float | None:
        """The first piece of the answer goes to the client. Seconds since the beginning; None if not the first."""
        if self.first is not None:
            return None
        self.first = _now()
        return self.first - self.began

    def end(self, status: int) -> float:
        """The request is over; its whole duration in seconds."""
        if self.ended is None:
            self.ended = _now()
            self.status = status
        return self.ended - self.began

    @property
    def seconds(self) -> float:
        return (self.ended or _now()) - self.began

    def server_timing(self) -> bytes:
        """The value of a `Server-Timing` header: milliseconds of admission and of each kind of leg until now.

        Legs of one role are told as one span, from the first's beginning to the last's end, so that the header is short
        whatever the request. Engines' addresses stay inside.
        """
        now = _now()
        if len(self.legs) == 1 and self.admitted is not None:
            # The usual case, in one go.
            leg, began = self.legs[0], self.began
            return b"admission;dur=%.1f, %b;dur=%.1f, total;dur=%.1f" % (
                (self.admitted - began) * 1e3,
                leg.role.encode("ascii"),
                ((leg.ended or now) - leg.queued) * 1e3,
                (now - began) * 1e3,
            )
        parts = []
        if self.admitted is not None:
            parts.append(f"admission;dur={(self.admitted - self.began) * 1e3:.1f}")
        spans: dict[str, tuple[float, float, int]] = {}
        for leg in self.legs:
            start, end, count = spans.get(leg.role, (leg.queued, 0.0, 0))
            spans[leg.role] = min(start, leg.queued), max(end, leg.ended or now), count + 1
        for role, (start, end, count) in spans.items():
            legs = f';desc="{count} legs"' if count > 1 else ""
            parts.append(f"{role};dur={(end - start) * 1e3:.1f}{legs}")
        parts.append(f"total;dur={(now - self.began) * 1e3:.1f}")
        return ", ".join(parts).encode("ascii")

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-able; offsets in seconds."""
        return {
            **self.summary(),
            "admitted": _offset(self.admitted, self.began),
            "first": _offset(self.first, self.began),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "legs": [leg.to_dict(self.began) for leg in self.legs],
        }

    def summary(self) -> dict[str, Any]:
        """The line of a list."""
        return {
            "id": self.id,
            "at": self.wall,
            "api": self.api,
            "model": self.model,
            "plan": self.plan,
            "status": self.status,
            "seconds": round(self.seconds, 6),
            "running": self.ended is None,
            "reasons": list(self._reasons),
            "error": self.error,
        }

    def __repr__(self) -> str:
        state = "running" if self.ended is None else str(self.status)
        return f"<Timeline {self.id}: {self.plan or 'no plan'}, {len(self.legs)} legs, {state}>"


class Ring:
    """The last requests, running ones too, newest last."""

    def __init__(self, size: int) -> None:
        """size: how many are kept; 0 for none."""
        self._kept: deque[Timeline] = deque(maxlen=size)

    def add(self, timeline: Timeline) -> None:
        self._kept.append(timeline)

    def get(self, request_id: str) -> Timeline | None:
        """The newest request of that id (clients may use one again)."""
        return next((t for t in reversed(self._kept) if t.id == request_id), None)

    def __iter__(self) -> Iterator[Timeline]:
        return iter(tuple(self._kept))

    def __len__(self) -> int:
        return len(self._kept)


def _offset(moment: float | None, origin: float) -> float | None:
    return None if moment is None else round(moment - origin, 6)
