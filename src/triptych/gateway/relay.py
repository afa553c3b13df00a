"""The way back: the answering engine's response to the client.

Rules: contract, "Errors, and what the client sees". The status line waits for the engine's own. A whole answer is
buffered, so that a cut one is a 502; a stream is relayed event by event, and where it breaks the
client is told in band.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from triptych.body.answer import AnswerError, nulled, nulled_inside
from triptych.body.scan import BodyError, validate
from triptych.gateway.endpoints import Api
from triptych.gateway.engines import Deployment
from triptych.gateway.errors import ApiError
from triptych.gateway.identity import answer_headers
from triptych.gateway.timeline import Timeline
from triptych.gateway.tools import Tools
from triptych.gateway.upstream import Leg, LegError, LegStatus, failed, read_answer
from triptych.http.client import Response
from triptych.http.errors import CutError, UpstreamError
from triptych.http.head import Header
from triptych.http.request import Buffer, Request
from triptych.http.sse import EventScanner, EventTooLarge

# At the beginning of a line: inside of one it is text that a model has written.
_ERROR_EVENT = re.compile(rb'^(?:data: ?\{"error"|event: ?(?:error|response\.failed)[\r\n])', re.MULTILINE)
# An event that may tell handles: vLLM's streams of responses end with the whole answer, handles and all.
_TELLING_DATA = re.compile(rb"^(data: ?)(\{.*_transfer_params.*\})(?=\r?$)", re.MULTILINE)
_WHOLE_ANSWERS = ("response", "message")
_check_json = msgspec.json.Decoder(msgspec.Raw).decode

# What the last event of a whole stream holds (vLLM 0.32, entrypoints): a stream that ends without it has been cut by
# something that then ended it as if nothing had happened.
_END_MARKS: dict[Api, bytes] = {
    "chat": b"data: [DONE]",
    "completions": b"data: [DONE]",
    "messages": b"event: message_stop",
}


class Outcome(msgspec.Struct, frozen=True):
    """How the relay ended.

    status: of the status line that the client got. failure: why the answer is not a good one though it was relayed,
    in a word for logs; None if it is. leg: how that leaves the leg.
    """

    status: int
    failure: str | None = None
    leg: LegStatus = "success"


class Relay:
    """One answer on its way. own_headers: the gateway's (request id)."""

    __slots__ = (
        "api",
        "deployment",
        "leg",
        "own_headers",
        "request",
        "timeline",
        "tools",
    )

    def __init__(
        self,
        tools: Tools,
        request: Request,
        api: Api,
        deployment: Deployment,
        timeline: Timeline,
        leg: Leg,
        own_headers: list[Header],
    ) -> None:
        self.tools = tools
        self.request = request
        self.api = api
        self.deployment = deployment
        self.timeline = timeline
        self.leg = leg
        self.own_headers = own_headers

    async def run(self, response: Response) -> Outcome:
        """Relay the response.

        Raises LegError or ApiError only while nothing has been sent to the client.
        """
        # Then a refused key is none of the client's.
        if response.status in (401, 403) and self.deployment.settings.engine_api_key is not None:
            raise ApiError(
                502,
                f"{self.leg} refused the gateway's own key ({response.status}): check `engine_api_key`",
                reason="engine_key",
            )
        kind = _content_type(response.headers)
        if kind == b"text/event-stream" and response.status < 300:
            return await self._events(response)
        if kind == b"application/json" or response.status >= 300 or response.length is not None:
            return await self._whole(response, is_json=kind == b"application/json")
        return await self._bytes(response)

    async def _whole(self, response: Response, *, is_json: bool) -> Outcome:
        tools = self.tools
        body = await read_answer(self.leg, response, tools.answer_bytes, tools.stream_idle)
        segments: Buffer | Sequence[Buffer] = body
        good = response.status < 300
        if is_json and not tools.shows_handles and body.find(b"_transfer_params") >= 0:
            try:
                segments = nulled(body)
            except AnswerError as error:
                if good:
                    raise LegError(self.leg.name, "invalid_response", f"{self.leg}: {error}") from error
                # An error in words that calls itself JSON: nothing that a client could read handles from.
        elif is_json and good:
            try:
                _check_json(body)
            except (msgspec.MsgspecError, RecursionError):
                self._check_again(body)
        await self.request.respond(response.status, self._head(response), segments)
        if response.status >= 400:
            return Outcome(response.status, f"http_{response.status}", "http_error")
        return Outcome(response.status)

    def _check_again(self, body: bytes) -> None:
        """JSON that msgspec does not take (lone surrogates) is JSON all the same. Raises LegError for what is not."""
        try:
            validate(body, "answer")
        except BodyError as error:
            raise LegError(self.leg.name, "invalid_response", f"{self.leg}: {error}") from None

    async def _bytes(self, response: Response) -> Outcome:
        """Anything else of unknown length (sound, say) as it comes.

        A cut one cannot be told of once it has begun, so the connection is dropped.
        """
        request = self.request
        try:
            async for data in response.chunks(timeout=self.tools.stream_idle):
                if not request.started:
                    await request.start(response.status, self._head(response))
                await request.send(data)
        except UpstreamError as error:
            broken = failed(self.leg, error)
            if not request.started:
                raise broken from error
            request.abort()
            return Outcome(response.status, f"{broken.leg}_{broken.status}", broken.status)
        if not request.started:
            await request.start(response.status, self._head(response))
        await request.finish()
        return Outcome(response.status)

    async def _events(self, response: Response) -> Outcome:
        request, idle = self.request, self.tools.stream_idle
        scanner = EventScanner(self.tools.event_bytes)
        end_mark = _END_MARKS.get(self.api, b"")
        told = False
        last = b""

        def relay(data: bytes) -> bool:
            nonlocal told, last
            events = scanner.feed(data)
            if events.find(b"_transfer_params") >= 0:
                events = self._without_handles(events)
            if events.find(b"error") >= 0 and _tells_error(events):
                told = True
            last = events or last
            return request.send_nowait(events)

        try:
            # The status line waits for the first whole event: until then a broken stream is still an error of its own.
            async for data in response.chunks(timeout=idle):
                events = scanner.feed(data)
                if events:
                    if events.find(b"_transfer_params") >= 0:
                        events = self._without_handles(events)
                    await self._begin(response)
                    told = _tells_error(events)
                    last = events
                    await request.send(events)
                    break
            await response.pump(relay, request.drained, timeout=idle)
            if scanner.pending:
                raise CutError(self.leg.engine.origin, "the stream ended inside an event")
            if not (request.started and (told or end_mark in last)):
                raise CutError(self.leg.engine.origin, "the stream ended before its last event")
        except EventTooLarge as error:
            if error.ready:
                if not request.started:
                    await self._begin(response)
                await request.send(self._without_handles(error.ready))
            message = f"{self.leg} sent an event of more than {self.tools.event_bytes} bytes"
            return await self._broken(LegError(self.leg.name, "oversize", message))
        except UpstreamError as error:
            if not end_mark or end_mark not in last:  # else all was said that there was to say
                return await self._broken(failed(self.leg, error))
        await request.finish()
        if told:
            return Outcome(response.status, f"{self.leg.name}_stream_error", "http_error")
        return Outcome(response.status)

    def _without_handles(self, events: bytes) -> bytes:
        """Events with the handles in them nulled, unless a setting shows them."""
        return events if self.tools.shows_handles else _TELLING_DATA.sub(_nulled_event, events)

    async def _begin(self, response: Response) -> None:
        seconds = self.timeline.first_token()
        if seconds is not None:
            self.tools.metrics.first_token(self.timeline.plan, seconds, self.deployment.label)
        await self.request.start(response.status, self._head(response))

    async def _broken(self, error: LegError) -> Outcome:
        """Tell the client in band which leg broke, then close: never an end of ours that looks like a good one."""
        request = self.request
        if not request.started:
            raise error
        request.keep_alive = False
        await request.send(error.api_error().event(self.api))
        await request.finish()
        return Outcome(200, f"{error.leg}_{error.status}", error.status)

    def _head(self, response: Response) -> list[Header]:
        return [*answer_headers(response.headers), *self.own_headers, (b"server-timing", self.timeline.server_timing())]


def _content_type(headers: list[Header]) -> bytes:
    for name, value in headers:
        if name == b"content-type":
            return value.partition(b";")[0].strip().lower()
    return b""


def _nulled_event(data: re.Match[bytes]) -> bytes:
    try:
        return data[1] + nulled_inside(data[2], _WHOLE_ANSWERS)
    except AnswerError:
        return data[0]  # no JSON: nothing that a client could read handles from


def _tells_error(events: bytes) -> bool:
    """Whether an engine tells an error in its stream: vLLM's `data: {"error": ...}`, or an event of that name."""
    return _ERROR_EVENT.search(events) is not None
