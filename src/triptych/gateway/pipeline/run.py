"""Running a request through all stages of a pipeline at once.

The first stage's legs are those of any request (`gateway.run`), with its answer read here instead of being relayed;
each later stage has one leg, which is silent until its stage has ended; the sound comes over the chunk transfer layer.
The first of all these that fails ends the others, and the client is told of the one that the others failed from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.gateway.engines import Lease, Pool
from triptych.gateway.errors import ApiError, EngineRefused
from triptych.gateway.pipeline.answer import Answer
from triptych.gateway.pipeline.events import BadEvent, data_of
from triptych.gateway.pipeline.receiver import SoundBroken, SoundReceiver, SoundStream
from triptych.gateway.relay import Outcome
from triptych.gateway.run import Run
from triptych.gateway.timeline import LegTiming
from triptych.gateway.upstream import Leg, LegError, failed, open_leg, read_answer
from triptych.http.client import Response
from triptych.http.errors import ServerSideError, UpstreamError
from triptych.http.sse import EventScanner, EventTooLarge
from triptych.transfer.errors import ConnectorError

TEXT_PATH = b"/v1/chat/completions"
STAGE_PATH = b"/v1/completions"
SOUND = "sound"
AFTERMATH = 0.25
"""Seconds in which, after the first failure, the others may show which of them it came from."""
GRACE = 1.0
"""Seconds in which, after the answer's end, legs may end by themselves."""


@dataclass(frozen=True, slots=True)
class StageLeg:
    """What one of the later stages is asked, and the place on the replica that was chosen. body: JSON."""

    name: str
    pool: Pool
    lease: Lease
    body: bytes


