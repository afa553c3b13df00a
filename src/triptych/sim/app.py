"""The HTTP edge of a simulated engine."""

from __future__ import annotations

import asyncio
import base64
import hmac
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from triptych.http.errors import BodyTooLarge, ClientGone
from triptych.http.request import Request
from triptych.sim.answer import Answer
from triptych.sim.config import SimConfig
from triptych.sim.content import digest, vector
from triptych.sim.delivery import JSON, Delivery, Ended, InStream
from triptych.sim.engine import Engine
from triptych.sim.errors import EngineError, malformed
from triptych.sim.faults import Fault, Faults
from triptych.sim.job import Job, decode
from triptych.sim.media import encode
from triptych.sim.metrics import metrics, models
from triptych.sim.multipart import form
from triptych.sim.parse import PARSERS, parse, transcription
from triptych.sim.seen import Cancel, Seen
from triptych.sim.wire import wire_of

GUARDED = ("/v1", "/v2", "/inference")
TEXT = [(b"server", b"uvicorn"), (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
TRANSCRIPTIONS = "/v1/audio/transcriptions"
POSTS = frozenset({*PARSERS, TRANSCRIPTIONS})


class App:
    """Answers requests with one engine. `admin` answers what is under /sim/."""

    def __init__(
        self,
        config: SimConfig,
        engine: Engine,
        seen: Seen,
        faults: Faults,
        admin: Callable[[Request], Awaitable[None]],
    ) -> None:
        self.config = config
        self.engine = engine
        self.seen = seen
        self.faults = faults
        self._admin = admin
        self.closing = False
        """the engine is stopped by its owner: what breaks off now is no client's doing"""
        self._key = config.api_key.encode() if config.api_key else None

    async def handle(self, request: Request) -> None:
        """One request."""
        path = request.path
        if path.startswith("/sim/"):
            await self._admin(request)
            return
        seen = self.seen
        seen.requests[path] += 1
        seen.enter()
        moment = _Moment()
        try:
            if path in POSTS:
                await self._post(request, path, moment)
            else:
                await self._get(request, path, moment)
        except Ended:
            pass
        except (asyncio.CancelledError, ClientGone):
            if self.closing:
                raise
            given = request.header(b"x-request-id")
            name = given.decode("latin-1") if given else ""
            streaming = moment.delivery is not None and request.started
            events = moment.delivery.events if moment.delivery is not None else 0
            stage = "streaming" if streaming else moment.stage
            seen.cancels.append(Cancel(path, name, stage, events))
            raise
        finally:
            seen.leave()

    # --- GET ---------------------------------------------------------------------------------------------------------

    async def _get(self, request: Request, path: str, moment: _Moment) -> None:
        delivery = await self._deliver(request, self._fault(request, path, False, []), moment)
        if not self._allowed(request, path):
            await delivery.whole(401, b'{"error":"Unauthorized"}')
        elif path == "/health":
            self.seen.answers[503 if self.engine.dead else 200] += 1
            await request.respond(503 if self.engine.dead else 200, JSON[:1], b"")
        elif path == "/version":
            await delivery.whole(200, b'{"version":"0.32.0"}')
        elif path == "/v1/models":
            await delivery.whole(200, msgspec.json.encode(models(self.config)))
        elif path == "/metrics":
            self.seen.answers[200] += 1
            await request.respond(200, TEXT, metrics(self.config, self.seen))
        elif path == "/load":
            await delivery.whole(200, msgspec.json.encode({"server_load": self.seen.in_flight - 1}))
        else:
            await delivery.whole(404, EngineError(404, "Not Found", "Not Found").body())

    # --- POST --------------------------------------------------------------------------------------------------------

    async def _post(self, request: Request, path: str, moment: _Moment) -> None:
        delivery: Delivery | None = None
        job: Job | None = None
        anthropic = path == "/v1/messages"
        try:
            if not self._allowed(request, path):
                await request.read_body(self.config.max_body)
                delivery = await self._deliver(request, self._fault(request, path, False, []), moment)
                await delivery.whole(401, b'{"error":"Unauthorized"}')
                return
            if request.method != "POST":
                raise EngineError(405, "Method Not Allowed", "Method Not Allowed")
            body = await request.read_body(self.config.max_body)
            moment.stage = "working"
            self.seen.keep(request.method, path, request.headers, body)
            job, upload = await self._parse(request, path, body)
            fault = self._fault(request, path, job.stream, self._count(job))
            late = fault is not None and fault.after_work
            if not late:
                delivery = await self._deliver(request, fault, moment)
            self.engine.check()
            answer = None if job.stream and not late else await self._run(job, len(body), upload)
            if delivery is None:
                delivery = await self._deliver(request, fault, moment)
            if job.stream:
                await self._stream(job, len(body), delivery, answer)
            elif answer is not None:
                await delivery.whole(200, self._full(answer))
        except EngineError as error:
            if job is not None and error.status < 500:
                await self.engine.rejected(job.kv)
            if delivery is None:
                delivery = await self._deliver(request, None, moment)
            await delivery.whole(error.status, error.body(anthropic))
        except BodyTooLarge:
            large = EngineError(413, "Request Entity Too Large", "Request body too large")
            await request.respond(413, JSON, large.body(anthropic))

    async def _parse(self, request: Request, path: str, body: bytes) -> tuple[Job, bytes]:
        kind = request.header(b"content-type") or b""
        if path == TRANSCRIPTIONS:
            return transcription(form(body, kind), self.config, request.header, self.engine.known)
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            raise malformed("Unsupported Media Type: Only 'application/json' is allowed")
        given = decode(body)
        try:
            return parse(path, given, self.config, request.header, self.engine.known), b""
        except EngineError as error:
            # What the server refuses after it has parsed the fields, it tells the KV connector of.
            if error.type != "Bad Request":
                await self.engine.rejected(given.get("kv_transfer_params"))
            raise

    async def _run(self, job: Job, size: int, upload: bytes) -> Answer:
        if upload:
            name = digest(upload)
            self.seen.media_bytes += len(upload)
            job.prompts[0].text += encode(name, "audio").content
        answer = await self.engine.run(job, size)
        gap = self.config.costs.token
        if gap and not job.stream:
            await asyncio.sleep(gap * answer.output_tokens)
        return answer

    def _full(self, answer: Answer) -> bytes:
        if answer.job.api == "embeddings":
            return self._embeddings(answer)
        return wire_of(answer.job.api).full(answer)

    def _embeddings(self, answer: Answer) -> bytes:
        job = answer.job
        data: list[Any] = []
        for index, key in enumerate(answer.keys):
            values: Any = vector(key, self.config.hidden_size)
            if job.request.get("encoding_format") == "base64":
                values = _base64(values)
            data.append({"index": index, "object": "embedding", "embedding": values})
        total = answer.prompt_tokens
        usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
        return msgspec.json.encode(
            {
                "id": f"embd-{job.request_id}",
                "object": "list",
                "created": answer.created,
                "model": job.model,
                "data": data,
                "usage": usage | {"prompt_tokens_details": None, "completion_tokens_details": None},
            }
        )

    async def _stream(self, job: Job, size: int, delivery: Delivery, answer: Answer | None) -> None:
        """`answer`: where the work was done already, since a fault asked for that."""
        wire = wire_of(job.api)
        try:
            await delivery.head()
            for event in wire.opening(job):
                await delivery.event(event)
            if answer is None:
                answer = await self.engine.run(job, size)
            for event in wire.start(answer):
                await delivery.event(event)
            await self._tokens(answer, wire, delivery)
            for event in wire.end(answer):
                await delivery.event(event)
        except (EngineError, InStream) as problem:
            error = problem if isinstance(problem, EngineError) else _injected(delivery.fault)
            delivery.fault = None
            events = wire.error(job, error)
            if not events:
                delivery.close()
                raise Ended from None
            # An opening that went out already is not said twice.
            for event in events[job.n if delivery.events and job.api == "chat" else 0 :]:
                if not (delivery.events and event.startswith(b"event: message_start")):
                    await delivery.event(event)
        await delivery.finish()

    async def _tokens(self, answer: Answer, wire: Any, delivery: Delivery) -> None:
        gap = self.config.costs.token
        for number in range(max((len(choice.pieces) for choice in answer.choices), default=0)):
            if gap:
                await asyncio.sleep(gap)
            for choice in answer.choices:
                if number < len(choice.pieces):
                    await delivery.event(wire.token(answer, choice, number))

    # --- both --------------------------------------------------------------------------------------------------------

    def _allowed(self, request: Request, path: str) -> bool:
        if self._key is None or not path.startswith(GUARDED):
            return True
        scheme, _, given = (request.header(b"authorization") or b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given, self._key)

    def _count(self, job: Job) -> list[tuple[int, str]]:
        """Number this request's media items."""
        numbered = []
        for prompt in job.prompts:
            for item in prompt.items:
                numbered.append((self.seen.items, item.content or ""))
                self.seen.items += 1
                self.seen.media_bytes += item.size
        return numbered

    def _fault(self, request: Request, path: str, stream: bool, items: list[tuple[int, str]]) -> Fault | None:
        if not self.faults.rules:
            return None
        given = request.header(b"x-request-id") or b""
        return self.faults.pick(path, given.decode("latin-1"), stream, items)

    async def _deliver(self, request: Request, fault: Fault | None, moment: _Moment) -> Delivery:
        delivery = Delivery(request, fault, self.seen)
        moment.delivery = delivery
        if fault is not None and fault.kind == "die":
            self.engine.die("fault")
        await delivery.before_head()
        return delivery


class _Moment:
    """How far a request has come, for the record of cancels."""

    __slots__ = ("delivery", "stage")

    def __init__(self) -> None:
        self.stage = "upload"
        self.delivery: Delivery | None = None


def _injected(fault: Fault | None) -> EngineError:
    message = fault.message if fault is not None else "injected fault"
    return EngineError(fault.status if fault is not None else 500, "InternalServerError", message)


def _base64(values: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
