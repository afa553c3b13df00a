"""What can be set on the gateway: one model behind flags, YAML file and environment.

`triptych.gateway.sources` reads the three and merges them; everything else only sees `GatewaySettings`.
Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from triptych.config.values import (
    EngineUrl,
    KeyFile,
    Model,
    PemFile,
    Secret,
    Size,
    authorities_problem,
    host_port,
    read_keys,
    refuse,
    tls_problem,
)

MiB = 1 << 20

Role = Literal["encode", "prefill", "decode", "combined"]
ROLES: tuple[Role, ...] = ("encode", "prefill", "decode", "combined")

# What a client may not send unless it is named here (epd-gateway contract, "What a client may not send").
Opening = Literal[
    "ec_transfer_params",
    "kv_transfer_params",
    "uuid",
    "embeds",
    "data_parallel_rank",
    "answer_handles",
]


class EngineSettings(Model):
    """One engine of a pool; a bare URL stands for one with defaults."""

    url: EngineUrl = Field(description="http://HOST:PORT or https://HOST:PORT")
    weight: PositiveFloat = Field(1.0, description="share of the load that this engine gets, relative to its pool")
    max_in_flight: PositiveInt | None = Field(None, description="requests at once on this engine; no limit if unset")
    ec_zmq: tuple[str, ...] = Field(
        (),
        description="EC mooncake: the control address(es) tcp://HOST:PORT where this consumer takes encoder output, "
        "one per data-parallel rank",
    )
    source: str | None = Field(
        None, description="pipelines: HOST:PORT by which what follows knows it as a sender of chunks"
    )
    handover: Mapping[str, Any] = Field(
        {},
        description="whatever else a hand-over dialect needs to know of this engine; those of Triptych need nothing",
    )

    @model_validator(mode="before")
    @classmethod
    def _bare_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("source")
    @classmethod
    def _host_port(cls, value: str | None) -> str | None:
        if value is not None:
            host_port(value)
        return value

    @field_validator("ec_zmq", mode="before")
    @classmethod
    def _one_address(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("ec_zmq")
    @classmethod
    def _tcp(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            if not address.startswith("tcp://"):
                raise ValueError(f"{address!r} is not of the form tcp://HOST:PORT")
        return value


def _split_urls(value: Any) -> Any:
    """`a,b` and the reference proxy's `disable`/`none` are what users of vLLM's proxy type."""
    if value is None:
        return ()
    if isinstance(value, str | dict):
        value = [value]
    if isinstance(value, list | tuple):
        out: list[Any] = []
        for entry in value:
            if isinstance(entry, str):
                out += [u for u in (p.strip() for p in entry.split(",")) if u and u.lower() not in ("disable", "none")]
            else:
                out.append(entry)
        return tuple(out)
    return value


EngineList = Annotated[tuple[EngineSettings, ...], BeforeValidator(_split_urls)]


class StageSettings(Model):
    """A stage of a pipeline after the first."""

    id: str = Field(description="its name", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    engines: EngineList = Field(description="its replicas")
    max_tokens: PositiveInt = Field(2048, description="that a request of this stage may make")


class SoundSettings(Model):
    """How the last stage's chunks of sound get here."""

    connector: str = Field("shm", description="shm, tcp, or one of another package's")
    extra: Mapping[str, Any] = Field({}, description="the connector's options")
    text_stage: str = Field("text", description="name of the first stage, whose answer is the text")
    text_tokens: PositiveInt | None = Field(
        None, description="tokens of a speech request's text; the engine's limit if unset"
    )


