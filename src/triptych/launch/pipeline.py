"""The stages of a pipeline in a topology file: each a group of equal engines, joined by the chunk transfer layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from triptych.config.problems import Loc
from triptych.config.values import Model
from triptych.launch.groups import EngineGroup

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PROCESSOR = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?|[\w.-]+")
# What the launcher itself says of a connector.
_OWNED = ("stage_id", "deployment", "port", "role", "secret", "secret_file", "host", "advertise")
_TAKEN = ("gateway", "encode", "prefill", "decode", "combined", "sound", "admission", "total")


class StageConnector(Model):
    """How chunks get from one stage to the next; a bare name stands for one with defaults."""

    name: Literal["shm", "tcp"] = Field("shm", description="shared memory, or TCP")
    extra: dict[str, Any] = Field({}, description="passed on to the connector")

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("extra")
    @classmethod
    def _not_ours(cls, extra: dict[str, Any]) -> dict[str, Any]:
        for key in _OWNED:
            if key in extra:
                raise ValueError(f"`{key}` is the launcher's to say")
        return extra


class StageGroup(EngineGroup):
    """One stage: equal engines that do the same part of every request."""

    id: str = Field(description="its name: letters, digits, `-` and `_`")
    model: str | None = Field(
        None, description="directory or name on the hub; in the pipeline's model: the id if unset"
    )
    worker: Literal["ar", "generation"] = Field("ar", description="token by token, or each chunk at once")
    processor: str | None = Field(None, description="makes its output into what comes next, as `module:function`")
    take: Literal["hidden"] | None = Field(None, description="what is taken of a stock model beside tokens")
    final: Literal["text", "audio"] | None = Field(None, description="what of the answer comes from this stage")
    connector: StageConnector = Field(StageConnector(), description="from this stage to the next")
    chunk: dict[str, Any] = Field({}, description="options that the processor reads")
    window: NonNegativeInt = Field(0, description="streams that are received at once, 0 for all")
    chunk_timeout: NonNegativeFloat = Field(600.0, description="that a request waits for its next chunk, 0 for ever")

    max_tokens: PositiveInt = Field(
        2048, description="that a request may make here; of the first stage, what a speech request may"
    )

    @field_validator("id")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not _ID.fullmatch(value):
            raise ValueError("is not a name of letters, digits, `-` and `_`, 64 at most")
        if value in _TAKEN:
            raise ValueError(f"`{value}` already means something to the gateway: choose another name")
        return value

    @field_validator("processor")
    @classmethod
    def _is_place(cls, value: str | None) -> str | None:
        if value is not None and not _PROCESSOR.fullmatch(value):
            raise ValueError("is not of the form `package.module:function`, nor the name of an entry point")
        return value

    @field_validator("chunk")
    @classmethod
    def _not_ours(cls, chunk: dict[str, Any]) -> dict[str, Any]:
        for key in _OWNED:
            if key in chunk:
                raise ValueError(f"`{key}` is the launcher's to say")
        return chunk


def unfit_stages(stages: Sequence[StageGroup]) -> Iterator[tuple[Loc, str]]:
    """What is right by itself but does not fit together."""
    last = len(stages) - 1
    if not last:
        yield ("stages",), "a pipeline has two stages at least; one model alone goes under `engines`"
    known: dict[str, int] = {}
    for index, stage in enumerate(stages):
        if stage.id in known:
            yield ("stages", index, "id"), f"`{stage.id}` is stage {known[stage.id]} already"
        known.setdefault(stage.id, index)
        if stage.final == "audio" and index != last:
            yield ("stages", index, "final"), "only the last stage gives the sound"
        if stage.final == "text" and index:
            yield ("stages", index, "final"), "only the first stage gives the text"
        if stage.processor is None:
            follows = f"`{stages[index + 1].id}`" if index < last else "the gateway"
            yield ("stages", index, "processor"), f"is missing: it makes this stage's output into what {follows} takes"
        if stage.connector != stages[0].connector:
            yield (
                ("stages", index, "connector"),
                "is another one than the first stage's: one kind for all edges, for now",
            )
    if stages[0].worker != "ar":
        yield ("stages", 0, "worker"), "the first stage takes requests of clients: it is `ar`"
    if stages[last].final != "audio":
        yield ("stages", last, "final"), "is missing: the last stage gives the sound (`final: audio`)"
