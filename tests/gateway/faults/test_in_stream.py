"""Errors inside a stream that has begun: the engine's own, and the gateway's, in the form of each API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.raw import Answer, Raw
from tests.gateway.rig import BODIES, PLANS, POSTS, PlanName, Rig, chat
from triptych.http.server import Server
from triptych.sim import Sim
from triptych.sim.faults import Fault

IMAGES = {"plain": 0, "p_d": 0, "e_pd": 1, "e_p_d": 1}


def parsed(event: bytes) -> tuple[str | None, Any]:
    """Name and data of one event."""
    name, data = None, b""
    for line in event.split(b"\n"):
        field, _, value = line.partition(b": ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            data += value
    return name, json.loads(data)


def check_form(api: str, event: bytes, code: int, text: str) -> None:
    """The event is an error in the API's own form."""
    name, data = parsed(event)
    if api in ("chat", "completions"):
        assert name is None
        assert set(data) == {"error"}
        assert set(data["error"]) == {"message", "type", "param", "code"}
        assert data["error"]["code"] == code
        assert text in data["error"]["message"]
    elif api == "messages":
        assert name == "error"
        assert data["type"] == "error"
        assert set(data["error"]) == {"type", "message"}
        assert text in data["error"]["message"]
    else:
        assert name == "error"
        assert data["type"] == "error"
        assert text in data["message"]
        assert data["code"] == str(code)


def check_body(api: str, answer: Answer, status: int, text: str) -> None:
    """The answer is an error of that status in the API's own form."""
    assert answer.status == status, answer
    if api == "messages":
        assert answer.json["type"] == "error"
        assert set(answer.json["error"]) == {"type", "message"}
    else:
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        assert answer.json["error"]["code"] == status
    assert text in answer.json["error"]["message"]


@pytest.mark.parametrize("api", ["chat", "completions", "messages"])
@pytest.mark.parametrize("events", [0, 4])
async def test_a_stream_that_ends_without_its_end_mark_is_a_broken_one(api: str, events: int) -> None:
    """Something between engine and gateway may end a cut stream as if nothing had happened."""
    path, body = BODIES[api]
    async with Rig("plain") as rig:
        rig.sim("combined").faults.add(Fault(kind="end", events=events, path=POSTS))
        answer = await rig.post(body(stream=True), path)
        text = f"combined engine {rig.sim('combined').url}: the stream ended before its last event"
        if events:
            assert answer.complete
            check_form(api, answer.events[-2], 502, text)
        else:
            check_body(api, answer, 502, text)
        await rig.settled()
        assert rig.legs() == {("combined", "invalid_response"): 1}


async def test_a_stream_without_any_event_is_no_answer() -> None:
    path, body = BODIES["responses"]
    async with Rig("plain") as rig:
        rig.sim("combined").faults.add(Fault(kind="end", events=0, path=POSTS))
        check_body("responses", await rig.post(body(stream=True), path), 502, "combined engine")
        await rig.settled()


@pytest.mark.parametrize("api", ["chat", "completions", "messages"])
async def test_a_connection_lost_behind_the_end_mark_costs_nothing(api: str) -> None:
    path, body = BODIES[api]
    async with Rig("plain") as rig:
        whole = await rig.post(body(stream=True), path)
        last = len(whole.events) - 1

        async def lose(request: Any) -> None:
            """The whole stream, then the end of the connection instead of the end of the answer."""
            await request.read_body(1 << 20)
            await request.start(200, [(b"content-type", b"text/event-stream")])
            await request.send(whole.body)
            request.abort()

        server = Server(lose)
        ((_, port),) = await server.start("127.0.0.1", 0)
        (engine,) = rig.gateway.fleet.engines()
        engine.origin = engine.origin._replace(port=port)
        answer = await rig.post(body(stream=True), path)
        assert answer.complete
        assert answer.body == whole.body
        assert len(answer.events) - 1 == last
        await rig.settled()
        assert rig.legs() == {("combined", "success"): 2}
        await server.close()


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("kind", ["cut", "reset_body", "hang_body"])
async def test_a_broken_stream_is_told_of_in_the_form_of_its_api(api: str, kind: str) -> None:
    path, body = BODIES[api]
    async with Rig("p_d", deadlines={"stream_idle": 0.3}) as rig:
        rig.sim("decode").faults.add(Fault(kind=kind, events=4, path=POSTS, partial=True))
        async with rig.client() as client:
            client.send(body(stream=True), path)
            answer = await client.answer()
            assert answer.complete
            assert b"[DONE]" not in answer.body
            assert b"message_stop" not in answer.body
            assert b"response.completed" not in answer.body
            *whole, error, tail = answer.events
            assert len(whole) == 4
            assert tail == b""
            code = 504 if kind == "hang_body" else 502
            check_form(api, error, code, f"decode engine {rig.sim('decode').url}")
            assert await client.ended()
        await rig.settled()
        assert rig.count("stream_errors", leg="decode") == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("api", BODIES)
