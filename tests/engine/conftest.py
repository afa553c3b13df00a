"""Topologies of real engines. Each starts once per session, when first asked for; one runs at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.engines import Engine, ec_flags, start_all
from triptych.engine.check import vllm_problem
from triptych.models.tiny import write_tiny

# An image of 64 rows (the largest) does not fit, three of 16 rows do: bounds and evictions are met on the way.
STORE_LIMITS = {"max_bytes": 16 * 1024, "lease_s": 0.2}


@dataclass
class Handover:
    """Engines that exchange encoder outputs, and a plain one (no connector) to compare with, if there is one."""

    encode: Engine
    consume: Engine
    plain: Engine | None
    store: Path

    @property
    def engines(self) -> list[Engine]:
        return [engine for engine in (self.encode, self.consume, self.plain) if engine is not None]


class Stage:
    """Where at most one topology runs. Asking for another stops the one before."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._name = ""
        self._running: Handover | None = None

    def show(self, name: str, start: Callable[[Path], Handover]) -> Handover:
        if self._running is None or self._name != name:
            self.clear()
            directory = self.base / name
            directory.mkdir()
            self._running, self._name = start(directory), name
            start_all(*self._running.engines)
        return self._running

    def clear(self) -> None:
        if self._running is not None:
            for engine in self._running.engines:
                engine.stop()
        self._running = None


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    if problem := vllm_problem():
        pytest.skip(problem)
    stage = Stage(tmp_path_factory.mktemp("engines"))
    yield stage
    stage.clear()


def _images(directory: Path) -> Handover:
    model, store = write_tiny("image", directory / "model"), directory / "store"
    encode = ec_flags("ec_producer", store, **STORE_LIMITS)
    # Short steps, so that a prompt with two images takes several.
    consume = [*ec_flags("ec_consumer", store, metadata_wait_s=0.2), "--max-num-batched-tokens=80"]
    return Handover(
        Engine("encode", model, directory / "encode.log", encode),
        Engine("consume", model, directory / "consume.log", consume),
        Engine("plain", model, directory / "plain.log"),
        store,
    )


def _sounds(directory: Path) -> Handover:
    model, store = write_tiny("audio", directory / "model"), directory / "store"
    return Handover(
        Engine("encode", model, directory / "encode.log", ec_flags("ec_producer", store)),
        Engine("consume", model, directory / "consume.log", ec_flags("ec_consumer", store, metadata_wait_s=0.2)),
        None,
        store,
    )


@pytest.fixture
def images(stage: Stage) -> Handover:
    """Encode, consume and plain engines with the tiny image model."""
    return stage.show("images", _images)


@pytest.fixture
def sounds(stage: Stage) -> Handover:
    """Encode and consume engines with the tiny audio model."""
    return stage.show("sounds", _sounds)
