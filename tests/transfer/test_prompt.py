"""A prompt that grows while the stage before still writes. Contract, 2.6."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.transfer.prompt import extend_prompt


class Req:
    """What of vLLM's request a prompt is made of: `prompt` tokens, then `answer` tokens, `computed` of them."""

    def __init__(self, prompt: list[int], answer: list[int], computed: int, ahead: int = 0) -> None:
        self.prompt_token_ids = list(prompt)
        self._all_token_ids = [*prompt, *answer]
        self._output_token_ids = list(answer)
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = computed
        self.num_output_placeholders = ahead
        self.hashed = 0

    def update_block_hashes(self) -> None:
        self.hashed += 1

    def holds_together(self) -> bool:
        return (
            self.num_prompt_tokens == len(self.prompt_token_ids)
            and self._all_token_ids == [*self.prompt_token_ids, *self._output_token_ids]
            and self.num_computed_tokens <= len(self._all_token_ids)
        )


def meta(length: Any = None, reserve: Any = ..., **more: Any) -> dict[str, Any]:
    fields = {"next_stage_prompt_len": length, **more}
    if reserve is not ...:
        fields["next_stage_generation_tokens"] = reserve
    return {"meta": {name: value for name, value in fields.items() if value is not None or name.endswith("_tokens")}}


def test_a_condition_is_appended_behind_what_is_computed_and_the_token_sampled_last_is_dropped() -> None:
    request = Req([1, 2], [7, 8, 9], computed=4)
    assert extend_prompt(meta(2), request) is False
    assert request.prompt_token_ids == [1, 2, 7, 8, 0, 0]
    assert request.num_computed_tokens == 4
    assert request.hashed == 1
    assert request.holds_together()


def test_real_tokens_are_appended_where_the_chunk_brings_them() -> None:
    request = Req([1], [7], computed=1)
    assert extend_prompt({"ids": {"tokens": [4, 5]}}, request) is False
    assert request.prompt_token_ids == [1, 4, 5]
    request._all_token_ids.append(8)
    request._output_token_ids.append(8)
    request.num_computed_tokens = 3
    extend_prompt({"ids": {"tokens": [6]}}, request)
    assert request.prompt_token_ids == [1, 4, 5, 6]
    assert request.holds_together()


def test_tokens_for_a_request_that_never_ran_keep_its_own_prompt() -> None:
    request = Req([1, 2, 3], [], computed=0)
    extend_prompt({"ids": {"tokens": [9]}}, request)
    assert request.prompt_token_ids == [1, 2, 3, 9]
    assert request.num_computed_tokens == 0


def test_tokens_for_a_preempted_request_keep_its_answer() -> None:
    request = Req([1, 2], [7, 8, 9], computed=0)
    extend_prompt({"ids": {"tokens": [5]}}, request)
    assert request.prompt_token_ids == [1, 2, 7, 8, 5]
    assert request.holds_together()


@pytest.mark.parametrize("tokens", [[-1], ["a"], [1, True], [1.5]])
def test_tokens_that_are_none_are_refused(tokens: list[Any]) -> None:
    request = Req([1], [], computed=1)
    with pytest.raises(ValueError, match="list of token ids"):
        extend_prompt({"ids": {"tokens": tokens}}, request)
    assert request.prompt_token_ids == [1]


def test_tokens_beyond_the_context_are_refused_and_nothing_changes() -> None:
    request = Req([1, 2, 3], [], computed=3)
    with pytest.raises(ValueError, match="max_model_len=5"):
        extend_prompt({"ids": {"tokens": [4, 5]}}, request, max_model_len=5)
    assert request.prompt_token_ids == [1, 2, 3]


def test_without_a_length_that_of_the_prompt_is_taken_and_without_either_nothing_happens() -> None:
    request = Req([1], [], computed=1)
    extend_prompt({"ids": {"prompt": [5, 6, 7]}}, request)
    assert request.prompt_token_ids == [1, 0, 0, 0]
    assert extend_prompt({}, request) is False
    assert request.prompt_token_ids == [1, 0, 0, 0]


