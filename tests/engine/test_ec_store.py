"""The store of encoder outputs: bounds, damage, hostile files. Kills are in test_ec_store_faults.py."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.engine import ec_files
from triptych.engine.ec_format import HEADER_SIZE, Header, item_key
from triptych.engine.ec_store import EcStore, Expected, ItemUnusable, PublishRefused, StoreLimits

ROWS, WIDTH = 3, 5
EXPECTED = Expected(ROWS, WIDTH, "float32")
SIZE = HEADER_SIZE + ROWS * WIDTH * 4


class Clock:
    """Time that passes when told to, in seconds."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> int:
        return int(self.now * 1e9)


def rows_of(identifier: str) -> bytes:
    seed = item_key(identifier)
    return (seed * 2)[: ROWS * WIDTH * 4 // 2] * 2


def put(store: EcStore, identifier: str) -> bool:
    return store.publish(identifier, "float32", ROWS, WIDTH, memoryview(rows_of(identifier)))


def refusal(store: EcStore, identifier: str) -> str:
    with pytest.raises(PublishRefused) as caught:
        put(store, identifier)
    return caught.value.reason


def fault(store: EcStore, identifier: str, expected: Expected = EXPECTED) -> str:
    with pytest.raises(ItemUnusable) as caught:
        store.read(identifier, expected)
    return caught.value.reason


def file_of(store: EcStore, identifier: str) -> Path:
    return store.directory / "items" / item_key(identifier).hex()


def truth(store: EcStore) -> tuple[int, int]:
    sizes = [path.stat().st_size for path in (store.directory / "items").iterdir()]
    return sum(sizes), len(sizes)


def recorded(store: EcStore) -> tuple[int, int]:
    usage = store.usage()
    return usage.bytes, usage.items


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> EcStore:
    return EcStore(tmp_path / "root", "ns", StoreLimits(max_bytes=10 * SIZE, max_items=100, lease_s=60), clock=clock)


def test_an_item_is_read_as_it_was_published(store: EcStore) -> None:
    assert put(store, "a") is True
    item = store.read("a", EXPECTED)
    assert (item.payload, item.header.rows, item.header.width) == (rows_of("a"), ROWS, WIDTH)
    assert recorded(store) == truth(store) == (SIZE, 1)


def test_publishing_again_writes_nothing(store: EcStore) -> None:
    put(store, "a")
    inode = file_of(store, "a").stat().st_ino
    assert put(store, "a") is False
    assert file_of(store, "a").stat().st_ino == inode
    assert recorded(store) == (SIZE, 1)


def test_a_missing_item_or_store_is_missing(store: EcStore) -> None:
    assert fault(store, "a") == "missing"
    assert not store.directory.exists()
    put(store, "b")
    assert fault(store, "a") == "missing"


def test_consumers_and_other_namespaces_share_nothing(store: EcStore, tmp_path: Path) -> None:
    put(store, "a")
    assert fault(EcStore(tmp_path / "root", "other"), "a") == "missing"
    assert EcStore(tmp_path / "root", "ns").read("a", EXPECTED).payload == rows_of("a")


@pytest.mark.parametrize("identifier", ["../../evil", "/tmp/evil", "a/b", "", "..", "x" * 100_000, "\0", "é\ud800"])
def test_no_identifier_is_a_path(identifier: str, store: EcStore, tmp_path: Path) -> None:
    put(store, identifier)
    assert store.read(identifier, EXPECTED).payload == rows_of(identifier)
    assert [path.name for path in (store.directory / "items").iterdir()] == [item_key(identifier).hex()]
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_everything_is_private_to_the_user(store: EcStore) -> None:
    previous = os.umask(0)
    try:
        put(store, "a")
    finally:
        os.umask(previous)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.directory.parent.rglob("*")}
    assert set(modes.values()) == {0o700, 0o600}
    assert stat.S_IMODE(file_of(store, "a").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        (Expected(ROWS + 1, WIDTH, "float32"), "rows"),
        (Expected(ROWS, WIDTH + 1, "float32"), "width"),
        (Expected(ROWS, WIDTH, "bfloat16"), "dtype"),
    ],
)
def test_an_item_of_another_shape_or_type_is_refused_and_kept(store: EcStore, expected: Expected, reason: str) -> None:
    put(store, "a")
    assert fault(store, "a", expected) == reason
    assert store.contains("a")


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def claim_rows(path: Path) -> None:
    """A header that is right in itself and claims 512 GB, with the file's real content behind it."""
    data = path.read_bytes()
    header = Header.parse(data[:HEADER_SIZE])
    path.write_bytes(
        Header(header.key, "float32", ROWS, 2**35 // ROWS // 10, header.checksum).pack() + data[HEADER_SIZE:]
    )


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit in the rows": flip_last,
    "a cut file": lambda path: os.truncate(path, SIZE - 1),
    "a cut header": lambda path: os.truncate(path, HEADER_SIZE - 1),
    "an empty file": lambda path: os.truncate(path, 0),
    "a longer file": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "random bytes": lambda path: path.write_bytes(os.urandom(SIZE)),
    "a header that claims gigabytes": claim_rows,
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_item_is_refused_removed_and_can_be_published_again(store: EcStore, damage: str) -> None:
    put(store, "a")
    put(store, "b")
    DAMAGE[damage](file_of(store, "a"))
    assert fault(store, "a") == "corrupt"
    assert not file_of(store, "a").exists()
    assert put(store, "a") is True
    assert store.read("a", EXPECTED).payload == rows_of("a")
    assert truth(store)[1] == 2


def test_the_file_of_one_item_under_the_name_of_another_is_refused(store: EcStore) -> None:
    put(store, "a")
    os.link(file_of(store, "a"), file_of(store, "b"))
    assert fault(store, "b") == "corrupt"
    assert store.read("a", EXPECTED).payload == rows_of("a")


def test_a_publish_replaces_what_is_visibly_damaged(store: EcStore) -> None:
    put(store, "a")
    os.truncate(file_of(store, "a"), SIZE - 1)
    assert not store.contains("a")
    assert put(store, "a") is True
    assert recorded(store) == truth(store) == (SIZE, 1)


def foreign_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a link": foreign_link,
    "a FIFO": fifo,
    "a file that others can write": lambda path: path.chmod(0o622),
}


