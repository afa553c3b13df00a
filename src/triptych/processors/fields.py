"""What processors read: checked fields of a request, of a model's output, and of a connector's options.

Every error is a ValueError that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def request_information(request: Any) -> Mapping[str, Any]:
    """What the model has written down about a request."""
    live = getattr(request, "model_intermediate_buffer", None)
    return live if isinstance(live, Mapping) else mapping(getattr(request, "additional_information", None))


def codes(source: Any, *, width: int, exact: bool) -> torch.Tensor | None:
    """`codes.audio` of a source: integers `[rows, width]`, or wider unless `exact`. None where it has no rows.

    Raises:
        ValueError: it is something else.
    """
    audio = mapping(mapping(source).get("codes")).get("audio")
    if audio is None:
        return None
    expected = f"codes.audio must be an integer tensor [rows, {width if exact else f'at least {width}'}]"
    if not isinstance(audio, torch.Tensor):
        raise ValueError(f"{expected}, not a {type(audio).__name__}")
    if not audio.numel():
        return None
    shape = tuple(audio.shape)
    if audio.dtype not in _INTEGERS or len(shape) != 2 or shape[1] < width or (exact and shape[1] != width):
        raise ValueError(f"{expected}, not {audio.dtype} {list(shape)}")
    return audio


def number(source: Mapping[str, Any], name: str) -> int | None:
    """A field that counts, of the source itself or of its `meta`: a positive int, or an integer tensor of one element.

    Raises:
        ValueError: it is something else. None where it is not there.
    """
    value = source.get(name)
    if value is None:
        value = mapping(source.get("meta")).get(name)
    if value is None:
        return None
    plain = value
    if isinstance(value, torch.Tensor) and value.dtype in _INTEGERS and value.numel() == 1:
        plain = value.item()
    if not isinstance(plain, int) or isinstance(plain, bool) or plain < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    return plain


def is_set(source: Mapping[str, Any], name: str) -> bool:
    """A switch, of the source itself or of its `meta`: a bool, or a tensor of one element.

    Raises:
        ValueError: it is something else.
    """
    value = source.get(name)
    if value is None:
        value = mapping(source.get("meta")).get(name)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return bool(value.item())
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return bool(value)


def option(transfer_manager: Any, name: str, default: int) -> int:
    """A positive number of the connector's options; `default` where there is none, or it is 0.

    Raises:
        ValueError: it is not one.
    """
    config = mapping(transfer_manager.connector.config)
    value = mapping(config.get("extra", config)).get(name) or default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"the connector's option {name} must be a positive integer, not {value!r}")
    return value


def flag(value: bool) -> torch.Tensor:
    """A bool as models and receivers of other makes expect it: a tensor without dimensions."""
    return torch.tensor(value, dtype=torch.bool)


def is_last(request: Any, is_finished: bool) -> bool:
    """Whether a flush ends the request, and not just one segment of a resumable one."""
    return is_finished and not getattr(request, "resumable", False)
