"""What an engine is told about the connectors: their configuration, environment and side channels.

The names, keys and environment variables are those of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.launch.ports import reachable
from triptych.launch.site import Replica
from triptych.launch.topology import Topology

# Our connector files under the same keys as vLLM's example connector, so the gateway speaks the same dialect with it.
EC_DIALECT = {"triptych": "example", "example": "example", "eccpu": "eccpu", "mooncake": "mooncake"}
# Options that are fields of vLLM's transfer configuration; all others belong to the connector.
EC_FIELDS = frozenset({"ec_buffer_device", "ec_buffer_size", "engine_id"})
KV_FIELDS = frozenset({"kv_buffer_device", "kv_load_failure_policy", "enable_permute_local_kv", "engine_id"})
EC_CPU_BYTES = 1 << 30


def ec_role(topology: Topology, role: str) -> str | None:
    """The role in encoder output hand-over of the engines of a role, None for none."""
    if topology.engines.encode is None:
        return None
    if role == "encode":
        return "ec_producer"
    if role == "decode":
        # KV in files comes in whole blocks: decode computes the tail itself, and an image may reach into the tail.
        needed = topology.kv.connector == "example"
        # Without KV and without a connector vLLM 0.32 dies of a part that is metadata only. Ours asks nothing of the
        # request, so decode can always have it: it then finds the item, or fails that request alone.
        harmless = topology.ec.connector == "triptych"
        return "ec_consumer" if needed or harmless else None
    return "ec_consumer"


def kv_role(topology: Topology, role: str) -> str | None:
    """The role in KV hand-over of the engines of a role, None for none."""
    return {"prefill": "kv_producer", "decode": "kv_consumer"}.get(role)


def has_side_channel(topology: Topology, role: str) -> bool:
    """Whether engines of a role listen for their peers."""
    if topology.kv.connector == "nixl" and kv_role(topology, role):
        return True
    part = ec_role(topology, role)
    return (topology.ec.connector, part) in (("eccpu", "ec_producer"), ("mooncake", "ec_consumer"))


def ec_config(topology: Topology, role: str, store: Path, side: int | None) -> dict[str, Any] | None:
    """What `--ec-transfer-config` says, None for no such flag. `store`: directory for connectors that use files."""
    part = ec_role(topology, role)
    if part is None:
        return None
    options = dict(topology.ec.options)
    fields = {name: options.pop(name) for name in EC_FIELDS & options.keys()}
    match topology.ec.connector:
        case "triptych":
            fields = {"ec_connector_module_path": "triptych.engine.ec_connector"} | fields
            return _ec("TriptychECConnector", part, fields, {"shared_storage_path": str(store)} | options)
        case "example":
            return _ec("ECExampleConnector", part, fields, {"shared_storage_path": str(store)} | options)
        case "eccpu":
            return _ec("ECCPUConnector", part, fields, {"ec_cpu_bytes": EC_CPU_BYTES, "ec_enable_nixl": True} | options)
        case "mooncake":
            if part == "ec_consumer":
                fields = {"ec_ip": reachable(topology.host), "ec_port": side} | fields
            return _ec("ECMooncakeConnector", part, fields, options)
        case _:
            raise AssertionError(topology.ec.connector)


def kv_config(topology: Topology, role: str, store: Path, *, accelerator: bool) -> dict[str, Any] | None:
    """What `--kv-transfer-config` says, None for no such flag."""
    part = kv_role(topology, role)
    if part is None:
        return None
    options = dict(topology.kv.options)
    fields = {name: options.pop(name) for name in KV_FIELDS & options.keys()}
    if topology.kv.connector == "nixl":
        if not accelerator:
            fields = {"kv_buffer_device": "cpu"} | fields
        extra = options
        name = "NixlConnector"
    else:
        extra = {"shared_storage_path": str(store)} | options
        name = "ExampleConnector"
    return {"kv_connector": name, "kv_role": part} | fields | ({"kv_connector_extra_config": extra} if extra else {})


def defaults(topology: Topology, role: str, *, accelerator: bool) -> dict[str, str]:
    """Environment that the connectors want and a topology may override."""
    if topology.kv.connector == "nixl" and kv_role(topology, role) and not accelerator:
        return {"UCX_TLS": "tcp,self,sm"}
    return {}


def environment(topology: Topology, role: str, side: int | None) -> dict[str, str]:
    """Environment that the connectors need as it is: which runner, which side channel."""
    env: dict[str, str] = {}
    if topology.ec.connector == "eccpu" and ec_role(topology, role):
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if side is None:
        return env
    # An engine passes the host on to its peers, who connect to it.
    host = reachable(topology.host).strip("[]")
    if topology.kv.connector == "nixl" and kv_role(topology, role):
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
    elif topology.ec.connector == "eccpu" and role == "encode":
        env |= {"VLLM_EC_SIDE_CHANNEL_HOST": host, "VLLM_EC_SIDE_CHANNEL_PORT": str(side)}
    return env


def push_addresses(topology: Topology, engine: Replica, side: int) -> list[str]:
    """EC mooncake: where a consumer takes encoder output, one address per data-parallel rank; else none."""
    if topology.ec.connector != "mooncake" or ec_role(topology, engine.role) != "ec_consumer":
        return []
    ranks, shards = parallel_sizes((*topology.args, *engine.group.args))
    return [f"tcp://{reachable(topology.host)}:{side + rank * shards}" for rank in range(ranks)]


def parallel_sizes(words: Sequence[str]) -> tuple[int, int]:
    """Data-parallel ranks and tensor-parallel shards that engine arguments ask for; the last one said counts."""
    sizes = {"--data-parallel-size": 1, "--tensor-parallel-size": 1}
    short = {"-dp": "--data-parallel-size", "-tp": "--tensor-parallel-size"}
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        flag = short.get(flag, flag.replace("_", "-"))
        value = value or (words[index + 1] if index + 1 < len(words) else "")
        if flag in sizes and value.isdigit():
            sizes[flag] = max(1, int(value))
    return sizes["--data-parallel-size"], sizes["--tensor-parallel-size"]


def _ec(connector: str, role: str, fields: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    config = {"ec_connector": connector, "ec_role": role, **fields}
    return config | ({"ec_connector_extra_config": dict(extra)} if extra else {})
