"""The topology file: which engines of which role serve a model, how they hand over, what stands in front.

Everything here is about *what* is wanted. `triptych.launch.plan` turns it into processes. Times are seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from triptych.config import yamlfile
from triptych.config.problems import Loc, Origin, Problem, SettingsError, dotted, from_pydantic
from triptych.config.values import Model, refuse

Role = Literal["encode", "prefill", "decode", "combined"]
ROLES: tuple[Role, ...] = ("encode", "prefill", "decode", "combined")

# What the launcher itself says to an engine, and where a topology says it instead.
OWNED_FLAGS = {
    "--host": "use `host`",
    "--port": "use `ports`",
    "--uds": "engines listen on TCP: use `ports`",
    "--model": "use `model`",
    "--served-model-name": "use `model: {name: …}`",
    "--ec-transfer-config": "use `ec`",
    "--kv-transfer-config": "use `kv`",
}
# What the launcher itself tells the gateway.
OWNED_GATEWAY = ("models", "name", "encode", "prefill", "decode", "combined", "ec", "kv", "decode_ec_consumer")


def _scalar(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{json.dumps(value, default=str)} is not text or a number; put it in quotes")
    return str(value)


def _arguments(value: Any) -> Any:
    """`{max-model-len: 4096, enforce-eager: true}` or a list as on a command line; as a tuple of words."""
    if isinstance(value, list | tuple):
        return tuple(_scalar(word) for word in value)
    if not isinstance(value, Mapping):
        raise ValueError("give engine arguments as a mapping (`max-model-len: 4096`) or as a list of words")
    words: list[str] = []
    for key, given in value.items():
        name = str(key).lstrip("-").replace("_", "-")
        if given is True:
            words.append(f"--{name}")
        elif given is False:
            words.append(f"--no-{name}")
        elif isinstance(given, Mapping):
            words += [f"--{name}", json.dumps(given)]
        elif isinstance(given, list):
            words += [f"--{name}", *map(_scalar, given)]
        else:
            words += [f"--{name}", _scalar(given)]
    return tuple(words)


def _no_owned_flag(words: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in OWNED_FLAGS:
            raise ValueError(f"{flag} is the launcher's to give: {OWNED_FLAGS[flag]}")
    return words


def _environment(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError("give environment variables as a mapping, `NAME: value` (`null` removes one)")
    return {str(name): None if given is None else _scalar(given) for name, given in value.items()}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


def _device(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Arguments = Annotated[tuple[str, ...], BeforeValidator(_arguments)]
Environment = Annotated[dict[str, str | None], BeforeValidator(_environment)]
Port = Annotated[int, Field(ge=1, le=65535)]
Devices = Annotated[tuple[Annotated[str, BeforeValidator(_device)], ...], BeforeValidator(_as_list)]
# One number is the first of a row; a list has one for each replica.
Ports = Annotated[tuple[Port, ...], BeforeValidator(_as_list)]


class ModelSource(Model):
    """Which model the engines serve."""

    path: str | None = Field(None, description="a directory (relative to the file), or a name on the model hub")
    tiny: str | None = Field(None, description="a tiny random-weight model of this kind, written on first use")
    name: str | None = Field(None, description="the name clients use; from the path if unset")

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> ModelSource:
        if self.path and self.tiny:
            raise ValueError("give `path` or `tiny`, not both")
        return self


class Connector(Model):
    options: dict[str, Any] = Field({}, description="passed on to the connector's configuration")
    path: Path | None = Field(None, description="directory of a shared-storage connector; a temporary one if unset")

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"connector": value} if isinstance(value, str) else value


class EcSettings(Connector):
    """How encoder output gets from encode engines to consumers."""

    connector: Literal["triptych", "example", "eccpu", "mooncake", "none"] = "triptych"


class KvSettings(Connector):
    """How KV gets from prefill to decode engines."""

    connector: Literal["nixl", "example", "none"] = "nixl"


class EngineGroup(Model):
    """The engines of one role; a bare number stands for so many with defaults."""

    replicas: PositiveInt = 1
    ports: Ports = Field((), description="HTTP ports; free ones if unset")
    side_ports: Ports = Field((), description="ports of the connector's side channel; free ones if unset")
    devices: Devices = Field((), description='CUDA_VISIBLE_DEVICES of each replica, such as ["0", "1,2"]')
    args: Arguments = Field((), description="engine arguments after those for all engines")
    env: Environment = Field({}, description="environment over that for all engines")

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"replicas": value} if isinstance(value, int) and not isinstance(value, bool) else value

    _owned = field_validator("args")(_no_owned_flag)

    def fixed_ports(self, ports: tuple[int, ...]) -> tuple[int, ...]:
        """One port per replica from what the file gives, or none."""
        if len(ports) == 1:
            return tuple(ports[0] + replica for replica in range(self.replicas))
        return ports


class Engines(Model):
    """How many engines of each role."""

    encode: EngineGroup | None = None
    prefill: EngineGroup | None = None
    decode: EngineGroup | None = None
    combined: EngineGroup | None = None

    def groups(self) -> Iterator[tuple[Role, EngineGroup]]:
        for role in ROLES:
            group: EngineGroup | None = getattr(self, role)
            if group is not None:
                yield role, group


class Topology(Model):
    """One model, its engines by role, and the gateway in front."""

    model: ModelSource = ModelSource()
    engine: Literal["vllm", "sim"] = Field("vllm", description="real engines, or simulated ones")
    engines: Engines
    ec: EcSettings = EcSettings()
    kv: KvSettings = KvSettings()
    host: str = Field("127.0.0.1", description="where engines and their side channels listen")
    light: Literal["auto", "on", "off"] = Field(
        "auto", description="settings for a quick start in little memory; auto: on a machine without an accelerator"
    )
    args: Arguments = Field((), description="engine arguments for all engines")
    env: Environment = Field({}, description="environment for all engines; `null` removes a variable")
    gateway: dict[str, Any] | Literal[False] = Field({}, description="the gateway's settings; `false`: no gateway")
    log_dir: Path | None = Field(None, description="where logs go; a directory per start under the user's state")
    start_timeout: PositiveFloat = Field(600.0, description="until an engine must be healthy")
    stop_timeout: PositiveFloat = Field(15.0, description="from SIGTERM to SIGKILL, for an engine")

    _owned = field_validator("args")(_no_owned_flag)
    _file: Path | None = PrivateAttr(None)
    _origins: Mapping[Loc, Origin] = PrivateAttr({})

    @model_validator(mode="after")
    def _fits(self) -> Topology:
        refuse(Topology, _unfit(self))
        return self

    @property
    def origins(self) -> Mapping[Loc, Origin]:
        """Line and name of each field in the file; empty without a file."""
        return self._origins

    @property
    def name(self) -> str:
        """The file's name without its ending; names log directories."""
        return self._file.stem if self._file else "topology"

    def near(self, path: Path) -> Path:
        """A path of the file, relative to the file."""
        base = self._file.parent if self._file else Path.cwd()
        return (base / path.expanduser()).absolute()

    @property
    def model_directory(self) -> Path | None:
        """The model's directory if `model.path` names one (`/…`, `./…`, `../…`, `~…`), else None."""
        path = self.model.path
        return self.near(Path(path)) if path and path.startswith(("/", "./", "../", "~")) else None

    @property
    def served_name(self) -> str:
        """The model name that clients use."""
        if self.model.name:
            return self.model.name
        if self.model.tiny:
            return "tiny"
        if self.model_directory:
            return self.model_directory.resolve().name
        return self.model.path or "sim"


