"""For folders whose tests import vLLM into pytest's own process: prepared as an engine's process is."""

from __future__ import annotations

import importlib.util
import warnings


def prepare() -> list[str]:
    """What is not to be collected: everything, where there is no vLLM."""
    if not all(map(importlib.util.find_spec, ("torch", "vllm"))):
        return ["test_*.py"]
    from triptych.engine.compat import apply, detect  # noqa: PLC0415 - it looks for torch

    apply(detect())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.worker import gpu_model_runner  # noqa: F401, PLC0415 - its imports warn
    return []
