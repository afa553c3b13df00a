"""Which requests a pipeline answers in sound, and with which replicas of its stages."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from triptych.body.request import HANDLES, Policy, RequestBody
from triptych.gateway.endpoints import ENDPOINTS, Endpoint
from triptych.gateway.engines import Deployment, Engine
from triptych.gateway.intake import Asked, Intake
from triptych.gateway.metrics import Metrics
from triptych.gateway.pipeline.answer import Answer, ChatStream, ChatWhole, SpeechStream, SpeechWhole
from triptych.gateway.pipeline.ask import Ask, chat_ask, speech_ask, stage_request, text_request
from triptych.gateway.pipeline.receiver import SoundReceiver
from triptych.gateway.pipeline.run import StageLeg
from triptych.gateway.plan import Plan, pick
from triptych.gateway.settings import GatewaySettings
from triptych.gateway.timeline import Timeline
from triptych.http.head import Header
from triptych.http.request import Request

SPEECH = "/v1/audio/speech"
_CHAT = ENDPOINTS["/v1/chat/completions"]


class Wish(NamedTuple):
    """A request for sound: what for, the first stage's request in its place, and the id that all stages know it by."""

    ask: Ask
    asked: Asked
    endpoint: Endpoint
    stream: str


class Pipelines:
    """The sound of all models that have stages. `async with` it before the first request."""

    def __init__(
        self,
        deployments: tuple[Deployment, ...],
        settings: GatewaySettings,
        owned: frozenset[str],
        metrics: Metrics,
    ) -> None:
        """owned: as of `Intake.of`. Raises ConnectorError for options of `sound` that cannot be."""
        self._limits = settings.limits
        self._metrics = metrics
        # What the gateway says to stages has been put in by then, and what a client may not say is gone.
        self._intake = Intake(Policy.of(owned, HANDLES.difference(settings.open)), settings.open, settings.limits.items)
        self._receivers = {
            d: SoundReceiver(d.settings.sound, len(d.stages) + 1) for d in deployments if d.stages and d.settings.sound
        }
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Pipelines:
        for receiver in self._receivers.values():
            await self._stack.enter_async_context(receiver)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    @property
    def open_streams(self) -> int:
        """How many requests are being given sound."""
        return sum(receiver.open_streams for receiver in self._receivers.values())

    def wish(self, endpoint: Endpoint, body: RequestBody, deployment: Deployment, request_id: str) -> Wish | None:
        """The request as one for sound, None where it is none. Raises ApiError, BodyError."""
        if endpoint.path == SPEECH:
            ask: Ask | None = speech_ask(body)
        else:
            ask = chat_ask(body) if endpoint.api == "chat" else None
        if ask is None:
            return None
        # The client may choose the request's id; that of the stream nobody else may know or use.
        stream = f"{request_id}-{secrets.token_hex(8)}"
        sound = deployment.settings.sound
        raw = text_request(ask, body, stream, sound.text_tokens if sound else None)
        return Wish(ask, self._intake.read(raw, _CHAT), _CHAT, stream)

    def more(
        self, wish: Wish, deployment: Deployment, plan: Plan, request: Request, timeline: Timeline
    ) -> Mapping[str, Any]:
        """What a `SpokenRun` has beside a `Run`; the later stages' places are taken. Raises ApiError 429, 503."""
        timeline.plan += "+sound"

        def head() -> list[Header]:
            return [(b"x-request-id", timeline.id.encode("ascii")), (b"server-timing", timeline.server_timing())]

        def first() -> None:
            seconds = timeline.first_token()
            if seconds is not None:
                self._metrics.first_token(timeline.plan, seconds, deployment.label)

        sound = deployment.settings.sound
        assert sound is not None
        chosen = [pick(pool) for pool in deployment.stages]
        senders = [plan.final, *chosen]
        legs = [
            StageLeg(
                stage.id,
                pool,
                engine.lease(),
                stage_request(
                    wish.asked.body.model,
                    wish.stream,
                    before.settings.source,
                    wish.ask,
                    _room(engine, stage.max_tokens),
                ),
            )
            for stage, pool, engine, before in zip(
                deployment.settings.stages, deployment.stages, chosen, senders, strict=False
            )
        ]
        return {
            "answer": self._answer(wish, timeline.id, request, head, first),
            "receiver": self._receivers[deployment],
            "stages": legs,
            "stream": wish.stream,
            "source": chosen[-1].settings.source,
            "streams_text": wish.ask.api == "speech" or wish.ask.stream,
            "text_stage": sound.text_stage,
        }

    def _answer(
        self, wish: Wish, request_id: str, request: Request, head: Callable[[], list[Header]], first: Any
    ) -> Answer:
        ask, most = wish.ask, self._limits.answer_bytes
        if ask.api == "speech":
            return (
                SpeechStream(request, head, first, ask) if ask.stream else SpeechWhole(request, head, first, ask, most)
            )
        audio_id = f"audio_{request_id}"
        if ask.stream:
            return ChatStream(request, head, first, ask, audio_id)
        return ChatWhole(request, head, first, ask, audio_id, most)


def _room(engine: Engine, most: int) -> int:
    """How many tokens an engine lets a request of one token make: vLLM refuses more than its context holds."""
    lengths = [card.get("max_model_len") for card in engine.cards]
    return min([most, *(length - 1 for length in lengths if isinstance(length, int) and length > 1)])
