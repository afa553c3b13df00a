"""Running a plan: encode legs, the prefill leg, the answering leg, in the order that the hand-over needs.

Whatever ends the run (an answer, an error, a client that leaves), every leg that was started is closed and every place
on an engine given back: legs end in `finally`, and leaving a leg's await closes its connection.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.body.answer import AnswerError, top_level_object
from triptych.gateway.encode import EncodeStage
from triptych.gateway.endpoints import Endpoint
from triptych.gateway.engines import Deployment, Engine, Lease
from triptych.gateway.errors import ApiError, EngineRefused, first_of
from triptych.gateway.handover import EcContext, EcDialect, KvContext, KvDialect
from triptych.gateway.legs import LegBodies
from triptych.gateway.plan import Plan
from triptych.gateway.relay import Outcome, Relay
from triptych.gateway.timeline import Timeline
from triptych.gateway.tools import Tools
from triptych.gateway.upstream import Leg, LegError, call_leg, open_leg
from triptych.http.head import Header
from triptych.http.request import Buffer, Request

_RANK = b"x-data-parallel-rank"
# vLLM 0.32 takes it like the body's `priority` (entrypoints/generate/base/serving.py).
_PRIORITY = b"x-vllm-priority"


@dataclass(slots=True)
class Run:
    """One request on its way through its plan; `go` is called once.

    headers: the client's that every leg gets. own_headers: the gateway's on the answer. sent: told once no leg has the
    client's body to send any more.
    """

    tools: Tools
    request: Request
    request_id: str
    endpoint: Endpoint
    deployment: Deployment
    plan: Plan
    bodies: LegBodies
    ec: EcDialect
    kv: KvDialect
    timeline: Timeline
    headers: list[Header]
    own_headers: list[Header]
    sent: Callable[[], None] = lambda: None

    async def go(self) -> Outcome:
        """Run all legs and relay the answer.

        Raises ApiError, LegError, EngineRefused while nothing has been sent to the client.
        """
        plan = self.plan
        # Both places are taken before the first await, so that the choice still holds when the leg's turn comes.
        final = self._leg("decode", plan.final.lease())
        prefill = None if plan.prefill is None else self._leg("prefill", plan.prefill.lease())
        try:
            if plan.items:
                await self._encode(prefill or final)
            if prefill is None:
                final.body = self.bodies.final({}, consumer=True)
                return await self._answer(final)
            context = KvContext(
                self.request_id,
                plan.prefill.settings,  # type: ignore[union-attr]
                plan.final.settings,
                secrets.token_hex(16),
            )
            prefill.body = self.bodies.prefill(self.kv.prefill_members(context))
            if self.kv.at_once:
                return await self._at_once(prefill, final, context)
            handed = await self._prefill(prefill)
            final.body = self._decode_body(context, handed)
            return await self._answer(final)
        finally:
            if prefill is not None:
                prefill.end(self.tools.metrics)
            final.end(self.tools.metrics)

    async def _encode(self, consumer: Leg) -> None:
        """Run the encode stage and tell the consumer's body what came of it."""
        settings, tools = self.deployment.settings, self.tools
        engine = consumer.engine
        context = EcContext(
            self.request_id,
            engine.settings,
            tuple(secrets.token_hex(16) for _ in range(self.plan.items)),
            self.ec.rank(engine.settings, tools.rng),
        )

        def make_leg(item: int, lease: Lease) -> Leg:
            leg = self._leg(f"enc{item}", lease)
            if not settings.encode_priority:
                leg.headers = [header for header in leg.headers if header[0] != _PRIORITY]
            leg.repeatable = True
            leg.body = self.bodies.encode(item, self.ec.encode_params(context, item))
            return leg

        stage = EncodeStage(
            client=tools.client,
            pool=self.deployment.encode,
            metrics=tools.metrics,
            log=tools.log,
            request_id=self.request_id,
            deadline=tools.settings.deadlines.encode,
            parallel=tools.settings.limits.encode_legs,
            strict=settings.encode_failure == "strict",
            gateway_key=settings.engine_api_key is not None,
        )
        handles = await stage.run(self.plan.items, make_leg)
        params = self.ec.consumer_params(context, handles)
        self.bodies.encoded(params, handles)
        if params is not None:
            tools.metrics.handles_merged += sum(handed is not None for handed in handles)
        tools.metrics.parts_rewritten += self.bodies.rewritten
        consumer.pinned = self.ec.pins_consumer
        rank = self.ec.consumer_rank(context)
        if rank is not None:
            # The encoders were told of this rank: a client's own, where a setting lets it through, gives way.
            headers = [header for header in consumer.headers if header[0] != _RANK]
            consumer.headers = [*headers, (_RANK, b"%d" % rank)]

    async def _prefill(self, leg: Leg) -> bytes | None:
        """Run the prefill leg; what it hands to decode, None for nothing."""
        settings, tools = self.tools.settings, self.tools
        try:
            answer = await call_leg(
                tools.client, leg, settings.deadlines.prefill, settings.limits.prefill_answer_bytes, tools.metrics
            )
            leg.body = ()
            if answer.status != 200:
                leg.status = "http_error"
                if answer.status in (401, 403) and self._gateway_key:
                    raise ApiError(502, f"{leg} refused the gateway's own key ({answer.status})", reason="engine_key")
                if 400 <= answer.status < 500:
                    raise EngineRefused(leg.name, answer.status, answer.headers, answer.body)
                raise LegError(leg.name, "http_error", f"{leg} answered {answer.status}")
            try:
                handed = top_level_object(answer.body, self.kv.answer_field or "")
            except AnswerError as error:
                raise LegError(leg.name, "invalid_response", f"{leg}: {error}") from error
        except LegError as error:
            leg.status = error.status
            raise
        leg.status = "success"
        leg.end(tools.metrics)
        return handed

    async def _at_once(self, prefill: Leg, final: Leg, context: KvContext) -> Outcome:
        """Both legs together; whichever fails first ends the other."""
        final.body = self._decode_body(context, None)
        prefill.pinned = final.pinned = True  # each engine has been told of the other
        self.sent = lambda: None  # prefill may have to send when decode's answer has begun
        outcome: Outcome | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._prefill(prefill))
                outcome = await self._answer(final)
        except BaseExceptionGroup as failures:
            if outcome is not None:
                return outcome  # the client has its answer: what prefill said after it is only counted
            raise first_of(failures) from None
        return outcome

    def _decode_body(self, context: KvContext, handed: bytes | None) -> Sequence[Buffer]:
        members = self.kv.decode_members(context, handed)
        takes_encoder_output = self.deployment.settings.decode_ec_consumer
        # vLLM 0.32 dies of a metadata-only part whose embeddings it can get neither from KV nor from an encoder.
        has_kv = handed is not None or self.kv.at_once
        raw_media = not (takes_encoder_output or has_kv)
        return self.bodies.final(members, consumer=takes_encoder_output, raw_media=raw_media)

    def _answer(self, leg: Leg) -> Coroutine[Any, Any, Outcome]:
        # Not a coroutine of its own: each is one more to pass through with every wake-up of a request.
        self.bodies.let_go()
        return answer(
            self.tools, self.request, self.endpoint, self.deployment, self.timeline, leg, self.own_headers, self.sent
        )

    @property
    def _gateway_key(self) -> bool:
        return self.deployment.settings.engine_api_key is not None

    def _leg(self, name: str, lease: Lease) -> Leg:
        engine: Engine = lease.engine
        suffix = "" if self.kv.same_id and not name.startswith("enc") else f"-{name}"
        role = engine.role
        return Leg(
            role if name == "decode" else name,
            role,
            self.deployment.pools[role],
            lease,
            self.request.origin_target,
            [*self.headers, (b"x-request-id", f"{self.request_id}{suffix}".encode())],
            (),
            self.timeline.leg(name, role, engine.url),
        )


async def answer(
    tools: Tools,
    request: Request,
    endpoint: Endpoint,
    deployment: Deployment,
    timeline: Timeline,
    leg: Leg,
    own_headers: list[Header],
    sent: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run the answering leg and relay what it says; the caller ends the leg. sent: told when its answer begins.

    Raises LegError, ApiError while nothing has been sent to the client.
    """
    try:
        response = await open_leg(tools.client, leg, tools.first_byte, tools.metrics)
        leg.body = ()  # nothing is sent again from here on, and a stream may take minutes
        sent()
        try:
            relay = Relay(tools, request, endpoint.api, deployment, timeline, leg, own_headers)
            outcome = await relay.run(response)
        except ApiError:  # the engine's answer was such that the client gets another one
            leg.status = "http_error"
            raise
        finally:
            response.close()
    except LegError as error:
        leg.status = error.status
        raise
    leg.status = outcome.leg
    if outcome.failure is not None and outcome.status < 400:
        tools.metrics.stream_error(leg.role, outcome.leg)
    return outcome
