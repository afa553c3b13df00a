"""Contract, "Names that users expect" and the listeners: endpoints, readiness, TLS on both sides, admin calls."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

import triptych
from tests.gateway.contract.kit import Gate, Scripted, eventually
from tests.gateway.raw import Answer, Raw
from tests.gateway.rig import BODIES, Rig, chat
from triptych.gateway.settings import GatewaySettings
from triptych.sim import Sim


async def get(gate: Rig, path: str) -> Answer:
    async with gate.client() as client:
        client.get(path)
        return await client.answer()


# -- endpoints


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_generating_endpoints_are_there_streamed_and_whole(api: str, stream: bool) -> None:
    path, make = BODIES[api]
    async with Rig("plain") as rig:
        answer = await rig.post(make(stream=stream), path)
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")


async def test_embeddings_and_audio_are_there() -> None:
    async with Rig("plain") as rig:
        assert (await rig.post({"model": "sim", "input": "a"}, "/v1/embeddings")).json["data"]
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n--x--\r\n'
        kind = {"content-type": "multipart/form-data; boundary=x"}
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            assert (await gate.post(form, path, headers=kind)).status == 200
        c.headers = [(b"content-type", b"audio/wav")]
        c.says = bytes(range(256)) * 40
        answer = await gate.post({"model": "sim", "input": "a"}, "/v1/audio/speech")
        assert (answer.status, answer.body) == (200, c.says)
        assert answer.headers["content-type"] == "audio/wav"


async def test_health_and_version_are_there_without_a_key() -> None:
    async with Scripted() as c, Gate(combined=[c.url], api_keys=["k"]) as gate:
        assert (await get(gate, "/health")).status == 200
        assert (await get(gate, "/version")).json == {"version": triptych.__version__}
        assert (await get(gate, "/readyz")).json == {"status": "ready"}
        assert (await get(gate, "/v1/models")).status == 401


async def test_models_are_what_the_engines_tell_of_them() -> None:
    async with Scripted(names=("a", "a-lora")) as a, Scripted(names=("b",)) as b:
        models = [{"name": "a", "combined": [a.url]}, {"name": "named", "combined": [b.url]}]
        async with Gate(models=models) as gate:
            listed = (await get(gate, "/v1/models")).json
            assert listed["object"] == "list"
            assert sorted(card["id"] for card in listed["data"]) == ["a", "a-lora", "b", "named"]
            assert {card["id"]: card.get("max_model_len") for card in listed["data"]} == {
                "a": 4096, "a-lora": 4096, "b": 4096, "named": None,
            }  # fmt: skip
            assert (await get(gate, "/v1/models/a-lora")).json["id"] == "a-lora"
            missing = await get(gate, "/v1/models/c")
            assert (missing.status, missing.json["error"]["code"]) == (404, 404)


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat", "/metrics", "/debug/requests", "/engines/eject", "/v1/rerank"]
)
async def test_what_is_not_there_is_404_and_neither_are_admin_calls(path: str) -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        assert (await get(gate, path)).status == 404
        assert (await gate.post({}, path)).status == 404
        assert not c.seen


async def test_the_wrong_method_is_405_that_names_the_right_one() -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        answer = await get(gate, "/v1/chat/completions")
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        answer = await gate.post({}, "/v1/models")
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


# -- readiness


async def test_readyz_waits_for_every_engine_to_be_probed_and_for_one_that_can_answer() -> None:
    async with Rig("p_d") as rig:
        assert (await get(rig, "/readyz")).status == 200
        (prefill,) = [e for e in rig.gateway.fleet.engines() if e.role == "prefill"]
        prefill.hold()
        answer = await get(rig, "/readyz")
        assert answer.status == 503
        assert answer.json == {"status": "no engine for sim"}
        prefill.restore()
        assert (await get(rig, "/health")).status == 200, "alive all the while"


async def test_readyz_is_503_until_every_engine_has_been_probed() -> None:
    async with Rig("plain") as rig:
        for engine in rig.gateway.fleet.engines():
            engine.state = "unknown"  # type: ignore[misc]
        assert (await get(rig, "/readyz")).json == {"status": "probing"}


async def test_readyz_is_503_while_draining() -> None:
    async with Rig("plain") as rig:
        rig.gateway.draining = True
        answer = await get(rig, "/readyz")
        assert (answer.status, answer.json) == (503, {"status": "draining"})


# -- connections


async def test_so_many_client_connections_and_no_more() -> None:
    async with Scripted() as c, Gate(combined=[c.url], limits={"connections": 2}) as gate:
        async with gate.client() as one, gate.client() as two:
            for client in (one, two):
                client.send(chat())
                assert (await client.answer()).status == 200
            async with gate.client() as three:
                answer = await three.answer()
                assert answer.status == 503
                assert answer.json["error"]["code"] == 503
                assert answer.headers["retry-after"] == "1"
                assert await three.ended()
            one.send(chat())
            assert (await one.answer()).status == 200, "those that are there are served"
        await eventually(lambda: not gate.running.server.connections, "the connections' end", 5.0)
        assert (await gate.post(chat())).status == 200


# -- TLS


class Secure:
    """An authority of the test's own with a certificate for 127.0.0.1, as files and as a context."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        certificate = self.authority.issue_cert("127.0.0.1")
        self.ca, self.chain, self.key = folder / "ca.pem", folder / "chain.pem", folder / "key.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        self.key.write_bytes(certificate.private_key_pem.bytes())
        self.chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        self.server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificate.configure_cert(self.server)

    @property
    def files(self) -> dict[str, str]:
        return {"certificate": str(self.chain), "key": str(self.key)}

    async def ask(self, gate: Rig, body: Any) -> Answer:
        """A POST over TLS by a client that trusts the authority."""
        context = ssl.create_default_context(cafile=self.ca)
        host, port = gate.running.api[0]
        client = Raw(host, port)
        client.reader, client.writer = await asyncio.open_connection(host, port, ssl=context)
        client.send(body)
        answer = await client.answer()
        await client.close()
        return answer


