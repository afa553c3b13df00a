"""What a consumer's scheduler decides, played through as vLLM calls it."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_ec_store import EXPECTED, file_of, flip_last, put, rows_of
from triptych.engine.ec_intake import Feature, Intake
from triptych.engine.ec_store import EcStore, Expected

WINDOW = 100


@dataclass
class Scheduler:
    """As much of vLLM's scheduler as concerns encoder outputs, with its encoder cache."""

    store: EcStore
    wait_s: float = 0.0
    metadata_wait_s: float = 0.0
    now: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    cache: dict[str, int] = field(default_factory=dict)
    evicted: list[str] = field(default_factory=list)
    encoded: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    reads: int = 0

    def __post_init__(self) -> None:
        self.intake = Intake(
            self.store,
            wait_s=self.wait_s,
            metadata_wait_s=self.metadata_wait_s,
            counters=self.counters,
            logger=logging.getLogger("test"),
            clock=lambda: self.now,
        )
        real = self.store.read

        def counted(identifier: str, expected: Expected) -> object:
            self.reads += 1
            return real(identifier, expected)

        self.store.read = counted  # type: ignore[method-assign,assignment]

    def step(self, request: str, features: tuple[Feature, ...], computed: int = 0, preemptions: int = 0) -> str:
        """Try to schedule a step of one request: "run", "wait" or "fail"."""
        known = self.intake.features(request, len(features)) or features
        if not self.intake.admit(request, known, preemptions=preemptions, computed=computed, window=WINDOW):
            return "fail" if request in self.intake.take_failed() else "wait"
        for feature in features:
            if feature.end <= computed or feature.start >= computed + WINDOW:
                continue
            if feature.identifier not in self.cache:
                if not self.intake.has(feature.identifier):
                    assert feature.raw, "vLLM was left to encode what it has no media for: the engine would die"
                    self.encoded.append(feature.identifier)
                self.cache[feature.identifier] = feature.expected.rows
                self.intake.claim(request, feature.identifier)
            assert self.cache[feature.identifier] == feature.expected.rows, "wrong number of rows: the engine would die"
        for identifier, item in self.intake.take_loads(self.evicted).items():
            assert item.header.rows == self.cache[identifier]
            self.loaded.append(identifier)
        self.evicted = []
        return "run"

    def evict(self, identifier: str) -> None:
        if self.cache.pop(identifier, None) is not None:
            self.evicted.append(identifier)


@pytest.fixture
def store(tmp_path: Path) -> EcStore:
    return EcStore(tmp_path, "ns")


def item(name: str, start: int = 0, *, raw: bool = False, expected: Expected = EXPECTED) -> Feature:
    return Feature(name, start, start + 10, expected, raw)


def test_a_stored_item_is_loaded_with_or_without_media(store: EcStore) -> None:
    put(store, "a")
    put(store, "b")
    scheduler = Scheduler(store)
    assert scheduler.step("r1", (item("a"), item("b", 20, raw=True))) == "run"
    assert scheduler.loaded == ["a", "b"]
    assert scheduler.encoded == []
    assert scheduler.counters == {"hit": 2, "hit_bytes": 2 * len(rows_of("a"))}


def test_a_missing_item_with_media_is_encoded_here_at_once(store: EcStore) -> None:
    scheduler = Scheduler(store)
    assert scheduler.step("r1", (item("a", raw=True),)) == "run"
    assert scheduler.encoded == ["a"]
    assert scheduler.counters == {"fallback/missing": 1}


def test_a_missing_item_without_media_fails_that_request_alone(store: EcStore) -> None:
    put(store, "b")
    scheduler = Scheduler(store)
    assert scheduler.step("r1", (item("a"),)) == "fail"
    assert scheduler.step("r2", (item("b"),)) == "run"
    assert scheduler.counters["failed/missing"] == 1
    scheduler.intake.finish("r1")
    put(store, "a")
    assert scheduler.step("r1", (item("a"),)) == "run"


