"""What the gateway counts, and how Prometheus gets it.

Counting is plain Python on dicts and ints (some 0.1 µs each); one collector makes families of it when somebody
scrapes. What others know already (requests in flight, engines' health) is read from them at that time. The registry is
this object's own: two gateways in one process do not meet.

Labels are words of the gateway's own vocabulary or of its configuration, never text of a client's; should one
slip through all the same, `Counts` ends at a fixed number of series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import triptych
from triptych.gateway.admission import Admission
from triptych.gateway.engines import Change, Fleet
from triptych.gateway.settings import ROLES

PREFIX = "triptych_"
# Seconds. From an SSE frame of a tiny model to the deadlines' order of magnitude.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
ENCODE_STATUSES = (
    "success",
    "timeout",
    "connect_error",
    "http_error",
    "oversize",
    "invalid_response",
    "cancelled",
)
MAX_SERIES = 512
_OTHER = "other"

Key = tuple[str | int, ...]


class Counts(dict[Key, int]):
    """Counters by label values, at most MAX_SERIES of them; the rest is lumped together under "other"."""

    __slots__ = ()

    def add(self, key: Key, amount: int = 1) -> None:
        try:
            self[key] += amount
        except KeyError:
            key = _bounded(self, key)
            self[key] = self.get(key, 0) + amount


class Histogram:
    """Observations in seconds by bucket. `counts` has one more entry than BUCKETS, for what is beyond the last."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0


class Histograms(dict[Key, Histogram]):
    """Histograms by label values, bounded like Counts."""

    __slots__ = ()

    def observe(self, key: Key, seconds: float) -> None:
        try:
            histogram = self[key]
        except KeyError:
            histogram = self.setdefault(_bounded(self, key), Histogram())
        histogram.counts[bisect_left(BUCKETS, seconds)] += 1
        histogram.total += seconds


