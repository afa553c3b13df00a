"""The scheduler of a generation stage: each chunk is computed as a whole, and there is no token to sample."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from triptych.scheduling.chunks import ChunkScheduling
from triptych.transfer.adapter.loops import is_streamed


class GenerationScheduler(ChunkScheduling, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with the chunk transfer adapter beside it. `_pending_finish_reqs`: requests whose stream ended
    with nothing left to compute; they are finished with the next output."""

    worker: ClassVar[str] = "generation"
    _pending_finish_reqs: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As of ChunkScheduling; ValueError also with asynchronous scheduling: each chunk is a prompt of its own, which
        the output of the chunk before must not come after."""
        super().__init__(*args, **kwargs)
        self._pending_finish_reqs = []

    def _check(self) -> None:
        super()._check()
        if self.scheduler_config.async_scheduling:
            raise ValueError("a generation stage needs --no-async-scheduling")

    def _tick(self) -> None:
        """Without requests whose stream has ended with nothing to compute: vLLM computes at least one token of each."""
        super()._tick()
        empty = [request for request in self._waiting_queues if not request.num_prompt_tokens]
        if empty:
            self._waiting_queues.remove_requests(empty)
            self._pending_finish_reqs += empty
        for request in self._waiting_queues:
            if not request.num_computed_tokens:
                self._record_prefill_stats(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """vLLM's own, then the end of streams and segments whose last chunk is computed."""
        scheduled = {rid: self.requests.get(rid) for rid in scheduler_output.num_scheduled_tokens}
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        computed = [r for r in scheduled.values() if r is not None and r.num_computed_tokens >= r.num_prompt_tokens]
        ended = [request for request in computed if self._ends(request)]
        self._send_on(outputs, scheduled)
        ended += [request for request in self._pending_finish_reqs if request not in ended]
        self._pending_finish_reqs = []
        for request in ended:
            if not request.is_finished():
                self._finish(request, outputs)
        self._end_failed(outputs)
        return outputs

    def _ends(self, request: Request) -> bool:
        """Whether nothing more will come of the stream, or of a session's segment."""
        adapter = self.chunk_transfer_adapter
        if request.request_id in adapter.upstream_exhausted_requests:
            return True
        if request.status != RequestStatus.RUNNING or request.request_id not in adapter.segment_finished_requests:
            return False
        if request.resumable is True:
            return True
        adapter.segment_finished_requests.discard(request.request_id)  # the next segment's chunks follow by themselves
        return False

    def _finish(self, request: Request, outputs: dict[int, EngineCoreOutputs]) -> None:
        adapter = self.chunk_transfer_adapter
        request.status = RequestStatus.FINISHED_STOPPED
        reason = request.get_finished_reason()
        sends = self._stage.sends is True and is_streamed(request)
        if sends:
            # Behind the last chunk: whether there was one in this step, only the model knew.
            self._send_held(request)
            over = request.request_id in adapter.upstream_exhausted_requests
            adapter.save_async(None, request, is_segment_finished=not over, force_request_finished=over)
        parameters = None
        if self._handle_stopped_request(request):
            parameters, _ = self._free_request(request)
            if sends:
                adapter.cleanup_receiver(request.request_id)  # the sending side owes its last chunks
            else:
                adapter.cleanup(request.request_id, request.external_req_id)
            self.waiting.remove_requests([request])
        self.running = remove_all(self.running, {request})
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
