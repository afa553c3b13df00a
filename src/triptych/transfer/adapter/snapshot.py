"""A copy of a request for the save thread: what the scheduler changes in place afterwards does not change in it."""

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.utils import ConstantList


def snapshot(request: Any) -> Any:
    """A shallow copy whose lists of tokens and whose additional information are its own.

    Containers are copied at every depth; tensors and other values are shared, since nothing changes them in place.
    """
    twin = copy.copy(request)
    for name in ("additional_information", "model_intermediate_buffer"):
        value = getattr(request, name, None)
        if isinstance(value, dict):
            setattr(twin, name, copy_containers(value))
    if isinstance(request.prompt_token_ids, list):
        twin.prompt_token_ids = request.prompt_token_ids.copy()
    for hidden, public in (("_all_token_ids", "all_token_ids"), ("_output_token_ids", "output_token_ids")):
        tokens = getattr(request, hidden, None)
        if isinstance(tokens, list):
            own = tokens.copy()
            setattr(twin, hidden, own)
            setattr(twin, public, ConstantList(own))
    return twin


def copy_containers(value: Any) -> Any:
    """Dicts, lists and tuples anew, at every depth, around the same leaves."""
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_containers(item) for item in value]
    if type(value) is tuple:
        return tuple(copy_containers(item) for item in value)
    return value
