"""Contract, "Errors, and what the client sees", its paragraph on headers: both ways, on every leg of every plan."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.gateway.contract.kit import Gate, Scripted
from tests.gateway.raw import Answer, Raw
from tests.gateway.rig import PLANS, ROLES, Rig, chat, messages
from triptych.sim import Fault, SeenRequest

PLAN = "e_p_d"
FORM = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--x--\r\n'
FORM_TYPE = {"content-type": "multipart/form-data; boundary=x"}


async def told(
    headers: dict[str, str] | bytes,
    *,
    plan: str = PLAN,
    body: Any = None,
    path: str = "/v1/chat/completions",
    **settings: Any,
) -> tuple[dict[str, SeenRequest], Answer]:
    """What the engine of each role got for one request with these headers (bytes: whole lines), and the answer."""
    async with AsyncExitStack() as stack:
        engines = {role: await stack.enter_async_context(Scripted()) for role in ROLES[plan]}
        pools = {role: [engine.url] for role, engine in engines.items()}
        gate = await stack.enter_async_context(Gate(**pools, **settings))
        client: Raw = await stack.enter_async_context(gate.client())
        body = chat(images=1) if body is None else body
        if isinstance(headers, bytes):
            raw = b'{"model":"sim","messages":[]}'
            head = b"POST %b HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n%b\r\n" % (path.encode(), len(raw), headers)
            client.writer.write(head + raw)
        else:
            client.send(body, path, headers=headers)
        answer = await client.answer()
        return {role: engine.seen[-1] for role, engine in engines.items() if engine.seen}, answer


# -- end to end


@pytest.mark.parametrize("plan", PLANS)
async def test_end_to_end_headers_pass_to_every_leg(plan: str) -> None:
    given = {"x-custom": "a, b", "traceparent": "00-1-2-01", "User-Agent": "me/1", "content-type": "application/json"}
    got, answer = await told(given, plan=plan)
    assert answer.status == 200
    assert set(got) == set(ROLES[plan])
    for seen in got.values():
        for name, value in given.items():
            assert seen.header(name.lower()) == value


async def test_repeated_headers_pass_in_their_order() -> None:
    got, _ = await told(b"x-a: 1\r\nX-B: 2\r\nx-a: 3\r\n", plan="plain")
    assert [h for h in got["combined"].headers if h[0] in ("x-a", "x-b")] == [("x-a", "1"), ("x-b", "2"), ("x-a", "3")]


@pytest.mark.parametrize("plan", PLANS)
async def test_hop_by_hop_headers_stay_on_their_hop(plan: str) -> None:
    given = {
        "connection": "keep-alive, X-Private , te",
        "x-private": "1",
        "keep-alive": "timeout=5",
        "te": "trailers",
        "trailer": "x-sum",
        "proxy-authorization": "Basic x",
        "proxy-connection": "keep-alive",
        "upgrade": "h2c",
        "x-public": "2",
    }
    got, answer = await told(given, plan=plan)
    assert answer.status == 200
    for seen in got.values():
        assert seen.header("x-public") == "2"
        assert [h for h in seen.headers if h[0] in given and h[0] != "x-public"] == []


async def test_host_is_the_engines_and_the_encoding_of_answers_is_left_to_the_gateway() -> None:
    got, _ = await told({"accept-encoding": "gzip, br", "host": "evil.example"}, plan="plain")
    assert got["combined"].header("accept-encoding") is None, "a compressed answer's handles could not be nulled"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", str(got["combined"].header("host")))


async def test_the_engines_end_to_end_headers_reach_the_client_and_hop_by_hop_ones_do_not() -> None:
    raw = (
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-engine: e\r\nset-cookie: a=1\r\n"
        "connection: x-private, close\r\nx-private: 1\r\nkeep-alive: timeout=5\r\nproxy-authenticate: Basic\r\n"
        "x-request-id: engines-own\r\ncontent-length: 2\r\n\r\n{}"
    )
    async with Rig("plain") as rig:
        rig.sim("combined").faults.add(Fault(kind="garbage", body=raw, path="/v1/*"))
        answer = await rig.post(chat(), headers={"x-request-id": "mine"})
        assert (answer.headers["x-engine"], answer.headers["set-cookie"]) == ("e", "a=1")
        assert answer.headers["x-request-id"] == "mine"
        for name in ("connection", "x-private", "keep-alive", "proxy-authenticate"):
            assert name not in answer.headers


async def test_the_client_is_told_one_request_id_whatever_the_engine_calls_the_request() -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate, gate.client() as client:
        c.headers = [(b"content-type", b"application/json"), (b"x-request-id", b"engines-own")]
        client.send(chat(), headers={"x-request-id": "mine"})
        head = (await client.reader.readuntil(b"\r\n\r\n")).lower()
        assert [line for line in head.split(b"\r\n") if line.startswith(b"x-request-id")] == [b"x-request-id: mine"]


# -- keys

BEARER = "Bearer client-key"


@pytest.mark.parametrize("plan", PLANS)
async def test_authorization_is_passed_where_nothing_is_configured(plan: str) -> None:
    got, _ = await told({"authorization": BEARER, "x-api-key": "k"}, plan=plan)
    for seen in got.values():
        assert (seen.header("authorization"), seen.header("x-api-key")) == (BEARER, "k")


@pytest.mark.parametrize("plan", PLANS)
async def test_authorization_is_replaced_where_an_engine_key_is_set(plan: str) -> None:
    given = {"authorization": BEARER, "x-api-key": "k"}
    for settings in ({}, {"api_keys": ["client-key"]}):
        got, answer = await told(given, plan=plan, engine_api_key="engine-key", **settings)
        assert answer.status == 200
        for seen in got.values():
            assert [v for n, v in seen.headers if n == "authorization"] == ["Bearer engine-key"]
            assert seen.header("x-api-key") is None


@pytest.mark.parametrize("plan", PLANS)
async def test_authorization_is_never_forwarded_where_the_gateway_checks_keys(plan: str) -> None:
    got, answer = await told({"authorization": BEARER, "x-api-key": "k"}, plan=plan, api_keys=["client-key"])
    assert answer.status == 200
    for seen in got.values():
        assert seen.header("authorization") is None
        assert seen.header("x-api-key") is None


async def test_uploads_follow_the_same_policies() -> None:
    given = FORM_TYPE | {"authorization": BEARER}
    where: dict[str, Any] = {"plan": "plain", "body": FORM, "path": "/v1/audio/transcriptions"}
    got, _ = await told(given, **where)
    assert got["combined"].header("authorization") == BEARER
    got, _ = await told(given, **where, engine_api_key="e")
    assert got["combined"].header("authorization") == "Bearer e"
    got, _ = await told(given, **where, api_keys=["client-key"])
    assert got["combined"].header("authorization") is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"authorization": "Bearer wrong"}, 401), ({"authorization": "client-key"}, 401),
     ({"authorization": "Basic client-key"}, 401), ({"authorization": "Bearer "}, 401),
     ({"x-api-key": "client-key"}, 401), ({"authorization": "Bearer client-key"}, 200),
     ({"authorization": "bearer client-key"}, 200),
     ({"authorization": "Bearer other-key"}, 200)],
)  # fmt: skip
async def test_a_client_must_show_a_key_where_keys_are_configured(headers: dict[str, str], status: int) -> None:
    got, answer = await told(headers, plan="plain", api_keys=["client-key", "other-key"])
    assert answer.status == status
    assert bool(got) == (status == 200)
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("key", "status"), [("client-key", 200), ("wrong", 401)])
async def test_x_api_key_counts_on_messages(key: str, status: int) -> None:
    where: dict[str, Any] = {"plan": "plain", "body": messages(), "path": "/v1/messages", "api_keys": ["client-key"]}
    _, answer = await told({"x-api-key": key}, **where)
    assert answer.status == status
    if status == 401:
        assert answer.json["error"]["type"] == "authentication_error"


# -- request ids


@pytest.mark.parametrize("given", ["a", "A-z.0_9", "x" * 128])
async def test_a_request_id_is_accepted_and_returned_and_legs_get_theirs(given: str) -> None:
    got, answer = await told({"X-Request-Id": given})
    assert answer.headers["x-request-id"] == given
    assert {role: seen.header("x-request-id") for role, seen in got.items()} == {
        "encode": f"{given}-enc0",
        "prefill": f"{given}-prefill",
        "decode": f"{given}-decode",
    }
    assert all(len([1 for n, _ in seen.headers if n == "x-request-id"]) == 1 for seen in got.values())


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a/b", "é", "a:b", "../x"])
async def test_a_request_id_of_another_form_is_replaced_by_one_of_the_gateways(given: str | None) -> None:
    got, answer = await told({} if given is None else {"X-Request-Id": given.encode().decode("latin-1")})
    made = answer.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)
    assert got["decode"].header("x-request-id") == f"{made}-decode"


@pytest.mark.parametrize("plan", ["plain", "e_pd"])
async def test_a_combined_engine_gets_the_decode_id(plan: str) -> None:
    got, _ = await told({"x-request-id": "r"}, plan=plan)
    assert got["combined"].header("x-request-id") == "r-decode"


async def test_errors_and_lookups_return_the_request_id_too() -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        for sent, path in ((b"{", "/v1/chat/completions"), (b"{}", "/nowhere"), (chat(model="x"), "/v1/completions")):
            answer = await gate.post(sent, path, headers={"x-request-id": "r"})
            assert answer.status >= 400
            assert answer.headers["x-request-id"] == "r"
        async with gate.client() as client:
            client.get("/v1/models", headers={"x-request-id": "r"})
            assert (await client.answer()).headers["x-request-id"] == "r"


async def test_each_item_has_its_own_leg_id() -> None:
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        await gate.post(chat(images=3), headers={"x-request-id": "r"})
        assert sorted(str(seen.header("x-request-id")) for seen in e.seen) == ["r-enc0", "r-enc1", "r-enc2"]


async def test_the_query_goes_along_with_every_leg() -> None:
    got, answer = await told({}, path="/v1/chat/completions?a=1&b=%20")
    assert answer.status == 200
    assert {seen.path for seen in got.values()} == {"/v1/chat/completions?a=1&b=%20"}


async def test_expect_100_continue_is_answered_and_goes_no_further() -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate, gate.client() as client:
        raw = b'{"model":"sim"}'
        client.head(len(raw), headers={"expect": "100-continue"})
        status, _ = await client.answer_head()
        assert status == 100
        client.writer.write(raw)
        assert (await client.answer()).status == 200
        assert c.last.header("expect") is None


async def test_a_target_with_an_authority_reaches_engines_without_it() -> None:
    """An engine behind a proxy would be asked for an address of the client's choice otherwise."""
    async with Scripted() as e, Scripted() as c, Gate(encode=[e.url], combined=[c.url]) as gate:
        for path in ("/v1/chat/completions", "/v1/chat/completions?a=%2F&b"):
            assert (await gate.post(chat(images=1), f"http://elsewhere.example:1{path}")).status == 200
            assert [engine.last.path for engine in (e, c)] == [path, path]
