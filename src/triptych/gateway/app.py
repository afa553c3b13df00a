"""The gateway put together: what every request passes, from its first byte to its line in the log."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import triptych
from triptych.body import BodyError
from triptych.gateway.admission import Admission, Overloaded, Ticket, TooLarge
from triptych.gateway.endpoints import ENDPOINTS, Endpoint
from triptych.gateway.engines import Deployment, Fleet, ModelRequired, UnknownModel
from triptych.gateway.errors import ApiError, EngineRefused
from triptych.gateway.handover import EcDialect, KvDialect, ec_dialects, kv_dialects
from triptych.gateway.identity import Keyring, answer_headers, leg_headers, request_id
from triptych.gateway.intake import Asked, read_json
from triptych.gateway.logs import Log, exception_fields
from triptych.gateway.metrics import Metrics
from triptych.gateway.multipart import relay_form
from triptych.gateway.plan import choose, route
from triptych.gateway.relay import Outcome
from triptych.gateway.run import Run, Tools
from triptych.gateway.settings import GatewaySettings
from triptych.gateway.timeline import Ring, Timeline
from triptych.gateway.upstream import LegError
from triptych.http import Client, Header, Request, ServerSideError


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
        self.admission = Admission(settings.limits, settings.deadlines.queue)
        self.metrics = Metrics(self.fleet, self.admission)
        self.requests = Ring(settings.debug_requests)
        self.keyring = Keyring(settings.api_keys, settings.tenant_header)
        self.tools = Tools(settings, client, self.metrics, log, self.rng)
        self._dialects = {d: _dialects(d) for d in self.fleet.deployments}
        self.draining = False

    # -- one request

    async def handle(self, request: Request) -> None:
        """Answer one request, whatever happens to it."""
        endpoint = ENDPOINTS.get(request.path)
        if endpoint is None or request.method != "POST":
            await self._other(request, endpoint)
            return
        timeline = Timeline(request_id(request.headers), endpoint.api)
        self.requests.add(timeline)
        status = 499
        try:
            outcome = await self._answer(request, endpoint, timeline)
            status = outcome.status
            if outcome.failure is not None:
                timeline.error = outcome.failure
        except asyncio.CancelledError:
            timeline.error = "client_left"
            raise
        except EngineRefused as refused:
            status = refused.status
            timeline.error = f"{refused.leg}_{refused.status}"
            headers = [*answer_headers(refused.headers), *_own_headers(timeline)]
            await request.respond(refused.status, headers, refused.body)
        except (ApiError, LegError, BodyError, Overloaded, TooLarge, ModelRequired, UnknownModel, ServerSideError) as e:
            error = _api_error(e)
            status = error.status
            timeline.error = error.reason
            await self._refuse(request, endpoint, timeline, error)
        except Exception as unexpected:
            self.log.error("unexpected error", request=timeline.id, **exception_fields(unexpected))
            status = 500
            timeline.error = "internal"
            await self._refuse(request, endpoint, timeline, ApiError(500, "internal error of the gateway"))
        finally:
            timeline.bytes_out = request.bytes_sent
            seconds = timeline.end(status)
            self.metrics.request(timeline.plan, status, seconds, timeline.model)
            self.log.access(timeline, request.method, request.path, request.peer)

    async def _answer(self, request: Request, endpoint: Endpoint, timeline: Timeline) -> Outcome:
        total = self.settings.deadlines.total
        if total is None:
            return await self._admitted(request, endpoint, timeline)
        try:
            async with asyncio.timeout(total):
                return await self._admitted(request, endpoint, timeline)
        except TimeoutError:
            running = ", ".join(f"{leg.name} ({leg.engine})" for leg in timeline.legs if leg.status in ("", "cancelled"))
            message = f"the request took longer than {total:g} s; it waited for {running or 'the client'}"
            raise ApiError(504, message, reason="total") from None

    async def _admitted(self, request: Request, endpoint: Endpoint, timeline: Timeline) -> Outcome:
        limits = self.settings.limits
        tenant = self.keyring.tenant(request.headers, endpoint.api)
        declared = request.content_length
        if declared is not None and declared > limits.body_bytes:
            raise ApiError(413, f"request body of {declared} bytes: at most {limits.body_bytes}", reason="body_size")
        ticket = await self.admission.admit(declared or 0)
        try:
            timeline.admit()
            if endpoint.body == "multipart":
                return await relay_form(self, request, endpoint, timeline, ticket)
            raw = await request.read_body(limits.body_bytes)
            if declared is None:
                ticket.grow(len(raw))
            timeline.bytes_in = len(raw)
            return await self._run(request, endpoint, timeline, raw, tenant)
        finally:
            ticket.release()

    async def _run(
        self, request: Request, endpoint: Endpoint, timeline: Timeline, raw: bytes, tenant: bytes
    ) -> Outcome:
        asked = read_json(raw, endpoint, self.settings.open, self.settings.limits.items)
        deployment = self.fleet.resolve(asked.body.model)
        timeline.model = deployment.label
        dialects = self._dialects[deployment]
        asked.body.refuse_duplicates(dialects.kv.owned)
        chosen = route(asked.shape, deployment.pools, deployment.settings)
        plan = choose(chosen, deployment, asked.shape.items)
        timeline.plan = plan.name
        for reason in chosen.degraded:
            timeline.reason(reason)
            self.metrics.degraded(reason)
        engine_key = deployment.settings.engine_api_key
        run = Run(
            tools=self.tools,
            request=request,
            request_id=timeline.id,
            endpoint=endpoint,
            deployment=deployment,
            plan=plan,
            bodies=asked.leg_bodies(plan, deployment.settings, tenant, self.metrics),
            ec=dialects.ec,
            kv=dialects.kv,
            timeline=timeline,
            headers=leg_headers(
                request.headers,
                engine_key=engine_key.get_secret_value() if engine_key else None,
                checks_keys=self.keyring.checks,
                pass_rank="data_parallel_rank" in self.settings.open,
            ),
            own_headers=_own_headers(timeline),
        )
        return await run.go()
