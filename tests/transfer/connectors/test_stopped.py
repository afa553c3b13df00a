"""What a sender is told of a stop says which generation of the name it is about."""

from __future__ import annotations

import queue

from tests.transfer.connectors.rig import PATIENCE, Bench, take
from triptych.transfer.connectors.base import Mark


class Stops:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: queue.Queue[tuple[str, str, int | None]] = queue.Queue()

    def ready(self, stream: str) -> None:
        """It receives nothing."""

    def writable(self, stream: str) -> None:
        """It waits for nothing."""

    def stopped(self, stream: str, reason: str, generation: int | None = None) -> None:
        self.told.put((stream, reason, generation))


def test_a_stop_names_the_generation_that_is_not_wanted_and_not_the_name_alone(bench: Bench) -> None:
    sender, stops = bench.make(0), Stops()
    sender.listen(stops)
    receiver, events = bench.told(1)
    for generation in (5, 6):
        receiver.watch("0", "1", "s_0")
        sender.put("0", "1", "s_0_0", {"n": generation}, Mark(generation, False))
        assert take(receiver, events, "s_0_0") == {"n": generation}
        receiver.unwatch("s_0", f"no {generation}")
        stream, reason, told = stops.told.get(timeout=PATIENCE)
        assert (stream, told) == ("s_0", generation)
        assert reason.endswith(f"no {generation}")