@dataclass(slots=True)
class SpokenRun(Run):
    """One request for sound on its way.

    answer: how its client gets it. stages: the legs of the later stages, their places taken. stream: the id that all
    stages know it by; source: where its sound comes from, `host:port`. streams_text: the first stage answers in
    events. text_stage: the first stage's name.
    """

    answer: Answer = field(kw_only=True)
    receiver: SoundReceiver = field(kw_only=True)
    stages: Sequence[StageLeg] = field(kw_only=True)
    stream: str = field(kw_only=True)
    source: str | None = field(kw_only=True)
    streams_text: bool = field(kw_only=True)
    text_stage: str = field(kw_only=True)
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)  # whose piece goes to the client
    _heard: float = field(init=False, default=0.0)  # when text or sound last came

    async def go(self) -> Outcome:
        """Run everything and give the client its answer.

        Raises ApiError, LegError, EngineRefused, ServerSideError; the client may have been sent a part then.
        """
        legs = [self._stage_leg(stage) for stage in self.stages]
        timing = self.timeline.leg(SOUND, SOUND, self.source or "")
        sound: SoundStream | None = None
        self._note()
        try:
            sound = self._open(timing)
            await self._all(legs, sound, timing)
            return Outcome(200)
        finally:
            timing.end("cancelled")
            if sound is not None:
                sound.close("the client's request has ended")
            self.answer.close()
            for leg in legs:
                leg.end(self.tools.metrics)

    async def _all(self, legs: Sequence[Leg], sound: SoundStream, timing: LegTiming) -> None:
        text = asyncio.create_task(Run.go(self), name=self.text_stage)
        hears = asyncio.create_task(self._hear(sound, timing), name=SOUND)
        silent = [asyncio.create_task(self._attend(leg), name=leg.name) for leg in legs]
        everything = {text, hears, *silent}
        running = set(everything)
        try:
            while not (text.done() and hears.done()):
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if any(map(_failure, done)):
                    first = [error for error in map(_failure, done) if error is not None]
                    if running and not any(isinstance(error, ServerSideError) for error in first):
                        later, _ = await asyncio.wait(running, timeout=AFTERMATH)
                        first += [error for error in map(_failure, later) if error is not None]
                    raise min(first, key=_rank)
            await self.answer.end()
            if running:
                await asyncio.wait(running, timeout=GRACE)
        except BadEvent as error:
            raise LegError(self.text_stage, "invalid_response", f"{self.text_stage}: {error}") from error
        finally:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    # --- the first stage

    def _leg(self, name: str, lease: Lease) -> Leg:
        leg = Run._leg(self, name, lease)
        leg.target = TEXT_PATH
        if name == "decode":
            # What follows has been told of this replica.
            leg.pinned = True
            leg.name = leg.timing.name = leg.timing.role = self.text_stage
        return leg

    async def _answer(self, leg: Leg) -> Outcome:
        """Read what the first stage says. Raises LegError, ApiError, EngineRefused."""
        settings = self.tools.settings
        try:
            response = await open_leg(self.tools.client, leg, settings.deadlines.first_byte, self.tools.metrics)
            try:
                await self._check(leg, response)
                if self.streams_text:
                    async for data in self._events(leg, response, settings.deadlines.stream_idle):
                        async with self._turn:
                            await self.answer.text(data)
                else:
                    body = await read_answer(
                        leg, response, settings.limits.answer_bytes, settings.deadlines.stream_idle
                    )
                    await self.answer.whole_text(body)
            except (ApiError, EngineRefused):
                leg.status = "http_error"
                raise
            finally:
                response.close()
        except LegError as error:
            leg.status = error.status
            raise
        leg.status = "success"
        return Outcome(200)

    # --- the later stages

    def _stage_leg(self, stage: StageLeg) -> Leg:
        engine = stage.lease.engine
        return Leg(
            name=stage.name,
            role=engine.role,
            pool=stage.pool,
            lease=stage.lease,
            target=STAGE_PATH,
            headers=[*self.headers, (b"x-request-id", f"{self.request_id}-{stage.name}".encode())],
            body=(stage.body,),
            timing=self.timeline.leg(stage.name, engine.role, engine.url),
            pinned=True,
        )

    async def _attend(self, leg: Leg) -> None:
        """Be with a later stage until it has ended: it is silent unless it fails. Raises LegError, EngineRefused."""
        try:
            deadline = self.tools.settings.deadlines.first_byte
            response = await open_leg(self.tools.client, leg, deadline, self.tools.metrics)
            try:
                await self._check(leg, response)
                # As long as the stages before it: the sound's own deadline is for all of them.
                async for _ in self._events(leg, response, None):
                    pass
            except (ApiError, EngineRefused):
                leg.status = "http_error"
                raise
            finally:
                response.close()
        except LegError as error:
            leg.status = error.status
            raise
        leg.status = "success"

    async def _check(self, leg: Leg, response: Response) -> None:
        """Raise for an answer that is none: EngineRefused, ApiError, LegError."""
        if response.status == 200:
            return
        settings = self.tools.settings
        body = await read_answer(leg, response, settings.limits.answer_bytes, settings.deadlines.stream_idle)
        if response.status in (401, 403) and self._gateway_key:
            raise ApiError(502, f"{leg} refused the gateway's own key ({response.status})", reason="engine_key")
        if leg.name != self.text_stage:
            # The client did not write this request: what is wrong with it is nothing that it could mend.
            raise LegError(
                leg.name, "http_error", f"{leg} answered {response.status}: {body[:500].decode(errors='replace')}"
            )
        raise EngineRefused(leg.name, response.status, response.headers, body)

    async def _events(self, leg: Leg, response: Response, idle: float | None) -> AsyncIterator[dict[str, Any]]:
        """The objects of a stream until its end mark. Raises LegError where it fails, breaks, or ends without."""
        scanner = EventScanner(self.tools.settings.limits.event_bytes)
        try:
            async for data in response.chunks(timeout=idle):
                leg.timing.received(len(data))
                for found in data_of(scanner.feed(data)):
                    if found is None:
                        return
                    error = found.get("error")
                    if error is not None:
                        told = error.get("message") if isinstance(error, dict) else error
                        raise LegError(leg.name, "http_error", f"{leg} failed: {str(told)[:1000]}")
                    self._note()
                    yield found
        except UpstreamError as error:
            raise failed(leg, error) from error
        except (BadEvent, EventTooLarge) as error:
            raise LegError(leg.name, "invalid_response", f"{leg}: {error}") from error
        raise LegError(leg.name, "invalid_response", f"{leg}: the stream ended before its last event")

    # --- the sound

    def _open(self, timing: LegTiming) -> SoundStream:
        timing.start()
        try:
            return self.receiver.open(self.stream, self.source)
        except ConnectorError as error:
            raise ApiError(502, f"the sound cannot be received: {error}", reason="sound_connect") from error

    async def _hear(self, sound: SoundStream, timing: LegTiming) -> None:
        """Give the client its sound as it comes. Raises LegError."""
        idle = self.tools.settings.deadlines.stream_idle
        try:
            last = False
            while not last:
                try:
                    async with asyncio.timeout_at(self._heard + idle):
                        pcm, rate, last = await sound.next()
                except TimeoutError:
                    if asyncio.get_running_loop().time() < self._heard + idle:
                        continue  # the text goes on
                    raise LegError(SOUND, "timeout", f"{self._last_stage} gave no sound for {idle:g} s", 504) from None
                self._note()
                if pcm:
                    if timing.first is None:
                        timing.first_byte()
                    timing.received(len(pcm))
                    async with self._turn:
                        await self.answer.sound(pcm, rate)
        except SoundBroken as error:
            timing.end("invalid_response")
            raise LegError(SOUND, "invalid_response", f"the sound of {self._last_stage} broke: {error}") from error
        except LegError as error:
            timing.end(error.status)
            raise
        timing.end("success")

    @property
    def _last_stage(self) -> str:
        stage = self.stages[-1]
        return f"{stage.name} engine {stage.lease.engine.url}"

    def _note(self) -> None:
        self._heard = asyncio.get_running_loop().time()


def _failure(task: asyncio.Task[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def _rank(error: BaseException) -> int:
    """How near an error is to what went wrong: a stage whose connection broke is the cause, one that says that another
    has failed it is not."""
    match error:
        case ServerSideError():
            return 0
        case LegError(leg=leg, status="connect_error" | "invalid_response") if leg != SOUND:
            return 1
        case EngineRefused() | ApiError():
            return 2
        case LegError(leg=leg) if leg != SOUND:
            return 3
        case LegError():
            return 4
    return 0
