"""The requests of a worker, from one step of its scheduler to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.stage.model import Row


@dataclass(slots=True)
class _Known:
    prompt_len: int = 0
    length: int = 0  # tokens that the request has, as far as the scheduler has told
    state: dict[str, Any] = field(default_factory=dict)


class Requests:
    """What the model keeps of each request. A request is known from its first step until its scheduler says that it is
    finished, however it ended."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def step(self, scheduled: Any) -> dict[str, Row]:
        """The rows of a step, by request; `offset` is not known yet. `scheduled`: vLLM's SchedulerOutput."""
        for request_id in scheduled.finished_req_ids:
            self._known.pop(request_id, None)
        lengths: Mapping[str, int] = scheduled.num_scheduled_tokens
        rows: dict[str, Row] = {}
        for new in scheduled.scheduled_new_reqs:
            known = self._known.setdefault(new.req_id, _Known())
            known.prompt_len = known.length = len(new.prompt_token_ids or ())
            if new.prefill_token_ids is not None:
                known.length = max(known.length, len(new.prefill_token_ids))
            information = getattr(new, "additional_information", None)
            rows[new.req_id] = _row(new.req_id, new.num_computed_tokens, lengths, known, information)
        cached = scheduled.scheduled_cached_reqs
        given: Mapping[str, Any] = getattr(cached, "additional_information", None) or {}
        for index, request_id in enumerate(cached.req_ids):
            known = self._known.setdefault(request_id, _Known())
            known.length = known.prompt_len + cached.num_output_tokens[index]
            rows[request_id] = _row(
                request_id, cached.num_computed_tokens[index], lengths, known, given.get(request_id)
            )
        return rows


def _row(request_id: str, start: int, lengths: Mapping[str, int], known: _Known, information: Any) -> Row:
    length = lengths.get(request_id, 0)
    return Row(
        request_id=request_id,
        start=start,
        length=length,
        offset=-1,
        prompt_len=known.prompt_len,
        samples=start + length >= known.length,
        information=information if isinstance(information, Mapping) else None,
        state=known.state,
    )


def placed(rows: Mapping[str, Row], order: Sequence[str]) -> list[Row]:
    """The rows of a step in the order in which they lie in the batch.

    Raises:
        ValueError: the batch has a request that the scheduler has not told of.
    """
    found: list[Row] = []
    offset = 0
    for request_id in order:
        row = rows.get(request_id)
        if row is None:
            raise ValueError(f"request {request_id} is in the batch, and the scheduler did not tell of it")
        row.offset = offset
        offset += row.length
        found.append(row)
    return found
