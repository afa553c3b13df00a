"""The admin listener over a real socket: what it tells, what it does, and whom it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from triptych.gateway.admin import Admin
from triptych.gateway.admission import Admission
from triptych.gateway.engines import Fleet
from triptych.gateway.logs import Log
from triptych.gateway.metrics import Metrics
from triptych.gateway.settings import GatewaySettings, Limits
from triptych.gateway.timeline import Ring, Timeline

ENGINE = "http://10.0.0.1:8000"
ENCODER = "http://10.0.0.1:9000"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Setup:
    def __init__(self) -> None:
        settings = {
            "models": [
                {
                    "name": "m",
                    "encode": [ENCODER],
                    "combined": [{"url": ENGINE, "max_in_flight": 4}],
                    "engine_api_key": "sk-engine",
                }
            ],
            "api_keys": ["sk-client-key-1234"],
        }
        self.fleet = Fleet(GatewaySettings.model_validate(settings))
        self.admission = Admission(Limits(), 10)
        self.requests = Ring(8)
        self.drains = 0
        self.lines: list[bytes] = []
        self.admin = Admin(
            fleet=self.fleet,
            admission=self.admission,
            metrics=Metrics(self.fleet, self.admission),
            requests=self.requests,
            log=Log("json", write=self.lines.append),
            drain=self.drain,
        )
        self.port = 0

    def drain(self) -> None:
        self.drains += 1

    async def start(self, host: str = "127.0.0.1") -> None:
        ((_, self.port),) = await self.admin.start(host, 0)

    async def call(
        self, method: str, path: str, body: bytes = b"", *, host: str | None = "localhost", **headers: str
    ) -> Answer:
        lines = [f"{method} {path} HTTP/1.1", "connection: close", f"content-length: {len(body)}"]
        if host is not None:
            lines.append(f"host: {host}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write("\r\n".join((*lines, "", "")).encode() + body)
        raw = await reader.read()
        writer.close()
        await writer.wait_closed()
        head, _, answer = raw.partition(b"\r\n\r\n")
        status, *fields = head.decode().split("\r\n")
        return Answer(int(status.split()[1]), dict(f.split(": ", 1) for f in fields), answer)

    async def post(self, path: str, value: Any = None, **headers: str) -> Answer:
        body = b"" if value is None else json.dumps(value).encode()
        return await self.call("POST", path, body, **{"content_type": "application/json", **headers})


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    setup = Setup()
    await setup.start()
    yield setup
    await setup.admin.close()


# -- what it tells


async def test_index_lists_every_call(setup: Setup) -> None:
    answer = await setup.call("GET", "/")
    assert answer.status == 200
    assert set(answer.json) == {
        "GET /",
        "GET /health",
        "GET /metrics",
        "GET /debug/engines",
        "GET /debug/requests",
        "POST /drain",
        "POST /engines/eject",
        "POST /engines/restore",
    }
    for call in answer.json:
        method, path = call.split()
        if method == "GET":
            assert (await setup.call("GET", path)).status == 200


async def test_metrics_are_prometheus_text(setup: Setup) -> None:
    answer = await setup.call("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"\ntriptych_requests_in_flight 0.0\n" in answer.body
    openmetrics = await setup.call("GET", "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert openmetrics.body.endswith(b"# EOF\n")


async def test_engines_shows_pools_health_and_what_is_in_flight(setup: Setup) -> None:
    encoder, engine = setup.fleet.engines()
    encoder.probed("refused")
    engine.probed(None)
    engine.reported([{"id": "m"}, {"id": "lora"}])
    setup.admission.try_admit(1000)
    with engine.lease():
        got = (await setup.call("GET", "/debug/engines")).json
    assert got["ready"] is True
    assert got["draining"] is False
    assert got["requests"]["in_flight"] == 1
    assert got["requests"]["bytes"] == 1000
    (model,) = got["models"]
    assert model["names"] == ["lora", "m"]
    assert set(model["pools"]) == {"encode", "combined"}
    assert model["pools"]["encode"]["healthy"] is False
    assert model["pools"]["encode"]["engines"][0]["why"] == "refused"
    assert model["pools"]["combined"]["engines"] == [
        {
            "url": ENGINE,
            "role": "combined",
            "state": "alive",
            "why": "",
            "in_flight": 1,
            "limit": 4,
            "weight": 1.0,
            "names": ["lora", "m"],
        }
    ]


async def test_requests_are_listed_newest_first_and_shown_one_by_one(setup: Setup) -> None:
    for request_id in ("a", "b"):
        timeline = Timeline(request_id, "chat")
        timeline.leg("decode", "decode", ENGINE).start()
        setup.requests.add(timeline)
    listed = (await setup.call("GET", "/debug/requests")).json["requests"]
    assert [r["id"] for r in listed] == ["b", "a"]
    assert listed[0]["running"] is True
    one = (await setup.call("GET", "/debug/requests/a")).json
    assert one["id"] == "a"
    assert one["legs"][0]["engine"] == ENGINE
    missing = await setup.call("GET", "/debug/requests/c")
    assert missing.status == 404
    assert "debug_requests" in missing.json["error"]


async def test_nothing_tells_a_key(setup: Setup) -> None:
    everything = b"".join(
        [(await setup.call("GET", path)).body for path in ("/", "/metrics", "/debug/engines", "/debug/requests")]
    )
    assert b"sk-" not in everything


async def test_head_is_get_without_a_body(setup: Setup) -> None:
    for path in ("/metrics", "/health"):
        answer = await setup.call("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")


async def test_unknown_call_says_what_there_is(setup: Setup) -> None:
    answer = await setup.call("GET", "/metric")
    assert answer.status == 404
    assert "GET /metrics" in answer.json["calls"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/drain"), ("POST", "/metrics"), ("DELETE", "/debug/engines"), ("PUT", "/drain")]
)
async def test_wrong_method_says_the_right_one(setup: Setup, method: str, path: str) -> None:
    answer = await setup.call(method, path, content_type="application/json")
    assert answer.status == 405
    assert ("POST" if path == "/drain" else "GET") in answer.json["error"]
    assert answer.headers["allow"] == ("POST" if path == "/drain" else "GET, HEAD")
    assert setup.drains == 0


# -- what it does


async def test_drain_begins_once(setup: Setup) -> None:
    assert (await setup.post("/drain")).status == 202
    assert (await setup.post("/drain")).json == {"draining": True}
    assert setup.drains == 1
    assert (await setup.call("GET", "/debug/engines")).json["draining"] is True


async def test_engine_is_ejected_and_restored_by_its_address(setup: Setup) -> None:
    engine = setup.fleet.find(ENGINE)[0]
    answer = await setup.post("/engines/eject", {"engine": ENGINE + "/"})
    assert answer.status == 200
    assert answer.json["engines"][0]["state"] == "held"
    engine.probed(None)
    assert not engine.healthy
    answer = await setup.post("/engines/restore", {"engine": ENGINE})
    assert answer.json["engines"][0]["state"] == "unknown"
    assert engine.healthy


async def test_unknown_engine_lists_those_that_there_are(setup: Setup) -> None:
    answer = await setup.post("/engines/eject", {"engine": "http://nowhere"})
    assert answer.status == 404
    assert answer.json["engines"] == [ENGINE, ENCODER]


@pytest.mark.parametrize("value", [None, [], {}, {"engine": 5}, "x"])
async def test_body_that_is_not_understood_is_refused(setup: Setup, value: Any) -> None:
    answer = await setup.post("/engines/eject", value)
    assert answer.status == 400
    assert '{"engine": URL}' in answer.json["error"]


async def test_huge_body_is_refused(setup: Setup) -> None:
    answer = await setup.post("/engines/eject", "x" * 100_000)
    assert answer.status == 413


# -- whom it refuses


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8001", "LOCALHOST:1", "127.0.0.1:8001", "127.0.0.1", "127.1.2.3", "[::1]:8001"]
)
async def test_loopback_names_are_answered(setup: Setup, host: str) -> None:
    assert (await setup.call("GET", "/health", host=host)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8001",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "0.0.0.0",
        "[::1",
        "",
        "a]",
        "localhost:8001.evil.example",
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/debug/requests", "/", "/nowhere"])
async def test_other_names_are_refused_on_loopback(setup: Setup, host: str, path: str) -> None:
    answer = await setup.call("GET", path, host=host)
    assert answer.status in (400, 403)
    assert b"triptych_" not in answer.body


async def test_rebound_page_cannot_post(setup: Setup) -> None:
    assert (await setup.post("/drain", host="evil.example:8001")).status == 403
    assert setup.drains == 0


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "application/jsonx"],
)
async def test_post_that_a_page_of_another_origin_can_send_is_refused(setup: Setup, kind: str) -> None:
    answer = await setup.call("POST", "/drain", b'{"engine": "x"}', content_type=kind)
    assert answer.status == 415
    assert setup.drains == 0


async def test_preflight_gets_no_permission(setup: Setup) -> None:
    answer = await setup.call(
        "OPTIONS",
        "/drain",
        origin="http://evil.example",
        access_control_request_method="POST",
        access_control_request_headers="content-type",
    )
    assert answer.status == 405
    assert not [h for h in answer.headers if h.startswith("access-control")]


async def test_any_name_is_answered_where_it_listens_wider() -> None:
    setup = Setup()
    await setup.start("0.0.0.0")
    try:
        assert (await setup.call("GET", "/metrics", host="gateway.internal:8001")).status == 200
        assert (await setup.call("POST", "/drain", content_type="text/plain")).status == 415
    finally:
        await setup.admin.close()


async def test_close_leaves_no_listener(setup: Setup) -> None:
    await setup.admin.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", setup.port)
    await setup.admin.close()
