"""Probes against engines over real sockets: what ejects, what brings back, what is told, what is left (nothing)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from triptych.gateway.engines import Engine, Fleet
from triptych.gateway.health import Prober
from triptych.gateway.logs import Log
from triptych.gateway.plan import ready
from triptych.gateway.settings import GatewaySettings
from triptych.http.client import Client
from triptych.http.server import Request, Server, ServerLimits

JSON = [(b"content-type", b"application/json")]


class FakeEngine:
    """Answers `/health` and `/v1/models` as it is told to."""

    def __init__(self) -> None:
        self.health = 200
        self.models_status = 200
        self.models: Any = {"object": "list", "data": [{"id": "m"}, {"id": "lora", "parent": "m"}]}
        self.hang = False
        self.seen: list[tuple[str, bytes | None]] = []
        self.asked = asyncio.Event()
        self.server = Server(self.handle, ServerLimits())
        self.url = ""

    async def start(self, port: int = 0) -> None:
        (host, port), *_ = await self.server.start("127.0.0.1", port)
        self.url = f"http://{host}:{port}"

    async def handle(self, request: Request) -> None:
        self.seen.append((request.path, request.header(b"authorization")))
        self.asked.set()
        if self.hang:
            await asyncio.Event().wait()
        if request.path == "/v1/models":
            body = self.models if isinstance(self.models, bytes) else json.dumps(self.models).encode()
            await request.respond(self.models_status, JSON, body)
        else:
            await request.respond(self.health, [], b"")

    def count(self, path: str) -> int:
        return sum(p == path for p, _ in self.seen)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    fake = FakeEngine()
    await fake.start()
    yield fake
    await fake.server.close()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    client = Client(connect_timeout=1.0)
    yield client
    await client.close()


class Setup:
    def __init__(self, client: Client, url: str, model: dict[str, Any] | None = None, **health: Any) -> None:
        settings = GatewaySettings.model_validate(
            {
                "models": [{"combined": [url], **(model or {})}],
                "health": {"failures": 2, "successes": 1, "timeout": 0.2, "interval": 0.01, **health},
            }
        )
        self.lines: list[bytes] = []
        self.fleet = Fleet(settings)
        self.engine: Engine = self.fleet.deployments[0].combined.engines[0]
        self.prober = Prober(self.fleet, settings.health, client, Log("json", write=self.lines.append))

    @property
    def told(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in json.loads(line).items() if k not in ("time", "engine")} for line in self.lines]

    async def until(self, state: Callable[[], bool]) -> None:
        """Wait for a change of the engine after which `state` holds."""
        changed = asyncio.Event()
        watch = lambda _: changed.set()  # noqa: E731
        self.fleet.watchers.append(watch)
        try:
            while not state():
                await asyncio.wait_for(changed.wait(), 10)
                changed.clear()
        finally:
            self.fleet.watchers.remove(watch)


async def test_live_engine_becomes_alive_and_its_names_are_known(engine: FakeEngine, client: Client) -> None:
    setup = Setup(client, engine.url)
    await setup.prober.round()
    assert (setup.engine.state, setup.engine.names) == ("alive", {"m", "lora"})
    assert ready(setup.fleet)
    assert setup.fleet.deployments[0].label == "m"


@pytest.mark.parametrize("status", [401, 403, 404, 302, 204])
async def test_any_answer_below_500_is_a_sign_of_life(engine: FakeEngine, client: Client, status: int) -> None:
    engine.health = status
    setup = Setup(client, engine.url)
    async with setup.prober:
        await setup.until(lambda: setup.engine.names is not None)
        for _ in range(2):
            engine.asked.clear()
            await engine.asked.wait()
    assert setup.engine.state == "alive"
    odd = [line for line in setup.told if line["event"] == "engine answers oddly"]
    assert len(odd) == (0 if status == 204 else 1), "told once, not at every probe"
    assert all(f"answered {status}" in line["what"] for line in odd)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("503", "/health answered 503"),
        ("hang", "/health did not answer within 0.2 s"),
        ("refused", "127.0.0.1"),
    ],
)
async def test_engine_is_ejected_after_failures_in_a_row_with_the_reason(
    engine: FakeEngine, client: Client, fault: str, why: str
) -> None:
    setup = Setup(client, engine.url)
    await setup.prober.round()
    if fault == "503":
        engine.health = 503
    elif fault == "hang":
        engine.hang = True
    else:
        await engine.server.close()
    await setup.prober.round()
    assert setup.engine.state == "alive", "one failure is not enough"
    await setup.prober.round()
    assert setup.engine.state == "ejected"
    assert why in setup.engine.why


async def test_something_that_is_not_http_is_not_alive(client: Client) -> None:
    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        setup = Setup(client, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await setup.prober.round()
    assert setup.engine.state == "ejected"


async def test_ejection_and_recovery_are_logged_once_each(engine: FakeEngine, client: Client) -> None:
    setup = Setup(client, engine.url, models_interval=1000)
    async with setup.prober:
        await setup.until(lambda: setup.engine.names is not None)
        engine.health = 503
        await setup.until(lambda: setup.engine.state == "ejected")
        for _ in range(3):
            engine.asked.clear()
            await engine.asked.wait()
        engine.health = 200
        await setup.until(lambda: setup.engine.state == "alive")
    assert setup.told == [
        {"level": "info", "event": "engine serves", "role": "combined", "models": ["lora", "m"], "count": 2},
        {"level": "warning", "event": "engine ejected", "role": "combined", "why": "/health answered 503"},
        {"level": "info", "event": "engine recovered", "role": "combined"},
    ]


async def test_passive_ejection_is_logged_too(engine: FakeEngine, client: Client) -> None:
    setup = Setup(client, engine.url, interval=1000)
    async with setup.prober:
        await setup.until(lambda: setup.engine.names is not None)
        setup.engine.failed("reset")
        setup.engine.failed("reset")
    assert setup.told[-1]["event"] == "engine ejected"
    assert setup.told[-1]["why"] == "reset"
    setup.engine.probed(None)
    assert setup.told[-1]["event"] == "engine ejected", "once left, the prober listens no more"


async def test_engine_that_starts_late_is_found(client: Client) -> None:
    fake = FakeEngine()
    await fake.start()
    port = int(fake.url.rpartition(":")[2])
    await fake.server.close()
    setup = Setup(client, fake.url)
    late = FakeEngine()
    try:
        async with setup.prober:
            await setup.until(lambda: setup.engine.state == "ejected")
            assert not ready(setup.fleet)
            await late.start(port)
            await setup.until(lambda: setup.engine.names is not None)
            assert ready(setup.fleet)
    finally:
        await late.server.close()


async def test_models_are_polled_seldom_and_again_when_the_engine_is_back(engine: FakeEngine, client: Client) -> None:
    setup = Setup(client, engine.url, models_interval=1000)
    async with setup.prober:
        await setup.until(lambda: setup.engine.names is not None)
        for _ in range(3):
            engine.asked.clear()
            await engine.asked.wait()
        assert engine.count("/v1/models") == 1
        engine.health = 500
        await setup.until(lambda: setup.engine.state == "ejected")
        engine.models = {"data": [{"id": "m"}, {"id": "other-lora"}]}
        engine.health = 200
        await setup.until(lambda: setup.engine.names == {"m", "other-lora"})


async def test_models_are_polled_again_after_their_interval(engine: FakeEngine, client: Client) -> None:
    setup = Setup(client, engine.url, models_interval=0.02)
    async with setup.prober:
        await setup.until(lambda: setup.engine.names is not None)
        engine.models = {"data": [{"id": "m"}]}
        await setup.until(lambda: setup.engine.names == {"m"})


async def test_engine_key_is_shown(engine: FakeEngine, client: Client) -> None:
    setup = Setup(client, engine.url, {"engine_api_key": "sk-engine"})
    await setup.prober.round()
    assert engine.seen == [("/health", b"Bearer sk-engine"), ("/v1/models", b"Bearer sk-engine")]
    assert b"sk-engine" not in b"".join(setup.lines)


@pytest.mark.parametrize(
    ("status", "models", "what"),
    [
        (401, {}, "/v1/models answered 401: set engine_api_key to the engine's key"),
        (404, {}, "/v1/models answered 404"),
        (200, b"{not json", "/v1/models: "),
        (200, {"data": "no list"}, "/v1/models: "),
        (200, [], "/v1/models: "),
        (200, b'"' + b"x" * (5 << 20) + b'"', "/v1/models: "),
    ],
)
async def test_models_that_cannot_be_had_leave_the_engine_healthy_and_are_told_once(
    engine: FakeEngine, client: Client, status: int, models: Any, what: str
) -> None:
    engine.models_status, engine.models = status, models
    setup = Setup(client, engine.url)
    for _ in range(3):
        await setup.prober.round()
    assert (setup.engine.state, setup.engine.names) == ("alive", None)
    assert len(setup.told) == 1
    assert setup.told[0]["what"].startswith(what)
    assert engine.count("/v1/models") == 3, "asked again at each probe until the names are known"
    assert setup.fleet.resolve("anything")


async def test_entries_without_a_name_are_passed_over(engine: FakeEngine, client: Client) -> None:
    engine.models = {"data": [{"id": 5}, {"object": "model"}, {"id": ""}, {"id": "m", "max_model_len": 8}]}
    setup = Setup(client, engine.url)
    await setup.prober.round()
    assert setup.engine.names == {"m"}
    assert setup.fleet.deployments[0].cards() == [{"id": "m", "max_model_len": 8}]


async def test_configured_name_that_the_engine_does_not_serve_is_told(engine: FakeEngine, client: Client) -> None:
    setup = Setup(client, engine.url, {"name": "mine"})
    for _ in range(3):
        await setup.prober.round()
    (line,) = [line for line in setup.told if line["level"] == "warning"]
    assert line["what"] == "serves lora, m, but is configured for mine: it will refuse that name"


async def test_leaving_cancels_every_probe_and_leaves_no_task(engine: FakeEngine, client: Client) -> None:
    engine.hang = True
    before = asyncio.all_tasks()
    setup = Setup(client, engine.url, timeout=1000)
    async with setup.prober:
        await engine.asked.wait()
        assert len(asyncio.all_tasks() - before) >= 1
    assert not [t for t in asyncio.all_tasks() - before if t.get_name().startswith("probe")]
    assert setup.engine.state == "unknown", "a cancelled probe says nothing of the engine"
    assert setup.fleet.watchers == []


async def test_cancelled_block_leaves_no_task(engine: FakeEngine, client: Client) -> None:
    setup = Setup(client, engine.url)

    async def block() -> None:
        async with setup.prober:
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await engine.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("probe")]


async def test_one_hanging_engine_does_not_hold_the_others_back(client: Client) -> None:
    slow, quick = FakeEngine(), FakeEngine()
    slow.hang = True
    await slow.start()
    await quick.start()
    try:
        setup = Setup(client, slow.url, {"combined": [slow.url, quick.url]}, timeout=1000)
        async with setup.prober:
            while quick.count("/health") < 5:
                quick.asked.clear()
                await quick.asked.wait()
            assert slow.count("/health") == 1
    finally:
        await slow.server.close()
        await quick.server.close()


async def test_mistake_of_ours_does_not_end_the_probing(
    engine: FakeEngine, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(client, engine.url)
    real = setup.engine.probed
    calls = 0

    def probed(_: Engine, why_not: str | None) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a mistake")
        real(why_not)

    monkeypatch.setattr(Engine, "probed", probed)
    async with setup.prober:
        await setup.until(lambda: setup.engine.names is not None)
    assert setup.told[0]["event"] == "probe failed by itself"
    assert setup.told[0]["exception"] == "RuntimeError"
