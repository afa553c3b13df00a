"""What can be said of a topology without starting it: whether it is right, its graph, its command lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import ValidationError

from triptych.config.problems import Loc, Origin, SettingsError, from_pydantic, names
from triptych.config.values import host_port
from triptych.launch.plan import GATEWAY, Front, Plan, ProcessSpec, gateway_config

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
    return Front(host, port, settings.tls is not None, settings.deadlines.drain)


def graph(topology: Topology, plan: Plan) -> Iterator[str]:
    """The processes and what goes between them, a line each."""
    roles: dict[str, list[ProcessSpec]] = {}
    for spec in plan.processes:
        if spec.role != GATEWAY:
            roles.setdefault(spec.role, []).append(spec)
    count = sum(map(len, roles.values()))
    kind = "simulated" if topology.engine == "sim" else "vLLM"
    yield f"model {topology.served_name}: {count} {kind} engine{'s' if count > 1 else ''}"
    yield ""
    if plan.gateway_url:
        yield f"  clients -> gateway {plan.gateway_url}"
    for number, (role, specs) in enumerate(roles.items(), 1):
        branch = ("`-" if number == len(roles) else "|-") + " " if plan.gateway_url else ""
        yield f"             {branch}{role} x {len(specs)}: " + ", ".join(spec.url for spec in specs)
    yield ""
    for edge in plan.edges:
        if edge.source != GATEWAY:
            yield f"  {edge.source} -> {edge.target}: {edge.what}"


def shell(spec: ProcessSpec) -> str:
    """A process's command as one can paste it into a shell."""
    unset = [f"-u {name}" for name, value in spec.env.items() if value is None]
    settings = [f"{name}={shlex.quote(value)}" for name, value in spec.env.items() if value is not None]
    words = (["env", *unset] if unset or settings else []) + settings
    return " ".join([*words, shlex.join(spec.argv)])