def test_a_failed_request_is_reported_once_and_stays_out(store: EcStore) -> None:
    scheduler = Scheduler(store)
    features = (item("a"),)
    assert scheduler.step("r1", features) == "fail"
    put(store, "a")
    assert scheduler.step("r1", features) == "wait"
    assert scheduler.counters["failed/missing"] == 1


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (Expected(4, 5, "float32"), "rows"),
        (Expected(3, 6, "float32"), "width"),
        (Expected(3, 5, "float16"), "dtype"),
    ],
)
def test_an_item_of_the_wrong_shape_is_encoded_here_or_fails_the_request(
    store: EcStore, wanted: Expected, reason: str
) -> None:
    put(store, "a")
    scheduler = Scheduler(store)
    assert scheduler.step("r1", (item("a", expected=wanted),)) == "fail"
    assert scheduler.step("r2", (item("a", expected=wanted, raw=True),)) == "run"
    assert (scheduler.encoded, scheduler.loaded) == (["a"], [])
    assert scheduler.counters == {f"failed/{reason}": 1, f"fallback/{reason}": 1}


def test_a_damaged_item_is_encoded_here_or_fails_the_request(store: EcStore) -> None:
    scheduler = Scheduler(store)
    for request, raw, outcome in (("r1", False, "fail"), ("r2", True, "run")):
        put(store, "a")
        flip_last(file_of(store, "a"))
        assert scheduler.step(request, (item("a", raw=raw),)) == outcome
    assert scheduler.encoded == ["a"]


def test_what_happens_to_the_file_after_admission_does_not_matter(store: EcStore) -> None:
    """vLLM may find no room for an admitted request; its item is lost meanwhile."""
    put(store, "a")
    scheduler = Scheduler(store)
    features = (item("a"),)
    assert scheduler.intake.admit("r1", features, preemptions=0, computed=0, window=WINDOW)
    file_of(store, "a").unlink()
    assert scheduler.step("r1", features) == "run"
    assert scheduler.loaded == ["a"]


def test_a_missing_item_is_waited_for_as_long_as_configured(store: EcStore) -> None:
    scheduler = Scheduler(store, wait_s=1.0, metadata_wait_s=2.0)
    raw, bare = (item("a", raw=True),), (item("b"),)
    assert [scheduler.step("raw", raw), scheduler.step("bare", bare)] == ["wait", "wait"]
    scheduler.now = 0.9
    assert [scheduler.step("raw", raw), scheduler.step("bare", bare)] == ["wait", "wait"]
    scheduler.now = 1.1
    assert [scheduler.step("raw", raw), scheduler.step("bare", bare)] == ["run", "wait"]
    scheduler.now = 2.1
    assert scheduler.step("bare", bare) == "fail"
    assert scheduler.counters == {"wait": 2, "fallback/missing": 1, "failed/missing": 1}


def test_an_item_that_comes_while_it_is_waited_for_is_loaded(store: EcStore) -> None:
    scheduler = Scheduler(store, metadata_wait_s=2.0)
    assert scheduler.step("r1", (item("a"),)) == "wait"
    put(store, "a")
    scheduler.now = 0.5
    assert scheduler.step("r1", (item("a"),)) == "run"
    assert scheduler.loaded == ["a"]


def test_waiting_looks_at_the_store_every_few_milliseconds_only(store: EcStore) -> None:
    scheduler = Scheduler(store, metadata_wait_s=2.0)
    for _ in range(1000):
        scheduler.step("r1", (item("a"),))
        scheduler.now += 0.0001
    assert scheduler.reads <= 21


def test_an_item_in_vllms_cache_is_not_read_again_for_a_request_with_media(store: EcStore) -> None:
    put(store, "a")
    scheduler = Scheduler(store)
    scheduler.step("r1", (item("a", raw=True),))
    assert scheduler.step("r2", (item("a", raw=True),)) == "run"
    assert scheduler.reads == 1
    scheduler.evict("a")
    scheduler.step("r3", (item("z", raw=True),))
    assert scheduler.step("r4", (item("a", raw=True),)) == "run"
    assert scheduler.loaded == ["a", "a"]


def test_a_request_without_media_never_relies_on_vllms_cache(store: EcStore) -> None:
    """vLLM may evict an unreferenced item in the very pass in which it was seen to be there."""
    put(store, "a")
    scheduler = Scheduler(store)
    scheduler.step("r1", (item("a"),))
    features = (item("a"),)
    assert scheduler.intake.admit("r2", features, preemptions=0, computed=0, window=WINDOW)
    scheduler.evict("a")
    assert scheduler.intake.has("a")
    file_of(store, "a").unlink()
    assert scheduler.step("r3", (item("a"),)) == "run", "the bytes that r2 holds serve r3 too"


