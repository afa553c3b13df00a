"""A chunk that has come becomes part of its request: on an autoregressive stage by the scheduler's thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from triptych.transfer.prompt import Window, extend_prompt, positive

LONGEST: Final = 1 << 24
"""Tokens by which a chunk may extend a prompt where the stage has no limit of its own: a prompt is allocated."""


class PendingUpdate(NamedTuple):
    """A chunk between the receive thread, which took it, and the scheduler, which publishes it.

    `extends`: the prompt may grow by it; `condition_len`: by how many tokens, where the stage keeps a window, else
    None; `was_resumable`: of the request before this chunk was taken.
    """

    request: Any
    payload: dict[str, Any]
    extends: bool
    condition_len: int | None
    was_resumable: bool


@dataclass(frozen=True, slots=True)
class Condition:
    """The last condition of a stream: its length in tokens and its number."""

    length: int
    seq: int


def section(payload: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of a payload, {} where there is none. Raises ValueError where it is not a map."""
    part = payload.get(name)
    if part is None:
        return {}
    if not isinstance(part, dict):
        raise ValueError(f"the chunk's {name} must be a map, not {type(part).__name__}")
    return part


def truthy(value: Any, name: str) -> bool:
    """A flag: a bool, a number, None, or a tensor of one element. Raises ValueError for anything else."""
    item = getattr(value, "item", None)
    if item is not None:
        if value.numel() != 1:
            raise ValueError(f"the chunk's {name} has {value.numel()} elements and must have one")
        value = item()
    if value is None or isinstance(value, bool | int | float):
        return bool(value)
    raise ValueError(f"the chunk's {name} must be true or false, not {type(value).__name__}")


def prepare(request: Any, payload: dict[str, Any], number: int, window: Window, max_model_len: int) -> PendingUpdate:
    """What the receive thread notes of chunk `number`; it changes nothing. Raises ValueError for a wrong payload."""
    meta, ids = section(payload, "meta"), section(payload, "ids")
    resumable = bool(request.resumable)
    length, limit = positive(meta.get("next_stage_prompt_len")), max_model_len or LONGEST
    if length is not None and length > limit:
        raise ValueError(f"next_stage_prompt_len={length} is more than the context holds: max_model_len={limit}")
    replaces = meta.get("replace_streaming_prompt") is True
    # Real tokens are the prompt itself, so the first chunk's count as well.
    extends = bool(ids.get("tokens")) or (resumable and (replaces or number > 0))
    return PendingUpdate(request, payload, extends, length if window.previous else None, resumable)


def publish(
    update: PendingUpdate, request: Any, last: Condition | None, window: Window, max_model_len: int
) -> tuple[bool, Condition | None]:
    """Give the request its chunk. Returns whether its prompt was replaced, and the stream's last condition now.

    Raises:
        ValueError: the chunk breaks the contract. The request has its payload, the prompt is as it was.
    """
    payload = update.payload
    request.additional_information = payload
    meta = section(payload, "meta")
    condition = last
    if update.condition_len is not None:
        condition = Condition(update.condition_len, 0 if last is None else last.seq + 1)
    replaced = False
    if update.extends and _has_place(update, last, window):
        replaced = extend_prompt(
            payload,
            request,
            max_model_len=max_model_len or None,
            previous_condition_len=last.length if last else None,
            previous_condition_seq=last.seq if last else None,
            condition_seq=condition.seq if condition else None,
            recompute_previous_chunks=window.previous,
            recompute_on_capacity=window.on_capacity,
        )
    if update.condition_len is not None and condition is not None:
        payload.setdefault("meta", meta)["streaming_condition_seq"] = condition.seq
    return replaced, condition


def _has_place(update: PendingUpdate, last: Condition | None, window: Window) -> bool:
    """Where a window is kept, the first condition is in the prompt already, and only a condition adds to it."""
    if not window.previous or section(update.payload, "ids").get("tokens"):
        return True
    return last is not None or section(update.payload, "meta").get("replace_streaming_prompt") is True
