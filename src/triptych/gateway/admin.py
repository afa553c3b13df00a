"""The admin listener: metrics, a look inside, and the few things that an operator does by hand.

It has no keys; what protects it is where it listens (127.0.0.1 unless told otherwise). A browser on the same machine
is the way around that, so: bound to loopback, it answers only to loopback names in `Host` (a page whose own
name resolves to 127.0.0.1 sends its own name), and what changes something is a POST with `content-type:
application/json`, which a page of another origin cannot send without asking first, and nobody here says yes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

import triptych
from triptych.gateway.admission import Admission
from triptych.gateway.engines import Deployment, Engine, Fleet
from triptych.gateway.logs import Log
from triptych.gateway.metrics import Metrics
from triptych.gateway.plan import ready
from triptych.gateway.timeline import Ring
from triptych.http.errors import HttpError
from triptych.http.head import Header
from triptych.http.server import Request, Server, ServerLimits

_BODY_BYTES = 64 * 1024
_JSON = b"application/json"
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]*))(?::[0-9]*)?")

_Answer = tuple[int, Any]


class _Refused(Exception):
    """An answer other than the wanted one; `more` goes into its body beside the message."""

    def __init__(self, status: int, message: str, *, allow: bytes = b"", **more: Any) -> None:
        super().__init__(message)
        self.status = status
        self.headers: list[Header] = [(b"allow", allow)] if allow else []
        self.body = {"error": message, **more}


class _EngineCall(msgspec.Struct):
    engine: str


class Admin:
    """The admin calls, and the listener that offers them. `drain` begins a graceful end of the gateway."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        admission: Admission,
        metrics: Metrics,
        requests: Ring,
        log: Log,
        drain: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics
        self._requests = requests
        self._log = log
        self._drain = drain
        self._draining = False
        self._loopback = True
        self._server: Server | None = None
        self._gets: dict[str, tuple[str, Callable[[], _Answer]]] = {
            "/": ("this list", self._index),
            "/health": ("this process answers", lambda: (200, {"status": "ok"})),
            "/debug/engines": ("pools, health, in flight", self._engines),
            "/debug/requests": ("the last requests, newest first; /debug/requests/ID for one", self._recent),
        }
        self._posts: dict[str, tuple[str, Callable[[bytes], _Answer]]] = {
            "/drain": ("end gracefully: accept nothing more, finish what runs, exit", self._begin_drain),
            "/engines/eject": ('take an engine out of service: {"engine": URL}', self._eject),
            "/engines/restore": ('take it back: {"engine": URL}', self._restore),
        }

    async def start(self, host: str, port: int) -> list[tuple[str, int]]:
        """Listen; the addresses bound. Raises OSError."""
        self._loopback = _is_loopback(host)
        self._server = Server(self.handle, ServerLimits())
        return await self._server.start(host, port)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def handle(self, request: Request) -> None:
        """One admin request."""
        headers: list[Header] = []
        try:
            self._check_origin(request)
            if request.path == "/metrics" and request.method in ("GET", "HEAD"):
                accept = (request.header(b"accept") or b"").decode("latin-1")
                content_type, body = self._metrics.render(accept)
                await request.respond(200, [(b"content-type", content_type.encode())], body)
                return
            status, answer = await self._route(request)
        except _Refused as refused:
            status, answer, headers = refused.status, refused.body, refused.headers
        body = msgspec.json.format(msgspec.json.encode(answer), indent=2) + b"\n"
        await request.respond(status, [(b"content-type", _JSON), (b"cache-control", b"no-store"), *headers], body)

    # -- who may ask what

    def _check_origin(self, request: Request) -> None:
        host = (request.header(b"host") or b"").decode("latin-1")
        if self._loopback and not _is_loopback(_without_port(host)):
            raise _Refused(403, "This listener answers to loopback names only (localhost, 127.0.0.1, [::1]).")
        if request.method == "POST":
            kind = (request.header(b"content-type") or b"").split(b";")[0].strip().lower()
            if kind != _JSON:
                raise _Refused(415, "A POST here needs the header `content-type: application/json`.")

    async def _route(self, request: Request) -> _Answer:
        path = request.path
        if request.method in ("GET", "HEAD"):
            if path in self._gets:
                return self._gets[path][1]()
            if path.startswith("/debug/requests/"):
                return self._one(path.removeprefix("/debug/requests/"))
        elif request.method == "POST" and path in self._posts:
            try:
                body = await request.read_body(_BODY_BYTES)
            except HttpError as error:
                raise _Refused(getattr(error, "status", 400), str(error)) from error
            return self._posts[path][1](body)
        if path in self._gets or path in self._posts or path == "/metrics":
            right = "POST" if path in self._posts else "GET, HEAD"
            raise _Refused(405, f"{path} takes {right}.", allow=right.encode())
        raise _Refused(404, "There is no such admin call.", calls=self._index()[1])

    # -- GET

    def _index(self) -> _Answer:
        calls = {f"GET {path}": what for path, (what, _) in self._gets.items()}
        calls["GET /metrics"] = "Prometheus metrics"
        return 200, calls | {f"POST {path}": what for path, (what, _) in self._posts.items()}

    def _engines(self) -> _Answer:
        return 200, {
            "version": triptych.__version__,
            "ready": ready(self._fleet),
            "draining": self._draining,
            "requests": {
                "in_flight": self._admission.requests,
                "limit": self._admission.max_requests,
                "bytes": self._admission.nbytes,
                "bytes_limit": self._admission.max_bytes,
                "queued": self._admission.queued,
            },
            "models": [_describe(d) for d in self._fleet.deployments],
        }

    def _recent(self) -> _Answer:
        return 200, {"requests": [t.summary() for t in reversed(tuple(self._requests))]}

    def _one(self, request_id: str) -> _Answer:
        timeline = self._requests.get(request_id)
        if timeline is None:
            raise _Refused(404, "No such request among the last ones (setting `debug_requests`).")
        return 200, timeline.to_dict()

    # -- POST

    def _begin_drain(self, _: bytes) -> _Answer:
        if not self._draining:
            self._draining = True
            self._log.info("draining", why="asked by an admin call")
            self._drain()
        return 202, {"draining": True}

    def _eject(self, body: bytes) -> _Answer:
        return self._on_engines(body, Engine.hold)

    def _restore(self, body: bytes) -> _Answer:
        return self._on_engines(body, Engine.restore)

    def _on_engines(self, body: bytes, act: Callable[[Engine], None]) -> _Answer:
        try:
            url = msgspec.json.decode(body, type=_EngineCall).engine
        except msgspec.MsgspecError as error:
            raise _Refused(400, f'The body is to be {{"engine": URL}}: {error}') from error
        engines = self._fleet.find(url)
        if not engines:
            raise _Refused(404, "No such engine.", engines=sorted({e.url for e in self._fleet.engines()}))
        for engine in engines:
            act(engine)
        return 200, {"engines": [_describe_engine(e) for e in engines]}


def _describe(deployment: Deployment) -> Mapping[str, Any]:
    return {
        "model": deployment.label,
        "names": sorted(deployment.names),
        "pools": {
            role: {
                "healthy": pool.healthy,
                "full": pool.full,
                "waiting": pool.waiting,
                "engines": [_describe_engine(e) for e in pool.engines],
            }
            for role, pool in deployment.pools.items()
            if pool
        },
    }


def _describe_engine(engine: Engine) -> Mapping[str, Any]:
    return {
        "url": engine.url,
        "role": engine.role,
        "state": engine.state,
        "why": engine.why,
        "in_flight": engine.in_flight,
        "limit": engine.limit if engine.limited else None,
        "weight": engine.weight,
        "names": None if engine.names is None else sorted(engine.names),
    }


def _without_port(host: str) -> str:
    """The name in a `Host` header, an IPv6 address without its brackets; empty if it is malformed."""
    match = _HOST.fullmatch(host)
    return (match[1] or match[2]) if match else ""


def _is_loopback(host: str) -> bool:
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
