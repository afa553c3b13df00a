"""From a topology to the processes that make it: command lines, environments, ports, addresses.

Pure: what has to be looked up (free ports, directories, whether there is an accelerator) comes in as a `Site`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.launch import connectors, engines, stages
from triptych.launch.ports import Need, reachable
from triptych.launch.site import CHUNKS, HTTP, SIDE, Site, replicas
from triptych.launch.topology import OWNED_GATEWAY, Topology

GATEWAY = "gateway"
ADMIN = "admin"
# From SIGTERM to SIGKILL for the gateway: its own drain deadline, and a little for closing.
DRAIN_MARGIN = 5.0
GATEWAY_START = 60.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to run. Times are seconds."""

    name: str
    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    """over the launcher's own environment; None removes a variable"""
    url: str
    ready_url: str
    """answers 200 once the process is ready"""
    ports: Mapping[str, int] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    """names of processes that must be ready before this one is started"""
    tier: int = 0
    """higher tiers are started after and stopped before lower ones"""
    start_timeout: float = 600.0
    stop_timeout: float = 15.0


@dataclass(frozen=True, slots=True)
class Front:
    """How the gateway listens. Ports of 0: any; the one taken is in `Site.ports`. `drain`: seconds."""

    host: str
    port: int
    tls: bool
    drain: float
    admin: tuple[str, int] | None
    """host and port of the admin listener"""


@dataclass(frozen=True, slots=True)
class Edge:
    """What one kind of process sends to another."""

    source: str
    target: str
    what: str


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a topology, and how they hang together."""

    processes: tuple[ProcessSpec, ...]
    edges: tuple[Edge, ...]
    gateway_url: str | None
    gateway_config: Mapping[str, Any] | None
    """what the gateway's configuration file holds"""
    gateway_file: Path | None
    admin_url: str | None = None
    """of the gateway's admin listener, where it has a fixed port"""


def needs(topology: Topology, front: Front | None) -> list[Need]:
    """The ports that a topology needs."""
    found: list[Need] = []
    if front is not None:
        found.append(Need(GATEWAY, HTTP, front.host, front.port or None))
        if front.admin and front.admin[1]:
            found.append(Need(GATEWAY, ADMIN, *front.admin))
    for engine in replicas(topology):
        group, host = engine.group, topology.host
        http = group.fixed_ports(group.ports)
        found.append(Need(engine.name, HTTP, host, http[engine.index] if http else None))
        if connectors.has_side_channel(topology, engine.role):
            side = group.fixed_ports(group.side_ports)
            width = math.prod(connectors.parallel_sizes((*topology.args, *group.args)))
            found.append(Need(engine.name, SIDE, host, side[engine.index] if side else None, width))
        if topology.stages:
            chunks = group.fixed_ports(group.side_ports)
            found.append(Need(engine.name, CHUNKS, host, chunks[engine.index] if chunks else None))
    return found


def plan(topology: Topology, site: Site, front: Front | None) -> Plan:
    """The processes of a topology. `front`: how the gateway listens, None for no gateway."""
    found: list[ProcessSpec] = []
    users: dict[str, str] = {}  # device -> the last process that starts on it
    for engine in replicas(topology):
        # vLLM measures free device memory while it starts, so two that share a device must not start at once.
        devices = engine.devices.split(",") if engine.devices else []
        after = tuple(dict.fromkeys(users[device] for device in devices if device in users))
        users |= dict.fromkeys(devices, engine.name)
        if topology.stages:
            light = engines.is_light(topology, accelerator=site.accelerator)
            argv, env = stages.command(topology, site, engine, light=light)
        else:
            command = engines.simulated if topology.engine == "sim" else engines.vllm
            argv, env = command(topology, site, engine)
        labels = (HTTP, SIDE, CHUNKS)
        ports = {label: site.ports[engine.name, label] for label in labels if (engine.name, label) in site.ports}
        url = f"http://{reachable(topology.host)}:{ports[HTTP]}"
        spec = ProcessSpec(
            name=engine.name,
            role=engine.role,
            argv=tuple(argv),
            env=env,
            url=url,
            ready_url=f"{url}/health",
            ports=ports,
            after=after,
            start_timeout=topology.start_timeout,
            stop_timeout=topology.stop_timeout,
        )
        found.append(spec)
    if front is None:
        return Plan(tuple(found), _edges(topology), None, None, None)
    file = site.disk / "gateway.json"
    port = site.ports[GATEWAY, HTTP]
    url = f"{'https' if front.tls else 'http'}://{reachable(front.host)}:{port}"
    gateway = ProcessSpec(
        name=GATEWAY,
        role=GATEWAY,
        argv=(site.python, "-m", "triptych", "gateway", "--config", str(file)),
        # To the gateway variables win over the file. They may hold keys, but not what the topology says.
        env={f"TRIPTYCH_{name.upper()}": None for name in ("config", "listen", *OWNED_GATEWAY)}
        | stages.secret(topology, site),
        url=url,
        ready_url=f"{url}/readyz",
        ports={HTTP: port},
        tier=1,
        start_timeout=min(GATEWAY_START, topology.start_timeout),
        stop_timeout=front.drain + DRAIN_MARGIN,
    )
    host = f"[{front.host}]" if ":" in front.host else front.host
    config = gateway_config(topology, found, site) | {"listen": f"{host}:{port}"}
    admin = None
    if front.admin and (GATEWAY, ADMIN) in site.ports:
        admin = f"http://{reachable(front.admin[0])}:{site.ports[GATEWAY, ADMIN]}"
    return Plan((*found, gateway), _edges(topology), url, config, file, admin)


def gateway_config(topology: Topology, processes: Iterable[ProcessSpec], site: Site | None = None) -> dict[str, Any]:
    """The gateway's settings: those of the file, and the pools. A process not given has a stand-in, to be validated."""
    known = {spec.name: spec for spec in processes}
    config: dict[str, Any] = {**(topology.gateway or {}), "name": topology.served_name}
    if topology.stages:
        return config | stages.gateway_config(topology, site, known)
    for engine in replicas(topology):
        spec = known.get(engine.name)
        url = spec.url if spec else f"http://{engine.role}:{engine.index + 1}"
        side = spec.ports.get(SIDE, 0) if spec else 1
        addresses = connectors.push_addresses(topology, engine, side)
        config.setdefault(engine.role, []).append({"url": url, "ec_zmq": addresses} if addresses else url)
    if topology.engines.encode:
        config["ec"] = connectors.EC_DIALECT[topology.ec.connector]
    if topology.engines.prefill:
        config["kv"] = topology.kv.connector
        config["decode_ec_consumer"] = connectors.ec_role(topology, "decode") is not None
    return config


def _edges(topology: Topology) -> tuple[Edge, ...]:
    if topology.stages:
        front = () if topology.gateway is False else tuple(Edge(GATEWAY, s.id, "HTTP") for s in topology.stages)
        return (*front, *(Edge(*edge) for edge in stages.edges(topology)))
    roles = [role for role, _ in topology.engines.groups()]
    found = [Edge(GATEWAY, role, "HTTP") for role in roles] if topology.gateway is not False else []
    found += [
        Edge("encode", role, f"EC {topology.ec.connector}")
        for role in roles
        if role != "encode" and "encode" in roles and connectors.ec_role(topology, role)
    ]
    if "prefill" in roles:
        found.append(Edge("prefill", "decode", f"KV {topology.kv.connector}"))
    return tuple(found)
