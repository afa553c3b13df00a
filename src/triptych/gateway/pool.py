"""Engines and their pools: state and choices, no I/O.

Everything that changes an engine's state is a method of `Engine`. Where it matters to others (an engine taken out or
back, other names) the method tells the pool and its `watcher`, so that logs and indexes follow from one place.

Health. An engine is *unknown* until the first word of it, then *alive* or *ejected*; an operator may *hold* it out
of service besides, which nothing but `restore` ends. Unknown counts as healthy: a gateway that refused everything
until its first round of probes would turn each of its restarts into an outage, and a request that meets a dead engine
is retried on another one anyway. In return an unknown engine is ejected by its first failure, since nothing speaks
for it; one that has been alive, by `health.failures` failures in a row.

Failures in a row are counted for probes and for requests' connections together, but a connection that works clears only
its own kind: an engine whose `/health` says 503 while its port still accepts (vLLM with a dead core does) has to
leave the pool however busy it is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from triptych.gateway.settings import EngineSettings, Health
from triptych.http.client import Origin

State = Literal["unknown", "alive", "ejected", "held"]
_NO_LIMIT = 1 << 62
_SCAN = 4  # pools up to this size are looked at whole: it costs no more than two random draws


@dataclass(frozen=True, slots=True)
class Change:
    """Something about an engine that others may want to know; `why` is for people."""

    engine: Engine
    what: Literal["ejected", "recovered", "held", "restored", "names"]
    why: str = ""


class Lease:
    """One request's place on an engine. `release` may be called again; also a context manager."""

    __slots__ = ("_held", "engine")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self.engine._returned()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease on {self.engine.url}{'' if self._held else ', released'}>"


class Engine:
    """One engine of a pool. Read its attributes; change it through its methods only."""

    __slots__ = (
        "_back_after",
        "_bad_connections",
        "_bad_probes",
        "_eject_after",
        "_good_probes",
        "_pool",
        "cards",
        "healthy",
        "in_flight",
        "limit",
        "names",
        "origin",
        "role",
        "settings",
        "state",
        "url",
        "weight",
        "why",
    )

    def __init__(self, settings: EngineSettings, role: str, health: Health, limit: int | None = None) -> None:
        """limit: requests at once beside the engine's own setting, the smaller one counts."""
        self.settings = settings
        self.role = role
        self.url = settings.url
        self.origin = Origin.parse(settings.url)
        self.weight = settings.weight
        self.limit = min(x for x in (settings.max_in_flight, limit, _NO_LIMIT) if x is not None)
        self.in_flight = 0
        self.healthy = True
        self.state: State = "unknown"
        self.why = ""
        self.names: frozenset[str] | None = None
        self.cards: tuple[Mapping[str, Any], ...] = ()
        self._eject_after = health.failures
        self._back_after = health.successes
        self._bad_probes = self._bad_connections = self._good_probes = 0
        self._pool: Pool | None = None

    @property
    def limited(self) -> bool:
        """Whether there is a limit at all."""
        return self.limit < _NO_LIMIT

    # -- places

    def lease(self) -> Lease:
        """Take a place, whatever the limit: the limit is for the choice."""
        self.in_flight += 1
        return Lease(self)

    def _returned(self) -> None:
        self.in_flight -= 1
        if self._pool is not None and self._pool._waiting:
            self._pool._assign()

    # -- health

    def connected(self) -> None:
        """A request's connection to the engine works."""
        self._bad_connections = 0

    def failed(self, why: str) -> None:
        """A request could not reach the engine or lost it: counts like a failed probe."""
        self._bad_connections += 1
        self._count(why)

    def probed(self, why_not: str | None) -> None:
        """The outcome of one probe; None if the engine is alive, else what was wrong."""
        if why_not is not None:
            self._bad_probes += 1
            self._count(why_not)
            return
        self._bad_probes = self._bad_connections = 0
        self._good_probes += 1
        if self.state == "unknown":
            self.state = "alive"
        elif self.state == "ejected" and self._good_probes >= self._back_after:
            self._become("alive", "recovered", "")

    def hold(self) -> None:
        """Out of service by an operator's word, until `restore`. What runs on it goes on."""
        if self.state != "held":
            self._become("held", "held", "by hand")

    def restore(self) -> None:
        """End a hold or an ejection; the next probes judge it as one never seen before."""
        if not self.healthy:
            self._bad_probes = self._bad_connections = self._good_probes = 0
            self._become("unknown", "restored", "")

    def reported(self, cards: Sequence[Mapping[str, Any]]) -> None:
        """What the engine's `/v1/models` lists: objects with an `id` each (its name, aliases, adapters)."""
        self.cards = tuple(cards)
        names = frozenset(card["id"] for card in cards)
        if names != self.names:
            self.names = names
            self._tell(Change(self, "names"))

    def _count(self, why: str) -> None:
        self._good_probes = 0
        failures = self._bad_probes + self._bad_connections
        if self.state == "unknown" or (self.state == "alive" and failures >= self._eject_after):
            self._become("ejected", "ejected", why)

    def _become(self, state: State, what: Literal["ejected", "recovered", "held", "restored"], why: str) -> None:
        self.state = state
        self.healthy = state in ("unknown", "alive")
        self.why = why
        self._tell(Change(self, what, why))

    def _tell(self, change: Change) -> None:
        if self._pool is not None:
            self._pool._changed(change)

    def __repr__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        limit = f" of {self.limit}" if self.limited else ""
        return f"<Engine {self.role} {self.url}: {self.state}{why}, {self.in_flight}{limit} in flight>"


