"""`--worker-cls triptych.stage.cpu.StageWorker`: a stage's worker on a machine without an accelerator."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from triptych.stage.hooks import StageHooks


class StageWorker(StageHooks, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with a stage's hooks."""
