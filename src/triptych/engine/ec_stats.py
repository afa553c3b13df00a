"""The EC connector's counters on their way from an engine's scheduler to its /metrics page and periodic log line."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
    PromMetric,
)

_GAUGES = frozenset({"store_bytes", "store_items", "store_evicted_items", "store_evicted_bytes"})


class EcStats(ECConnectorStats):  # type: ignore[misc]
    """Counts since the last report; `store_*` are states, not counts."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, int | float] = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        """Add the counts of `other`, which is the later one."""
        for name, value in other.data.items():
            self.data[name] = value if name in _GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return dict(sorted(self.data.items()))


class EcPromMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """`triptych_ec_*` in the engine's Prometheus registry."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def counter(name: str, text: str, *labels: str) -> Any:
            return metric_types[PromCounter](name=name, documentation=text, labelnames=[*labelnames, *labels])

        self._items = counter(
            "triptych_ec_items",
            "Encoder outputs that requests needed: hit (loaded), fallback (encoded here), failed (request failed).",
            "result",
            "reason",
        )
        self._published = counter(
            "triptych_ec_announced",
            "Encoder outputs at the end of a request: published (in the store) or withheld (could not be stored).",
            "result",
        )
        self._bytes = counter("triptych_ec_loaded_bytes", "Bytes of encoder output loaded.")
        self._waits = counter("triptych_ec_waits", "Requests that had to wait for an encoder output.")
        self._states = {
            name: metric_types[Gauge](
                name=f"triptych_ec_{name}",
                documentation=f"State of the shared store: {name.removeprefix('store_').replace('_', ' ')}.",
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for name in sorted(_GAUGES)
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            kind, _, reason = name.partition("/")
            if kind in ("hit", "fallback", "failed"):
                self._items.labels(*labels, kind, reason).inc(value)
            elif kind == "announced":
                self._published.labels(*labels, reason).inc(value)
            elif kind == "hit_bytes":
                self._bytes.labels(*labels).inc(value)
            elif kind == "wait":
                self._waits.labels(*labels).inc(value)
            elif kind in self._states:
                self._states[kind].labels(*labels).set(value)
