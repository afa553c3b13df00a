"""How the client gets text and sound: a stream of chat events, a whole chat answer, or a file of sound."""

from __future__ import annotations

import asyncio
import base64
import time
from abc import ABC, abstractmethod
from typing import Any

from triptych.gateway.errors import ApiError
from triptych.gateway.pipeline.ask import Ask
from triptych.gateway.pipeline.events import Spoken, event, whole_answer
from triptych.gateway.sound.formats import Encoder, FormatUnavailable, content_type, encoder, whole
from triptych.http.head import Header
from triptych.http.request import Request

Head = list[Header]


class Answer(ABC):
    """One client's answer, from the pieces of text and sound in the order in which they come.

    `head`: the gateway's own headers, asked for when the answer begins; `first`: called when it does.
    """

    def __init__(self, request: Request, head: Any, first: Any) -> None:
        self.request = request
        self._head = head
        self._first = first

    async def text(self, data: dict[str, Any]) -> None:
        """An event of the first stage's stream."""
        raise NotImplementedError

    async def whole_text(self, answer: bytes) -> None:
        """The first stage's whole answer."""
        raise NotImplementedError

    @abstractmethod
    async def sound(self, pcm: bytes, rate: int) -> None:
        """A piece of sound."""

    @abstractmethod
    async def end(self) -> None:
        """Text and sound have ended."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what the answer holds, however it went; may be called twice."""

    async def _begin(self, kind: bytes, *, events: bool = True) -> None:
        if not self.request.started:
            if events:  # of anything else a client cannot be told in band that it broke
                self._first()
            await self.request.start(200, [(b"content-type", kind), *self._head()])


class ChatStream(Answer):
    """Chat events, text and sound as they come."""

    def __init__(self, request: Request, head: Any, first: Any, ask: Ask, audio_id: str) -> None:
        super().__init__(request, head, first)
        self._spoken = Spoken(audio_id, usage=ask.usage, now=int(time.time()))

    async def text(self, data: dict[str, Any]) -> None:
        await self._send(self._spoken.text(data))

    async def sound(self, pcm: bytes, rate: int) -> None:
        await self._send([self._spoken.sound(pcm)])

    async def end(self) -> None:
        await self._send(self._spoken.end())
        await self.request.send(b"data: [DONE]\n\n")
        await self.request.finish()

    async def _send(self, made: list[dict[str, Any]]) -> None:
        if made:
            await self._begin(b"text/event-stream; charset=utf-8")
            await self.request.send(b"".join(map(event, made)))


class ChatWhole(Answer):
    """One JSON answer once everything is there. most: bytes of sound that it may have."""

    def __init__(self, request: Request, head: Any, first: Any, ask: Ask, audio_id: str, most: int) -> None:
        super().__init__(request, head, first)
        self._ask = ask
        self._audio_id = audio_id
        self._pcm = _Gathered(most)
        self._answer = b""

    async def whole_text(self, answer: bytes) -> None:
        self._answer = answer

    async def sound(self, pcm: bytes, rate: int) -> None:
        self._pcm.add(pcm, rate)

    async def end(self) -> None:
        encoded = await self._pcm.encoded(self._ask.form)
        body = whole_answer(self._answer, self._audio_id, encoded, int(time.time()))
        await self.request.respond(200, [(b"content-type", b"application/json"), *self._head()], body)


class SpeechStream(Answer):
    """Encoded sound as it comes; as bytes, or in events."""

    def __init__(self, request: Request, head: Any, first: Any, ask: Ask) -> None:
        super().__init__(request, head, first)
        self._ask = ask
        self._encoder: Encoder | None = None
        self._usage: Any = None

    async def text(self, data: dict[str, Any]) -> None:
        self._usage = data.get("usage") or self._usage

    async def sound(self, pcm: bytes, rate: int) -> None:
        if self._encoder is None:
            self._encoder = _made(self._ask.form, rate)
            kind = b"text/event-stream; charset=utf-8" if self._ask.events else content_type(self._ask.form, rate)
            await self._begin(kind, events=self._ask.events)
        await self._send(await asyncio.to_thread(self._encoder.feed, pcm))

    async def end(self) -> None:
        if self._encoder is None:
            raise ApiError(502, "the pipeline gave no sound", reason="no_sound")
        await self._send(await asyncio.to_thread(self._encoder.finish))
        if self._ask.events:
            await self.request.send(event({"type": "speech.audio.done", "usage": self._usage}))
        await self.request.finish()

    async def _send(self, encoded: bytes) -> None:
        if encoded:
            if self._ask.events:
                encoded = event({"type": "speech.audio.delta", "audio": base64.b64encode(encoded).decode()})
            await self.request.send(encoded)

    def close(self) -> None:
        if self._encoder is not None:
            self._encoder.close()


class SpeechWhole(Answer):
    """One file once everything is there: its head says how long it is."""

    def __init__(self, request: Request, head: Any, first: Any, ask: Ask, most: int) -> None:
        super().__init__(request, head, first)
        self._ask = ask
        self._pcm = _Gathered(most)

    async def text(self, data: dict[str, Any]) -> None:
        """Nobody reads it."""

    async def sound(self, pcm: bytes, rate: int) -> None:
        self._pcm.add(pcm, rate)

    async def end(self) -> None:
        encoded = await self._pcm.encoded(self._ask.form)
        kind = content_type(self._ask.form, self._pcm.rate)
        await self.request.respond(200, [(b"content-type", kind), *self._head()], encoded)


class _Gathered:
    """Sound that is kept until it is whole."""

    def __init__(self, most: int) -> None:
        self.rate = 0
        self._most = most
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, pcm: bytes, rate: int) -> None:
        self.rate = rate
        self._size += len(pcm)
        if self._size > self._most:
            raise ApiError(
                502, f"the sound has more than {self._most} bytes (`limits.answer_bytes`)", reason="oversize"
            )
        self._pieces.append(pcm)

    async def encoded(self, form: str) -> bytes:
        if not self.rate:
            raise ApiError(502, "the pipeline gave no sound", reason="no_sound")
        try:
            return await asyncio.to_thread(whole, form, self.rate, b"".join(self._pieces))
        except FormatUnavailable as error:
            raise _unavailable(error) from None


def _made(form: str, rate: int) -> Encoder:
    try:
        return encoder(form, rate)
    except FormatUnavailable as error:
        raise _unavailable(error) from None


def _unavailable(error: FormatUnavailable) -> ApiError:
    return ApiError(501, str(error), param="response_format", reason="format")
