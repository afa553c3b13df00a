"""The gateway put together: what every request passes, from its first byte to its line in the log."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import msgspec

import triptych
from triptych.body.items import ON_ENDPOINT
from triptych.body.request import HANDLES
from triptych.body.scan import BodyError
from triptych.gateway.admission import Admission, Overloaded, Ticket, TooLarge
from triptych.gateway.endpoints import ENDPOINTS, Endpoint
from triptych.gateway.engines import Change, Deployment, Fleet, ModelRequired, UnknownModel
from triptych.gateway.errors import ApiError, EngineRefused
from triptych.gateway.handover import EcDialect, KvDialect, ec_dialects, kv_dialects
from triptych.gateway.identity import Keyring, LegHeaders, answer_headers, request_id
from triptych.gateway.intake import Intake
from triptych.gateway.legs import LegBodies
from triptych.gateway.logs import Log, exception_fields
from triptych.gateway.metrics import Metrics
from triptych.gateway.multipart import look_for_model
from triptych.gateway.pipeline.plan import Pipelines
from triptych.gateway.pipeline.run import SpokenRun
from triptych.gateway.plan import Route, Shape, can_answer, choose, route
from triptych.gateway.relay import Outcome
from triptych.gateway.run import Run, answer
from triptych.gateway.settings import GatewaySettings
from triptych.gateway.timeline import Ring, Timeline
from triptych.gateway.tools import Tools
from triptych.gateway.upstream import Leg, LegError
from triptych.http.client import Client
from triptych.http.errors import BadRequest, BodyTimeout, BodyTooLarge, ClientGone, ServerSideError, WriteStalled
from triptych.http.head import Header
from triptych.http.request import Request

_CLIENT_FAULTS: dict[type[ServerSideError], str] = {
    BadRequest: "bad_http",
    BodyTooLarge: "body_size",
    BodyTimeout: "body_timeout",
    ClientGone: "client_left",
    WriteStalled: "client_stalled",
}


class ConfigurationError(ValueError):
    """Settings that are valid by themselves but name something that is not there."""


@dataclass(frozen=True, slots=True)
class Dialects:
    """The two hand-over dialects of one deployment."""

    ec: EcDialect
    kv: KvDialect


class Gateway:
    """Answers requests. Makes no listener and no task of its own: see `triptych.gateway.serve`."""

    def __init__(self, settings: GatewaySettings, client: Client, log: Log, rng: random.Random | None = None) -> None:
        self.settings = settings
        self.client = client
        self.log = log
        self.rng = rng or random.Random()
        self.fleet = Fleet(settings, self.rng)
        self.admission = Admission(settings.limits, settings.deadlines.queue, settings.deadlines.body)
        self.metrics = Metrics(self.fleet, self.admission)
        self.requests = Ring(settings.debug_requests)
        self.keyring = Keyring(settings.api_keys, settings.tenant_header)
        self.tools = Tools(settings, client, self.metrics, log, self.rng)
        self._total = settings.deadlines.total
        self._body_bytes = settings.limits.body_bytes
        self._keep_uuids = "uuid" in settings.open
        self._dialects = {d: _dialects(d) for d in self.fleet.deployments}
        self._leg_headers = {d: self._headers_for(d) for d in self.fleet.deployments}
        self._routes: dict[Deployment, dict[Shape, Route]] = {d: {} for d in self.fleet.deployments}
        self.fleet.watchers.append(self._engine_changed)
        owned = frozenset().union(*(d.kv.owned for d in self._dialects.values()))
        self.intake = Intake.of(settings.open, settings.limits.items, owned)
        self.pipelines = Pipelines(self.fleet.deployments, settings, owned, self.metrics)
        self.draining = False

    # -- one request

    async def handle(self, request: Request) -> None:
        """Answer one request, whatever happens to it."""
        endpoint = ENDPOINTS.get(request.path)
        if endpoint is None or request.method != "POST":
            await self._other(request, endpoint)
            return
        timeline = Timeline(request_id(request.headers, self.rng), endpoint.api)
        self.requests.add(timeline)
        status = 499
        try:
            total = self._total
            if total is None:
                outcome = await self._admitted(request, endpoint, timeline)
            else:
                outcome = await self._within(total, request, endpoint, timeline)
            status = outcome.status
            if outcome.failure is not None:
                timeline.error = outcome.failure
        except asyncio.CancelledError:
            timeline.error = "client_left"
            raise
        except EngineRefused as refused:
            timeline.error = f"{refused.leg}_{refused.status}"
            if request.started:
                status = await self._refuse(request, endpoint, timeline, ApiError(502, str(refused)))
            else:
                status = refused.status
                headers = [*answer_headers(refused.headers), *_own_headers(timeline), _timing(timeline)]
                await request.respond(refused.status, headers, refused.body)
        except (ApiError, LegError, BodyError, Overloaded, TooLarge, ModelRequired, UnknownModel, ServerSideError) as e:
            error = _api_error(e)
            timeline.error = error.reason
            status = await self._refuse(request, endpoint, timeline, error)
        except Exception as unexpected:
            self.log.error("unexpected error", request=timeline.id, **exception_fields(unexpected))
            timeline.error = "internal"
            error = ApiError(500, "internal error of the gateway")
            status = await self._refuse(request, endpoint, timeline, error)
        finally:
            timeline.bytes_out = request.bytes_sent
            seconds = timeline.end(status)
            self.metrics.request(timeline.plan, status, seconds, timeline.model)
            self.log.access(timeline, request.method, request.path, request.peer)

    async def _within(self, total: float, request: Request, endpoint: Endpoint, timeline: Timeline) -> Outcome:
        try:
            async with asyncio.timeout(total):
                return await self._admitted(request, endpoint, timeline)
        except TimeoutError:
            message = f"the request took longer than {total:g} s; it waited for {_waited_for(timeline)}"
            raise ApiError(504, message, reason="total") from None

    async def _admitted(self, request: Request, endpoint: Endpoint, timeline: Timeline) -> Outcome:
        most = self._body_bytes
        self.keyring.check(request.headers, endpoint.api)
        declared = request.content_length
        if declared is not None and declared > most:
            raise ApiError(413, f"request body of {declared} bytes: at most {most}", reason="body_size")
        ticket = self.admission.try_admit(declared or 0) or await self.admission.admit(declared or 0)
        try:
            timeline.admit()
            if endpoint.body == "multipart":
                with self.admission.upload(lambda: _streamed(request), request.fail):
                    return await self._form(request, endpoint, timeline, ticket)
            if request.body_ended:
                raw = await request.read_body(most)
                if declared is None:
                    ticket.grow(len(raw))
            elif declared is None:
                with self.admission.upload(lambda: ticket.nbytes, request.fail):
                    raw = await _chunked_body(request, most, ticket)
            else:
                with self.admission.upload(lambda: request.buffered, request.fail):
                    raw = await request.read_body(most)
            timeline.bytes_in = len(raw)
            run = self._planned(request, endpoint, timeline, raw)
            run.sent = partial(ticket.shrink, len(raw))
            del raw
            return await run.go()
        finally:
            ticket.release()

    def _planned(self, request: Request, endpoint: Endpoint, timeline: Timeline, raw: bytes) -> Run:
        """The request with its plan, nothing of it begun. Raises BodyError, ApiError, ModelRequired, UnknownModel."""
        asked = self.intake.read(raw, endpoint)
        deployment = self.fleet.resolve(asked.body.model)
        timeline.model = deployment.label
        wish = None
        if deployment.stages:
            wish = self.pipelines.wish(endpoint, asked.body, deployment, timeline.id)
            if wish is not None:
                endpoint, asked = wish.endpoint, wish.asked
        dialects = self._dialects[deployment]
        stages = self._route(asked.shape, deployment, timeline)
        bodies = LegBodies(
            endpoint,
            asked.body,
            asked.media,
            deployment.settings,
            self.keyring.tenant(request.headers, endpoint.api) if stages.encode else b"",
            encode=stages.encode,
            keep_uuids=self._keep_uuids,
        )
        if asked.media.items or asked.media.embeds:
            self.metrics.uuids("removed", bodies.removed)
            self.metrics.uuids("replaced", bodies.replaced)
        if asked.body.stripped:
            self.metrics.stripped("handles", 1)
        plan = choose(stages, deployment, bodies.count)
        make: type[Run] = Run
        more: Mapping[str, Any] = {}
        if wish is not None:
            make, more = SpokenRun, self.pipelines.more(wish, deployment, plan, request, timeline)
        return make(
            tools=self.tools,
            request=request,
            request_id=timeline.id,
            endpoint=endpoint,
            deployment=deployment,
            plan=plan,
            bodies=bodies,
            ec=dialects.ec,
            kv=dialects.kv,
            timeline=timeline,
            headers=self._leg_headers[deployment].of(request.headers),
            own_headers=_own_headers(timeline),
            **more,
        )

    def _headers_for(self, deployment: Deployment) -> LegHeaders:
        key = deployment.settings.engine_api_key
        return LegHeaders(
            engine_key=key.get_secret_value() if key else None,
            checks_keys=self.keyring.checks,
            pass_rank="data_parallel_rank" in self.settings.open,
        )

    def _route(self, shape: Shape, deployment: Deployment, timeline: Timeline) -> Route:
        known = self._routes[deployment]
        stages = known.get(shape)
        if stages is None:
            stages = known[shape] = route(shape, deployment.pools, deployment.settings)
        timeline.plan = stages.name
        for reason in stages.degraded:
            timeline.reason(reason)
            self.metrics.degraded(reason)
        return stages

    def _engine_changed(self, _change: Change) -> None:
        """Routes are remembered only as long as every engine stays as it is."""
        for known in self._routes.values():
            known.clear()

    async def _form(self, request: Request, endpoint: Endpoint, timeline: Timeline, ticket: Ticket) -> Outcome:
        """A multipart upload, streamed through on a plain plan."""
        limit = self.settings.limits.body_bytes
        several = len(self.fleet.deployments) > 1
        model, chunks = await look_for_model(
            request, limit, must_find=several, closed=HANDLES.difference(self.settings.open)
        )
        deployment = self.fleet.resolve(model)
        timeline.model = deployment.label
        encoders = bool(deployment.encode.engines)
        shape = Shape(generates=False, unplanned=(ON_ENDPOINT,) if encoders else ())
        stages = self._route(shape, deployment, timeline)
        engine = choose(stages, deployment, 0).final
        grows = request.content_length is None

        async def counted() -> AsyncIterator[bytes]:
            async for data in chunks:
                timeline.bytes_in += len(data)
                if grows:
                    ticket.grow(len(data))
                yield data

        own = (b"x-request-id", f"{timeline.id}-decode".encode())
        leg = Leg(
            name=engine.role,
            role=engine.role,
            pool=deployment.pools[engine.role],
            lease=engine.lease(),
            target=request.origin_target,
            headers=[*self._leg_headers[deployment].of(request.headers), own],
            body=counted(),
            timing=timeline.leg("decode", engine.role, engine.url),
            content_length=request.content_length,
        )
        try:
            return await answer(self.tools, request, endpoint, deployment, timeline, leg, _own_headers(timeline))
        finally:
            leg.end(self.metrics)

    # -- everything that is not a leg

    async def _other(self, request: Request, endpoint: Endpoint | None) -> None:
        """Health, models, version; and what is not there."""
        timeline = Timeline(request_id(request.headers, self.rng))
        status = 499
        try:
            reply = self._look_up(request, endpoint)
            status = reply.status
            head = [(b"content-type", b"application/json"), *reply.headers, *_own_headers(timeline), _timing(timeline)]
            await request.respond(reply.status, head, reply.body)
        except ApiError as error:
            timeline.error = error.reason
            status = await self._refuse(request, None, timeline, error)
        finally:
            timeline.bytes_out = request.bytes_sent
            timeline.end(status)
            self.log.access(timeline, request.method, request.path, request.peer)

    def _look_up(self, request: Request, endpoint: Endpoint | None) -> _Reply:
        path = request.path
        if endpoint is not None:
            raise ApiError(405, f"{path} takes POST", reason="method", headers=((b"allow", b"POST"),))
        if path not in _GETS and not path.startswith("/v1/models/"):
            known = ", ".join(sorted({*ENDPOINTS, *_GETS}))
            raise ApiError(404, f"there is no {path[:200]!r} here; there are {known}", reason="path")
        if request.method not in ("GET", "HEAD"):
            raise ApiError(405, f"{path[:200]} takes GET", reason="method", headers=((b"allow", b"GET, HEAD"),))
        if path == "/health":
            return _Reply(200, b"{}")
        if path == "/version":
            return _Reply(200, msgspec.json.encode({"version": triptych.__version__}))
        if path == "/readyz":
            return self._readiness()
        self.keyring.tenant(request.headers, "other")
        cards: dict[str, Mapping[str, Any]] = {}
        for deployment in self.fleet.deployments:
            for card in deployment.cards():
                cards.setdefault(card["id"], card)
        if path == "/v1/models":
            return _Reply(200, msgspec.json.encode({"object": "list", "data": list(cards.values())}))
        name = unquote(path.removeprefix("/v1/models/"))
        if name not in cards:
            raise ApiError(404, f"The model `{name[:200]}` does not exist.", param="model", reason="unknown_model")
        return _Reply(200, msgspec.json.encode(cards[name]))

    def _readiness(self) -> _Reply:
        """Ready once every engine was probed and every model can be answered; not any more while draining."""
        missing = [d.label for d in self.fleet.deployments if not can_answer(d)]
        if self.draining:
            state = "draining"
        elif not self.fleet.probed:
            state = "probing"
        elif missing:
            state = "no engine for " + ", ".join(missing)
        else:
            return _Reply(200, b'{"status":"ready"}')
        return _Reply(503, msgspec.json.encode({"status": state}), ((b"retry-after", b"1"),))

    async def _refuse(self, request: Request, endpoint: Endpoint | None, timeline: Timeline, error: ApiError) -> int:
        """Tell the client of an error, as far as it can still be told; the status that it got."""
        if error.status < 500 and not timeline.legs:
            self.metrics.refused(error.reason)
        api = endpoint.api if endpoint is not None else "other"
        if not request.started:
            head = [*error.head(), *_own_headers(timeline), _timing(timeline)]
            await request.respond(error.status, head, error.body(api))
            return error.status
        if request.finished or request.gone or timeline.first is None:
            request.abort()
            return error.status
        # Events have gone out, each of them whole: the client is told by one more, then the connection closes.
        request.keep_alive = False
        await request.send(error.event(api))
        await request.finish()
        return 200


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: bytes
    headers: tuple[Header, ...] = ()


_GETS = ("/health", "/readyz", "/version", "/v1/models")


def _dialects(deployment: Deployment) -> Dialects:
    """The deployment's dialects. Raises ConfigurationError naming those that there are."""
    settings = deployment.settings
    ec, kv = ec_dialects(), kv_dialects()
    if settings.ec not in ec:
        raise ConfigurationError(f"ec: there is no dialect {settings.ec!r}; there are {', '.join(sorted(ec))}")
    if settings.kv not in kv:
        raise ConfigurationError(f"kv: there is no dialect {settings.kv!r}; there are {', '.join(sorted(kv))}")
    return Dialects(ec[settings.ec], kv[settings.kv])


