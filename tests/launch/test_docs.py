"""docs/topology.md names every field there is, and its example is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from triptych.launch.check import gateway_front
from triptych.launch.topology import EcSettings, EngineGroup, Engines, KvSettings, ModelSource, Topology, load

DOC = (Path(__file__).parents[2] / "docs" / "topology.md").read_text()


@pytest.mark.parametrize("model", [Topology, EngineGroup, Engines, ModelSource, EcSettings, KvSettings])
def test_every_field_is_documented(model: type[BaseModel]) -> None:
    missing = [name for name in model.model_fields if not re.search(rf"`{name}\b", DOC)]
    assert missing == []


@pytest.mark.parametrize("model", [EcSettings, KvSettings])
def test_every_connector_is_documented(model: type[BaseModel]) -> None:
    names = set(get_args(model.model_fields["connector"].annotation)) - {"none"}
    assert {name for name in names if f"\n| `{name}` |" in DOC} == names


def test_the_documented_example_is_a_topology(tmp_path: Path) -> None:
    example = re.search(r"```yaml\n(.*?)```", DOC, re.DOTALL)
    assert example
    (tmp_path / "t.yaml").write_text(example[1])
    front = gateway_front(load(tmp_path / "t.yaml"))
    assert front is not None
    assert front.port == 8000


def test_documented_defaults_are_the_defaults() -> None:
    for name in ("engine", "host", "light", "start_timeout", "stop_timeout"):
        default = Topology.model_fields[name].default
        shown = f"{default:g}" if isinstance(default, float) else f"`{default}`"
        assert f"\n| `{name}` | {shown} |" in DOC, name