async def test_an_error_before_the_answer_has_the_form_of_its_api(api: str, role: str, stream: bool) -> None:
    path, body = BODIES[api]
    async with Rig("p_d") as rig:
        rig.sim(role).faults.add(Fault(kind="reset", path=POSTS))
        check_body(api, await rig.post(body(stream=stream), path), 502, f"{role} engine {rig.sim(role).url}")
        await rig.settled()


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_an_error_of_a_strict_encode_leg_has_the_form_of_the_clients_api(api: str) -> None:
    path, body = BODIES[api]
    async with Rig("e_pd", encode_failure="strict") as rig:
        rig.sim("encode").faults.add(Fault(kind="reset", path=POSTS))
        check_body(api, await rig.post(body(images=1), path), 502, f"enc0 engine {rig.sim('encode').url}")
        await rig.settled()


@pytest.mark.parametrize("api", BODIES)
async def test_an_engines_own_error_in_its_stream_passes_as_it_is_and_counts(api: str) -> None:
    path, body = BODIES[api]
    async with Sim() as direct, Rig("plain") as rig:
        for sim in (direct, rig.sim("combined")):
            sim.faults.add(Fault(kind="sse_error", events=4, message="ran out of luck", path=POSTS))
        through = await rig.post(body(stream=True), path)
        async with Raw(direct.config.host, direct.port) as client:
            client.send(body(stream=True), path)
            told = await client.answer()
        assert through.status == 200
        if told.complete:
            assert through.complete
            assert [without_ids(e) for e in through.events] == [without_ids(e) for e in told.events]
            assert b"ran out of luck" in through.body
        else:  # responses: vLLM breaks off
            *whole, error, _ = through.events
            assert len(whole) == 4
            check_form(api, error, 502, "combined engine")
        await rig.settled()
        assert rig.legs() == {("combined", "http_error" if told.complete else "invalid_response"): 1}
        assert rig.count("stream_errors", leg="combined") == 1
        assert rig.count("requests", status="200") == 1
        assert [line["error"] for line in rig.log if line["event"] == "request"] != [""]


def without_ids(event: bytes) -> Any:
    """An event without what differs from one request to the next."""
    if not event.startswith((b"data: {", b"event: ")):
        return event
    name, data = parsed(event)

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in ("id", "created", "item_id", "created_at")}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return name, strip(data)


@pytest.mark.parametrize("plan", PLANS)
async def test_an_engines_error_as_its_first_event_passes(plan: PlanName) -> None:
    """vLLM begins a stream before it runs: what fails then is an event of a 200, and its own business."""
    async with Rig(plan) as rig:
        rig.sim("final").faults.add(Fault(kind="sse_error", events=0, message="at once", path=POSTS))
        answer = await rig.post(chat(images=IMAGES[plan], stream=True))
        assert answer.status == 200
        assert b"at once" in answer.body
        assert answer.complete
        await rig.settled()
        assert rig.legs()[(rig.final, "http_error")] == 1


@pytest.mark.parametrize(
    "text",
    ['data: {"error": 1}', "event: error", 'x\ndata: {"error"', "\r\nevent: error\r\n", "\u2028event: error\n"],
)
async def test_what_a_model_writes_of_errors_is_no_error(text: str) -> None:
    from_engine = [
        *({"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in (text, text * 2)),
    ]
    wire = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in from_engine) + b"data: [DONE]\n\n"
    async with Rig("plain") as rig:
        fault = Fault(
            kind="status", status=200, body=wire.decode(), headers={"content-type": "text/event-stream"}, path=POSTS
        )
        rig.sim("combined").faults.add(fault)
        answer = await rig.post(chat(stream=True))
        assert answer.body == wire
        await rig.settled()
        assert rig.legs() == {("combined", "success"): 1}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
async def test_an_engines_error_is_seen_whatever_its_line_ends(line_end: str) -> None:
    events = ['data: {"choices": []}', 'data: {"error": {"message": "no"}}', "data: [DONE]"]
    wire = "".join(event + 2 * line_end for event in events)
    async with Rig("plain") as rig:
        headers = {"content-type": "text/event-stream"}
        rig.sim("combined").faults.add(Fault(kind="status", status=200, body=wire, headers=headers, path=POSTS))
        answer = await rig.post(chat(stream=True))
        assert answer.body == wire.encode()
        await rig.settled()
        assert rig.legs() == {("combined", "http_error"): 1}