def _waited_for(timeline: Timeline) -> str:
    """Whom a request waited for that was given up."""
    if timeline.admitted is None:
        return "its turn, since the gateway is at its limit"
    if not timeline.plan:
        return "the client to send its body"
    running = [leg for leg in timeline.legs if leg.started is not None and leg.status in ("", "cancelled")]
    names = [f"{leg.role if leg.name == 'decode' else leg.name} engine {leg.engine}" for leg in running]
    return ", ".join(names) or "a free place on an engine"


def _streamed(request: Request) -> int | None:
    """Bytes of a streamed body that have come; None while the client has done its part: the engine is waited for."""
    return None if request.body_ended or request.buffered else request.taken


async def _chunked_body(request: Request, limit: int, ticket: Ticket) -> bytes:
    """A body of unknown length, counted as it arrives. Raises BodyTooLarge, TooLarge, Overloaded, BodyTimeout."""
    pieces: list[bytes] = []
    async for data in request.body_chunks(limit):
        ticket.grow(len(data))
        pieces.append(data)
    return b"".join(pieces)


def _timing(timeline: Timeline) -> Header:
    return b"server-timing", timeline.server_timing()


def _own_headers(timeline: Timeline) -> list[Header]:
    return [(b"x-request-id", timeline.id.encode("ascii"))]


def _api_error(error: Exception) -> ApiError:
    """What the client is told of anything that may end a request."""
    match error:
        case ApiError():
            return error
        case LegError():
            return error.api_error()
        case BodyError():
            return ApiError(error.status, str(error), param=error.param, reason="bad_body")
        case Overloaded():
            return ApiError(429, str(error), retry_after=error.retry_after, reason=error.reason)
        case TooLarge():
            return ApiError(413, str(error), reason="body_size")
        case ModelRequired():
            return ApiError(400, str(error), param="model", reason="model_required")
        case UnknownModel():
            return ApiError(404, str(error), param="model", reason="unknown_model")
        case ServerSideError():
            return ApiError(error.status, error.message, reason=_CLIENT_FAULTS.get(type(error), "request"))
    raise error
