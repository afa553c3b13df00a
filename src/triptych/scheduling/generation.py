"""The scheduler of a generation stage: each chunk is computed as a whole, and there is no token to sample."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from triptych.scheduling.chunks import ChunkScheduling


class GenerationScheduler(ChunkScheduling, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with the chunk transfer adapter beside it. `_pending_finish_reqs`: requests whose stream ended
    with nothing left to compute; they are finished with the next output."""

    _pending_finish_reqs: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending_finish_reqs = []

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """vLLM's own, then the end of requests that have computed the last chunk of their stream."""
        scheduled = {rid: self.requests.get(rid) for rid in scheduler_output.num_scheduled_tokens}
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        ended = [request for request in scheduled.values() if request is not None and self._computed_all(request)]
        ended += [request for request in self._pending_finish_reqs if request not in ended]
        self._pending_finish_reqs = []
        for request in ended:
            if not request.is_finished():
                self._finish(request, outputs)
        self._end_failed(outputs)
        return outputs

    def _computed_all(self, request: Request) -> bool:
        """Whether nothing more will come, and what came is computed."""
        exhausted = request.request_id in self.chunk_transfer_adapter.upstream_exhausted_requests
        return exhausted and request.num_computed_tokens >= request.num_prompt_tokens

    def _finish(self, request: Request, outputs: dict[int, EngineCoreOutputs]) -> None:
        request.status = RequestStatus.FINISHED_STOPPED
        reason = request.get_finished_reason()
        parameters = None
        if self._handle_stopped_request(request):
            parameters, _ = self._free_request(request)
            self.chunk_transfer_adapter.cleanup(request.request_id, request.external_req_id)
        self.running = remove_all(self.running, {request})
        self.waiting.remove_requests([request])
        self._emit(
            outputs,
            request,
            finish_reason=reason,
            kv_transfer_params=parameters,
            prefill_stats=request.take_prefill_stats(),
        )

    @staticmethod
    def _record_prefill_stats(request: Request) -> None:
        """Each chunk is a prompt of its own, none of it cached."""
        if request.prefill_stats is not None:
            request.prefill_stats.set(request.num_prompt_tokens, 0, 0)
