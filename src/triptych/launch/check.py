"""What can be said of a topology without starting it: whether it is right, its graph, its command lines."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from triptych.config.problems import Loc, Origin, SettingsError, from_pydantic, names
from triptych.config.values import host_port
from triptych.launch.plan import GATEWAY, Front, Plan, ProcessSpec, gateway_config, needs, plan
from triptych.launch.ports import Reservations
from triptych.launch.site import Site, replicas

if TYPE_CHECKING:
    from triptych.launch.topology import Topology


def gateway_front(topology: Topology) -> Front | None:
    """How the gateway will listen, None where there is none.

    Raises SettingsError for settings that the gateway would refuse, with the topology's lines.
    """
    if topology.gateway is False:
        return None
    from triptych.gateway.settings import GatewaySettings, ModelSettings  # noqa: PLC0415 - not for engines alone

    try:
        settings = GatewaySettings.model_validate(gateway_config(topology, []))
    except ValidationError as error:
        origins: dict[Loc, Origin] = {}
        for loc, origin in topology.origins.items():
            if loc[:1] == ("gateway",):
                # A single model's settings stand at top level, and are validated as the first of `models`.
                origins[loc[1:]] = origins["models", 0, *loc[1:]] = origin
        known = (*names(ModelSettings), *names(GatewaySettings))
        nowhere = f"{topology.name}: gateway"
        raise SettingsError(from_pydantic(error, GatewaySettings, origins, nowhere=nowhere, known=known)) from None
    host, port = host_port(settings.listen)
    admin = None if settings.admin == "off" else host_port(settings.admin)
    return Front(host, port, settings.tls is not None, settings.deadlines.drain, admin)


def missing(topology: Topology) -> str | None:
    """What is not installed here that the topology needs, with what to do; None for nothing."""
    if topology.engine == "sim":
        return None
    from triptych.engine.check import nixl_problem, vllm_problem  # noqa: PLC0415 - not for simulated engines

    problem = vllm_problem()
    needs_nixl = (topology.engines.prefill and topology.kv.connector == "nixl") or (
        topology.engines.encode and topology.ec.connector == "eccpu"
    )
    # With a PYTHONPATH of their own the engines may find what this process does not.
    own_path = any("PYTHONPATH" in env for env in (topology.env, *(engine.group.env for engine in replicas(topology))))
    if problem is None and not own_path:
        problem = nixl_problem() if needs_nixl else _missing_processor(topology)
    return problem


def _missing_processor(topology: Topology) -> str | None:
    """Which stage's processor cannot be found. Its module is looked for, not imported: that may need PyTorch."""
    offered = {point.name for point in entry_points(group="triptych.processors")}
    for stage in topology.stages:
        name = stage.processor or ""
        module = name.partition(":")[0] if ":" in name else name.rpartition(".")[0]
        if name in offered:
            continue
        try:
            found = bool(module) and find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            return f"stage {stage.id}: there is no processor {name!r}: no module of that name, and no entry point"
    return None


def has_accelerator() -> bool:
    """Whether this machine shows a GPU that vLLM could use (NVIDIA, AMD)."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))


def model_argument(topology: Topology, *, write: bool) -> str:
    """What engines get as their model. A tiny one is put into the user's cache, if `write` and it is not there yet."""
    if topology.engine == "sim" or not (topology.model.path or topology.model.tiny):
        return topology.served_name
    if topology.model.tiny:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = cache / "triptych" / "models" / topology.model.tiny
        if write:
            from triptych.models.tiny import write_tiny  # noqa: PLC0415 - only who asks for a recipe needs them

            write_tiny(topology.model.tiny, directory)
        return str(directory)
    return str(topology.model_directory or topology.model.path)


def dry_plan(topology: Topology) -> Plan:
    """The plan of a topology on this machine, with ports that are free now and directories that are not made."""
    front = gateway_front(topology)
    wanted = needs(topology, front)
    with Reservations() as reserved:
        # A fixed port that is in use now may be free when the topology is started.
        ports = {(need.process, need.label): need.port for need in wanted if need.port}
        ports |= reserved.take(need for need in wanted if not need.port)
    run = Path("RUN_DIRECTORY")
    site = Site(ports, sys.executable, model_argument(topology, write=False), run, run, has_accelerator(), "SECRET")
    return plan(topology, site, front)


def shown_config(made: Plan) -> str:
    """The gateway's configuration without the values of keys."""
    return json.dumps({k: "***" if "key" in k else v for k, v in (made.gateway_config or {}).items()}, indent=1)


def graph(topology: Topology, made: Plan) -> Iterator[str]:
    """The processes and what goes between them, a line each."""
    roles: dict[str, list[ProcessSpec]] = {}
    for spec in made.processes:
        if spec.role != GATEWAY:
            roles.setdefault(spec.role, []).append(spec)
    count = sum(map(len, roles.values()))
    kind = "simulated" if topology.engine == "sim" else "vLLM"
    yield f"model {topology.served_name}: {count} {kind} engine{'s' if count > 1 else ''}"
    yield ""
    if made.gateway_url:
        yield f"  clients -> gateway {made.gateway_url}"
    for number, (role, specs) in enumerate(roles.items(), 1):
        branch = ("`-" if number == len(roles) else "|-") + " " if made.gateway_url else ""
        yield f"             {branch}{role} x {len(specs)}: " + ", ".join(spec.url for spec in specs)
    yield ""
    for edge in made.edges:
        if edge.source != GATEWAY:
            yield f"  {edge.source} -> {edge.target}: {edge.what}"


def shell(spec: ProcessSpec) -> str:
    """A process's command as one can paste it into a shell."""
    unset = [f"-u {name}" for name, value in spec.env.items() if value is None]
    settings = [f"{name}={shlex.quote(value)}" for name, value in spec.env.items() if value is not None]
    words = (["env", *unset] if unset or settings else []) + settings
    return " ".join([*words, shlex.join(spec.argv)])
