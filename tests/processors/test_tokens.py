"""Text to text: a chunk is the step's tokens."""

from __future__ import annotations

import pytest

from tests.processors.adapter import Adapter, Request
from triptych.processors.tokens import forward
from triptych.transfer.payload import Ids, StagePayload
from triptych.transfer.wire import decode, encode


def test_a_step_s_tokens_are_its_chunk() -> None:
    payload = forward(Adapter(), None, Request(), new_token_ids=[5, 6])
    assert payload == StagePayload(ids=Ids(tokens=[5, 6]))
    assert decode(*encode(payload)) == {"ids": {"tokens": [5, 6]}}


def test_the_tokens_are_a_copy_because_the_scheduler_s_list_grows() -> None:
    step = [5]
    payload = forward(Adapter(), None, Request(), new_token_ids=step)
    step.append(6)
    assert payload == StagePayload(ids=Ids(tokens=[5]))


@pytest.mark.parametrize("tokens", [None, []])
@pytest.mark.parametrize("flush", [False, True])
def test_a_step_without_tokens_has_no_chunk_of_its_own(tokens: list[int] | None, flush: bool) -> None:
    assert forward(Adapter(), None, Request(), is_finished=flush, new_token_ids=tokens) is None


def test_the_last_step_s_tokens_are_sent_with_the_end() -> None:
    payload = forward(Adapter(), None, Request(resumable=False), is_finished=True, new_token_ids=[2])
    assert payload == StagePayload(ids=Ids(tokens=[2]))