class ModelSettings(Model):
    """The pools that serve one model, and how they hand over to each other."""

    name: str | None = Field(None, description="model name; polled from the engines' /v1/models if unset")
    encode: EngineList = Field((), description="encode engines")
    prefill: EngineList = Field((), description="prefill engines")
    decode: EngineList = Field((), description="decode engines; without prefill engines they are combined engines")
    combined: EngineList = Field((), description="engines that do prefill and decode")
    prefer: Literal["disaggregated", "combined"] = Field(
        "disaggregated", description="which to use where both combined and prefill/decode engines are there"
    )
    ec: str = Field("example", description="dialect of encoder output hand-over: example, eccpu or mooncake")
    kv: str = Field("nixl", description="dialect of KV hand-over: nixl or example")
    decode_ec_consumer: bool = Field(
        False,
        description="decode engines also take encoder output (file KV needs that: an image may overlap the tail)",
    )
    media_to_consumer: Literal["raw", "metadata"] = Field(
        "raw",
        description="what the consumer gets for an encoded item: the media again, or placeholder metadata only",
    )
    encode_failure: Literal["soft", "strict"] = Field(
        "soft", description="a failed encode leg: go on without it, or fail the request"
    )
    no_prefill: Literal["refuse", "decode"] = Field(
        "refuse", description="no healthy prefill engine: answer 503, or let decode do it all"
    )
    encode_priority: bool = Field(
        False, description="pass `priority` to encode legs (engines without priority scheduling refuse it)"
    )
    stages: tuple[StageSettings, ...] = Field(
        (), description="a pipeline's stages after the first, which `combined` is"
    )
    sound: SoundSettings | None = Field(None, description="how the sound of the last of `stages` gets here")
    engine_api_key_file: KeyFile | None = Field(
        None, description="file that holds the key that the gateway shows to these engines"
    )
    engine_api_key: Secret | None = Field(None, description="key that the gateway shows to these engines")

    @field_validator("engine_api_key_file")
    @classmethod
    def _one_key(cls, value: Path | None) -> Path | None:
        if value is not None and len(read_keys(value)) > 1:
            raise ValueError(f"{value} holds several keys: engines are shown one")
        return value

    @field_validator("engine_api_key")
    @classmethod
    def _key_of_file(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        file = info.data.get("engine_api_key_file")
        if file is None:
            return value
        key = read_keys(file)[0]
        if value is not None and value != key:
            raise ValueError("is set beside `engine_api_key_file`, which holds another key: give one of the two")
        return key

    @model_validator(mode="after")
    def _pools_fit(self) -> Self:
        refuse(type(self), self._misfits())
        return self

    def _misfits(self) -> Iterable[tuple[tuple[str | int, ...], str]]:
        if self.prefill and not self.decode:
            yield ("prefill",), "prefill engines without decode engines: give `decode` engines too, or no `prefill`"
        elif not (self.combined or self.decode):
            what = "no engine can answer: give `combined` engines, or `decode` engines (with `prefill` ones for P+D)"
            yield ("encode",) if self.encode else (), what
        seen: dict[str, str] = {}
        for role in ROLES:
            for index, engine in enumerate(getattr(self, role)):
                if engine.url in seen:
                    where = "twice" if seen[engine.url] == role else f"in `{seen[engine.url]}` too"
                    yield (role, index, "url"), f"{engine.url} is listed {where}: an engine has one role"
                seen[engine.url] = role
        yield from self._unfit_stages(seen)
        if self.ec == "mooncake" and self.encode:
            if self.prefill:
                yield ("ec",), "mooncake works with E+PD only: leave `prefill` out, or choose `ec` example or eccpu"
            for role in ("combined", "decode"):
                for index, engine in enumerate(getattr(self, role)):
                    if not engine.ec_zmq:
                        what = f"`ec` mooncake needs, for {engine.url}, the address tcp://HOST:PORT where it listens"
                        yield (role, index, "ec_zmq"), what

    def _unfit_stages(self, seen: dict[str, str]) -> Iterable[tuple[tuple[str | int, ...], str]]:
        if bool(self.stages) != (self.sound is not None):
            yield ("sound" if self.stages else "stages",), "is missing: `stages` and `sound` go together"
        known: set[str] = {*ROLES, "sound"}
        for index, stage in enumerate(self.stages):
            if stage.id in known:
                yield ("stages", index, "id"), f"{stage.id!r} is taken: give each stage a name of its own"
            known.add(stage.id)
            if not stage.engines:
                yield ("stages", index, "engines"), f"stage {stage.id!r} has no engine"
            for number, engine in enumerate(stage.engines):
                if engine.url in seen:
                    yield (
                        ("stages", index, "engines", number, "url"),
                        f"{engine.url} is listed in `{seen[engine.url]}` too",
                    )
                seen[engine.url] = stage.id


class Deadlines(Model):
    """Seconds until a wait is given up. Every one of them names whom it waited for when it passes."""

    connect: PositiveFloat = Field(2.0, description="TCP (and TLS) connection to an engine")
    encode: PositiveFloat = Field(30.0, description="one encode leg, whole")
    prefill: PositiveFloat = Field(60.0, description="the prefill leg, whole")
    first_byte: PositiveFloat = Field(120.0, description="until the answering engine's response head")
    stream_idle: PositiveFloat = Field(120.0, description="between two pieces of an answer")
    total: PositiveFloat | None = Field(None, description="the whole request; none by default")
    queue: PositiveFloat = Field(10.0, description="a request waiting for admission")
    body: PositiveFloat = Field(30.0, description="silence of a client that is sending its body")
    header: PositiveFloat = Field(10.0, description="a client sending a request head")
    keep_alive: PositiveFloat = Field(75.0, description="an idle client connection")
    write: PositiveFloat = Field(60.0, description="a client that takes nothing of its answer")
    drain: PositiveFloat = Field(30.0, description="after SIGTERM, for requests in flight")


class Limits(Model):
    """What one request, and all together, may take. Sizes are bytes, or a number with KiB, MiB or GiB."""

    body_bytes: Size = Field(64 * MiB, description="a request's body (413 above)")
    items: PositiveInt = Field(128, description="media items of one request (400 above)")
    requests: PositiveInt = Field(1024, description="requests in flight")
    bytes: Size = Field(1024 * MiB, description="bytes of request bodies in flight")
    upload_rate: PositiveInt = Field(
        64 * 1024,
        description="bytes a second that a body must come at once it has taken `deadlines.body`, while others wait for "
        "its place (408 below)",
    )
    queue: int = Field(256, ge=0, description="requests that may wait for admission (429 above)")
    header_bytes: Size = Field(64 * 1024, description="a request's or an answer's head (431 above)")
    answer_bytes: Size = Field(64 * MiB, description="a non-streaming answer (502 above)")
    prefill_answer_bytes: Size = Field(16 * MiB, description="a prefill engine's answer (502 above)")
    event_bytes: Size = Field(16 * MiB, description="one SSE event (502 above)")
    encode_legs: PositiveInt = Field(8, description="encode legs of one request at once")
    encode_legs_per_engine: PositiveInt = Field(32, description="encode legs on one encoder at once")
    connections: PositiveInt = Field(4096, description="client connections (503 above)")


# Fixed by the contract (Encode stage, 4): one byte more and the leg has failed.
ENCODE_ANSWER_BYTES = MiB


class Health(Model):
    """How engines are probed, ejected and taken back."""

    interval: PositiveFloat = Field(2.0, description="between two probes of an engine")
    timeout: PositiveFloat = Field(5.0, description="for one probe")
    failures: PositiveInt = Field(3, description="probes or connections in a row that fail until an engine is ejected")
    successes: PositiveInt = Field(1, description="probes in a row that succeed until it is taken back")
    path: str = Field("/health", description="what is probed", pattern=r"^/[!-~]*$")
    models_interval: PositiveFloat = Field(10.0, description="between two looks at an engine's /v1/models")


class ServerTls(Model):
    """TLS on the API's own address."""

    certificate: PemFile = Field(description="PEM file with the certificate chain")
    key: PemFile = Field(description="PEM file with the private key")

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if problem := tls_problem(self.certificate, self.key):
            refuse(type(self), [(("key",), problem)])
        return self


class EngineTls(Model):
    """TLS to engines whose address is https://."""

    ca: PemFile | None = Field(None, description="PEM file with the authorities that sign the engines' certificates")
    verify: bool = Field(True, description="check the engines' certificates")

    @field_validator("ca")
    @classmethod
    def _usable(cls, value: Path | None) -> Path | None:
        if value is not None and (problem := authorities_problem(value)):
            raise ValueError(problem)
        return value


class GatewaySettings(Model):
    """All of the gateway's settings."""

    listen: str = Field("0.0.0.0:8000", description="HOST:PORT of the API")
    admin: str = Field("127.0.0.1:8001", description="HOST:PORT of /metrics, /debug and admin calls; `off` for none")
    models: tuple[ModelSettings, ...] = Field(
        description="the models served, each with its pools; for a single one its settings may stand at top level"
    )
    api_keys_file: KeyFile | None = Field(None, description="file with more `api_keys`, one a line")
    api_keys: tuple[Secret, ...] = Field((), description="keys of which a client must show one; open if empty")
    tenant_header: str | None = Field(None, description="header that names the tenant (a client can forge it)")
    open: frozenset[Opening] = Field(frozenset(), description="what clients may send though it is closed by default")
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()
    health: Health = Health()
    tls: ServerTls | None = Field(None, description="serve the API over TLS")
    engine_tls: EngineTls = EngineTls()
    log_format: Literal["json", "text"] = Field("text", description="form of the log lines on stderr")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    access_log: bool = Field(True, description="one line per request")
    debug_requests: int = Field(256, ge=0, description="how many requests' timelines /debug/requests keeps")

    @model_validator(mode="before")
    @classmethod
    def _single_model(cls, value: Any) -> Any:
        """One model's fields may stand at top level, so that the usual case needs no list."""
        if not isinstance(value, dict):
            return value
        own = {k: v for k, v in value.items() if k in _MODEL_FIELDS and v is not None}
        rest = {k: v for k, v in value.items() if k not in _MODEL_FIELDS}
        if not own:
            return rest
        if rest.get("models"):
            raise ValueError(
                f"`models` and {', '.join(f'`{k}`' for k in sorted(own))} at top level: with `models`, "
                "put the latter inside the model that they belong to"
            )
        return {**rest, "models": [own]}

    @field_validator("models")
    @classmethod
    def _models_fit(cls, value: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
        if not value:
            raise ValueError("no model: give engines, for example --combined http://127.0.0.1:8000")
        names = [m.name for m in value]
        problems: list[tuple[tuple[str | int, ...], str]] = []
        for index, name in enumerate(names):
            if len(names) > 1 and name is None:
                problems.append(((index, "name"), "is missing: with several models each needs its `name`"))
            elif name in names[:index]:
                problems.append(((index, "name"), f"{name!r} is the name of an earlier model too: give each its own"))
        refuse(ModelSettings, problems)
        return value

    @field_validator("api_keys")
    @classmethod
    def _keys_of_file(cls, value: tuple[SecretStr, ...], info: ValidationInfo) -> tuple[SecretStr, ...]:
        file = info.data.get("api_keys_file")
        return tuple(dict.fromkeys((*value, *(read_keys(file) if file else ()))))

    @field_validator("open", mode="before")
    @classmethod
    def _comma(cls, value: Any) -> Any:
        return [v.strip() for v in value.split(",") if v.strip()] if isinstance(value, str) else value

    @field_validator("listen", "admin")
    @classmethod
    def _address(cls, value: str, info: ValidationInfo) -> str:
        if value == "off" and info.field_name == "admin":
            return value
        host, port = host_port(value)
        listen = info.data.get("listen")
        if info.field_name == "admin" and listen and port:
            other, taken = host_port(listen)
            if port == taken and (host == other or {host, other} & {"0.0.0.0", "::"}):
                raise ValueError(f"{value!r} is taken by `listen` ({listen}): give another port, or `off`")
        return value

    @field_validator("tenant_header")
    @classmethod
    def _header_name(cls, value: str | None) -> str | None:
        if value and not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", value):
            raise ValueError(f"{value!r} is not a header's name: write it like x-tenant")
        return value.lower() if value else None


_MODEL_FIELDS = frozenset(ModelSettings.model_fields)
