"""What the adapter adds to a scheduler's tick while many requests are parked and nothing is new. Needs vLLM.

The real adapter with the real connector and its threads; the queues are vLLM's. A tick here is all that a stage's
scheduler calls each time: what it asks before a step, the tick itself, what it hands over after, and what it collects.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

from benchmarks.bars import Bar
from triptych.engine.compat import apply, detect

PARKED = 1000
LIMIT = 30.0
"""Microseconds."""


def run(rounds: int) -> list[Bar]:
    """Medians of so many rounds of 2,000 ticks."""
    apply(detect())  # as in an engine's process, before vLLM is imported
    logging.disable(logging.INFO)
    tick, close = _parked()
    try:
        for _ in range(2000):
            tick()
        found = []
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(2000):
                tick()
            found.append(1e6 * (time.perf_counter() - began) / 2000)
    finally:
        close()
    return [Bar(f"µs of the adapter in a tick, {PARKED:,} parked, nothing new", median(found), LIMIT)]


def _parked() -> tuple[Callable[[], None], Callable[[], None]]:
    """A tick of a stage with its requests parked, and what ends the stage."""
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415  after the preparation above
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue  # noqa: PLC0415
    from vllm.v1.request import Request  # noqa: PLC0415

    from triptych.scheduling.status import register_status  # noqa: PLC0415
    from triptych.transfer.adapter.adapter import ChunkTransferAdapter  # noqa: PLC0415

    register_status()
    directory = tempfile.TemporaryDirectory(prefix="triptych-")
    config = {"name": "shm", "extra": {"deployment": f"benchmark {directory.name}", "role": "receiver"}}
    model = SimpleNamespace(worker_type="ar", stage_id=1, stage_connector_config=config)
    adapter = ChunkTransferAdapter(
        SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=2 * PARKED))
    )
    adapter.start()
    waiting, requests = FCFSRequestQueue(), {}
    for number in range(PARKED):
        made = Request(
            request_id=f"r{number}",
            prompt_token_ids=[1, 2, 3],
            sampling_params=SamplingParams(max_tokens=64),
            pooling_params=None,
        )
        made.external_req_id = f"e{number}"  # type: ignore[attr-defined]
        made.additional_information = None  # type: ignore[attr-defined]
        requests[made.request_id] = made
        waiting.add_request(made)
    adapter.tick(waiting, [], requests)
    if adapter.num_parked() != PARKED or waiting:
        raise RuntimeError(f"{adapter.num_parked()} of {PARKED} requests are parked")
    cached = SimpleNamespace(req_ids=[], additional_information={})
    output = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)

    def tick() -> None:
        adapter.has_news()
        adapter.tick(waiting, [], requests)
        adapter.postprocess_scheduler_output(output, requests)
        adapter.collect_failed_receive_request_ids()
        adapter.collect_failed_send_request_ids()
        adapter.collect_stopped_request_ids()
        adapter.collect_timed_out_request_ids(600.0)

    def close() -> None:
        adapter.close()
        directory.cleanup()

    return tick, close
