"""Stages for the tests: adapters over a connector in memory, requests, and the queues of a scheduler."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request, RequestStatus

from tests.transfer.adapter.memory import Exchange, MemoryConnector
from triptych.transfer.adapter.adapter import ChunkTransferAdapter
from triptych.transfer.connectors.base import Connector
from triptych.transfer.payload import Ids, StagePayload

WAITING_FOR_CHUNK = RequestStatus["WAITING_FOR_CHUNK"]
PATIENCE_S = 20.0


def adapter(connector: Connector, **options: Any) -> ChunkTransferAdapter:
    """An adapter over this connector. Options: of the model configuration; `extra` goes to the connector's options."""

    class Stage(ChunkTransferAdapter):
        @classmethod
        def create_connector(cls, model_config: Any) -> Connector:
            return connector

    extra = options.pop("extra", {})
    processor = options.pop("processor", None)
    max_num_seqs = options.pop("max_num_seqs", 8)
    model = SimpleNamespace(
        worker_type=options.pop("worker_type", "ar"),
        stage_connector_config={"name": "memory", "extra": extra},
        custom_process_next_stage_input_func=processor,
        **options,
    )
    return Stage(SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs)))


def pair(credit: int = 8, **options: Any) -> tuple[ChunkTransferAdapter, ChunkTransferAdapter, Exchange]:
    """A sending and a receiving stage on one exchange. Options are the sender's; those of `to` are the receiver's."""
    exchange = Exchange(credit)
    to = options.pop("to", {})
    options.setdefault("processor", forward)
    return adapter(MemoryConnector(exchange, 0), **options), adapter(MemoryConnector(exchange, 1), **to), exchange


_ids = itertools.count()


def request(external_id: str | None = "ext", request_id: str | None = None, **fields: Any) -> Request:
    """A request of vLLM's, of three tokens."""
    made = Request(
        request_id=request_id or f"r{next(_ids)}",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=64),
        pooling_params=None,
        resumable=fields.pop("resumable", False),
    )
    made.external_req_id = external_id  # type: ignore[attr-defined]
    made.additional_information = None  # type: ignore[attr-defined]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def forward(
    transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False, new_token_ids: Any = None
) -> StagePayload | None:
    """A processor that sends what the step gives: a payload, or tokens."""
    if isinstance(multimodal_output, StagePayload):
        return multimodal_output
    return StagePayload(ids=Ids(tokens=list(new_token_ids))) if new_token_ids else None


def tokens(*values: int) -> StagePayload:
    return StagePayload(ids=Ids(tokens=list(values)))


def received(*values: int, finished: bool = False, segment_finished: bool = False) -> dict[str, Any]:
    """A chunk as a receiver gets it."""
    return {
        "ids": {"tokens": list(values)},
        "meta": {"finished": torch.tensor(finished), "is_segment_finished": torch.tensor(segment_finished)},
    }


def codes(*values: int, finished: bool = False, **meta: Any) -> dict[str, Any]:
    """A chunk of codec tokens as a receiver gets it."""
    return {"codes": {"audio": torch.tensor(values, dtype=torch.long)}, "meta": {"finished": finished, **meta}}


def send(stage: ChunkTransferAdapter, of: Request, output: Any, **more: Any) -> None:
    """Queue one step's output, with the tokens that it makes certain."""
    of.num_computed_tokens += 1
    stage.save_async(output, of, **more)


def drain(stage: ChunkTransferAdapter) -> list[BaseException]:
    """Do what the save thread would with what is queued now; returns what was raised."""
    raised: list[BaseException] = []
    stage._hear_consumers()
    while stage._pending_save_reqs:
        try:
            stage._send_single_request(stage._pending_save_reqs.popleft())
        except Exception as error:
            raised.append(error)
        stage._hear_consumers()
    return raised


def poll(stage: ChunkTransferAdapter) -> None:
    """Do what the receive thread would with what may have come by now."""
    stage._answer_doorbell()
    while (entry := stage._next_entry()) is not None:
        stage._poll(entry)
        stage._answer_doorbell()


class Queues:
    """A scheduler's queues, and a tick."""

    def __init__(self, stage: ChunkTransferAdapter, waiting: Iterable[Request] = ()) -> None:
        self.stage = stage
        self.waiting = FCFSRequestQueue(waiting)
        self.running: list[Request] = []
        self.requests = {r.request_id: r for r in self.waiting}

    def add(self, *requests: Request) -> None:
        for made in requests:
            self.requests[made.request_id] = made
            self.waiting.add_request(made)

    def tick(self) -> None:
        self.stage.tick(self.waiting, self.running, self.requests)

    def run(self) -> list[Request]:
        """A step: what is schedulable runs, and its chunk is used up."""
        new = list(self.waiting)
        scheduled = [*new, *self.running]
        for made in new:
            made.status = RequestStatus.RUNNING
        self.waiting.clear()
        cached = SimpleNamespace(req_ids=[r.request_id for r in self.running])
        self.running.extend(new)
        self.stage.postprocess_scheduler_output(
            SimpleNamespace(
                scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id) for r in new], scheduled_cached_reqs=cached
            )
        )
        return scheduled

    def finish(self, of: Request, status: RequestStatus = RequestStatus.FINISHED_ABORTED) -> None:
        self.stage.finish_requests([of.request_id], status, self.requests)
        self.requests.pop(of.request_id, None)
        self.running = [r for r in self.running if r is not of]
        if of in self.waiting:
            self.waiting.remove_request(of)


class Bell:
    """A wake-up that counts, and can be waited for."""

    def __init__(self) -> None:
        self.rung = 0
        self._cond = threading.Condition()

    def __call__(self) -> None:
        with self._cond:
            self.rung += 1
            self._cond.notify_all()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Until something is so; looks whenever it is rung."""
        with self._cond:
            assert self._cond.wait_for(done, PATIENCE_S), "the adapter did not wake its scheduler"


def end(stage: ChunkTransferAdapter) -> None:
    """Nothing is left of any stream."""
    assert not stage._senders.by_id
    assert not stage._senders.blocked
    assert not stage._receivers.by_id
    assert not stage._receivers.by_stream
    assert not stage._finished_load_reqs
    assert not stage._pending_ar_prompt_updates
    assert not stage.num_parked()
    assert not stage._lot.active
    assert not stage._lot.origin
    assert not stage._lot.clock
