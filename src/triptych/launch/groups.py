"""A group of equal engines in a topology file, and the values that a file gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from triptych.config.values import Model

# What the launcher itself says to an engine, and where a topology says it instead.
OWNED_FLAGS = {
    "--host": "use `host`",
    "--port": "use `ports`",
    "--uds": "engines listen on TCP: use `ports`",
    "--model": "use `model`",
    "--served-model-name": "use `model: {name: …}`",
    "--ec-transfer-config": "use `ec`",
    "--kv-transfer-config": "use `kv`",
}


def _scalar(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{json.dumps(value, default=str)} is not text or a number; put it in quotes")
    return str(value)


def _arguments(value: Any) -> Any:
    """`{max-model-len: 4096, enforce-eager: true}` or a list as on a command line; as a tuple of words."""
    if isinstance(value, list | tuple):
        return tuple(_scalar(word) for word in value)
    if not isinstance(value, Mapping):
        raise ValueError("give engine arguments as a mapping (`max-model-len: 4096`) or as a list of words")
    words: list[str] = []
    for key, given in value.items():
        name = str(key).lstrip("-").replace("_", "-")
        if given is True:
            words.append(f"--{name}")
        elif given is False:
            words.append(f"--no-{name}")
        elif isinstance(given, Mapping):
            words += [f"--{name}", json.dumps(given)]
        elif isinstance(given, list):
            words += [f"--{name}", *map(_scalar, given)]
        else:
            words += [f"--{name}", _scalar(given)]
    return tuple(words)


def no_owned_flag(words: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in OWNED_FLAGS:
            raise ValueError(f"{flag} is the launcher's to give: {OWNED_FLAGS[flag]}")
    return words


def _environment(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError("give environment variables as a mapping, `NAME: value` (`null` removes one)")
    return {str(name): None if given is None else _scalar(given) for name, given in value.items()}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


def _device(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Arguments = Annotated[tuple[str, ...], BeforeValidator(_arguments)]
Environment = Annotated[dict[str, str | None], BeforeValidator(_environment)]
Port = Annotated[int, Field(ge=1, le=65535)]
Devices = Annotated[tuple[Annotated[str, BeforeValidator(_device)], ...], BeforeValidator(_as_list)]
# One number is the first of a row; a list has one for each replica.
Ports = Annotated[tuple[Port, ...], BeforeValidator(_as_list)]


class EngineGroup(Model):
    """The engines of one role; a bare number stands for so many with defaults."""

    replicas: PositiveInt = 1
    ports: Ports = Field((), description="HTTP ports; free ones if unset")
    side_ports: Ports = Field((), description="ports of the connector's side channel; free ones if unset")
    devices: Devices = Field((), description='CUDA_VISIBLE_DEVICES of each replica, such as ["0", "1,2"]')
    args: Arguments = Field((), description="engine arguments after those for all engines")
    env: Environment = Field({}, description="environment over that for all engines")

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"replicas": value} if isinstance(value, int) and not isinstance(value, bool) else value

    _owned = field_validator("args")(no_owned_flag)

    def fixed_ports(self, ports: tuple[int, ...]) -> tuple[int, ...]:
        """One port per replica from what the file gives, or none."""
        if len(ports) == 1:
            return tuple(ports[0] + replica for replica in range(self.replicas))
        return ports
