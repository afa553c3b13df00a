"""From topology to command lines, against what vLLM 0.32 wants word for word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triptych.engine.light import CPU_FLAGS
from triptych.launch.check import gateway_front
from triptych.launch.plan import Plan, ProcessSpec, needs, plan
from triptych.launch.site import Site
from triptych.launch.topology import Topology


def made(data: dict[str, Any], *, accelerator: bool = False) -> Plan:
    """The plan of a topology with ports 7000, 7001, … in order of need, 9000 for the gateway."""
    topology = Topology.model_validate({"model": "org/m", **data})
    front = gateway_front(topology)
    ports, free = {("gateway", "http"): 9000}, 7000
    for need in needs(topology, None):
        ports[need.process, need.label] = need.port or free
        free += 0 if need.port else need.width
    model = "/cache/tiny" if topology.model.tiny else topology.model.path or "sim"
    return plan(topology, Site(ports, "python", model, Path("/disk"), Path("/memory"), accelerator), front)


def process(data: dict[str, Any], name: str, *, accelerator: bool = False) -> ProcessSpec:
    return next(spec for spec in made(data, accelerator=accelerator).processes if spec.name == name)


def transfer(spec: ProcessSpec, kind: str) -> Any:
    flag = f"--{kind}-transfer-config"
    return json.loads(spec.argv[spec.argv.index(flag) + 1]) if flag in spec.argv else None


EPD = {"encode": 1, "prefill": 1, "decode": 1}
FILES = {"shared_storage_path": "/disk/ec"}
EXAMPLE_WITH_ALL = {"connector": "example", "path": "/ec", "options": {"ec_buffer_device": "cpu", "x": 1}}
TRIPTYCH = {"ec_connector": "TriptychECConnector"}
MODULE = {"ec_connector_module_path": "triptych.engine.ec_connector"}
MEMORY = {"ec_connector_extra_config": {"shared_storage_path": "/memory/ec"}}
NIXL = {"kv_connector": "NixlConnector"}


@pytest.mark.parametrize(
    ("data", "name", "ec", "kv"),
    [
        pytest.param({"engines": {"combined": 1}}, "combined-0", None, None, id="plain"),
        pytest.param(
            {"engines": {"encode": 1, "combined": 1}},
            "encode-0",
            TRIPTYCH | {"ec_role": "ec_producer"} | MODULE | MEMORY,
            None,
            id="triptych-producer",
        ),
        pytest.param(
            {"engines": {"encode": 1, "combined": 1}},
            "combined-0",
            TRIPTYCH | {"ec_role": "ec_consumer"} | MODULE | MEMORY,
            None,
            id="triptych-consumer",
        ),
        pytest.param(
            {"engines": {"encode": 1, "combined": 1}, "ec": "example"},
            "encode-0",
            {"ec_connector": "ECExampleConnector", "ec_role": "ec_producer", "ec_connector_extra_config": FILES},
            None,
            id="example-producer",
        ),
        pytest.param(
            {
                "engines": EPD,
                "ec": {"connector": "example", "path": "/ec", "options": {"ec_buffer_device": "cpu", "x": 1}},
            },
            "prefill-0",
            {
                "ec_connector": "ECExampleConnector",
                "ec_role": "ec_consumer",
                "ec_buffer_device": "cpu",
                "ec_connector_extra_config": {"shared_storage_path": "/ec", "x": 1},
            },
            NIXL | {"kv_role": "kv_producer", "kv_buffer_device": "cpu"},
            id="options-and-path",
        ),
        pytest.param(
            {"engines": EPD, "ec": "example"},
            "decode-0",
            None,
            NIXL | {"kv_role": "kv_consumer", "kv_buffer_device": "cpu"},
            id="nixl-decode-takes-no-encoder-output",
        ),
        pytest.param(
            {"engines": EPD},
            "decode-0",
            TRIPTYCH | {"ec_role": "ec_consumer"} | MODULE | MEMORY,
            NIXL | {"kv_role": "kv_consumer", "kv_buffer_device": "cpu"},
            id="nixl-decode-with-our-connector-takes-it",
        ),
        pytest.param(
            {"engines": EPD, "ec": "example", "kv": "example"},
            "prefill-0",
            {"ec_connector": "ECExampleConnector", "ec_role": "ec_consumer", "ec_connector_extra_config": FILES},
            {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": "/disk/kv"},
            },
            id="file-kv-prefill",
        ),
        pytest.param(
            {"engines": EPD, "ec": "example", "kv": "example"},
            "decode-0",
            {"ec_connector": "ECExampleConnector", "ec_role": "ec_consumer", "ec_connector_extra_config": FILES},
            {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_consumer",
                "kv_connector_extra_config": {"shared_storage_path": "/disk/kv"},
            },
            id="file-kv-decode-takes-encoder-output-too",
        ),
        pytest.param(
            {"engines": {"prefill": 1, "decode": 1}, "kv": {"connector": "nixl", "options": {"kv_lease_duration": 60}}},
            "prefill-0",
            None,
            NIXL
            | {"kv_role": "kv_producer", "kv_buffer_device": "cpu"}
            | {"kv_connector_extra_config": {"kv_lease_duration": 60}},
            id="P+D-without-encode",
        ),
        pytest.param(
            {"engines": EPD, "ec": "eccpu"},
            "encode-0",
            {
                "ec_connector": "ECCPUConnector",
                "ec_role": "ec_producer",
                "ec_connector_extra_config": {"ec_cpu_bytes": 1 << 30, "ec_enable_nixl": True},
            },
            None,
            id="eccpu-producer",
        ),
        pytest.param(
            {"engines": {"encode": 1, "combined": 2}, "ec": "mooncake"},
            "encode-0",
            {"ec_connector": "ECMooncakeConnector", "ec_role": "ec_producer"},
            None,
            id="mooncake-producer",
        ),
        pytest.param(
            {"engines": {"encode": 1, "combined": 2}, "ec": "mooncake"},
            "combined-1",
            {"ec_connector": "ECMooncakeConnector", "ec_role": "ec_consumer", "ec_ip": "127.0.0.1", "ec_port": 7004},
            None,
            id="mooncake-consumer-listens",
        ),
    ],
)
def test_transfer_configurations(data: dict[str, Any], name: str, ec: Any, kv: Any) -> None:
    spec = process(data, name)
    assert transfer(spec, "ec") == ec
    assert transfer(spec, "kv") == kv


def test_a_light_engines_whole_command_line() -> None:
    spec = process({"model": {"tiny": "image"}, "engines": {"encode": 1, "combined": 1}, "ec": "example"}, "encode-0")
    ec = {"ec_connector": "ECExampleConnector", "ec_role": "ec_producer", "ec_connector_extra_config": FILES}
    assert spec.argv == (
        *("python", "-m", "triptych.engine.vllm", "serve", "/cache/tiny"),
        *("--host", "127.0.0.1", "--port", "7000", "--served-model-name", "tiny"),
        *CPU_FLAGS,
        *("--ec-transfer-config", json.dumps(ec)),
    )
    assert spec.env == {
        "VLLM_CPU_KVCACHE_SPACE": None,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    assert (spec.url, spec.ready_url) == ("http://127.0.0.1:7000", "http://127.0.0.1:7000/health")


def test_a_model_of_the_hub_may_be_fetched_by_a_light_engine() -> None:
    assert "HF_HUB_OFFLINE" not in process({"engines": {"combined": 1}}, "combined-0").env


@pytest.mark.parametrize(
    ("light", "accelerator", "expected"),
    [("auto", False, True), ("auto", True, False), ("on", True, True), ("off", False, False)],
)
def test_light_settings_are_for_machines_without_an_accelerator(light: str, accelerator: bool, expected: bool) -> None:
    spec = process({"engines": {"combined": 1}, "light": light}, "combined-0", accelerator=accelerator)
    assert ("--enforce-eager" in spec.argv) is expected
    assert ("VLLM_CPU_OMP_THREADS_BIND" in spec.env) is expected


def test_every_nixl_replica_has_a_side_channel_port_of_its_own() -> None:
    plan = made({"engines": {"prefill": 2, "decode": 2}})
    ports = [spec.env.get("VLLM_NIXL_SIDE_CHANNEL_PORT") for spec in plan.processes if spec.role != "gateway"]
    hosts = {spec.env.get("VLLM_NIXL_SIDE_CHANNEL_HOST") for spec in plan.processes if spec.role != "gateway"}
    assert ports == ["7001", "7003", "7005", "7007"]
    assert hosts == {"127.0.0.1"}


def test_nixl_on_a_cpu_uses_tcp_and_shared_memory_unless_told_otherwise() -> None:
    data: dict[str, Any] = {"engines": {"prefill": 1, "decode": 1}}
    assert process(data, "decode-0").env["UCX_TLS"] == "tcp,self,sm"
    assert process(data | {"env": {"UCX_TLS": "all"}}, "decode-0").env["UCX_TLS"] == "all"
    gpu = process(data, "decode-0", accelerator=True)
    assert "UCX_TLS" not in gpu.env
    assert transfer(gpu, "kv") == NIXL | {"kv_role": "kv_consumer"}


def test_data_parallel_engines_get_a_row_of_side_channel_ports() -> None:
    data = {"engines": {"prefill": 2, "decode": {"args": {"data-parallel-size": 4}}}, "args": ["-dp", "3"]}
    plan = made(data)
    ports = [spec.env.get("VLLM_NIXL_SIDE_CHANNEL_PORT") for spec in plan.processes if spec.role != "gateway"]
    # 7000 http, 7001-3; 7004 http, 7005-7; 7008 http, 7009-12
    assert ports == ["7001", "7005", "7009"]


def test_eccpu_encoders_get_a_side_channel_and_all_its_engines_the_v2_runner() -> None:
    plan = made({"engines": {"encode": 2, "prefill": 1, "decode": 1}, "ec": "eccpu"})
    env = {spec.name: spec.env for spec in plan.processes}
    assert [env[f"encode-{n}"]["VLLM_EC_SIDE_CHANNEL_PORT"] for n in (0, 1)] == ["7001", "7003"]
    assert env["encode-0"]["VLLM_EC_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert [name for name in env if env[name].get("VLLM_USE_V2_MODEL_RUNNER") == "1"] == [
        *("encode-0", "encode-1", "prefill-0")
    ]
    assert not [name for name in env if name != "gateway" and "VLLM_EC_SIDE_CHANNEL_PORT" in env[name]][2:]


def test_a_wildcard_host_is_told_to_peers_as_loopback() -> None:
    spec = process({"engines": {"prefill": 1, "decode": 1}, "host": "0.0.0.0"}, "prefill-0")
    assert spec.argv[spec.argv.index("--host") + 1] == "0.0.0.0"
    assert spec.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert spec.url.startswith("http://127.0.0.1:")


def test_arguments_and_environment_of_a_role_come_after_those_of_all_and_the_connectors_last() -> None:
    spec = process(
        {
            "engines": {
                "prefill": {"args": ["--b"], "env": {"A": 2, "VLLM_NIXL_SIDE_CHANNEL_PORT": "1"}},
                "decode": 1,
            },
            "args": ["--a"],
            "env": {"A": 1, "B": 1, "OMP_NUM_THREADS": None},
        },
        "prefill-0",
    )
    tail = spec.argv[spec.argv.index(CPU_FLAGS[-1]) + 1 :]
    assert tail[:3] == ("--a", "--b", "--kv-transfer-config")
    assert (spec.env["A"], spec.env["B"], spec.env["OMP_NUM_THREADS"]) == ("2", "1", None)
    assert spec.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "7001"


def test_fixed_ports_and_devices_go_to_their_replicas() -> None:
    group = {"replicas": 2, "ports": [7100, 7200], "side_ports": 7300, "devices": ["0", "1,2"]}
    plan = made({"engines": {"prefill": group, "decode": {"ports": 7400}}})
    first, second, third = plan.processes[:3]
    assert [spec.ports for spec in (first, second, third)] == [
        {"http": 7100, "side channel": 7300},
        {"http": 7200, "side channel": 7301},
        {"http": 7400, "side channel": 7000},
    ]
    assert [spec.env.get("CUDA_VISIBLE_DEVICES") for spec in (first, second, third)] == ["0", "1,2", None]


def test_engines_that_share_a_device_start_one_after_another() -> None:
    plan = made({"engines": {"encode": {"devices": 0}, "combined": {"replicas": 3, "devices": ["0", "1", "0,1"]}}})
    assert [spec.after for spec in plan.processes if spec.role != "gateway"] == [
        (),
        ("encode-0",),
        (),
        ("combined-0", "combined-1"),
    ]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {"engines": {"encode": 1, "combined": 2}, "gateway": {"media_to_consumer": "metadata"}},
            {
                "media_to_consumer": "metadata",
                "encode": ["http://127.0.0.1:7000"],
                "combined": ["http://127.0.0.1:7001", "http://127.0.0.1:7002"],
                "ec": "example",
            },
        ),
        (
            {"engines": {"prefill": 1, "decode": 1}, "kv": "example"},
            {
                "prefill": ["http://127.0.0.1:7000"],
                "decode": ["http://127.0.0.1:7001"],
                "kv": "example",
                "decode_ec_consumer": False,
            },
        ),
        (
            {"engines": EPD, "kv": "example"},
            {
                "encode": ["http://127.0.0.1:7000"],
                "prefill": ["http://127.0.0.1:7001"],
                "decode": ["http://127.0.0.1:7002"],
                "ec": "example",
                "kv": "example",
                "decode_ec_consumer": True,
            },
        ),
        (
            {"engines": EPD},
            {
                "encode": ["http://127.0.0.1:7000"],
                "prefill": ["http://127.0.0.1:7001"],
                "decode": ["http://127.0.0.1:7003"],
                "ec": "example",
                "kv": "nixl",
                "decode_ec_consumer": True,
            },
        ),
        (
            {"engines": EPD, "ec": "eccpu"},
            {
                "encode": ["http://127.0.0.1:7000"],
                "prefill": ["http://127.0.0.1:7002"],
                "decode": ["http://127.0.0.1:7004"],
                "ec": "eccpu",
                "kv": "nixl",
                "decode_ec_consumer": False,
            },
        ),
        (
            {"engines": {"encode": 1, "combined": {"args": {"data-parallel-size": 2, "tp": 1}}}, "ec": "mooncake"},
            {
                "encode": ["http://127.0.0.1:7000"],
                "combined": [
                    {"url": "http://127.0.0.1:7001", "ec_zmq": ["tcp://127.0.0.1:7002", "tcp://127.0.0.1:7003"]}
                ],
                "ec": "mooncake",
            },
        ),
    ],
)
def test_what_the_gateway_is_told(data: dict[str, Any], expected: dict[str, Any]) -> None:
    assert made(data).gateway_config == {"name": "org/m", "listen": "0.0.0.0:9000", **expected}


def test_the_gateway_is_the_last_to_start_and_no_variable_overrides_the_topology() -> None:
    settings = {"listen": "127.0.0.1:0", "deadlines": {"drain": 7}}
    plan = made({"engines": {"combined": 1}, "gateway": settings})
    gateway = plan.processes[-1]
    assert gateway.argv == ("python", "-m", "triptych", "gateway", "--config", "/disk/gateway.json")
    assert (gateway.url, gateway.ready_url) == ("http://127.0.0.1:9000", "http://127.0.0.1:9000/readyz")
    assert (gateway.tier, gateway.stop_timeout) == (1, 12.0)
    assert gateway.env["TRIPTYCH_COMBINED"] is None
    assert gateway.env["TRIPTYCH_LISTEN"] is None
    assert "TRIPTYCH_API_KEYS" not in gateway.env


def test_without_a_gateway_there_are_engines_alone() -> None:
    plan = made({"engines": {"combined": 1}, "gateway": False})
    assert [spec.name for spec in plan.processes] == ["combined-0"]
    assert plan.gateway_url is plan.gateway_config is None


def test_simulated_engines_get_roles_dialects_and_side_ports() -> None:
    plan = made({"engine": "sim", "engines": EPD, "ec": "example", "args": {"token-ms": 2}})
    lines = [" ".join(spec.argv) for spec in plan.processes]
    assert lines[:3] == [
        "python -m triptych sim --role encode --model org/m --host 127.0.0.1 --port 7000 "
        "--ec example --ec-role producer --ec-dir /disk/ec --token-ms 2",
        "python -m triptych sim --role prefill --model org/m --host 127.0.0.1 --port 7001 "
        "--ec example --ec-role consumer --ec-dir /disk/ec --kv nixl --side-port 7002 --token-ms 2",
        "python -m triptych sim --role decode --model org/m --host 127.0.0.1 --port 7003 "
        "--kv nixl --side-port 7004 --token-ms 2",
    ]


def test_edges_say_who_sends_what_to_whom() -> None:
    plan = made({"engines": {**EPD, "combined": 1}, "kv": "example"})
    assert [(edge.source, edge.target, edge.what) for edge in plan.edges if edge.source != "gateway"] == [
        ("encode", "prefill", "EC triptych"),
        ("encode", "decode", "EC triptych"),
        ("encode", "combined", "EC triptych"),
        ("prefill", "decode", "KV example"),
    ]