class _Waiter(NamedTuple):
    future: asyncio.Future[Lease | None]
    avoid: Collection[Engine]


class Pool:
    """The engines of one role for one model."""

    def __init__(self, role: str, engines: Sequence[Engine], rng: random.Random | None = None) -> None:
        self.role = role
        self.engines = tuple(engines)
        self.watcher: Callable[[Change], None] | None = None
        self._random = (rng or random.Random()).random
        self._healthy: list[Engine] = [e for e in self.engines if e.healthy]
        self._waiting: dict[int, _Waiter] = {}  # in order of arrival
        self._arrivals = 0
        for engine in self.engines:
            engine._pool = self

    def __bool__(self) -> bool:
        return bool(self.engines)

    def __len__(self) -> int:
        return len(self.engines)

    @property
    def healthy(self) -> bool:
        """Whether any engine is in service."""
        return bool(self._healthy)

    @property
    def full(self) -> bool:
        """Whether engines are in service, but all at their limit."""
        return bool(self._healthy) and all(e.in_flight >= e.limit for e in self._healthy)

    @property
    def waiting(self) -> int:
        """How many wait in `take`."""
        return len(self._waiting)

    def choose(self, avoid: Collection[Engine] = ()) -> Engine | None:
        """The engine for the next request, or None: one in service, below its limit, not among `avoid`.

        By (in flight + 1) / weight, equals by chance: of all in a small pool, of two drawn at random in a large
        one (the power of two choices; of all where a drawn one cannot be had). The caller takes the place with
        `Engine.lease` before it awaits anything.
        """
        engines = self._healthy
        count = len(engines)
        if count > _SCAN:
            rnd = self._random
            a = int(rnd() * count)
            b = int(rnd() * (count - 1))
            first, second = engines[a], engines[b if b < a else b + 1]
            if (
                first.in_flight < first.limit
                and second.in_flight < second.limit
                and not (avoid and (first in avoid or second in avoid))
            ):
                less = (first.in_flight + 1) * second.weight - (second.in_flight + 1) * first.weight
                return first if less <= 0 else second
        best: Engine | None = None
        least = 0.0
        ties = 1
        for engine in engines:
            if engine.in_flight >= engine.limit or (avoid and engine in avoid):
                continue
            load = (engine.in_flight + 1) / engine.weight
            if best is None or load < least:
                best, least, ties = engine, load, 1
            elif load == least:
                ties += 1
                if self._random() * ties < 1.0:
                    best = engine
        return best

    async def take(self, avoid: Collection[Engine] = ()) -> Lease | None:
        """Like `choose` and `lease`, but where only the limits are in the way it waits its turn.

        None where no engine in service is left beside `avoid`. The time to wait is the caller's
        (`asyncio.timeout`); a cancelled wait leaves nothing behind.
        """
        # A place that is free while others wait is one that none of them can use (`_assign`), so nobody is overtaken.
        if (engine := self.choose(avoid)) is not None:
            return engine.lease()
        if not self._reachable(avoid):
            return None
        future: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        self._arrivals = arrival = self._arrivals + 1
        self._waiting[arrival] = _Waiter(future, avoid)
        self._assign()
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(arrival, None)
            if future.done() and not future.cancelled() and (lease := future.result()) is not None:
                lease.release()
            raise

    def _assign(self) -> None:
        """Give free places to those who wait, first come first served; tell those for whom none can come."""
        for arrival, waiter in list(self._waiting.items()):
            if waiter.future.done():
                del self._waiting[arrival]
            elif (engine := self.choose(waiter.avoid)) is not None:
                del self._waiting[arrival]
                waiter.future.set_result(engine.lease())
            elif not self._reachable(waiter.avoid):
                del self._waiting[arrival]
                waiter.future.set_result(None)
            elif self.full:
                return

    def _reachable(self, avoid: Collection[Engine]) -> bool:
        return any(e not in avoid for e in self._healthy) if avoid else bool(self._healthy)

    def _changed(self, change: Change) -> None:
        self._healthy = [e for e in self.engines if e.healthy]
        if self.watcher is not None:
            self.watcher(change)
        if self._waiting:
            self._assign()

    def __repr__(self) -> str:
        waiting = f", {self.waiting} waiting" if self._waiting else ""
        running = sum(e.in_flight for e in self.engines)
        serving = f"{len(self._healthy)} of {len(self.engines)} in service"
        return f"<Pool {self.role}: {serving}, {running} in flight{waiting}>"