@pytest.mark.parametrize("reserve", [True, False, 0, -3, 2.0, "1", None])
def test_a_reserve_that_is_no_positive_integer_is_refused(reserve: Any) -> None:
    with pytest.raises(ValueError, match="next_stage_generation_tokens must be a positive integer"):
        extend_prompt(meta(3, reserve), Req([1], [], 1), max_model_len=100)


def test_a_condition_that_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"exceeds max_model_len: prompt=96, reserve=5, limit=100"):
        extend_prompt(meta(96, 5), Req([1], [], 1), max_model_len=100)


def test_a_replacement_begins_anew_whatever_has_gathered() -> None:
    request = Req([1] * 90, [2] * 9, computed=98)
    payload = meta(4, replace_streaming_prompt=True)
    assert extend_prompt(payload, request, max_model_len=100, previous_condition_seq=3) is True
    assert request.prompt_token_ids == [0] * 4
    assert (request.num_computed_tokens, request._output_token_ids) == (0, [])
    assert payload["meta"]["streaming_prompt_recompute"] is False


def recompute(request: Req, payload: dict[str, Any], *, on_capacity: bool, seq: int | None = 0) -> bool:
    return extend_prompt(
        payload,
        request,
        max_model_len=100,
        previous_condition_len=5,
        previous_condition_seq=seq,
        condition_seq=1,
        recompute_previous_chunks=1,
        recompute_on_capacity=on_capacity,
    )


def test_a_sliding_window_recomputes_with_every_condition_but_the_first() -> None:
    request = Req([0] * 10, [7, 8, 9], computed=12, ahead=1)
    payload = meta(4, 20)
    assert recompute(request, payload, on_capacity=False) is True
    assert payload["ids"]["streaming_prompt_previous_codes"] == [7]
    assert request.prompt_token_ids == [0] * (5 + 1 + 4)
    assert payload["meta"]["streaming_condition_seq"] == 1
    assert recompute(Req([0] * 10, [7], 10), meta(4, 20), on_capacity=False, seq=None) is False


def test_with_full_attention_it_recomputes_only_where_the_context_would_overflow() -> None:
    assert recompute(Req([0] * 70, [], computed=70), meta(10, 20), on_capacity=True) is False
    assert recompute(Req([0] * 71, [], computed=71), meta(10, 20), on_capacity=True) is True


def test_without_a_window_a_full_context_is_an_error() -> None:
    with pytest.raises(ValueError, match="requires window_size=1"):
        extend_prompt(meta(10, 20), Req([0] * 71, [], 71), max_model_len=100, previous_condition_seq=0)


@given(
    prompt=st.integers(1, 20),
    answer=st.integers(0, 20),
    back=st.integers(0, 3),
    length=st.integers(1, 30),
    brings=st.booleans(),
    window=st.integers(0, 1),
    on_capacity=st.booleans(),
)
def test_whatever_comes_the_requests_numbers_fit_each_other(
    prompt: int, answer: int, back: int, length: int, brings: bool, window: int, on_capacity: bool
) -> None:
    request = Req([1] * prompt, [2] * answer, computed=max(prompt, prompt + answer - back))
    payload: dict[str, Any] = {"ids": {"tokens": [3] * length}} if brings else meta(length, 4)
    before = request.num_computed_tokens
    try:
        anew = extend_prompt(
            payload,
            request,
            max_model_len=64,
            previous_condition_len=2,
            previous_condition_seq=0,
            condition_seq=1,
            recompute_previous_chunks=window,
            recompute_on_capacity=on_capacity,
        )
    except ValueError:
        return
    assert request._output_token_ids == []
    assert request.num_prompt_tokens == len(request.prompt_token_ids) == len(request._all_token_ids)
    assert request.num_computed_tokens == (0 if anew else before)
    assert request.num_computed_tokens < request.num_prompt_tokens
