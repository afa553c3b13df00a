"""What the tests of the contract share: engines that say what they are told to, and a gateway over any engines.

Where an engine's own strictness is of no matter (any body, any answer, byte for byte), `Scripted` stands for it; where
the hand-over has to work, tests take simulated engines.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

from tests.gateway.rig import Rig, chat, eventually, image, open_sockets
from triptych.gateway.logs import Log
from triptych.gateway.process import running
from triptych.gateway.settings import GatewaySettings
from triptych.http.head import Header
from triptych.http.request import Request
from triptych.http.server import Server, ServerLimits
from triptych.sim import SeenRequest

EC = "ec_transfer_params"
KV = "kv_transfer_params"
JSON: list[Header] = [(b"content-type", b"application/json")]
Says = bytes | Callable[[SeenRequest], bytes | Awaitable[bytes]]


class Scripted:
    """An engine that answers 200 with `says` to every POST, and keeps what it got, as it came.

    says: the JSON body, or what makes it of the request. names: what its /v1/models tells. order: a list that several
    engines share, to which each adds `name` when a request arrives.
    """

    def __init__(
        self, says: Says = b"{}", *, names: Sequence[str] = ("sim",), order: list[str] | None = None, name: str = ""
    ) -> None:
        self.says = says
        self.names = names
        self.headers = JSON
        self.status = 200
        self.seen: list[SeenRequest] = []
        self._order = order
        self._name = name
        self._server = Server(self._handle, ServerLimits())
        self.port = 0

    async def __aenter__(self) -> Self:
        ((_, self.port),) = await self._server.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def last(self) -> SeenRequest:
        return self.seen[-1]

    async def _handle(self, request: Request) -> None:
        if request.method == "GET":
            cards = [{"id": name, "object": "model", "max_model_len": 4096} for name in self.names]
            await request.respond(200, JSON, json.dumps({"object": "list", "data": cards}).encode())
            return
        body = await request.read_body(1 << 28)
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers)
        got = SeenRequest(request.method, request.target.decode("latin-1"), headers, body)
        self.seen.append(got)
        if self._order is not None:
            self._order.append(self._name)
        said = self.says if isinstance(self.says, bytes) else self.says(got)
        await request.respond(self.status, self.headers, said if isinstance(said, bytes) else await said)


class Gate(Rig):
    """A gateway over engines that the test has made: `Gate(encode=[e.url], combined=[c.url], ...)`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("plain")
        self._own = settings

    def others_have_sockets(self) -> None:
        """Those that are open now are no leak: other event loops of this process have opened some meanwhile."""
        self._sockets = open_sockets()

    async def _start(self) -> None:
        given = {"listen": "127.0.0.1:0", "admin": "off", "health": self._health, **self._own}
        settings = GatewaySettings.model_validate(given)
        log = Log("json", "debug", write=self.lines.append, delay=0)
        self._stack.callback(log.attach())
        self.running = await self._stack.enter_async_context(running(settings, log))
        engines = list(self.gateway.fleet.engines())
        known = lambda: self.gateway.fleet.probed and all(e.names is not None or not e.healthy for e in engines)  # noqa: E731
        await eventually(lambda: known() and not self._busy, "the first probes", 30.0)
        self._tasks = asyncio.all_tasks()


def pairs(raw: bytes) -> list[tuple[str, Any]]:
    """The members of a JSON object at top level, every copy, in order; what is inside them as plain values."""
    found = json.loads(raw, object_pairs_hook=_Pairs)
    return [(key, _plain(value)) for key, value in found]


class _Pairs(list[tuple[str, Any]]):
    pass


def _plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {key: _plain(inner) for key, inner in value}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def copies(raw: bytes, key: str) -> list[Any]:
    """Every value that this key has at top level."""
    return [value for name, value in pairs(raw) if name == key]


def parts(seen: SeenRequest, field: str = "messages") -> list[dict[str, Any]]:
    """The content parts of the messages in a body."""
    messages = json.loads(seen.body)[field]
    return [part for m in messages if isinstance(m.get("content"), list) for part in m["content"]]


def media(*given: dict[str, Any], role: str = "user", **more: Any) -> dict[str, Any]:
    """A chat request of one message with these parts."""
    return {"model": "sim", "messages": [{"role": role, "content": list(given)}], **more}


__all__ = ["EC", "JSON", "KV", "Gate", "Scripted", "chat", "copies", "eventually", "image", "media", "pairs", "parts"]
