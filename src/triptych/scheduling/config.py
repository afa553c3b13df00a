"""What a stage is told of itself: `--additional-config '{"stage": {…}}'`, checked before anything is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import msgspec

from triptych.processors.registry import find

STREAM = "triptych_stream"
"""Key of `vllm_xargs`: the external id of the stream that a request belongs to, the same in every stage."""
SOURCE = "triptych_source"
"""Key of `vllm_xargs`: `host:port` of the replica of the stage before that sends it, where there are several."""
_MOST = 4096  # characters of a stream's id


class ConnectorConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`name` of the registry, and what its constructor takes."""

    name: str = "shm"
    extra: dict[str, Any] = {}


class StageConfig(msgspec.Struct, forbid_unknown_fields=True):
    """One stage. `name`: for messages; `role`: whether it sends, receives, or both; `processor` makes its chunks
    ("module:function" or an entry point); `window`: how many streams it receives at once, 0 for all; `chunk_timeout`:
    seconds that a request waits for a chunk before it fails, 0 for ever; `take`: what its worker takes from a model
    that says nothing of its own; `overlap`: false where it sends nothing before it has made everything."""

    id: int
    role: Literal["sender", "receiver", "both"]
    name: str = ""
    worker: Literal["ar", "generation"] = "ar"
    connector: ConnectorConfig = msgspec.field(default_factory=ConnectorConfig)
    processor: str | None = None
    window: int = 0
    chunk_timeout: float = 600.0
    take: Literal["hidden"] | None = None
    overlap: bool = True

    @property
    def sends(self) -> bool:
        return self.role != "receiver"

    @property
    def receives(self) -> bool:
        return self.role != "sender"


def stage_config(additional_config: Any) -> StageConfig:
    """The stage's configuration.

    Raises:
        ValueError: it is missing, a field is wrong (named), or the processor cannot be found.
    """
    given = additional_config.get("stage") if isinstance(additional_config, dict) else None
    if given is None:
        raise ValueError(
            "this scheduler needs to know its stage: --additional-config "
            '\'{"stage": {"id": 0, "role": "sender", "processor": "triptych.processors.tokens:forward"}}\''
        )
    try:
        config = msgspec.convert(given, StageConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"additional config `stage`: {error}") from None
    if config.id < 0 or config.window < 0 or config.chunk_timeout < 0:
        raise ValueError("additional config `stage`: id, window and chunk_timeout may not be negative")
    if config.receives and config.id == 0:
        raise ValueError("additional config `stage`: stage 0 has no stage before it: its role is `sender`")
    if config.sends and config.processor is None:
        raise ValueError("additional config `stage`: a stage that sends needs a `processor`, which makes its chunks")
    return config


def adapter_config(config: StageConfig, vllm_config: Any) -> Any:
    """The same as the adapter reads it: `model_config` and `scheduler_config` with the contract's fields (2.0)."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    extra = {**config.connector.extra, "role": config.role, "chunk_timeout_s": config.chunk_timeout}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            stage_id=config.id,
            worker_type=config.worker,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=model.max_model_len,
            hf_config=model.hf_config,
            hf_config_name=getattr(model, "hf_config_name", None),
            active_stream_window=config.window,
            stage_connector_config={"name": config.connector.name, "extra": extra},
            custom_process_next_stage_input_func=find(config.processor) if config.processor else None,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=scheduler.max_num_seqs),
    )


def stream_of(sampling_params: Any) -> tuple[str, dict[str, Any] | None] | None:
    """The stream that a request belongs to, and the replica that sends it; None for a request of no stream.

    Raises ValueError for values of a wrong form: they come from outside.
    """
    extra = getattr(sampling_params, "extra_args", None) or {}
    stream = extra.get(STREAM)
    if stream is None:
        return None
    if not isinstance(stream, str) or not 0 < len(stream) <= _MOST:
        raise ValueError(f"{STREAM} must be a text of 1 to {_MOST} characters")
    source = extra.get(SOURCE)
    if source is None:
        return stream, None
    host, _, port = source.rpartition(":") if isinstance(source, str) else ("", "", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{SOURCE} must be host:port")
    return stream, {"host": host, "zmq_port": int(port)}