def test_items_beyond_the_step_are_left_for_later(store: EcStore) -> None:
    put(store, "a")
    scheduler = Scheduler(store)
    features = (item("a"), item("late", WINDOW + 50))
    assert scheduler.step("r1", features) == "run"
    assert scheduler.reads == 1
    put(store, "late")
    assert scheduler.step("r1", features, computed=WINDOW) == "run"
    assert scheduler.loaded == ["a", "late"]


def test_an_item_that_spans_two_steps_is_read_once_even_if_its_file_goes(store: EcStore) -> None:
    put(store, "a")
    scheduler = Scheduler(store)
    features = (item("a"),)
    assert scheduler.step("r1", features) == "run"
    file_of(store, "a").unlink()
    assert scheduler.step("r1", features, computed=5) == "run"
    assert scheduler.reads == 1


def test_a_preempted_request_gets_its_items_again(store: EcStore) -> None:
    put(store, "a")
    scheduler = Scheduler(store)
    features = (item("a"),)
    scheduler.step("r1", features)
    scheduler.evict("a")
    assert scheduler.step("r1", features, preemptions=1) == "run"
    assert scheduler.loaded == ["a", "a"]
    file_of(store, "a").unlink()
    scheduler.evict("a")
    assert scheduler.step("r1", features, preemptions=2) == "fail"


def test_one_identifier_with_two_shapes_gives_each_request_its_own_or_nothing(store: EcStore) -> None:
    """Two clients use one uuid for different media: neither must get rows that do not fit."""
    put(store, "a")
    scheduler = Scheduler(store)
    good, bad = (item("a"),), (item("a", expected=Expected(7, 5, "float32"), raw=True),)
    assert scheduler.intake.admit("r1", good, preemptions=0, computed=0, window=WINDOW)
    assert scheduler.step("r2", bad) == "run"
    assert scheduler.encoded == ["a"]
    assert not scheduler.intake.has("a")


def test_finished_requests_leave_nothing_behind(store: EcStore) -> None:
    put(store, "a")
    scheduler = Scheduler(store)
    features = (item("a"),)
    scheduler.intake.admit("r1", features, preemptions=0, computed=0, window=WINDOW)
    assert scheduler.intake.features("r1", 1) is features
    scheduler.intake.finish("r1")
    assert scheduler.intake.features("r1", 1) is None
    scheduler.step("r2", (item("z", raw=True),))
    assert not scheduler.intake._shared


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "put", "lose", "damage", "evict", "preempt", "finish"]),
            st.integers(0, 3),
            st.booleans(),
        ),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_no_sequence_of_events_lets_the_engine_die(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int, bool]]
) -> None:
    """The assertions are in Scheduler.step: what it would have to encode or load and cannot."""
    store = EcStore(tmp_path_factory.mktemp("s"), "ns")
    scheduler = Scheduler(store)
    requests: dict[int, tuple[str, tuple[Feature, ...]]] = {}
    preemptions: Counter[int] = Counter()

    def evict_if_unused(identifier: str, *users: int) -> None:
        """vLLM keeps what a running request refers to."""
        if not any(feature.identifier == identifier for user in users for feature in requests[user][1]):
            scheduler.evict(identifier)

    for count, (event, number, raw) in enumerate(events):
        name = f"item {number}"
        if event == "put":
            put(store, name)
        elif event in ("lose", "damage") and file_of(store, name).exists():
            file_of(store, name).unlink() if event == "lose" else flip_last(file_of(store, name))
        elif event == "evict":
            evict_if_unused(name, *requests)
        elif event == "preempt":
            preemptions[number] += 1
            for feature in requests.get(number, ("", ()))[1]:
                evict_if_unused(feature.identifier, *(requests.keys() - {number}))
        elif event == "finish" and number in requests:
            scheduler.intake.finish(requests.pop(number)[0])
        elif event == "step":
            other = f"item {(number + 1) % 4}"
            fresh = (f"request {count}", (item(name, raw=raw), item(other, 20, raw=not raw)))
            request, features = requests.setdefault(number, fresh)
            outcome = scheduler.step(request, features, preemptions=preemptions[number])
            if outcome != "run":
                assert outcome == "fail"
                scheduler.intake.finish(request)
                del requests[number]
    store.close()
