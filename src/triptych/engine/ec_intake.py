"""What a consumer's scheduler decides about encoder outputs. Knows the store, and nothing of vLLM.

The rule that everything here follows: once vLLM has scheduled an item for loading, failure is not an option, since a
worker that misses one brings the whole engine down. So an item's rows are read and verified *before* its request is
admitted, and it is these bytes, in memory, that go to the worker. Whatever happens to the file after that is harmless.

    admit()   every step, before vLLM schedules tokens of a request: True go on, False not in this step
    has()     is this item of the admitted request in hand?
    claim()   vLLM has reserved room for it: hand it over with this step's loads
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from triptych.engine.ec_format import item_key
from triptych.engine.ec_store import EcStore, Expected, Item, ItemUnusable

_POLL_S = 0.005

_Outcome = Literal["now", "later", "never"]


@dataclass(frozen=True, slots=True)
class Feature:
    """One media item of a request: where its rows go (prompt tokens `start` to `end`) and what they must look like.

    `raw`: the request carries the media too, so the engine can encode it by itself.
    """

    identifier: str
    start: int
    end: int
    expected: Expected
    raw: bool


@dataclass(slots=True)
class _RequestState:
    features: Sequence[Feature]
    preemptions: int = 0
    # In vLLM's own cache on behalf of this request, so neither to be read nor to be lost before the request ends.
    held: set[str] = field(default_factory=set)
    # To be encoded by the engine itself.
    local: set[str] = field(default_factory=set)
    # Read and verified, not yet claimed.
    staged: dict[str, Item] = field(default_factory=dict)
    waiting_since: float | None = None
    next_look: float = 0.0
    failed: bool = False


class Intake:
    """The consumer's side of one engine's scheduler. Counts what it does in `counters`.

    Counters: `hit`, `hit_bytes`, `wait`, `fallback/<reason>` (encoded by this engine instead), `failed/<reason>`.
    """

    def __init__(
        self,
        store: EcStore,
        *,
        wait_s: float,
        metadata_wait_s: float,
        counters: Counter[str],
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._wait_s = {True: wait_s, False: metadata_wait_s}
        self._counters = counters
        self._logger = logger
        self._clock = clock
        self._requests: dict[str, _RequestState] = {}
        self._failed: set[str] = set()
        # Requests that need the same item share its bytes.
        self._shared: weakref.WeakValueDictionary[str, Item] = weakref.WeakValueDictionary()
        # In vLLM's cache, as far as can be seen from here. Saves reads; nothing that must not fail relies on it.
        self._cached: set[str] = set()
        self._admitted = ""
        self._in_hand: dict[str, Item] = {}
        self._loads: dict[str, Item] = {}

    def features(self, request_id: str, count: int) -> Sequence[Feature] | None:
        """The features that `admit` was given for a request, None if they are not known or not `count` any more."""
        state = self._requests.get(request_id)
        return state.features if state is not None and len(state.features) == count else None

    def admit(
        self, request_id: str, features: Sequence[Feature], *, preemptions: int, computed: int, window: int
    ) -> bool:
        """Whether vLLM may schedule this request now. `computed`: prompt tokens done; `window`: most tokens in a step.

        False while an item that may still come is waited for, and for good once one that must come cannot: then the
        request is in `take_failed`.
        """
        state = self._requests.get(request_id)
        if state is None or state.features is not features:
            state = self._requests[request_id] = _RequestState(features)
        if state.preemptions != preemptions:
            # vLLM has let go of what it held for this request.
            state.preemptions = preemptions
            state.held.clear()
            state.local.clear()
        self._admitted = request_id
        self._in_hand = {}
        if all(feature.end <= computed for feature in features):
            state.staged.clear()
            return not state.failed
        if state.failed or (state.waiting_since is not None and self._clock() < state.next_look):
            return False
        outcomes: set[_Outcome] = set()
        for feature in features:
            if feature.end <= computed or feature.start >= computed + window or feature.identifier in state.held:
                continue
            outcomes.add(self._obtain(request_id, state, feature))
            if "never" in outcomes:
                return False
        if "later" in outcomes:
            return False
        state.waiting_since = None
        return True

    def has(self, identifier: str) -> bool:
        """Whether the request admitted last has this item in hand."""
        return identifier in self._in_hand

    def claim(self, request_id: str, identifier: str) -> None:
        """vLLM has reserved room in its cache for this item of the admitted request: load it, if it is in hand."""
        state = self._requests.get(request_id)
        if state is None or request_id != self._admitted:
            return
        state.held.add(identifier)
        self._cached.add(identifier)
        item = self._in_hand.get(identifier)
        if item is None:
            return
        state.staged.pop(identifier, None)
        self._loads[identifier] = item
        self._counters["hit"] += 1
        self._counters["hit_bytes"] += len(item.payload)
        self._logger.info(
            "EC hit: item %s, %d rows of %d, %d bytes, request %s",
            _short(identifier),
            item.header.rows,
            item.header.width,
            len(item.payload),
            request_id,
        )

    def take_loads(self, evicted: Iterable[str]) -> dict[str, Item]:
        """Items to load in this step, by identifier. `evicted`: identifiers that vLLM has dropped from its cache."""
        self._cached.difference_update(evicted)
        loads, self._loads = self._loads, {}
        return loads

    def take_failed(self) -> set[str]:
        """Requests that cannot go on, each told once."""
        failed, self._failed = self._failed, set()
        return failed

    def finish(self, request_id: str) -> None:
        """A request has ended, one way or another."""
        self._requests.pop(request_id, None)
        self._failed.discard(request_id)

    def _obtain(self, request_id: str, state: _RequestState, feature: Feature) -> _Outcome:
        """Get an item in hand, or decide to do without it."""
        identifier = feature.identifier
        if feature.raw and (identifier in state.local or identifier in self._cached):
            return "now"
        item = state.staged.get(identifier) or self._shared.get(identifier)
        if item is None or not _fits(item, feature.expected):
            try:
                item = self._store.read(identifier, feature.expected)
            except ItemUnusable as error:
                return self._do_without(request_id, state, feature, error)
            self._shared[identifier] = item
        state.staged[identifier] = item
        self._in_hand[identifier] = item
        return "now"

    def _do_without(self, request_id: str, state: _RequestState, feature: Feature, error: ItemUnusable) -> _Outcome:
        if error.reason == "missing" and self._may_wait(state, self._wait_s[feature.raw]):
            return "later"
        name = _short(feature.identifier)
        if feature.raw:
            level = logging.DEBUG if error.reason == "missing" else logging.WARNING
            self._logger.log(level, "EC item %s not used (%s), encoding it here, request %s", name, error, request_id)
            self._counters[f"fallback/{error.reason}"] += 1
            state.local.add(feature.identifier)
            return "now"
        self._logger.error("EC item %s not usable (%s) and no media: request %s fails", name, error, request_id)
        self._counters[f"failed/{error.reason}"] += 1
        state.failed = True
        state.staged.clear()
        self._failed.add(request_id)
        return "never"

    def _may_wait(self, state: _RequestState, limit: float) -> bool:
        now = self._clock()
        if state.waiting_since is None:
            if limit <= 0:
                return False
            state.waiting_since = now
            self._counters["wait"] += 1
        state.next_look = now + _POLL_S
        return now - state.waiting_since < limit


def _fits(item: Item, expected: Expected) -> bool:
    header = item.header
    return (header.rows, header.width, header.dtype) == (expected.rows, expected.width, expected.dtype)


def _short(identifier: str) -> str:
    """How an item is called in logs: the start of its file's name, never what a client may have sent."""
    return item_key(identifier).hex()[:16]
