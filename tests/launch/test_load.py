"""The live table: what engines say of themselves, and what a person sees of it."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from triptych.launch.display import Display
from triptych.launch.events import State
from triptych.launch.load import Load, look, parse
from triptych.sim import Sim

VLLM = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""


def test_an_engines_metrics_are_added_up_over_its_ranks() -> None:
    assert parse(VLLM) == Load(4, 2, 0.25)
    assert parse("triptych_requests_in_flight 5.0\ntriptych_requests_queued 1.0\n") == Load(5, 1, None)


@given(st.text())
def test_a_page_of_anything_is_no_load(page: str) -> None:
    assert parse(page) is None  # none that hypothesis makes has the names of metrics in it


async def test_a_process_that_does_not_answer_has_no_load() -> None:
    async with Sim(role="combined") as sim:
        found = await look({"up": f"{sim.url}/metrics", "down": "http://127.0.0.1:9/metrics"})
    assert found["up"] is not None  # which counts the question itself
    assert found["down"] is None


def test_the_table_shows_each_stage_with_its_streams_and_its_queue() -> None:
    display = Display(io.StringIO(), plain=True)
    states: list[Any] = [
        SimpleNamespace(name="talker-0", state=State.READY),
        SimpleNamespace(name="codec-0", state=State.BACKING_OFF),
    ]
    display._supervisor = SimpleNamespace(status=lambda: states)  # type: ignore[assignment]
    display._loads = {"talker-0": Load(4, 2, 0.25), "codec-0": None}
    out = io.StringIO()
    Console(file=out, width=80).print(display._table())
    display.close()
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert rows[0] == ["state", "streams", "waiting", "KV"]
    assert rows[1] == ["talker-0", "ready", "6", "2", "25", "%"]
    assert rows[2][0] == "codec-0"
    assert rows[2][-2:] == ["-", "-"]


def test_without_a_terminal_there_is_no_table() -> None:
    out = io.StringIO()
    display = Display(out)
    assert not display.live
    display.loads({"talker-0": Load(4, 2)})
    display.close()
    assert out.getvalue() == ""