class Metrics:
    """All of the gateway's numbers. Each method is one event; `render` is a scrape."""

    def __init__(self, fleet: Fleet | None = None, admission: Admission | None = None) -> None:
        self._fleet = fleet
        self._admission = admission
        self.handles_merged = 0
        self.parts_rewritten = 0
        self.log_lines_dropped: Callable[[], int] = lambda: 0
        self._requests = Counts()
        self._seconds = Histograms()
        self._first_token = Histograms()
        self._refused = Counts()
        self._degraded = Counts()
        self._stream_errors = Counts()
        self._stripped = Counts()
        self._uuids = Counts({("removed",): 0, ("replaced",): 0})
        self._ejections = Counts()
        # Known label values start at 0, so that a rate sees the first event.
        self._legs = Counts({("encode", status): 0 for status in ENCODE_STATUSES})
        self._leg_seconds = Histograms({(role,): Histogram() for role in ROLES})
        self._retries = Counts({(role,): 0 for role in ROLES})
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Export(self))
        ProcessCollector(namespace="triptych", registry=self._registry)
        if fleet is not None:
            fleet.watchers.append(self._engine_changed)

    # -- events

    def request(self, plan: str, status: int, seconds: float, model: str = "") -> None:
        """A request is over. status: what the client got; 499 if it left. model: a deployment's label."""
        self._requests.add((model, plan, status))
        self._seconds.observe((model, plan), seconds)

    def first_token(self, plan: str, seconds: float, model: str = "") -> None:
        """The first piece of a streamed answer went out, that long after the request came."""
        self._first_token.observe((model, plan), seconds)

    def leg(self, role: str, status: str, seconds: float) -> None:
        """A leg is over; status as of the encode legs."""
        self._legs.add((role, status))
        self._leg_seconds.observe((role,), seconds)

    def retry(self, role: str) -> None:
        """A leg goes to another engine."""
        self._retries.add((role,))

    def refused(self, reason: str) -> None:
        """A request was refused before any leg: admission, key, shape."""
        self._refused.add((reason,))

    def degraded(self, reason: str) -> None:
        """A plan has fewer legs than the pools would allow."""
        self._degraded.add((reason,))

    def stream_error(self, leg: str, kind: str) -> None:
        """A stream that had begun broke; kind: as a leg's status, `http_error` for an error of the engine's own."""
        self._stream_errors.add((leg, kind))

    def stripped(self, kind: str, amount: int = 1) -> None:
        """Handles that a client had sent, or that an answer would have told, were removed."""
        if amount:
            self._stripped.add((kind,), amount)

    def uuids(self, action: str, amount: int = 1) -> None:
        """Media uuids were "removed" or "replaced"."""
        if amount:
            self._uuids.add((action,), amount)

    def _engine_changed(self, change: Change) -> None:
        if change.what == "ejected":
            self._ejections.add((change.engine.url, change.engine.role))

    # -- scrape

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and body of a scrape whose `Accept` header is `accept`."""
        encoder, content_type = choose_encoder(accept)
        return content_type, encoder(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The families as of now."""
        info = GaugeMetricFamily(PREFIX + "build_info", "The running version.", labels=("version",))
        info.add_metric((triptych.__version__,), 1)
        yield info
        yield from self._collect_requests()
        yield from self._collect_legs()
        if self._admission is not None:
            yield _gauge("requests_in_flight", "Requests admitted and not ended.", self._admission.requests)
            yield _gauge("request_bytes_in_flight", "Bytes of their bodies.", self._admission.nbytes)
            yield _gauge("requests_queued", "Requests that wait for admission.", self._admission.queued)
        if self._fleet is not None:
            yield from self._collect_engines(self._fleet)

    def _collect_requests(self) -> Iterator[Metric]:
        yield _counter("requests", "Requests by what the client got.", ("model", "plan", "status"), self._requests)
        yield _histogram("request_seconds", "Whole requests.", ("model", "plan"), self._seconds)
        yield _histogram(
            "time_to_first_token_seconds",
            "From the request to the first piece of a streamed answer.",
            ("model", "plan"),
            self._first_token,
        )
        yield _counter("requests_refused", "Requests refused before any leg.", ("reason",), self._refused)
        yield _counter("requests_degraded", "Plans with fewer legs than the pools allow.", ("reason",), self._degraded)
        yield _counter("stream_errors", "Streams that broke, by leg.", ("leg", "kind"), self._stream_errors)
        yield _counter("handles_merged", "Handles of encode legs put into a body.", (), {(): self.handles_merged})
        yield _counter("handles_stripped", "Handles removed from bodies.", ("kind",), self._stripped)
        yield _counter("media_uuids", "Clients' media uuids, by what became of them.", ("action",), self._uuids)
        yield _counter("media_parts_rewritten", "Media parts sent as metadata.", (), {(): self.parts_rewritten})
        yield _counter("log_lines_dropped", "Log lines that stderr did not take.", (), {(): self.log_lines_dropped()})

    def _collect_legs(self) -> Iterator[Metric]:
        yield _counter("legs", "Calls to engines, by how they ended.", ("leg", "status"), self._legs)
        yield _histogram("leg_seconds", "Calls to engines.", ("leg",), self._leg_seconds)
        yield _counter("leg_retries", "Calls that went to another engine.", ("leg",), self._retries)

    def _collect_engines(self, fleet: Fleet) -> Iterator[Metric]:
        labels = ("model", "role", "engine")
        healthy = GaugeMetricFamily(PREFIX + "engine_healthy", "1 if in service.", labels=labels)
        running = GaugeMetricFamily(PREFIX + "engine_in_flight", "Calls now on the engine.", labels=labels)
        waiting = GaugeMetricFamily(PREFIX + "pool_waiting", "Legs that wait for a place.", labels=labels[:2])
        legs: dict[str, int] = dict.fromkeys(ROLES, 0)
        for deployment in fleet.deployments:
            for role, pool in deployment.pools.items():
                if pool:
                    waiting.add_metric((deployment.label, role), pool.waiting)
                for engine in pool.engines:
                    healthy.add_metric((deployment.label, role, engine.url), int(engine.healthy))
                    running.add_metric((deployment.label, role, engine.url), engine.in_flight)
                    legs[role] = legs.get(role, 0) + engine.in_flight
        in_flight = GaugeMetricFamily(PREFIX + "legs_in_flight", "Calls now on engines.", labels=("leg",))
        for role, count in legs.items():
            in_flight.add_metric((role,), count)
        yield from (in_flight, healthy, running, waiting)
        yield _counter("engine_ejections", "Engines taken out of service.", ("engine", "role"), self._ejections)


class _Export(Collector):
    """What the registry holds: the families of a `Metrics`, made anew at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect()


def _bounded(series: dict[Key, Any], key: Key) -> Key:
    return key if len(series) < MAX_SERIES else (_OTHER,) * len(key)


def _gauge(name: str, doc: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, doc, value=value)


def _counter(name: str, doc: str, labels: Sequence[str], counts: dict[Key, int]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, doc, labels=labels)
    for key, count in counts.items():
        family.add_metric(tuple(map(str, key)), count)
    return family


def _histogram(name: str, doc: str, labels: Sequence[str], histograms: dict[Key, Histogram]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, doc, labels=labels)
    for key, histogram in histograms.items():
        below = 0
        buckets = []
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), histogram.counts, strict=True):
            below += count
            buckets.append((bound, float(below)))
        family.add_metric(tuple(map(str, key)), buckets, histogram.total)
    return family
