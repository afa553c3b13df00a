"""What a worker knows of its requests, from step to step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triptych.stage.rows import Requests, placed


def new(request_id: str, prompt: int, computed: int = 0, chunk: Any = None, prefill: int | None = None) -> Any:
    return SimpleNamespace(
        req_id=request_id,
        prompt_token_ids=[0] * prompt,
        prefill_token_ids=None if prefill is None else [0] * prefill,
        num_computed_tokens=computed,
        additional_information=chunk,
    )


def step(
    fresh: list[Any] = [],  # noqa: B006 - read only
    cached: dict[str, tuple[int, int]] = {},  # noqa: B006 - request: computed, outputs
    finished: set[str] = set(),  # noqa: B006
    chunks: dict[str, Any] | None = None,
    **lengths: int,
) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=fresh,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[computed for computed, _ in cached.values()],
            num_output_tokens=[outputs for _, outputs in cached.values()],
            additional_information=chunks,
        ),
        finished_req_ids=finished,
        num_scheduled_tokens=lengths,
    )


def test_rows_lie_in_the_order_of_the_batch() -> None:
    requests = Requests()
    rows = requests.step(step([new("a", 3), new("b", 5)], a=3, b=5))
    assert [(row.request_id, row.offset, row.length) for row in placed(rows, ["b", "a"])] == [("b", 0, 5), ("a", 5, 3)]


def test_a_request_that_the_scheduler_has_not_told_of_is_an_error() -> None:
    with pytest.raises(ValueError, match="request ghost is in the batch"):
        placed({}, ["ghost"])


def test_state_lives_as_long_as_the_request_and_no_longer() -> None:
    requests = Requests()
    requests.step(step([new("a", 3)], a=3))["a"].state["mark"] = 1
    assert requests.step(step(cached={"a": (3, 1)}, a=1))["a"].state == {"mark": 1}
    # Scheduled anew with a longer prompt, as every chunk makes it; and after a preemption.
    assert requests.step(step([new("a", 5, 3)], a=2))["a"].state == {"mark": 1}
    assert requests.step(step([new("a", 5, 0)], a=5))["a"].state == {"mark": 1}
    assert not requests.step(step(finished={"a"}))
    assert len(requests) == 0
    assert requests.step(step([new("a", 3)], a=3))["a"].state == {}


def test_a_step_samples_only_at_the_end_of_what_the_request_has() -> None:
    requests = Requests()
    assert not requests.step(step([new("a", 8)], a=4))["a"].samples
    assert requests.step(step(cached={"a": (4, 0)}, a=4))["a"].samples
    assert requests.step(step(cached={"a": (8, 1)}, a=1))["a"].samples
    # Preempted with three tokens of answer: all of it is computed again.
    again = requests.step(step([new("a", 8, 0, prefill=11)], a=8))["a"]
    assert (again.samples, again.prompt_len) == (False, 8)
    assert requests.step(step(cached={"a": (8, 3)}, a=3))["a"].samples


def test_a_chunk_is_shown_in_the_step_that_it_came_with_and_in_no_other() -> None:
    requests = Requests()
    chunk = {"ids": {"tokens": [1]}}
    assert requests.step(step([new("a", 3, chunk=chunk)], a=3))["a"].information == chunk
    assert requests.step(step(cached={"a": (3, 1)}, a=1, chunks={"a": None}))["a"].information is None
    assert requests.step(step(cached={"a": (4, 2)}, a=1, chunks={"a": {"meta": {}}}))["a"].information == {"meta": {}}
