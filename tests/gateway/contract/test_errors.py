"""Contract, "Errors, and what the client sees": the statuses and the shapes. What each fault of each leg comes to is
in the tests of faults."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.contract.kit import Gate, Scripted
from tests.gateway.raw import Answer
from tests.gateway.rig import BODIES, Rig, chat
from triptych.gateway.settings import GatewaySettings
from triptych.sim import Fault

OPENAI = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/audio/speech"]
TYPES = {
    400: ("BadRequestError", "invalid_request_error"),
    401: ("AuthenticationError", "authentication_error"),
    404: ("NotFoundError", "not_found_error"),
    413: ("RequestTooLargeError", "request_too_large"),
    429: ("RateLimitError", "rate_limit_error"),
    502: ("BadGatewayError", "api_error"),
    503: ("ServiceUnavailableError", "overloaded_error"),
    504: ("GatewayTimeoutError", "timeout_error"),
}


def is_error(answer: Answer, status: int, path: str = "/v1/chat/completions") -> None:
    """The answer tells an error of the gateway's in the shape of that API."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    told = answer.json
    openai, anthropic = TYPES[status]
    if path.startswith("/v1/messages"):
        assert set(told) == {"type", "error"}
        assert told["type"] == "error"
        assert set(told["error"]) == {"type", "message"}
        assert told["error"]["type"] == anthropic
    else:
        assert set(told) == {"error"}
        assert set(told["error"]) == {"message", "type", "param", "code"}
        assert (told["error"]["type"], told["error"]["code"]) == (openai, status)
        assert told["error"]["param"] is None or isinstance(told["error"]["param"], str)
    assert isinstance(told["error"]["message"], str)


PATHS = [*OPENAI, "/v1/messages"]
# A body for any API.
ANY = {"model": "sim", "messages": [{"role": "user", "content": "a"}], "input": "a", "prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize("path", PATHS)
async def test_every_status_has_the_shape_of_its_api(path: str) -> None:
    async with Rig("plain", deadlines={"first_byte": 0.3}, limits={"body_bytes": 3000}) as rig:
        sim = rig.sim("combined")
        is_error(await rig.post(b"[]", path), 400, path)
        is_error(await rig.post(ANY | {"model": "x"}, path), 404, path)
        is_error(await rig.post(ANY | {"pad": "x" * 3000}, path), 413, path)
        sim.faults.add(Fault(kind="reset", path="/v1/*"))
        if path != "/v1/audio/speech":  # the simulator has none
            is_error(await rig.post(ANY, path), 502, path)
            sim.faults.add(Fault(kind="hang", path="/v1/*"))
            is_error(await rig.post(ANY, path), 504, path)
        for engine in rig.gateway.fleet.engines():
            engine.hold()
        is_error(await rig.post(ANY, path), 503, path)


@pytest.mark.parametrize("path", PATHS)
async def test_bad_keys_and_full_engines_have_the_shape_of_their_api_too(path: str) -> None:
    async with Scripted() as c, Gate(combined=[{"url": c.url, "max_in_flight": 1}], api_keys=["k"]) as gate:
        is_error(await gate.post(ANY, path), 401, path)
        (engine,) = gate.gateway.fleet.engines()
        lease = engine.lease()
        answer = await gate.post(ANY, path, headers={"authorization": "Bearer k"})
        is_error(answer, 429, path)
        assert int(answer.headers["retry-after"]) > 0
        lease.release()
        assert (await gate.post(ANY, path, headers={"authorization": "Bearer k"})).status == 200


# -- too large, too many


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    "words",
    [b'"model":"\\ud800","messages":[]', b'"model":"sim","\\ud800_embeds":1', b'"model":"%b"' % (b"m" * 100_000)],
    ids=["model", "key", "long"],
)
async def test_a_clients_words_in_an_error_are_such_as_utf8_can_hold_and_few(path: str, words: bytes) -> None:
    async with Rig("plain") as rig:
        answer = await rig.post(b"{%b}" % words, path)
        is_error(answer, 400 if b"sim" in words else 404, path)
        assert len(answer.body) < 5000