@pytest.fixture
def secure(tmp_path: Path) -> Secure:
    return Secure(tmp_path)


@pytest.mark.parametrize("stream", [False, True])
async def test_tls_on_the_listener_and_to_engines(secure: Secure, stream: bool) -> None:
    async with Sim(tls=secure.server) as c:
        assert c.url.startswith("https://")
        async with Gate(combined=[c.url], tls=secure.files, engine_tls={"ca": str(secure.ca)}) as gate:
            assert gate.running.url.startswith("https://")
            answer = await secure.ask(gate, chat(stream=stream))
            assert answer.status == 200
            assert c.seen.answers[200] or stream
            # Plain HTTP on that port is no way around it.
            with pytest.raises((ConnectionError, TimeoutError)):
                await gate.post(chat())
            gate.others_have_sockets()


@pytest.mark.parametrize(("settings", "status"), [({}, 503), ({"verify": False}, 200)], ids=["default", "set"])
async def test_an_engines_certificate_is_checked_unless_told_otherwise(
    secure: Secure, settings: dict[str, Any], status: int
) -> None:
    health = {"interval": 3600, "failures": 1}
    async with Sim(tls=secure.server) as c, Gate(combined=[c.url], engine_tls=settings, health=health) as gate:
        assert (await gate.post(chat())).status == status
        gate.others_have_sockets()


# -- admin


def test_metrics_debug_and_admin_calls_listen_on_loopback_unless_told_otherwise() -> None:
    settings = GatewaySettings.model_validate({"combined": ["http://c:1"]})
    assert settings.admin.startswith("127.0.0.1:")
    assert settings.listen.startswith("0.0.0.0:")


async def test_the_admin_listener_has_what_the_contract_names() -> None:
    async with Scripted() as c, Gate(combined=[c.url], admin="127.0.0.1:0") as gate:
        assert (await gate.post(chat(), headers={"x-request-id": "r"})).status == 200
        host, port = gate.running.admin[0]
        assert host == "127.0.0.1"

        async def ask(method: str, path: str, body: Any = None) -> Answer:
            raw = b"" if body is None else json.dumps(body).encode()
            async with Raw(host, port) as client:
                head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                client.writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
                return await client.answer()

        metrics = await ask("GET", "/metrics")
        assert b'triptych_requests_total{model="sim",plan="plain",status="200"} 1.0' in metrics.body
        assert [r["id"] for r in (await ask("GET", "/debug/requests")).json["requests"]] == ["r"]
        assert (await ask("GET", "/debug/requests/r")).json["legs"][0]["engine"] == c.url
        assert (await ask("POST", "/engines/eject", {"engine": c.url})).status == 200
        assert (await gate.post(chat())).status == 503
        assert (await ask("POST", "/engines/restore", {"engine": c.url})).status == 200
        assert (await gate.post(chat())).status == 200
