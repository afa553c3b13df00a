"""What a stage's configuration says to its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from triptych.transfer.connectors.base import ConnectorSpec
from triptych.transfer.prompt import Window

_TTS_MODELS: Final = ("minicpmtts", "conditional_chattts")
_WINDOWS: Final = {"full_attention": Window(1, True), "sliding_recompute": Window(1, False)}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, threads and counts; each is an option of the connector of the same name.

    `chunk_timeout_s`: a request that has waited so long for a chunk is reported (0: never); `send_timeout_s`: a stream
    whose consumer has taken nothing for so long is given up (0: never); `max_backlog`: chunks of one stream that may
    wait for its consumer; `hold_backlog`: from which on its request makes no more, until half of them are gone. The
    rest is for connectors that have to be polled: an empty poll is repeated after `poll_interval_s`, then after twice
    as long, up to `poll_interval_max_s`, by `poll_threads` threads.
    """

    chunk_timeout_s: float = 600.0
    send_timeout_s: float = 600.0
    max_backlog: int = 1024
    hold_backlog: int = 16
    poll_interval_s: float = 0.002
    poll_interval_max_s: float = 0.05
    poll_threads: int = 8

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Timing:
        """Raises ValueError for an option that is not a number, or is less than there can be."""
        found: dict[str, Any] = {}
        for name, least in (
            ("chunk_timeout_s", 0.0),
            ("send_timeout_s", 0.0),
            ("max_backlog", 1),
            ("hold_backlog", 1),
            ("poll_interval_s", 1e-4),
            ("poll_interval_max_s", 1e-4),
            ("poll_threads", 1),
        ):
            value = options.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                raise ValueError(f"the connector's option {name} must be a number of at least {least}, not {value!r}")
            found[name] = type(least)(value)
        return cls(**found)


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """`window`: how many streams may be active at once, 0 for all; `max_model_len`: 0 where there is no limit."""

    autoregressive: bool = True
    enabled: bool = True
    role: str | None = None
    max_num_seqs: int = 1
    window: int = 0
    max_model_len: int = 0
    prompt_window: Window = field(default_factory=Window)
    processor: Any = None
    timing: Timing = field(default_factory=Timing)

    def sends(self, stage_id: int) -> bool:
        """Whether another stage follows, as far as the configuration tells."""
        if not self.enabled or self.role == "receiver":
            return False
        return stage_id == 0 or self.processor is not None or self.role in ("sender", "both")

    @classmethod
    def from_config(cls, vllm_config: Any) -> AdapterSettings:
        """Read from `model_config` and `scheduler_config`; what they do not have is off.

        Raises ValueError for options out of range, TypeError for a processor that cannot be called.
        """
        model = vllm_config.model_config
        max_num_seqs = int(vllm_config.scheduler_config.max_num_seqs)
        options = connector_options(model)[1]
        processor = getattr(model, "custom_process_next_stage_input_func", None)
        if processor is not None and not callable(processor):
            raise TypeError(f"the stage input processor must be a function, not {processor!r}")
        window = int(getattr(model, "active_stream_window", 0) or 0)
        limit, prompt_window = _context(model)
        return cls(
            autoregressive=getattr(model, "worker_type", "ar") == "ar",
            enabled=bool(getattr(model, "async_chunk", True)),
            role=options.get("role"),
            max_num_seqs=max_num_seqs,
            window=min(window, max_num_seqs) if window > 0 else 0,
            max_model_len=limit,
            prompt_window=prompt_window,
            processor=processor,
            timing=Timing.from_options(options),
        )


def connector_spec(model_config: Any) -> ConnectorSpec:
    """The connector that a stage's configuration names: shared memory where it names none."""
    name, options = connector_options(model_config)
    return ConnectorSpec(name=name, extra={**options, "stage_id": int(getattr(model_config, "stage_id", 0) or 0)})


def connector_options(model_config: Any) -> tuple[str, dict[str, Any]]:
    """Name and options of the configured connector: `stage_connector_config` is a mapping or an object with both."""
    raw = getattr(model_config, "stage_connector_config", None) or {}
    if isinstance(raw, Mapping):
        name, extra = raw.get("name"), raw.get("extra")
    else:
        name, extra = getattr(raw, "name", None), getattr(raw, "extra", None)
    return name or "SharedMemoryConnector", dict(extra or {})


def _context(model: Any) -> tuple[int, Window]:
    """The context's length and how a talker's prompt is kept within it."""
    limit = int(getattr(model, "max_model_len", 0) or 0)
    if getattr(model, "hf_config_name", None) != "tts_config":
        return limit, Window()
    config = getattr(model, "hf_config", None)
    config = getattr(config, "tts_config", None) or config
    if getattr(config, "model_type", None) not in _TTS_MODELS:
        return limit, Window()
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    window = _WINDOWS.get(getattr(config, "attention_type", ""), Window())
    return min((n for n in (limit, positions) if n > 0), default=0), window
