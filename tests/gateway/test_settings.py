from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme
from pydantic import ValidationError

from triptych.config.values import host_port, read_keys
from triptych.gateway.settings import ENCODE_ANSWER_BYTES, GatewaySettings

A, B, C = "http://a:8000", "http://b:8000", "http://c:8000"


def faults(**values: Any) -> dict[str, str]:
    """What is refused, by location."""
    with pytest.raises(ValidationError) as caught:
        GatewaySettings(**values)
    return {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}


def one_fault(**values: Any) -> tuple[str, str]:
    found = faults(**values)
    assert len(found) == 1, found
    return next(iter(found.items()))


def test_one_models_settings_may_stand_at_top_level() -> None:
    flat = GatewaySettings(encode=A, combined=[B, {"url": C, "weight": 2}], name="m")
    nested = GatewaySettings(models=[{"encode": A, "combined": [B, {"url": C, "weight": 2}], "name": "m"}])
    assert flat == nested
    assert [e.url for e in flat.models[0].combined] == [B, C]


@pytest.mark.parametrize("text", ["disable", "none", "NONE", ""])
def test_the_reference_proxys_words_mean_no_pool(text: str) -> None:
    assert GatewaySettings(decode=A, prefill=text).models[0].prefill == ()


@pytest.mark.parametrize(
    ("values", "loc", "words"),
    [
        ({"prefill": A}, "models.0.prefill", "give `decode` engines too"),
        ({"encode": A}, "models.0.encode", "no engine can answer"),
        ({"name": "m"}, "models.0", "no engine can answer"),
        ({"models": []}, "models", "no model: give engines"),
        ({}, "models", "Field required"),
        ({"combined": [A, "http://A:8000/"]}, "models.0.combined.1.url", "listed twice"),
        ({"encode": A, "decode": A}, "models.0.decode.0.url", "in `encode` too"),
        ({"encode": A, "combined": B, "ec": "mooncake"}, "models.0.combined.0.ec_zmq", "tcp://HOST:PORT"),
        (
            {"encode": A, "prefill": C, "decode": {"url": B, "ec_zmq": "tcp://b:1"}, "ec": "mooncake"},
            "models.0.ec",
            "E+PD only",
        ),
        ({"combined": {"url": A, "ec_zmq": "b:1"}}, "models.0.combined.0.ec_zmq", "tcp://HOST:PORT"),
        ({"models": [{"combined": A}, {"combined": B, "name": "b"}]}, "models.0.name", "is missing"),
        (
            {"models": [{"combined": A, "name": "b"}, {"combined": B, "name": "b"}]},
            "models.1.name",
            "name of an earlier model",
        ),
        ({"combined": A, "listen": "off"}, "listen", "HOST:PORT"),
        ({"combined": A, "listen": "1.2.3.4"}, "listen", "HOST:PORT"),
        ({"combined": A, "listen": "1.2.3.4:65536"}, "listen", "HOST:PORT"),
        ({"combined": A, "listen": "1.2.3.4:²"}, "listen", "HOST:PORT"),
        ({"combined": A, "admin": "127.0.0.1:8000"}, "admin", "taken by `listen`"),
        ({"combined": A, "tenant_header": "x tenant"}, "tenant_header", "not a header's name"),
        ({"combined": A, "health": {"path": "health"}}, "health.path", "pattern"),
        ({"combined": A, "deadlines": {"connect": float("inf")}}, "deadlines.connect", "finite"),
        ({"combined": A, "limits": {"body_bytes": "3 parsec"}}, "limits.body_bytes", "KiB, MiB or GiB"),
        ({"combined": A, "open": "all"}, "open.0", "Input should be"),
        ({"combined": A, "bogus": 1}, "bogus", "Extra inputs"),
        ({"combined": A, "api_keys": ["k", ""]}, "api_keys.1", "is empty"),
        ({"combined": A, "api_keys": ["two words"]}, "api_keys.0", "no HTTP header can carry"),
        ({"combined": A, "api_keys": ["schlüssel"]}, "api_keys.0", "no HTTP header can carry"),
        ({"combined": A, "api_keys": ["**********"]}, "api_keys.0", "the mask"),
        ({"combined": A, "engine_api_key": ""}, "models.0.engine_api_key", "is empty"),
        ({"combined": A, "tls": {"certificate": "/none.pem", "key": __file__}}, "tls.certificate", "no file"),
        ({"combined": A, "tls": {"certificate": __file__, "key": __file__}}, "tls.key", "give an X.509 certificate"),
        ({"combined": A, "engine_tls": {"ca": __file__}}, "engine_tls.ca", "holds no certificate"),
    ],
)
def test_what_is_refused_names_the_field(values: dict[str, Any], loc: str, words: str) -> None:
    found, message = one_fault(**values)
    assert found == loc
    assert words in message


@pytest.mark.parametrize(
    "url",
    [
        "a:8000", "ftp://a:1", "http://", "http://a:1/v1", "http://a:1?x", "http://a:1#x", "http://a:0",
        "http://a:70000", "http://a:x", "http://a b:1", "http://a:\t1", "http://a\x7f:1", "//a:1", "http://[::1:1",
    ],
)  # fmt: skip
def test_an_engine_is_an_address_and_nothing_more(url: str) -> None:
    loc, message = one_fault(combined=[url])
    assert loc == "models.0.combined.0.url"
    assert "address" in message or "port" in message


