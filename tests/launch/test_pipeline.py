"""The stages of a topology file: what is refused, with its line, and what processes they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from triptych.config.problems import SettingsError
from triptych.launch import check
from triptych.launch.check import dry_plan, gateway_front, graph, missing, shell
from triptych.launch.plan import Plan
from triptych.launch.stages import SECRET, _ours
from triptych.launch.topology import Topology, load

ROOT = Path(__file__).parents[2]
EXAMPLES = ("tiny-omni.yaml", "tiny-omni-replicas.yaml")


def omni(**more: Any) -> dict[str, Any]:
    """The example as a document; `more` replaces what stands at its top."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "tiny-omni.yaml").read_text())
    return document | more


def changed(index: int, **fields: Any) -> dict[str, Any]:
    document = omni()
    document["stages"][index] |= fields
    return document


def without(index: int, field: str) -> dict[str, Any]:
    document = omni()
    del document["stages"][index][field]
    return document


def planned(document: dict[str, Any]) -> Plan:
    return dry_plan(Topology.model_validate(document))


def argument(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def stage_of(argv: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(argument(argv, "--additional-config"))["stage"]
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_right_and_what_they_need_is_here(name: str) -> None:
    topology = load(ROOT / "examples" / name)
    assert gateway_front(topology) is not None
    assert check._missing_processor(topology) is None


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (changed(0, id="a b"), "stages[0].id: is not a name"),
        (changed(1, id="thinker"), "stages[1].id: `thinker` is stage 0 already"),
        (changed(1, id="decode"), "stages[1].id: `decode` already means something"),
        (changed(0, worker="generation"), "stages[0].worker: the first stage takes requests of clients"),
        (changed(1, final="audio"), "stages[1].final: only the last stage gives the sound"),
        (changed(1, final="text"), "stages[1].final: only the first stage gives the text"),
        (without(2, "final"), "stages[2].final: is missing"),
        (without(0, "processor"), "stages[0].processor: is missing: it makes this stage's output into what `talker`"),
        (
            without(2, "processor"),
            "stages[2].processor: is missing: it makes this stage's output into what the gateway",
        ),
        (changed(0, processor="no:t:right"), "stages[0].processor: is not of the form"),
        (changed(1, connector="tcp"), "stages[1].connector: is another one than the first stage's"),
        (changed(1, connector="pigeon"), "stages[1].connector.name"),
        (changed(1, chunk={"port": 5}), "stages[1].chunk: `port` is the launcher's to say"),
        (changed(1, connector={"extra": {"secret": "x"}}), "stages[1].connector.extra: `secret` is the launcher's"),
        (changed(1, replicas=2, ports=[1, 2, 3]), "stages[1].ports: 3 given for 2 replicas"),
        (changed(1, args=["--port=5"]), "--port is the launcher's to give"),
        (changed(1, max_tokens=0), "stages[1].max_tokens"),
        (changed(1, lots=1), "stages[1].lots: no such setting"),
        (omni(engines={"combined": 1}), "stages: give `engines` or `stages`, not both"),
        (omni(engine="sim"), "engine: simulated engines have no stages"),
        (omni(ec="triptych"), "ec: is for `engines`"),
        (omni(model={}), "model: is missing"),
        (omni(stages=omni()["stages"][2:]), "stages: a pipeline has two stages at least"),
        (omni(gateway={"stages": []}), "gateway.stages: is set by the launcher"),
        ({"model": {"tiny": "image"}, "engines": {"combined": 1}, "overlap": False}, "overlap: is for `stages`"),
    ],
)
def test_a_fault_is_told_with_its_line_and_field(document: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.raises(SettingsError) as caught:
        gateway_front(load(path))
    lines = [line for line in str(caught.value).splitlines() if told in line]
    assert lines, str(caught.value)
    assert lines[0].startswith(f"{path}:")


def test_each_replica_is_a_stock_server_with_its_stages_scheduler_and_worker() -> None:
    made = planned(changed(1, replicas=2))
    by_name = {spec.name: spec for spec in made.processes}
    assert list(by_name) == ["thinker-0", "talker-0", "talker-1", "codec-0", "gateway"]
    first, talker, codec = (by_name[name].argv for name in ("thinker-0", "talker-1", "codec-0"))
    assert first[1:4] == ("-m", "triptych.engine.vllm", "serve")
    assert first[4].endswith("/omni/thinker")
    assert argument(talker, "--scheduler-cls").startswith("triptych.scheduling.ar.")
    assert argument(codec, "--scheduler-cls") == "triptych.scheduling.generation.GenerationScheduler"
    assert "--no-async-scheduling" in codec
    assert argument(talker, "--worker-cls").startswith("triptych.stage.")
    assert [stage_of(argv)["role"] for argv in (first, talker, codec)] == ["sender", "both", "both"]
    assert [stage_of(argv)["id"] for argv in (first, talker, codec)] == [0, 1, 2]
    assert stage_of(first)["take"] == "hidden"
    assert stage_of(talker)["connector"]["extra"]["codec_chunk_frames"] == 25
    assert "overlap" not in stage_of(first)
    assert stage_of(planned(omni(overlap=False)).processes[0].argv)["overlap"] is False


def test_replicas_have_one_deployment_and_each_its_own_name_as_a_sender() -> None:
    made = planned(changed(1, replicas=2))
    extras = [stage_of(spec.argv)["connector"]["extra"] for spec in made.processes if spec.role != "gateway"]
    assert len({extra["deployment"] for extra in extras}) == 1
    assert len({extra["port"] for extra in extras}) == 4
    config = made.gateway_config
    assert config is not None
    told = [
        entry["source"] for pool in (config["combined"], *(s["engines"] for s in config["stages"])) for entry in pool
    ]
    assert [source.rpartition(":")[2] for source in told] == [str(extra["port"]) for extra in extras]
    assert config["sound"]["extra"]["deployment"] == extras[0]["deployment"]
    assert config["sound"]["extra"]["stage_id"] == 3
    assert (config["sound"]["text_stage"], config["sound"]["text_tokens"]) == ("thinker", 200)


def test_two_runs_of_one_file_do_not_meet() -> None:
    topology = Topology.model_validate(omni())
    site = check.Site({}, "python", "m", Path("/run/a"), Path("/run/a"), False)
    other = check.Site({}, "python", "m", Path("/run/b"), Path("/run/b"), False)
    assert _ours(topology, site) != _ours(topology, other)


def test_the_secret_of_tcp_edges_is_in_environments_only() -> None:
    document = omni()
    for stage in document["stages"]:
        stage["connector"] = "tcp"
    made = planned(document)
    for spec in made.processes:
        assert spec.env[SECRET] == "SECRET"
        assert "SECRET" not in " ".join(spec.argv)
    assert "SECRET" not in json.dumps(made.gateway_config)
    extra = stage_of(made.processes[0].argv)["connector"]["extra"]
    assert (extra["host"], extra["advertise"]) == ("127.0.0.1", "127.0.0.1")
    assert SECRET not in planned(omni()).processes[0].env
    assert "SECRET" in shell(made.processes[0])  # a dry plan has no real one


def test_the_graph_shows_stages_edges_and_processors() -> None:
    topology = Topology.model_validate(changed(1, replicas=2))
    shown = "\n".join(graph(topology, dry_plan(topology)))
    assert "talker x 2" in shown
    assert "talker -> codec: chunks by shm, made by triptych.families.tiny_omni.processors:talker_to_codec" in shown
    assert "codec -> gateway: chunks by shm" in shown


@pytest.mark.parametrize("name", ["nowhere.at_all:processor", "triptych.families.nowhere:x", "bare"])
def test_a_processor_that_is_not_here_is_said_before_anything_starts(name: str) -> None:
    told = missing(Topology.model_validate(changed(1, processor=name)))
    assert told is not None
    assert "vLLM" in told or f"stage talker: there is no processor {name!r}" in told


def test_a_model_of_the_hub_serves_all_stages_unless_they_name_their_own() -> None:
    document = changed(1, model="somebody/talker") | {"model": "somebody/omni"}
    models = [spec.argv[4] for spec in planned(document).processes if spec.role != "gateway"]
    assert models == ["somebody/omni", "somebody/talker", "somebody/omni"]


def test_a_stages_own_directory_is_near_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(changed(1, model="./mine")))
    assert dry_plan(load(path)).processes[1].argv[4] == str(tmp_path / "mine")
