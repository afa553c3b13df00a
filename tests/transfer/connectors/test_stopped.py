"""What a sender is told of a stop says which generation of the name it is about."""

from __future__ import annotations

import queue

from tests.transfer.connectors.rig import PATIENCE, Bench, take, until
from triptych.transfer.connectors.base import Mark
from triptych.transfer.connectors.frames import Failed


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


def test_a_failure_that_is_told_twice_is_one_and_the_connection_stays(bench: Bench) -> None:
    sender = bench.make(0)
    sender.listen(Stops())
    receiver, events = bench.told(1)
    receiver.watch("0", "1", "s_0")
    for number in range(3):
        sender.put("0", "1", f"s_0_{number}", {"n": number}, Mark(5, False))
    assert take(receiver, events, "s_0_0") == {"n": 0}
    sender.fail("0", "1", "s_0", "it ended")
    sender.discard(f"s_0_{number}" for number in range(3))
    for link in [link for link in sender._links if not link.to_sender]:
        for _ in range(2):
            with sender._lock:
                link.post(Failed(1, 3, "again"))
                sender._after()
    receiver.watch("0", "1", "t_0")
    sender.put("0", "1", "t_0_0", {"n": 7}, Mark(6, False))
    assert take(receiver, events, "t_0_0") == {"n": 7}
    assert receiver.statistics().peers == 1


def test_a_sender_whose_connection_broke_is_found_again(bench: Bench) -> None:
    sender = bench.make(0)
    sender.listen(Stops())
    receiver, events = bench.told(1)
    receiver.watch("0", "1", "s_0")
    sender.put("0", "1", "s_0_0", {"n": 0}, Mark(5, False))
    assert take(receiver, events, "s_0_0") == {"n": 0}
    (link,) = receiver._links
    with receiver._lock:
        receiver._lose(link, "a test cut it")
        receiver._after()
    until(lambda: not sender.statistics().peers, "the sender sees that it is cut")
    receiver.watch("0", "1", "t_0")
    sender.put("0", "1", "t_0_0", {"n": 7}, Mark(6, False))
    assert take(receiver, events, "t_0_0") == {"n": 7}
