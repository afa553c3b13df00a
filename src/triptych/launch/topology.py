"""The topology file: which engines of which role serve a model, how they hand over, what stands in front.

Everything here is about *what* is wanted. `triptych.launch.plan` turns it into processes. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PrivateAttr, ValidationError, field_validator, model_validator

from triptych.config import yamlfile
from triptych.config.problems import Loc, Origin, Problem, SettingsError, dotted, from_pydantic
from triptych.config.values import Model, refuse
from triptych.launch.groups import Arguments, EngineGroup, Environment, no_owned_flag
from triptych.launch.pipeline import StageGroup, unfit_stages

Role = Literal["encode", "prefill", "decode", "combined"]
ROLES: tuple[Role, ...] = ("encode", "prefill", "decode", "combined")

# What the launcher itself tells the gateway.
OWNED_GATEWAY = (
    "models", "name", "encode", "prefill", "decode", "combined", "ec", "kv", "decode_ec_consumer", "stages", "sound",
)  # fmt: skip


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
    """One model, its engines by role or by stage, and the gateway in front."""

    model: ModelSource = ModelSource()
    engine: Literal["vllm", "sim"] = Field("vllm", description="real engines, or simulated ones")
    engines: Engines = Field(Engines(), description="engines by role; or `stages`")
    stages: tuple[StageGroup, ...] = Field((), description="the stages of a pipeline, first to last; or `engines`")
    overlap: bool = Field(True, description="stages: `false` makes each wait for the whole of the one before it")
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

    _owned = field_validator("args")(no_owned_flag)
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

    def near_text(self, path: str) -> Path:
        """The same of a path in text."""
        return self.near(Path(path))

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
            return self.model.tiny if self.stages else "tiny"
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
    if not topology.model_fields_set & {"engines", "stages"}:
        yield ("engines",), "is missing: give it, or `stages`"
        return
    yield from _unfit_model(topology)
    for key in OWNED_GATEWAY:
        if topology.gateway and key in topology.gateway:
            yield ("gateway", key), "is set by the launcher from `engines`, `stages`, `ec`, `kv` and `model`"
    roles = dict(topology.engines.groups())
    if topology.stages:
        if roles:
            yield ("stages",), "give `engines` or `stages`, not both"
        for name in ("ec", "kv"):
            if name in topology.model_fields_set:
                yield (name,), "is for `engines`: stages hand over chunks, each by its own `connector`"
        if topology.engine == "sim":
            yield ("engine",), "simulated engines have no stages"
        yield from unfit_stages(topology.stages)
        yield from _unfit_groups({("stages", index): group for index, group in enumerate(topology.stages)})
        return
    if not topology.overlap:
        yield ("overlap",), "is for `stages`"
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
    yield from _unfit_groups({("engines", role): group for role, group in roles.items()})


def _unfit_groups(groups: Mapping[Loc, EngineGroup]) -> Iterator[tuple[Loc, str]]:
    taken: dict[int, str] = {}
    for place, group in groups.items():
        for name in ("devices", "ports", "side_ports"):
            given: tuple[Any, ...] = getattr(group, name)
            single = name != "devices" and len(given) == 1
            if given and not single and len(given) != group.replicas:
                yield (
                    (*place, name),
                    f"{len(given)} given for {group.replicas} replicas: give one for each",
                )
            elif name != "devices":
                for port in group.fixed_ports(given):
                    if port > 65535:
                        yield (*place, name), f"port {port} is above 65535"
                    if port in taken:
                        yield (*place, name), f"port {port} is also in {taken[port]}"
                    taken[port] = dotted((*place, name))


def _unfit_model(topology: Topology) -> Iterator[tuple[Loc, str]]:
    if topology.engine == "sim":
        return
    if not (topology.model.path or topology.model.tiny):
        if topology.stages and all(stage.model for stage in topology.stages):
            return
        yield ("model",), "is missing: give a directory, a name on the model hub, or `tiny: image`"
    elif topology.model.tiny:
        from triptych.models.tiny import kinds  # noqa: PLC0415 - only who asks for a recipe needs them

        if topology.model.tiny not in kinds():
            yield ("model", "tiny"), f"is not the kind of a tiny model; there are: {', '.join(kinds())}"
