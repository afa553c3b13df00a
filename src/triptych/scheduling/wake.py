"""Waking the engine core: a stage whose requests are all parked sleeps in its input queue until a chunk arrives.

vLLM gives a scheduler no way to its engine core. It is made in the core's constructor, so the core is one of the
frames below; this is looked up once, here, and nothing of vLLM is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc


class EngineCoreNotFound(RuntimeError):
    """This vLLM makes its scheduler in another way than the one that is supported."""


def engine_core() -> EngineCore:
    """The engine core whose constructor is running. Raises EngineCoreNotFound."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, EngineCore):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise EngineCoreNotFound("a stage's scheduler must be made by vLLM's engine core (vLLM 0.32 is supported)")


def waker(core: EngineCore) -> Callable[[], None]:
    """What wakes that core, from any thread. A core that runs in its caller's thread is not asleep: nothing to do.

    Raises EngineCoreNotFound where the core's queue or its wake-up message is missing.
    """
    if not isinstance(core, EngineCoreProc):
        return lambda: None
    wakeup = getattr(EngineCoreRequestType, "WAKEUP", None)
    queue = getattr(core, "input_queue", None)
    if wakeup is None or queue is None:
        raise EngineCoreNotFound("this vLLM's engine core cannot be woken up (vLLM 0.32 is supported)")
    put = queue.put_nowait
    message = (wakeup, None)
    return lambda: put(message)