@pytest.mark.parametrize("what", list(FOREIGN))
@pytest.mark.timeout(10)
def test_what_is_not_a_file_of_ours_is_not_read_nor_announced(store: EcStore, what: str) -> None:
    put(store, "a")
    FOREIGN[what](file_of(store, "a"))
    assert fault(store, "a") == "foreign"
    assert not store.renew("a")
    assert not store.contains("a")
    assert put(store, "a") is True
    assert store.read("a", EXPECTED).payload == rows_of("a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_another_users_file_or_directory_is_refused(store: EcStore, tmp_path: Path) -> None:
    put(store, "a")
    os.chown(file_of(store, "a"), 12345, -1)
    assert fault(store, "a") == "foreign"
    os.chown(store.directory, 12345, -1)
    store.close()
    assert fault(store, "a") == "foreign"
    assert refusal(store, "b") == "io"


def test_a_directory_that_is_a_link_or_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "evil").mkdir()
    store = EcStore(tmp_path, "ns")
    store.directory.symlink_to(tmp_path / "evil")
    assert refusal(store, "a") == "io"
    with pytest.raises(ec_files.ForeignFileError):
        store.recover()
    store.directory.unlink()
    store.directory.mkdir(mode=0o755)
    assert refusal(store, "a") == "io"
    assert list((tmp_path / "evil").iterdir()) == []


def test_the_least_recently_used_goes_first(store: EcStore, clock: Clock) -> None:
    for index in range(10):
        put(store, str(index))
        clock.now += 1
    clock.now += 100
    store.read("0", EXPECTED)
    put(store, "new")
    assert [name for name in map(str, range(10)) if not store.contains(name)] == ["1", "2"]
    assert recorded(store) == truth(store)
    usage = store.usage()
    assert (usage.evicted_items, usage.evicted_bytes) == (2, 2 * SIZE)


