"""Connectors are found by name: ours, and those of other packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from triptych.transfer.connectors.base import ConnectorSpec
from triptych.transfer.connectors.registry import ConnectorFactory, known
from triptych.transfer.errors import ConnectorError

PLUGIN = """
class Pigeon:
    def __init__(self, config):
        self.config = config
        config["seen"] = True
"""
POINTS = """[triptych.connectors]
pigeon = pigeon_post:Pigeon
lost = pigeon_post:Albatross
gone = no_such_module_of_anybody:Pigeon
"""


@pytest.fixture
def pigeon_post(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of somebody else, installed."""
    (tmp_path / "pigeon_post.py").write_text(PLUGIN, "utf-8")
    info = tmp_path / "pigeon_post-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon-post\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(POINTS, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pigeon_post", raising=False)


def test_the_built_in_names_are_known_without_importing_a_connector() -> None:
    code = (
        "import sys\n"
        "from triptych.transfer.connectors.registry import known\n"
        "assert {'SharedMemoryConnector', 'shm', 'TcpConnector', 'tcp'} <= set(known()), known()\n"
        "late = ('connectors.shm', 'connectors.tcp', 'torch', 'vllm')\n"
        "loaded = [name for name in sys.modules if name.endswith(late)]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SharedMemoryConnector", "SharedMemoryConnector"),
        ("shm", "SharedMemoryConnector"),
        ("TcpConnector", "TcpConnector"),
        ("tcp", "TcpConnector"),
    ],
)
def test_a_built_in_name_makes_its_connector(name: str, kind: str) -> None:
    extra = {"stage_id": 3, "deployment": "test-registry"}
    connector = ConnectorFactory.create_connector(ConnectorSpec(name, extra))
    try:
        assert type(connector).__name__ == kind
        assert connector.stage_id == 3
        assert connector.config["deployment"] == "test-registry"
    finally:
        connector.close()


@pytest.mark.usefixtures("pigeon_post")
def test_another_package_s_connector_gets_the_options_of_its_spec_and_not_the_spec_s_own_dict() -> None:
    spec = ConnectorSpec("pigeon", {"stage_id": 2, "extra": {"role": "sender"}})
    connector = ConnectorFactory.create_connector(spec)
    assert type(connector).__name__ == "Pigeon"
    assert connector.config == {"stage_id": 2, "extra": {"role": "sender"}, "seen": True}
    assert "seen" not in spec.extra


@pytest.mark.usefixtures("pigeon_post")
def test_an_unknown_name_is_answered_with_those_that_there_are_and_how_to_add_one() -> None:
    with pytest.raises(ConnectorError) as raised:
        ConnectorFactory.create_connector(ConnectorSpec("Pigeon"))
    for word in ("'Pigeon'", "SharedMemoryConnector", "TcpConnector", "pigeon", "'triptych.connectors'"):
        assert word in str(raised.value)
    assert "pigeon" in known()


@pytest.mark.usefixtures("pigeon_post")
@pytest.mark.parametrize(("name", "why"), [("gone", "no_such_module_of_anybody"), ("lost", "Albatross")])
def test_a_connector_that_cannot_be_imported_is_told_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ConnectorError, match=why):
        ConnectorFactory.create_connector(ConnectorSpec(name))