@pytest.mark.parametrize("url", ["http://u:hunter2@a:1", "hunter2@a", "http://hunter2@", "http:/u:hunter2@a:1"])
def test_a_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    _, message = one_fault(combined=[url])
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("given", "kept"),
    [("HTTP://Host:80/", "http://host:80"), ("https://[::1]:443", "https://[::1]:443"), ("http://h", "http://h")],
)
def test_engine_urls_have_one_spelling(given: str, kept: str) -> None:
    assert GatewaySettings(combined=given).models[0].combined[0].url == kept


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("1 gib", 1 << 30), ("10kB", 10_000), ("7", 7), (7, 7), ("512 KiB", 512 << 10), ("3b", 3)],
)
def test_sizes_may_have_units(text: Any, size: int) -> None:
    assert GatewaySettings(combined=A, limits={"bytes": text}).limits.bytes == size


def test_the_contracts_defaults() -> None:
    settings = GatewaySettings(combined=A)
    deadlines = settings.deadlines
    assert (deadlines.connect, deadlines.encode, deadlines.prefill) == (2, 30, 60)
    assert (deadlines.first_byte, deadlines.stream_idle, deadlines.total) == (120, 120, None)
    assert settings.limits.body_bytes == 64 << 20
    assert ENCODE_ANSWER_BYTES == 1 << 20
    assert settings.admin.startswith("127.0.0.1:")
    assert settings.open == frozenset()
    model = settings.models[0]
    assert (model.prefer, model.media_to_consumer, model.encode_failure) == ("disaggregated", "raw", "soft")
    assert (model.no_prefill, model.decode_ec_consumer, model.encode_priority) == ("refuse", False, False)


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nabc\n\n  def  \nabc\n")
    settings = GatewaySettings(combined=A, api_keys=["ghi", "abc"], api_keys_file=file)
    assert [key.get_secret_value() for key in settings.api_keys] == ["ghi", "abc", "def"]


@pytest.mark.parametrize(
    ("text", "words"), [("", "no key"), ("# only\n", "no key"), ("ok\nhunter2 x\n", ":2:"), (b"\xff", "not UTF-8")]
)
def test_a_bad_key_file_never_opens_the_gateway(tmp_path: Path, text: str | bytes, words: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    loc, message = one_fault(combined=A, api_keys_file=str(file))
    assert loc == "api_keys_file"
    assert words in message
    assert "hunter2" not in message
    with pytest.raises(ValueError, match="keys"):
        read_keys(file)


def test_a_missing_key_file_is_refused() -> None:
    assert one_fault(combined=A, api_keys_file="/none/keys")[0] == "api_keys_file"


def test_engines_are_shown_the_key_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1\n")
    key = GatewaySettings(combined=A, engine_api_key_file=file).models[0].engine_api_key
    assert key is not None
    assert key.get_secret_value() == "sk-1"
    assert "another key" in one_fault(combined=A, engine_api_key_file=file, engine_api_key="sk-2")[1]
    file.write_text("sk-1\nsk-2\n")
    assert "several keys" in one_fault(combined=A, engine_api_key_file=file)[1]


def test_no_representation_and_no_error_shows_a_key() -> None:
    settings = GatewaySettings(combined=A, api_keys=["hunter2"], engine_api_key="hunter2")
    assert "hunter2" not in repr(settings) + str(settings) + str(settings.model_dump()) + settings.model_dump_json()
    with pytest.raises(ValidationError) as caught:
        GatewaySettings(models=[{"encode": A, "engine_api_key": "hunter2"}], api_keyz="hunter2")
    assert "hunter2" not in str(caught.value)


def test_tls_files_are_tried(tmp_path: Path) -> None:
    authority = trustme.CA()
    pairs = []
    for name in ("one", "two"):
        issued = authority.issue_cert("localhost")
        certificate, key = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        pairs.append((certificate, key))
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    good = {"certificate": pairs[0][0], "key": pairs[0][1]}
    settings = GatewaySettings(combined=A, tls=good, engine_tls={"ca": tmp_path / "ca.pem"})
    assert settings.tls is not None
    assert "is not the key of" in one_fault(combined=A, tls={**good, "key": pairs[1][1]})[1]


def test_settings_cannot_be_changed() -> None:
    settings = GatewaySettings(combined=A)
    with pytest.raises(ValidationError, match="frozen"):
        settings.limits.items = 3


@pytest.mark.parametrize(
    ("text", "pair"),
    [("h:1", ("h", 1)), (":1", ("0.0.0.0", 1)), ("[::1]:2", ("::1", 2)), ("0.0.0.0:0", ("0.0.0.0", 0))],
)
def test_addresses_are_host_and_port(text: str, pair: tuple[str, int]) -> None:
    assert host_port(text) == pair


def test_an_engine_may_carry_what_a_dialect_of_a_third_party_needs_to_know_of_it() -> None:
    given = {"url": "http://p:1", "handover": {"bootstrap_port": 8998, "engine_id": "a"}}
    settings = GatewaySettings.model_validate({"prefill": [given], "decode": ["http://d:1"]})
    assert settings.models[0].prefill[0].handover == {"bootstrap_port": 8998, "engine_id": "a"}
    assert settings.models[0].decode[0].handover == {}
