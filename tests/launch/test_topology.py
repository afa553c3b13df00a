"""The topology file: short forms, and messages that name file, line and field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from triptych.config.problems import SettingsError
from triptych.launch.check import gateway_front
from triptych.launch.topology import Topology, load

BASE = """\
model: {tiny: image}
engines:
  encode: 1
  combined: 1
"""
EPD = """\
model: {tiny: image}
engines:
  encode: 1
  prefill: 1
  decode: 1
"""


def read(tmp_path: Path, text: str) -> Topology:
    file = tmp_path / "t.yaml"
    file.write_text(text)
    return load(file)


def faults(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        gateway_front(read(tmp_path, text))
    return [str(problem).removeprefix(f"{tmp_path}/") for problem in caught.value.problems]


def test_short_forms_stand_for_long_ones(tmp_path: Path) -> None:
    short = read(
        tmp_path,
        "model: org/name\nec: example\nkv: example\nargs: {max-model-len: 4096, enforce_eager: true, async: false, "
        "limit: {image: 2}, origins: [a, b]}\n"
        "engines: {encode: 2, prefill: {devices: 3}, decode: {devices: ['0,1']}}\n",
    )
    assert short.model.path == "org/name"
    assert short.ec.connector == short.kv.connector == "example"
    assert short.args == (
        *("--max-model-len", "4096", "--enforce-eager", "--no-async"),
        *("--limit", '{"image": 2}', "--origins", "a", "b"),
    )
    assert short.engines.encode is not None
    assert short.engines.encode.replicas == 2
    assert short.engines.prefill is not None
    assert short.engines.prefill.devices == ("3",)
    assert short.engines.decode is not None
    assert short.engines.decode.devices == ("0,1",)


def test_an_encoder_with_a_combined_engine_needs_four_lines(tmp_path: Path) -> None:
    topology = read(tmp_path, BASE)
    assert (topology.ec.connector, topology.light, topology.served_name) == ("triptych", "auto", "tiny")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BASE + "engins: 3\n", "t.yaml:5: engins: no such setting; did you mean `engines`?"),
        (
            "model: {tiny: image}\nengines:\n  combined:\n    replcas: 2\n",
            "t.yaml:4: engines.combined.replcas: no such setting; did you mean `replicas`?",
        ),
        ("model: {tiny: image}\n", "t.yaml:1: engines: is missing: give it"),
        (
            "model: {tiny: image}\nengines:\n  combined: 0\n",
            "t.yaml:3: engines.combined.replicas: must be above 0 (got 0); the default is 1",
        ),
        ("engines:\n  combined: 1\n", "t.yaml:1: model: is missing: give a directory, a name on the model hub"),
        (
            BASE.replace("image", "imag"),
            "t.yaml:1: model.tiny: is not the kind of a tiny model; there are: ",
        ),
        (BASE + "model: x\n", "t.yaml:5: model: stands here a second time, first in line 1: keep one"),
        ("model: ./none\nengines: {combined: 1}\n", "t.yaml:1: model: there is no directory "),
        ("model: {tiny: image, path: x}\nengines: {combined: 1}\n", "t.yaml:1: model: give `path` or `tiny`, not both"),
        (BASE + "ec: shm\n", "t.yaml:5: ec.connector: must be one of triptych, example, eccpu, mooncake, none"),
        (BASE + "ec: none\n", "t.yaml:5: ec: encode engines need a connector"),
        (BASE + "kv: nixl\n", "t.yaml:5: kv: there are no `prefill` engines"),
        (EPD + "kv: none\n", "t.yaml:6: kv: prefill engines need a connector"),
        (EPD + "ec: mooncake\n", "t.yaml:6: ec: mooncake hands encoder output to `combined` engines only"),
        (BASE + "ec:\n  connector: eccpu\n  path: x\n", "t.yaml:7: ec.path: eccpu stores no files"),
        ("model: m\nec: example\nengines: {combined: 1}\n", "t.yaml:2: ec: there are no `encode` engines"),
        ("model: m\nengines:\n  prefill: 1\n", "t.yaml:3: engines.prefill: prefill engines need `decode`"),
        ("model: m\nengines:\n  decode: 1\n", "t.yaml:3: engines.decode: decode engines without prefill engines"),
        ("model: m\nengines:\n  encode: 1\n", "t.yaml:2: engines: no engine can answer"),
        (
            "model: m\nengines:\n  combined:\n    replicas: 2\n    devices: [0]\n",
            "t.yaml:5: engines.combined.devices: 1 given for 2 replicas",
        ),
        (
            "model: m\nengines:\n  encode: {ports: 8000}\n  combined:\n    replicas: 2\n    ports: 7999\n",
            "t.yaml:6: engines.combined.ports: port 8000 is also in engines.encode.ports",
        ),
        (
            "model: m\nengines:\n  combined:\n    replicas: 3\n    ports: 65534\n",
            "t.yaml:5: engines.combined.ports: port 65536 is above 65535",
        ),
        (BASE + "args:\n  port: 1\n", "t.yaml:5: args: --port is the launcher's to give: use `ports`"),
        (BASE + "args: [--kv_transfer_config=x]\n", "t.yaml:5: args: --kv-transfer-config is the launcher's to give"),
        (BASE + "env: {A: true}\n", "t.yaml:5: env: true is not text or a number; put it in quotes"),
        (BASE + "gateway:\n  combined: [x]\n", "t.yaml:6: gateway.combined: is set by the launcher"),
        (BASE + "gateway:\n  lissten: x\n", "t.yaml:6: gateway.lissten: no such setting; did you mean `listen`?"),
        (
            BASE + "gateway:\n  media_to_consumer: meta\n",
            "t.yaml:6: gateway.media_to_consumer: must be one of raw, metadata (got 'meta')",
        ),
        (
            BASE + "gateway:\n  deadlines:\n    encode: -1\n",
            "t.yaml:7: gateway.deadlines.encode: must be above 0 (got -1); the default is 30",
        ),
        (BASE + "  - x\n", "t.yaml:5: is not YAML: "),
        ("", "t.yaml: engines: is missing"),
    ],
)
def test_a_fault_is_named_with_file_line_and_field(tmp_path: Path, text: str, expected: str) -> None:
    found = faults(tmp_path, text)
    assert found[0][: len(expected)] == expected


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    found = faults(tmp_path, "modle: m\nengines: {combined: 1, encod: 2}\nlight: maybe\n")
    assert [re.sub(":.*", "", line.partition(":")[2]) for line in found] == ["2", "3", "1"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none.yaml: cannot be read: No such file or directory$"):
        load(tmp_path / "none.yaml")


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir("/")
    topology = read(tmp_path, "model: ./models/mine\nengines: {combined: 1}\nlog_dir: logs\n")
    assert topology.model_directory == tmp_path / "models" / "mine"
    assert topology.near(Path("logs")) == tmp_path / "logs"
    assert topology.served_name == "mine"


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/model-7b", "org/model-7b"), ("{path: org/m, name: short}", "short"), ("{tiny: image}", "tiny")],
)
def test_the_name_that_clients_use(tmp_path: Path, model: str, name: str) -> None:
    assert read(tmp_path, f"model: {model}\nengines: {{combined: 1}}\n").served_name == name
