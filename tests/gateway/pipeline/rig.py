"""Three stages of a test's own before a real gateway: HTTP that says what a test wants, and real chunks of sound."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from openai import AsyncOpenAI

from tests.gateway.rig import eventually
from triptych.gateway.logs import Log
from triptych.gateway.process import Running, running
from triptych.gateway.settings import GatewaySettings
from triptych.http.request import Request
from triptych.http.server import Server, ServerLimits
from triptych.transfer.connectors.base import ConnectorSpec, Mark, StreamConnector
from triptych.transfer.connectors.registry import ConnectorFactory
from triptych.transfer.errors import ClosedError, WouldBlock
from triptych.transfer.wire import Tensor

RATE = 24_000
Act = Callable[["Stage", Request, dict[str, Any]], Awaitable[None]]


def samples(seed: int, count: int) -> bytes:
    """Noise that is the same for the same seed."""
    return np.random.default_rng(seed).integers(-3000, 3000, count, np.int16).tobytes()


def chunk(pcm: bytes | None, *, rate: Any = RATE, last: bool = False, dtype: str = "int16") -> dict[str, Any]:
    """One as the last stage sends it."""
    made: dict[str, Any] = {"meta": {"finished": last}}
    if pcm is not None:
        size = len(pcm) // {"int16": 2, "float32": 4}[dtype]
        made["extra"] = {"sound": Tensor(dtype, (size,), pcm), "sample_rate": rate}
    return made


def sse(data: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(data).encode()


def word(text: str | None, finish: str | None = None) -> dict[str, Any]:
    """An event of a chat."""
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "omni", "choices": [choice]}


@dataclass
class Stage:
    """One stage: what it was asked, and what it does then."""

    name: str
    act: Act
    rig: Rig
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0  # requests that were cut off by the gateway
    url: str = ""

    async def handle(self, request: Request) -> None:
        if request.path == "/health":
            await request.respond(200, [], b"")
            return
        if request.path == "/v1/models":
            cards = {"data": [{"id": "omni", "max_model_len": 512}]}
            await request.respond(200, [(b"content-type", b"application/json")], json.dumps(cards).encode())
            return
        body = json.loads(await request.read_body(1 << 20))
        self.asked.append(body)
        try:
            await self.act(self, request, body)
        except asyncio.CancelledError:
            self.left += 1
            raise


async def begin(request: Request) -> None:
    await request.start(200, [(b"content-type", b"text/event-stream")])


async def done(request: Request) -> None:
    await request.send(b"data: [DONE]\n\n")
    await request.finish()


async def says(stage: Stage, request: Request, body: dict[str, Any]) -> None:
    """A thinker: as many words as it is asked for, as an engine says them."""
    words = [f"{n} " for n in range(body.get("max_tokens", 4))]
    usage = {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)}
    if not body.get("stream"):
        message = {"role": "assistant", "content": "".join(words)}
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "omni",
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": usage,
            "kv_transfer_params": {"secret": 1},
        }
        await request.respond(200, [(b"content-type", b"application/json")], json.dumps(answer).encode())
        return
    await begin(request)
    first = word("")
    first["choices"][0]["delta"]["role"] = "assistant"
    await request.send(sse(first))
    for each in words:
        await request.send(sse(word(each)))
    await request.send(sse(word(None, "length")))
    if (body.get("stream_options") or {}).get("include_usage"):
        await request.send(sse({**word(None), "choices": [], "usage": usage}))
    await done(request)


async def waits(stage: Stage, request: Request, body: dict[str, Any]) -> None:
    """A stage in the middle: silent until the sound of its stream has been sent."""
    await begin(request)
    await stage.rig.sent(body["vllm_xargs"]["triptych_stream"]).wait()
    await done(request)


async def speaks(stage: Stage, request: Request, body: dict[str, Any]) -> None:
    """A codec: three chunks of sound, and the end."""
    stream = body["vllm_xargs"]["triptych_stream"]
    await begin(request)
    for number in range(3):
        await stage.rig.put(stream, number, chunk(samples(number, 480)))
    await stage.rig.put(stream, 3, chunk(None, last=True), last=True)
    stage.rig.sent(stream).set()
    await done(request)


WHOLE = b"".join(samples(number, 480) for number in range(3))


class Rig:
    """A gateway before stages of `acts` (thinker, talker, codec). `connector`: shm or tcp; `split`: the thinker is a
    prefill engine, which is `stages[3]`, and a decode engine."""

    def __init__(self, *acts: Act, connector: str = "shm", split: bool = False, **settings: Any) -> None:
        acts = (*acts, *(says, waits, speaks)[len(acts) :])
        self.stages = [Stage(name, act, self) for name, act in zip(("thinker", "talker", "codec"), acts, strict=True)]
        self.thinker, self.talker, self.codec = self.stages
        self._split = split
        if split:
            self.stages.append(Stage("prefill", says, self))
        self.running: Running
        self._name = connector
        self._settings = settings
        self._sent: dict[str, asyncio.Event] = {}
        self._stack = contextlib.AsyncExitStack()
        extra: dict[str, Any] = {"deployment": f"test-{secrets.token_hex(4)}", "credit_chunks": 4}
        self._extra = extra
        port = {"port": 0} if connector == "tcp" else {}
        made = ConnectorFactory.create_connector(ConnectorSpec(connector, {**extra, **port, "stage_id": 2}))
        assert isinstance(made, StreamConnector)
        self.connector = made
        self.lines: list[bytes] = []

    async def __aenter__(self) -> Self:
        limits = ServerLimits()
        for stage in self.stages:
            server = Server(stage.handle, limits)
            self._stack.push_async_callback(server.close)
            ((host, port),) = await server.start("127.0.0.1", 0)
            stage.url = f"http://{host}:{port}"
        told = self.connector.put("2", "3", "where_0", "here")[2] or {}
        self.connector.discard(["where_0"])
        source = f"{told['source_host']}:{told['source_port']}" if "source_port" in told else None
        self._stack.callback(self.connector.close)
        settings = {
            "listen": "127.0.0.1:0",
            "admin": "off",
            "name": "omni",
            "combined": [{"url": self.thinker.url, "source": "127.0.0.1:1"}],
            "stages": [
                {"id": "talker", "engines": [{"url": self.talker.url, "source": "127.0.0.1:2"}]},
                {"id": "codec", "engines": [{"url": self.codec.url, "source": source}]},
            ],
            "sound": {"connector": self._name, "extra": self._extra, "text_stage": "thinker", "text_tokens": 5},
            "health": {"interval": 3600},
            **self._settings,
        }
        if self._split:
            settings |= {"decode": settings.pop("combined"), "prefill": [self.stages[3].url]}
        log = Log("json", "debug", write=self.lines.append, delay=0)
        self._stack.callback(log.attach())
        self.running = await self._stack.enter_async_context(running(GatewaySettings.model_validate(settings), log))
        self.gateway.client.sweep_interval = 0.05
        engines = list(self.gateway.fleet.engines())
        await eventually(lambda: all(e.names is not None for e in engines), "the first probes", 10.0)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @property
    def gateway(self) -> Any:
        return self.running.gateway

    def sent(self, stream: str) -> asyncio.Event:
        """Set once all sound of a stream has been sent."""
        return self._sent.setdefault(stream, asyncio.Event())

    async def put(self, stream: str, number: int, data: Any, *, last: bool = False) -> None:
        """Send a chunk, as soon as there is credit."""
        while True:
            try:
                self.connector.put("2", "3", f"{stream}_2_{number}", data, Mark(1, last))
                return
            except WouldBlock:
                await asyncio.sleep(0.005)  # as the adapter, which is told when there is credit
            except ClosedError:
                return

    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.running.url + "/v1", api_key="none", max_retries=0, timeout=30)

    async def nothing_left(self) -> None:
        """No place on an engine, no stream of sound, no request."""
        engines = list(self.gateway.fleet.engines())
        await eventually(lambda: not any(e.in_flight for e in engines), "places on engines", 5.0)
        await eventually(lambda: not self.gateway.pipelines.open_streams, "streams of sound", 5.0)
        await eventually(lambda: not self.gateway.admission.requests, "requests", 5.0)

    @contextlib.asynccontextmanager
    async def chat(self, **more: Any) -> AsyncIterator[Any]:
        """A streamed chat with sound."""
        async with self.openai() as openai:
            stream: Any = await openai.chat.completions.create(
                model="omni",
                messages=[{"role": "user", "content": "hello"}],
                modalities=["text", "audio"],
                audio={"voice": "v", "format": "pcm16"},  # type: ignore[arg-type]
                stream=True,
                **{"max_tokens": 4, **more},
            )
            async with stream:
                yield stream