def load(path: Path) -> Topology:
    """Reads and validates a file. Raises SettingsError that names file, line and field of each fault."""
    document = yamlfile.read(path)
    origins = {loc: Origin(f"{path}:{line}", dotted(loc)) for loc, line in document.lines.items()}
    try:
        topology = Topology.model_validate(document.value)
    except ValidationError as error:
        raise SettingsError(from_pydantic(error, Topology, origins, nowhere=str(path))) from None
    topology._file = path
    topology._origins = origins
    directory = topology.model_directory
    if topology.engine == "vllm" and directory and not directory.exists():
        source = origins.get(("model", "path"), origins[("model",)]).source
        raise SettingsError([Problem(source, "model", f"there is no directory {directory}")])
    return topology


def _unfit(topology: Topology) -> Iterator[tuple[Loc, str]]:
    """What is right by itself but does not fit together."""
    roles = dict(topology.engines.groups())
    if "prefill" in roles and "decode" not in roles:
        yield ("engines", "prefill"), "prefill engines need `decode` engines beside them"
    if "decode" in roles and "prefill" not in roles:
        yield ("engines", "decode"), "decode engines without prefill engines do both: call them `combined`"
    if not roles.keys() & {"combined", "decode", "prefill"}:
        yield ("engines",), "no engine can answer: give `combined` engines, or `prefill` and `decode` engines"
    if "ec" in topology.model_fields_set and topology.ec.connector != "none" and "encode" not in roles:
        yield ("ec",), "there are no `encode` engines whose output could be handed over"
    if "encode" in roles and topology.ec.connector == "none":
        yield ("ec",), "encode engines need a connector: triptych, example, eccpu or mooncake"
    if "kv" in topology.model_fields_set and topology.kv.connector != "none" and "prefill" not in roles:
        yield ("kv",), "there are no `prefill` engines whose KV could be handed over"
    if "prefill" in roles and topology.kv.connector == "none":
        yield ("kv",), "prefill engines need a connector: nixl or example"
    if "encode" in roles and "prefill" in roles and topology.ec.connector == "mooncake":
        yield ("ec",), "mooncake hands encoder output to `combined` engines only, not to `prefill`"
    for name in ("ec", "kv"):
        settings: EcSettings | KvSettings = getattr(topology, name)
        if settings.path and settings.connector not in ("triptych", "example"):
            yield (name, "path"), f"{settings.connector} stores no files"
    yield from _unfit_groups(roles)
    yield from _unfit_model(topology)
    for key in OWNED_GATEWAY:
        if topology.gateway and key in topology.gateway:
            yield ("gateway", key), "is set by the launcher from `engines`, `ec`, `kv` and `model`"


