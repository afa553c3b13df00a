"""The scheduler of an autoregressive stage: it sends on what it makes, and lets prompts grow by what it is sent."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from triptych.scheduling.chunks import ChunkScheduling
from triptych.transfer.adapter.loops import is_streamed


class AutoregressiveStage(ChunkScheduling):
    """The stage's part, before either of vLLM's schedulers."""

    def add_request(self, request: Request) -> None:
        """A new request, or more input for one that there is.

        The last input of a session that waits ends it. vLLM ends it silently; if this stage has been sending a stream
        for it, the next stage must be told, or it would wait until its deadline.
        """
        session = self.requests.get(request.request_id)
        adapter = self.chunk_transfer_adapter
        if (
            session is None
            or session.status != RequestStatus.WAITING_FOR_STREAMING_REQ
            or request.resumable is True
            or not is_streamed(session)
            or not adapter.has_sender(session.external_req_id)
        ):
            super().add_request(request)
            return
        # A segment of its own, behind the boundary that the last one ended with.
        adapter.save_async(
            None,
            session,
            is_segment_finished=False,
            segment_generation=adapter.claim_segment(session.external_req_id),
            force_request_finished=True,
        )
        self.finish_requests(session.request_id, RequestStatus.FINISHED_STOPPED)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """vLLM's own, then a chunk for the next stage of everything that came out, ends of segments included."""
        scheduled = {rid: self.requests.get(rid) for rid in scheduler_output.num_scheduled_tokens}
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        self._send_on(outputs, scheduled)
        self._end_failed(outputs)
        return outputs


class ARScheduler(AutoregressiveStage, Scheduler):  # type: ignore[misc]
    """`--scheduler-cls triptych.scheduling.ar.ARScheduler`"""


class AsyncARScheduler(AutoregressiveStage, AsyncScheduler):  # type: ignore[misc]
    """The same where vLLM schedules ahead of the GPU: `triptych.scheduling.ar.AsyncARScheduler`"""
