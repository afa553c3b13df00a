"""Every private name of vLLM that Triptych relies on, each with its reason, and the check that it is there.

vLLM has public places to put a scheduler, a worker and a model; what a stage needs beyond those places is listed here
and nowhere else. A stage checks its part of the list before anything is loaded, so that a vLLM that has changed is
refused by name instead of failing in the middle of a request.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from triptych.engine.check import SUPPORTED


class SeamError(RuntimeError):
    """The installed vLLM lacks something that Triptych needs."""


class Seam(NamedTuple):
    """`place`: "module:Class.name", or "module:Class.__init__.name" for what its constructor sets. `parameters`: which
    a function must have, by name."""

    place: str
    reason: str
    parameters: tuple[str, ...] = ()


_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER: Final = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

SCHEDULING: Final = (
    Seam(f"{_SCHEDULER}._enqueue_waiting_request", "a request whose chunk came goes back to the right queue"),
    Seam(f"{_SCHEDULER}._holds_kv_blocks", "which of the two waiting queues a request belongs to"),
    Seam(f"{_SCHEDULER}._free_request_blocks", "a prompt that was replaced gives its blocks back"),
    Seam(f"{_SCHEDULER}._preempt_request", "a request that waits gives its blocks back where all wait for blocks"),
    Seam(f"{_SCHEDULER}._handle_stopped_request", "a stream's end is vLLM's own kind of stop"),
    Seam(f"{_SCHEDULER}._free_request", "the one place that every end of a request passes"),
    Seam(f"{_SCHEDULER}._is_blocked_waiting_status", "requests that vLLM itself waits for are left alone"),
    Seam(f"{_SCHEDULER}._update_request_as_session", "another segment of a session begins"),
    Seam(f"{_SCHEDULER}.__init__.kv_holding_waiting", "the queue of waiting requests that hold blocks"),
    Seam(f"{_SCHEDULER}.__init__.deferred_waiting", "the record of requests that were passed over"),
    Seam("vllm.v1.engine.core:EngineCoreProc.__init__.input_queue", "the engine core is woken through its queue"),
    Seam("vllm.v1.engine:EngineCoreRequestType.WAKEUP", "the message that wakes it"),
)
WORKER: Final = (
    Seam(
        f"{_RUNNER}._model_forward",
        "a stage's model sees its requests' chunks before the forward pass, and its output after it",
        ("input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
    ),
    Seam(f"{_RUNNER}.__init__.input_batch", "in which order a step's requests lie in the batch"),
    Seam(f"{_RUNNER}.__init__.enable_prompt_embeds", "whether a compiled model looks at embeddings"),
    Seam(f"{_RUNNER}.__init__.supports_mm_inputs", "the same of a model that takes media"),
    Seam(f"{_RUNNER}.__init__.input_ids", "the tokens of a step where the model is fed embeddings"),
    Seam("vllm.v1.outputs:ModelRunnerOutput.pooler_output", "what a stage's model says goes to the scheduler with it"),
    Seam("vllm.v1.outputs:AsyncModelRunnerOutput.get_output", "the same where the sampled tokens come later"),
)


def require(seams: Iterable[Seam]) -> None:
    """Raises SeamError that names everything that is missing, and why it is needed."""
    missing = [f"{seam.place} ({seam.reason})" for seam in seams if not _is_there(seam)]
    if missing:
        raise SeamError(
            f"this vLLM is not one that Triptych's stages fit: vLLM {SUPPORTED} has, and this one has not, "
            + "; ".join(missing)
        )


def _is_there(seam: Seam) -> bool:
    module, _, path = seam.place.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return False
    parts = path.split(".")
    if "__init__" in parts:
        return _sets(getattr(found, parts[0], None), parts[-1])
    owner = found
    for part in parts:
        owner, found = found, getattr(found, part, _NOTHING)
        if found is _NOTHING:
            return part in getattr(owner, "__annotations__", {}) or part in getattr(owner, "__dataclass_fields__", {})
    if not seam.parameters:
        return True
    return set(seam.parameters) <= set(inspect.signature(found).parameters)


def _sets(kind: Any, name: str) -> bool:
    """Whether a constructor sets this attribute, as far as its code tells."""
    if not inspect.isclass(kind):
        return False
    constructors = [inspect.unwrap(vars(base)["__init__"]) for base in kind.__mro__ if "__init__" in vars(base)]
    return any(name in getattr(getattr(c, "__code__", None), "co_names", ()) for c in constructors) or any(
        name in getattr(base, "__annotations__", {}) for base in kind.__mro__
    )


_NOTHING: Final = object()