def _unfit_groups(roles: Mapping[Role, EngineGroup]) -> Iterator[tuple[Loc, str]]:
    taken: dict[int, str] = {}
    for role, group in roles.items():
        for name in ("devices", "ports", "side_ports"):
            given: tuple[Any, ...] = getattr(group, name)
            single = name != "devices" and len(given) == 1
            if given and not single and len(given) != group.replicas:
                yield (
                    ("engines", role, name),
                    f"{len(given)} given for {group.replicas} replicas: give one for each",
                )
            elif name != "devices":
                for port in group.fixed_ports(given):
                    if port > 65535:
                        yield ("engines", role, name), f"port {port} is above 65535"
                    if port in taken:
                        yield ("engines", role, name), f"port {port} is also in {taken[port]}"
                    taken[port] = f"engines.{role}.{name}"


def _unfit_model(topology: Topology) -> Iterator[tuple[Loc, str]]:
    if topology.engine == "sim":
        return
    if not (topology.model.path or topology.model.tiny):
        yield ("model",), "is missing: give a directory, a name on the model hub, or `tiny: image`"
    elif topology.model.tiny:
        from triptych.models.tiny import kinds  # noqa: PLC0415 - only who asks for a recipe needs them

        if topology.model.tiny not in kinds():
            yield ("model", "tiny"), f"is not the kind of a tiny model; there are: {', '.join(kinds())}"