def test_what_was_just_published_or_announced_is_not_evicted(store: EcStore, clock: Clock) -> None:
    for index in range(10):
        put(store, str(index))
    clock.now += 59
    store.renew("3")
    assert refusal(store, "new") == "full"
    assert recorded(store) == truth(store) == (10 * SIZE, 10)
    clock.now += 2
    assert put(store, "new") is True
    assert store.contains("3")


def test_a_clock_set_back_protects_nothing_for_ever(store: EcStore, clock: Clock) -> None:
    for index in range(10):
        put(store, str(index))
    clock.now -= 10_000
    assert put(store, "new") is True


def test_the_number_of_items_is_bounded_too(tmp_path: Path, clock: Clock) -> None:
    store = EcStore(tmp_path, "ns", StoreLimits(max_items=3, lease_s=1), clock=clock)
    for index in range(20):
        clock.now += 10
        assert put(store, str(index)) is True
        assert truth(store)[1] <= 3
    assert store.contains("19")


def test_an_item_larger_than_the_store_is_refused_and_evicts_nothing(tmp_path: Path, clock: Clock) -> None:
    store = EcStore(tmp_path, "ns", StoreLimits(max_bytes=2 * SIZE, lease_s=0), clock=clock)
    put(store, "a")
    big = memoryview(bytes(4 * 100))
    with pytest.raises(PublishRefused) as caught:
        store.publish("big", "float32", 10, 10, big)
    assert caught.value.reason == "too_large"
    assert store.contains("a")


@pytest.mark.parametrize(
    ("dtype", "rows", "width"), [("float64", ROWS, WIDTH), ("float32", ROWS, 4), ("float16", ROWS, WIDTH)]
)
def test_bytes_that_are_not_the_rows_they_claim_to_be_are_refused(
    store: EcStore, dtype: str, rows: int, width: int
) -> None:
    with pytest.raises(PublishRefused) as caught:
        store.publish("a", dtype, rows, width, memoryview(bytes(ROWS * WIDTH * 4)))
    assert caught.value.reason == "unsupported"
    assert not store.directory.exists()


def test_a_reader_keeps_what_is_evicted_under_it(store: EcStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "a")
    real = ec_files.read_exactly

    def evicted_first(descriptor: int, target: memoryview, offset: int) -> bool:
        file_of(store, "a").unlink()
        return real(descriptor, target, offset)

    monkeypatch.setattr(ec_files, "read_exactly", evicted_first)
    assert store.read("a", EXPECTED).payload == rows_of("a")


