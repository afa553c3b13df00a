"""What every request uses and none owns."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from triptych.gateway.logs import Log
from triptych.gateway.metrics import Metrics
from triptych.gateway.settings import GatewaySettings
from triptych.http.client import Client


@dataclass(slots=True)
class Tools:
    """One for each gateway. What nearly every request needs of the settings lies here as it is, since a look into them
    costs several times as much."""

    settings: GatewaySettings
    client: Client
    metrics: Metrics
    log: Log
    rng: random.Random
    first_byte: float = field(init=False)
    stream_idle: float = field(init=False)
    answer_bytes: int = field(init=False)
    event_bytes: int = field(init=False)
    shows_handles: bool = field(init=False)

    def __post_init__(self) -> None:
        deadlines, limits = self.settings.deadlines, self.settings.limits
        self.first_byte = deadlines.first_byte
        self.stream_idle = deadlines.stream_idle
        self.answer_bytes = limits.answer_bytes
        self.event_bytes = limits.event_bytes
        self.shows_handles = "answer_handles" in self.settings.open
