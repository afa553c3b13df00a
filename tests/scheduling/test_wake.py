"""Finding the engine core, and waking it."""

from __future__ import annotations

import queue
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from triptych.scheduling.wake import EngineCoreNotFound, engine_core, waker


class Sleeping(EngineCoreProc):
    """A core of a process of its own."""

    def __init__(self, make: Any = engine_core) -> None:
        self.input_queue = queue.Queue()
        self.made = self.deeper(make)

    @staticmethod
    def deeper(make: Any) -> Any:
        return make()


class InCaller(EngineCore):
    """A core that runs in its caller's thread."""

    def __init__(self) -> None:
        self.made = engine_core()


def test_the_core_whose_constructor_is_running_is_found() -> None:
    core = Sleeping()
    assert core.made is core


def test_outside_a_core_there_is_none() -> None:
    with pytest.raises(EngineCoreNotFound, match=r"vLLM 0\.32"):
        engine_core()


def test_it_is_woken_by_vllm_s_own_message() -> None:
    core = Sleeping()
    wake = waker(core)
    wake()
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)


def test_a_core_in_its_caller_s_thread_is_never_asleep() -> None:
    core = InCaller()
    assert core.made is core
    waker(core)()


def test_a_core_that_cannot_be_woken_is_refused() -> None:
    core = Sleeping()
    del core.input_queue
    with pytest.raises(EngineCoreNotFound, match="cannot be woken"):
        waker(core)