def test_a_damaged_file_that_was_replaced_meanwhile_is_not_removed(
    store: EcStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a")
    flip_last(file_of(store, "a"))
    real = ec_files.read_exactly

    def replaced_first(descriptor: int, target: memoryview, offset: int) -> bool:
        file_of(store, "a").unlink()
        put(store, "a")
        return real(descriptor, target, offset)

    with monkeypatch.context() as patch:
        patch.setattr(ec_files, "read_exactly", replaced_first)
        assert fault(store, "a") == "corrupt"
    assert store.read("a", EXPECTED).payload == rows_of("a")


def test_a_second_producer_of_the_same_item_leaves_the_firsts_file(
    store: EcStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = EcStore(store.directory.parent, "ns", store.limits)
    real = ec_files.write_all

    inodes = []

    def twin_first(descriptor: int, *parts: bytes | memoryview) -> None:
        monkeypatch.setattr(ec_files, "write_all", real)
        put(twin, "a")
        inodes.append(file_of(store, "a").stat().st_ino)
        real(descriptor, *parts)

    monkeypatch.setattr(ec_files, "write_all", twin_first)
    put(store, "a")
    assert [file_of(store, "a").stat().st_ino] == inodes
    assert recorded(store) == truth(store) == (SIZE, 1)
    assert list((store.directory / "new").iterdir()) == []


def test_a_full_file_system_evicts_once_and_then_refuses(
    store: EcStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "old")
    clock.now += 100
    real = ec_files.write_all

    def no_space(descriptor: int, *parts: bytes | memoryview) -> None:
        if store.contains("old"):
            raise OSError(28, "No space left on device")
        real(descriptor, *parts)

    monkeypatch.setattr(ec_files, "write_all", no_space)
    assert put(store, "new") is True
    assert (store.contains("old"), store.contains("new")) == (False, True)

    def never_space(descriptor: int, *parts: bytes | memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ec_files, "write_all", never_space)
    assert refusal(store, "another") == "io"
    assert list((store.directory / "new").iterdir()) == []
    assert recorded(store) == truth(store)


def test_a_removed_directory_is_made_again(store: EcStore) -> None:
    put(store, "a")
    consumer = EcStore(store.directory.parent, "ns")
    consumer.read("a", EXPECTED)
    for path in sorted(store.directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    store.directory.rmdir()
    assert fault(consumer, "a") == "missing"
    assert put(store, "a") is True
    assert consumer.read("a", EXPECTED).payload == rows_of("a")


def test_a_stopped_process_with_the_lock_stops_nobody(
    store: EcStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a")
    monkeypatch.setattr("triptych.engine.ec_store._LOCK_TIMEOUT_S", 0.05)
    holder = os.open(store.directory / "ledger", os.O_RDWR)
    with ec_files.locked(holder, timeout=1):
        assert refusal(store, "b") == "busy"
        assert not store.renew("a")
        assert store.read("a", EXPECTED).payload == rows_of("a")
    os.close(holder)
    assert put(store, "b") is True


def test_a_damaged_ledger_is_rebuilt(store: EcStore) -> None:
    put(store, "a")
    (store.directory / "ledger").write_bytes(b"garbage")
    put(store, "b")
    assert recorded(store) == truth(store) == (2 * SIZE, 2)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "read", "renew", "tick", "damage", "recover"]), st.integers(0, 7)), max_size=40
)


def attempt(action: Callable[..., object], *arguments: object) -> str | None:
    """The reason for which the store refused, None if it did not."""
    try:
        action(*arguments)
    except (PublishRefused, ItemUnusable) as error:
        return error.reason
    return None


@given(OPERATIONS)
@settings(max_examples=60, deadline=None)
def test_bounds_ledger_and_content_hold_after_any_sequence(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]]
) -> None:
    clock = Clock()
    limits = StoreLimits(max_bytes=4 * SIZE, max_items=3, lease_s=5)
    stores = [EcStore(tmp_path_factory.mktemp("s"), "ns", limits, clock=clock)]
    stores.append(EcStore(stores[0].directory.parent, "ns", limits, clock=clock))
    stores[0].recover()
    damaged: set[str] = set()
    for step, (operation, number) in enumerate(operations):
        store, name = stores[step % 2], str(number)
        if operation == "put":
            leased = [p for p in (store.directory / "items").iterdir() if p.stat().st_mtime_ns > clock() - 5 * 10**9]
            outcome = attempt(put, store, name)
            assert outcome in (None, "full")
            # A publish looks at the header of what is there already; reading finds the rest, and removes it.
            if not outcome and attempt(store.read, name, EXPECTED) == "corrupt":
                assert name in damaged
                put(store, name)
            damaged.discard(name)
            assert outcome or store.read(name, EXPECTED).payload == rows_of(name)
            assert all(path.exists() for path in leased)
        elif operation == "read":
            assert attempt(store.read, name, EXPECTED) in (None, "missing", "corrupt")
        elif operation == "renew":
            store.renew(name)
        elif operation == "tick":
            clock.now += number
        elif operation == "damage" and file_of(store, name).exists():
            times = file_of(store, name).stat()
            flip_last(file_of(store, name))
            damaged.add(name)
            os.utime(file_of(store, name), ns=(times.st_atime_ns, times.st_mtime_ns))
        elif operation == "recover":
            assert store.recover() == 0
        assert recorded(store) == truth(store)
        assert truth(store)[0] <= limits.max_bytes
        assert truth(store)[1] <= limits.max_items
    for store in stores:
        store.close()
