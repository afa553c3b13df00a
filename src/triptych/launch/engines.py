"""Command line and environment of one engine, real or simulated."""

from __future__ import annotations

import json
from pathlib import Path

from triptych.engine.light import CPU_ENVIRONMENT, CPU_FLAGS, CPU_UNSET
from triptych.launch import connectors
from triptych.launch.site import HTTP, SIDE, Replica, Site
from triptych.launch.topology import EcSettings, KvSettings, Topology

Command = tuple[list[str], dict[str, str | None]]


def is_light(topology: Topology, *, accelerator: bool) -> bool:
    """Whether engines get the settings for a quick start in little memory."""
    return topology.light == "on" or (topology.light == "auto" and not accelerator)


def store(topology: Topology, settings: EcSettings | KvSettings, site: Site) -> Path:
    """Where a connector that uses files puts them. Only our own one bounds its store, so only that may use memory."""
    if settings.path:
        return topology.near(settings.path)
    base = site.memory if settings.connector == "triptych" else site.disk
    return base / ("ec" if isinstance(settings, EcSettings) else "kv")


def vllm(topology: Topology, site: Site, engine: Replica) -> Command:
    """A stock vLLM server. Later words win in vLLM, so the topology's arguments come after the light ones."""
    role, port, side = engine.role, site.ports[engine.name, HTTP], site.ports.get((engine.name, SIDE))
    light = is_light(topology, accelerator=site.accelerator)
    argv = [site.python, "-m", "triptych.engine.vllm", "serve", site.model]
    argv += ["--host", topology.host, "--port", str(port), "--served-model-name", topology.served_name]
    argv += [*(CPU_FLAGS if light else ()), *topology.args, *engine.group.args]
    ec = connectors.ec_config(topology, role, store(topology, topology.ec, site), side)
    if ec is not None:
        argv += ["--ec-transfer-config", json.dumps(ec)]
    kv = connectors.kv_config(topology, role, store(topology, topology.kv, site), accelerator=site.accelerator)
    if kv is not None:
        argv += ["--kv-transfer-config", json.dumps(kv)]
    env: dict[str, str | None] = {}
    if light:
        env |= dict.fromkeys(CPU_UNSET) | dict(CPU_ENVIRONMENT)
        if site.model == topology.model.path:
            del env["HF_HUB_OFFLINE"]  # a name on the hub may have to be fetched
    env |= connectors.defaults(topology, role, accelerator=site.accelerator)
    env |= topology.env | engine.group.env | connectors.environment(topology, role, side)
    if engine.devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = engine.devices
    return argv, env


def simulated(topology: Topology, site: Site, engine: Replica) -> Command:
    """An engine stand-in of the same role and dialects. It needs no devices."""
    role, port, side = engine.role, site.ports[engine.name, HTTP], site.ports.get((engine.name, SIDE))
    argv = [site.python, "-m", "triptych", "sim", "--role", role, "--model", topology.served_name]
    argv += ["--host", topology.host, "--port", str(port)]
    part = connectors.ec_role(topology, role)
    if part is not None:
        dialect = connectors.EC_DIALECT[topology.ec.connector]
        argv += ["--ec", dialect, "--ec-role", part.removeprefix("ec_")]
        if dialect == "example":
            argv += ["--ec-dir", str(store(topology, topology.ec, site))]
    if connectors.kv_role(topology, role):
        argv += ["--kv", topology.kv.connector]
        if topology.kv.connector == "example":
            argv += ["--kv-dir", str(store(topology, topology.kv, site))]
    if side is not None:
        argv += ["--side-port", str(side)]
    if ranks := len(connectors.push_addresses(topology, engine, 0)):
        argv += ["--dp-size", str(ranks)]
    return [*argv, *topology.args, *engine.group.args], {**topology.env, **engine.group.env}
