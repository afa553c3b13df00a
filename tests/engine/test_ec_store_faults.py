"""The store under SIGKILL and under several processes at once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.test_ec_store import EXPECTED, SIZE, file_of, flip_last, put, recorded, rows_of, truth
from triptych.engine.ec_store import EcStore, ItemUnusable, PublishRefused, StoreLimits

# Small enough that nearly every publish evicts; a lease of 0 so that none is refused.
LIMITS = StoreLimits(max_bytes=6 * SIZE, max_items=100, lease_s=0)
CALLS = ("open", "write", "pwrite", "rename", "utime", "unlink", "mkdir", "close", "fstat", "stat")


def in_child(action: Callable[[], None]) -> int:
    """Start `action` in a forked process; its status is 0 if it returned."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return pid


def assert_sound(store: EcStore) -> None:
    """What must hold after any crash, before and after recovery."""
    for name in map(str, range(100)):
        try:
            assert store.read(name, EXPECTED).payload == rows_of(name)
        except ItemUnusable as error:
            if error.reason != "missing":
                raise AssertionError(f"item {name}: {error}") from error
    store.recover()
    assert os.listdir(store.directory / "new") == []
    assert recorded(store) == truth(store)
    assert truth(store)[0] <= LIMITS.max_bytes


def die_at(call: int) -> None:
    """Make this process kill itself at its `call`-th system call of those that matter to the store."""
    left = [call]

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return counted

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def publish(store: EcStore) -> None:
    put(store, "new")


def find_damage(store: EcStore) -> None:
    with pytest.raises(ItemUnusable, match="corrupt"):
        store.read("damaged", EXPECTED)


@pytest.mark.parametrize(
    ("filled", "action", "at_least"),
    [(0, publish, 20), (6, publish, 20), (3, find_damage, 5)],
    ids=["publish in an empty store", "publish in a full store", "remove a damaged item"],
)
def test_a_process_killed_at_any_system_call_leaves_no_half_item_and_right_books(
    tmp_path: Path, filled: int, action: Callable[[EcStore], None], at_least: int
) -> None:
    for call in range(1, 1000):
        store = EcStore(tmp_path / str(call), "ns", LIMITS)
        for index in range(filled):
            put(store, str(index))
        if action is find_damage:
            put(store, "damaged")
            flip_last(file_of(store, "damaged"))
        store.close()

        def act_and_die(store: EcStore = store, call: int = call) -> None:
            die_at(call)
            action(store)

        _, status = os.waitpid(in_child(act_and_die), 0)
        # A producer that is running already does not recover first, and may have more room.
        roomy = EcStore(tmp_path / str(call), "ns")
        put(roomy, "next")
        assert recorded(roomy) == truth(roomy)
        roomy.close()
        put(store, "new")
        assert_sound(store)
        store.close()
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            assert call > at_least, "the kills did not reach the writes"
            return
    pytest.fail("the process never came to its end")


def publish_for_ever(root: Path, seed: int) -> None:
    store = EcStore(root, "ns", LIMITS)
    source = random.Random(seed)
    while True:
        try:
            put(store, str(source.randrange(100)))
        except PublishRefused as error:
            if error.reason != "busy":
                raise


def test_writers_killed_at_random_moments_and_readers_at_the_same_time(tmp_path: Path) -> None:
    """Two writers, one of which is killed again and again, evict each other's items under a reader."""
    store = EcStore(tmp_path, "ns", LIMITS)
    store.recover()
    source = random.Random(7)
    survivor = in_child(lambda: publish_for_ever(tmp_path, 1))
    seen = 0
    try:
        for round_ in range(25):
            victim = in_child(lambda seed=round_: publish_for_ever(tmp_path, seed))  # type: ignore[misc]
            until = time.monotonic() + source.uniform(0.005, 0.06)
            while time.monotonic() < until:
                name = str(source.randrange(100))
                try:
                    assert store.read(name, EXPECTED).payload == rows_of(name)
                    seen += 1
                except ItemUnusable as error:
                    if error.reason != "missing":
                        raise AssertionError(str(error)) from error
            os.kill(victim, signal.SIGKILL)
            _, status = os.waitpid(victim, 0)
            assert os.WIFSIGNALED(status), "the writer ended by itself"
            with store._lock(store._place(create=False)):
                assert truth(store)[0] <= LIMITS.max_bytes
    finally:
        os.kill(survivor, signal.SIGKILL)
        _, status = os.waitpid(survivor, 0)
    assert os.WIFSIGNALED(status), "the surviving writer ended by itself"
    assert seen > 100
    assert_sound(store)


def test_a_live_writers_file_is_not_reclaimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EcStore(tmp_path, "ns", LIMITS)
    other = EcStore(tmp_path, "ns", LIMITS)
    removed: list[int] = []
    monkeypatch.setattr(
        "triptych.engine.ec_files.write_all",
        lambda descriptor, *parts: (removed.append(other.recover()), [os.write(descriptor, part) for part in parts]),
    )
    assert put(store, "a") is True
    assert removed == [0]
    monkeypatch.undo()
    assert store.read("a", EXPECTED).payload == rows_of("a")


def test_a_dead_writers_file_is_reclaimed_when_room_is_needed(tmp_path: Path) -> None:
    store = EcStore(tmp_path, "ns", LIMITS)
    store.recover()
    (store.directory / "new" / "abandoned").write_bytes(b"x" * 1000)
    for index in range(7):
        put(store, str(index))
    assert os.listdir(store.directory / "new") == []
