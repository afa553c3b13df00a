"""What an engine saw: the counters that tests and benchmarks assert on."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from triptych.sim.content import digest


@dataclass(frozen=True, slots=True)
class Cancel:
    """A client that left before its answer ended. `moment`: "upload", "working" (no head sent yet) or
    "streaming" (`events` were sent)."""

    path: str
    request_id: str
    moment: str
    events: int = 0


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request as it arrived, kept where `keep_bodies` says so."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        """The first value of a header, by lower-case name."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass(slots=True)
class Seen:
    """Counters of one engine. `requests` and `answers` leave /sim/* out."""

    keep_bodies: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """by path"""
    answers: Counter[int] = field(default_factory=Counter)
    """by status; only answers that were sent to their end"""
    encodes: Counter[str] = field(default_factory=Counter)
    """runs of this engine's own encoder, by content digest"""
    taken: Counter[str] = field(default_factory=Counter)
    """encoder outputs that came from another engine, by content digest"""
    ec: Counter[str] = field(default_factory=Counter)
    """issued, taken, missed, served, pushed, unaddressed, refused, received, timeout, escapes, fallback"""
    kv: Counter[str] = field(default_factory=Counter)
    """issued, used, read, expired, stale, refused, stored, hit, released"""
    cancels: list[Cancel] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    """faults that were applied, by kind"""
    in_flight: int = 0
    max_in_flight: int = 0
    items: int = 0
    """media items in requests, however they came"""
    media_bytes: int = 0
    """bytes of raw media in requests (payload as sent, base64 and all)"""
    prompt_tokens: int = 0
    local_tokens: int = 0
    """prompt tokens computed here"""
    kv_tokens: int = 0
    """prompt tokens that came as KV"""
    output_tokens: int = 0
    body_digests: list[str] = field(default_factory=list)
    """of the bodies kept"""
    bodies: deque[SeenRequest] = field(default_factory=deque)
    deaths: list[str] = field(default_factory=list)
    """why the engine died"""
    _watchers: list[tuple[Callable[[], bool], asyncio.Future[None]]] = field(default_factory=list)

    def keep(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Remember a request, the last `keep_bodies` of them."""
        if self.keep_bodies <= 0:
            return
        names = tuple((k.decode("latin-1"), v.decode("latin-1")) for k, v in headers)
        self.bodies.append(SeenRequest(method, path, names, body))
        self.body_digests.append(digest(body))
        while len(self.bodies) > self.keep_bodies:
            self.bodies.popleft()
            del self.body_digests[0]

    def enter(self) -> None:
        self.in_flight += 1
        if self.in_flight > self.max_in_flight:  # noqa: PLR1730 (twice as fast)
            self.max_in_flight = self.in_flight
        if self._watchers:
            self.touch()

    def leave(self) -> None:
        self.in_flight -= 1
        if self._watchers:
            self.touch()

    def reset(self) -> None:
        """All counters to zero; requests in flight stay counted."""
        fresh = Seen(keep_bodies=self.keep_bodies, in_flight=self.in_flight, max_in_flight=self.in_flight)
        for name in self.__dataclass_fields__:
            if name != "_watchers":
                setattr(self, name, getattr(fresh, name))

    def touch(self) -> None:
        """Something changed: wake those who wait for it."""
        for watcher in list(self._watchers):
            holds, future = watcher
            if not future.done() and holds():
                future.set_result(None)

    async def until(self, holds: Callable[[], bool], timeout: float = 5.0) -> None:
        """Wait for the moment when `holds()`; looked at whenever a request comes, starts its answer or ends, or a
        fault, a cancel or a push happens. Raises TimeoutError after `timeout` seconds."""
        if holds():
            return
        watcher = (holds, asyncio.get_running_loop().create_future())
        self._watchers.append(watcher)
        try:
            async with asyncio.timeout(timeout):
                await watcher[1]
        finally:
            self._watchers.remove(watcher)

    def to_json(self, bodies: bool = False) -> dict[str, Any]:
        """Everything as plain values; the kept requests only when asked for."""
        out: dict[str, Any] = {
            "requests": dict(self.requests),
            "answers": {str(k): v for k, v in self.answers.items()},
            "encodes": dict(self.encodes),
            "taken": dict(self.taken),
            "ec": dict(self.ec),
            "kv": dict(self.kv),
            "cancels": [
                {"path": c.path, "request_id": c.request_id, "moment": c.moment, "events": c.events}
                for c in self.cancels
            ],
            "faults": dict(self.faults),
            "deaths": self.deaths,
            "body_digests": self.body_digests,
        }
        for name in ("in_flight", "max_in_flight", "items", "media_bytes", "prompt_tokens", "local_tokens"):
            out[name] = getattr(self, name)
        out["kv_tokens"] = self.kv_tokens
        out["output_tokens"] = self.output_tokens
        if bodies:
            out["bodies"] = [
                {
                    "method": b.method,
                    "path": b.path,
                    "headers": b.headers,
                    "body": b.body.decode("utf-8", "backslashreplace"),
                }
                for b in self.bodies
            ]
        return out