async def test_a_body_too_large_is_413_before_it_has_come() -> None:
    async with Scripted() as c, Gate(combined=[c.url], limits={"body_bytes": 1000}) as gate, gate.client() as client:
        client.head(1001)
        is_error(await client.answer(), 413)
        assert not c.seen


async def test_a_body_of_exactly_the_limit_passes() -> None:
    raw = b'{"model":"sim"}'.ljust(1000)
    async with Scripted() as c, Gate(combined=[c.url], limits={"body_bytes": 1000}) as gate:
        assert (await gate.post(raw)).status == 200
        is_error(await gate.post(raw + b" "), 413)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "application/json"), ("/v1/audio/transcriptions", "multipart/form-data; boundary=b")],
)
async def test_a_chunked_upload_is_counted_as_it_arrives(path: str, kind: str) -> None:
    async with Scripted() as c, Gate(combined=[c.url], limits={"body_bytes": 1000}) as gate, gate.client() as client:
        client.head(None, path, headers={"content-type": kind})
        start = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n' if "form" in kind else b'{"a":"'
        client.chunk(start)
        client.chunk(b"x" * 1000)  # and no end of it: the answer does not wait for one
        is_error(await client.answer(), 413)
        assert not c.seen


async def test_over_the_admission_limit_is_429_with_retry_after() -> None:
    async with Rig("plain", limits={"requests": 1, "queue": 0}) as rig:
        rig.sim("combined").faults.add(Fault(kind="hang", path="/v1/*"))
        task = asyncio.create_task(rig.post(chat()))
        await rig.sim("combined").seen.until(lambda: rig.sim("combined").seen.in_flight == 1)
        answer = await rig.post(chat())
        is_error(answer, 429)
        assert int(answer.headers["retry-after"]) > 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.settled()


async def test_there_is_a_budget_of_bytes_in_flight_as_well_as_of_requests() -> None:
    big = chat("x" * 6000)
    async with Rig("plain", limits={"bytes": 10_000, "queue": 0}) as rig:
        rig.sim("combined").faults.add(Fault(kind="hang", path="/v1/*"))
        task = asyncio.create_task(rig.post(big))
        await rig.sim("combined").seen.until(lambda: rig.sim("combined").seen.in_flight == 1)
        is_error(await rig.post(big), 429)
        assert (await rig.post(chat())).status == 200, "a small one still fits"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.settled()


@pytest.mark.parametrize("plan", ["plain", "p_d"])
async def test_a_body_that_an_engine_has_is_not_in_flight_while_its_answer_streams(plan: Any) -> None:
    big = chat("x" * 6000, stream=True)
    sims = {role: {"costs": {"token": 0.05}} for role in ("combined", "decode")}
    async with Rig(plan, limits={"bytes": 10_000, "queue": 0}, sims=sims) as rig, rig.client() as client:
        client.send(big)
        assert (await client.answer_head())[0] == 200
        assert rig.gateway.admission.nbytes == 0
        assert rig.gateway.admission.requests == 1
        assert (await rig.post(big)).status == 200


async def test_so_many_items_and_no_more() -> None:
    async with Scripted() as c, Gate(combined=[c.url], limits={"items": 2}) as gate:
        assert (await gate.post(chat(images=2))).status == 200
        is_error(await gate.post(chat(images=3)), 400)
        assert len(c.seen) == 1


# -- an engine's own


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(("plan", "role"), [("plain", "combined"), ("p_d", "prefill"), ("p_d", "decode")])
async def test_an_engines_401_or_403_on_the_gateways_own_key_is_502(plan: Any, role: str, status: int) -> None:
    rule = Fault(kind="status", status=status, body={"error": "Unauthorized"}, path="/v1/*")
    async with Rig(plan, engine_api_key="wrong") as rig:
        rig.sim(role).faults.add(rule)
        answer = await rig.post(chat())
        is_error(answer, 502)
        assert rig.sim(role).url in answer.json["error"]["message"]
    async with Rig(plan) as rig:
        rig.sim(role).faults.add(Fault(**{f: getattr(rule, f) for f in rule.__struct_fields__} | {"count": 1}))
        answer = await rig.post(chat())
        assert (answer.status, answer.json) == (status, {"error": "Unauthorized"}), "the client's key: the client's 401"


async def test_an_encoders_401_on_the_gateways_own_key_is_502_under_the_strict_policy() -> None:
    async with Rig("e_pd", engine_api_key="wrong", encode_failure="strict") as rig:
        rig.sim("encode").faults.add(Fault(kind="status", status=401, path="/v1/*"))
        is_error(await rig.post(chat(images=1)), 502)


@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
async def test_a_4xx_of_a_leg_reaches_the_client_with_the_engines_own_status_and_body_once(role: str) -> None:
    own = b'{"error" :{"message":"no\\u0020way","code":1.0}}'
    async with Rig("e_p_d", encode_failure="strict", engines={"encode": 2, "prefill": 2, "decode": 2}) as rig:
        for sim in rig.pools[role]:
            sim.faults.add(Fault(kind="status", status=422, body=own.decode(), headers={"x-own": "1"}, path="/v1/*"))
        answer = await rig.post(chat(images=1))
        assert (answer.status, answer.body) == (422, own)
        assert rig.seen(role) == 1, "never retried"
        assert rig.count("leg_retries") == 0


# -- streams


@pytest.mark.parametrize("api", BODIES)
async def test_in_streams_chat_and_completions_use_data_frames_messages_and_responses_event_frames(api: str) -> None:
    path, make = BODIES[api]
    async with Rig("plain") as rig:
        rig.sim("combined").faults.add(Fault(kind="cut", events=3, partial=True, path="/v1/*"))
        answer = await rig.post(make(stream=True), path)
        assert answer.status == 200
        *whole, last, rest = answer.events
        assert rest == b""
        if api in ("chat", "completions"):
            assert last.startswith(b"data: ")
            told = json.loads(last.removeprefix(b"data: "))["error"]
            assert set(told) == {"message", "type", "param", "code"}
            assert told["code"] == 502
        else:
            first, data = last.split(b"\n")
            assert first == b"event: error"
            told = json.loads(data.removeprefix(b"data: "))
            assert told["type"] == "error"
            told = told["error"] if api == "messages" else told
        assert f"combined engine {rig.sim('combined').url}" in told["message"]
        assert len(whole) == 3, "whole events are relayed, the partial tail is dropped"
        assert b"[DONE]" not in answer.body
        assert b"message_stop" not in answer.body


async def test_the_status_line_waits_for_the_engines_own() -> None:
    async with Rig("plain") as rig, rig.client() as client:
        sim = rig.sim("combined")
        sim.faults.add(Fault(kind="slow_first_byte", seconds=0.3, path="/v1/*"))
        client.send(chat(stream=True))
        await sim.seen.until(lambda: sim.seen.in_flight == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.read(1), 0.1)


@pytest.mark.parametrize("status", [500, 418])
@pytest.mark.parametrize("plan", ["plain", "p_d"])
async def test_an_error_before_the_first_byte_is_never_a_200_in_streams_either(plan: Any, status: int) -> None:
    async with Rig(plan) as rig:
        rig.sim("final").faults.add(Fault(kind="status", status=status, path="/v1/*"))
        assert (await rig.post(chat(stream=True))).status == status


def test_the_deadlines_have_the_contracts_defaults() -> None:
    deadlines = GatewaySettings.model_validate({"combined": ["http://c:1"]}).deadlines
    assert (deadlines.connect, deadlines.encode, deadlines.prefill) == (2, 30, 60)
    assert (deadlines.first_byte, deadlines.stream_idle, deadlines.total) == (120, 120, None)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400),
        (b"GET / HTTP/1.1\r\nhost: g\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
    ],
)
async def test_what_is_no_http_is_answered_in_openais_shape(raw: bytes, status: int) -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate, gate.client() as client:
        client.writer.write(raw)
        answer = await client.answer()
        assert answer.status == status
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
