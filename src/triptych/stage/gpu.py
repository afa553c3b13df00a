"""`--worker-cls triptych.stage.gpu.StageWorker`: a stage's worker on a GPU."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from triptych.stage.hooks import StageHooks


class StageWorker(StageHooks, Worker):  # type: ignore[misc]
    """vLLM's GPU worker with a stage's hooks."""
