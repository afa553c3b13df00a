"""A bounded store of encoder outputs: a directory that engines on one host or one shared file system have in common.

One file per item, named by a digest. Any number of producers and consumers may use a store at the same time, and any of
them may be killed at any moment:

* An item appears whole or not at all: it is written under another name, then renamed. Unfinished files of dead writers
  are recognised by their lock, which died with the writer, and removed.
* Bytes and items are bounded. The least recently used go first, but nothing that was published or announced within the
  lease, since a consumer may be on its way to it: rather is the new item refused.
* A reader holds the open file, so an eviction while it reads is harmless. It checks every claim of the header against
  what it expects and against the file's size before it reserves memory, and the rows against their checksum after.
* Names come from digests only, directories are private, links and files of other users are refused.

This module imports neither torch nor vLLM. An EcStore object belongs to one thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from triptych.engine import ec_files, ec_ledger
from triptych.engine.ec_files import ForeignFileError, StoreDirectories
from triptych.engine.ec_format import HEADER_SIZE, FormatError, Header, checksum, item_key
from triptych.engine.ec_ledger import Usage

#: Why an item cannot be used.
ReadFault = Literal["missing", "corrupt", "foreign", "dtype", "rows", "width", "io"]
#: Why an item was not stored.
WriteFault = Literal["too_large", "full", "busy", "unsupported", "io"]

_LOCK_TIMEOUT_S = 2.0
# After an eviction the store is this full, so that a full store does not evict on every publish.
_LOW_WATER = 0.9
_NANO = 1_000_000_000


class ItemUnusable(Exception):
    """An item is not there or must not be used; `reason` says which."""

    def __init__(self, reason: ReadFault, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: ReadFault = reason


class PublishRefused(Exception):
    """An item was not stored; the store is as it was. `reason` says why."""

    def __init__(self, reason: WriteFault, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: WriteFault = reason


@dataclass(frozen=True, slots=True)
class Expected:
    """What a consumer can use: exactly `rows` rows of exactly `width` values of type `dtype`."""

    rows: int
    width: int
    dtype: str


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Item:
    """A verified item: its header and its rows."""

    header: Header
    payload: bytearray


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of a store: bytes of all files together, number of items, seconds for which a published item is safe."""

    max_bytes: int = 2 << 30
    max_items: int = 4096
    lease_s: float = 60.0


class EcStore:
    """The items of one namespace under `root`. Directories are made when first written to."""

    def __init__(
        self,
        root: Path,
        namespace: str,
        limits: StoreLimits | None = None,
        *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.directory = root / f"ec-{item_key(namespace).hex()[:32]}"
        self.limits = limits or StoreLimits()
        self._clock = clock
        self._open: StoreDirectories | None = None

    def recover(self) -> int:
        """Make the store ready to write to: remove what dead writers left and count afresh.

        Returns the number of files removed. Raises ForeignFileError if the directory is not private to this user,
        TimeoutError if another process keeps the lock.
        """
        place = self._place(create=True)
        with self._lock(place):
            removed = self._reclaim(place)
            self._recount(place)
        return removed

    def publish(self, identifier: str, dtype: str, rows: int, width: int, payload: memoryview) -> bool:
        """Store an item. `payload`: its rows, C order. False if it was there already (its lease starts anew).

        Raises PublishRefused.
        """
        key = item_key(identifier)
        try:
            header = Header(key, dtype, rows, width, b"\0" * 32)
            header.pack()
            if header.payload_size != payload.nbytes:
                raise FormatError(f"{payload.nbytes} bytes for {rows} × {width} values of type {dtype}")
        except FormatError as error:
            raise PublishRefused("unsupported", str(error)) from None
        if header.file_size > self.limits.max_bytes:
            raise PublishRefused("too_large", f"{header.file_size} bytes, the store holds {self.limits.max_bytes}")
        try:
            if self._holds(header) and self.renew(identifier):
                return False
            packed = Header(key, dtype, rows, width, checksum(payload)).pack()
            try:
                self._write(header, packed, payload)
            except FileNotFoundError:
                # The directory was removed under us. Once more, from the start.
                self.close()
                self._write(header, packed, payload)
        except TimeoutError as error:
            raise PublishRefused("busy", str(error)) from None
        except OSError as error:
            raise PublishRefused("io", str(error)) from None
        return True

    def renew(self, identifier: str) -> bool:
        """Start an item's lease anew. False if it is not there, or not a file of ours."""
        name = item_key(identifier).hex()
        try:
            place = self._place(create=False)
            # Under the lock, or an eviction that has just looked at the old time could take it away.
            with self._lock(place), self._reading(place, name) as (descriptor, _):
                os.utime(descriptor, ns=(self._clock(), self._clock()))
        except OSError:
            return False
        return True

    def contains(self, identifier: str) -> bool:
        """Whether the item is there, as far as its header and size tell."""
        key = item_key(identifier)
        try:
            with self._reading(self._place(create=False), key.hex()) as (descriptor, status):
                header = Header.parse(os.pread(descriptor, HEADER_SIZE, 0))
        except (OSError, FormatError):
            return False
        return header.key == key and header.file_size == status.st_size

    def read(self, identifier: str, expected: Expected) -> Item:
        """The item's rows, verified. Counts as a use. Raises ItemUnusable; a damaged file is removed."""
        key = item_key(identifier)
        name = key.hex()
        try:
            place = self._place(create=False)
            with self._reading(place, name) as (descriptor, status):
                try:
                    item = _read_item(descriptor, status.st_size, key, expected)
                except FormatError as error:
                    self._discard(place, name, status)
                    raise ItemUnusable("corrupt", str(error)) from None
                with contextlib.suppress(OSError):
                    os.utime(descriptor, ns=(self._clock(), status.st_mtime_ns))
                return item
        except FileNotFoundError:
            raise ItemUnusable("missing", "no such item") from None
        except ForeignFileError as error:
            raise ItemUnusable("foreign", str(error)) from None
        except OSError as error:
            raise ItemUnusable("io", str(error)) from None

    def usage(self) -> Usage:
        """What the store holds, as recorded. Zeros where there is no store."""
        try:
            return ec_ledger.load(self._place(create=False).ledger)[0]
        except OSError:
            return Usage()

    def close(self) -> None:
        """Close the directories. The object can be used again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _place(self, *, create: bool) -> StoreDirectories:
        if self._open is not None and os.fstat(self._open.items).st_nlink == 0:
            self.close()
        if self._open is None:
            self._open = StoreDirectories.open(self.directory, create=create)
        return self._open

    @contextlib.contextmanager
    def _lock(self, place: StoreDirectories) -> Iterator[None]:
        with ec_files.locked(place.ledger, timeout=_LOCK_TIMEOUT_S):
            yield

    @contextlib.contextmanager
    def _reading(self, place: StoreDirectories, name: str) -> Iterator[tuple[int, os.stat_result]]:
        descriptor, status = ec_files.open_for_reading(name, at=place.items)
        try:
            yield descriptor, status
        finally:
            os.close(descriptor)

    def _holds(self, header: Header) -> bool:
        """Whether the item is there, by its header and size."""
        try:
            place = self._place(create=True)
            with self._reading(place, header.key.hex()) as (descriptor, status):
                found = Header.parse(os.pread(descriptor, HEADER_SIZE, 0))
        except (FileNotFoundError, ForeignFileError, FormatError):
            return False
        return replace(found, checksum=header.checksum) == header and status.st_size == header.file_size

    def _write(self, header: Header, packed: bytes, payload: memoryview) -> None:
        place = self._place(create=True)
        try:
            self._write_once(place, header, packed, payload)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The file system is smaller than the store may be. Make room all the same, once.
            with self._lock(place):
                self._make_room(place, header.file_size, by_force=True)
            self._write_once(place, header, packed, payload)

    def _write_once(self, place: StoreDirectories, header: Header, packed: bytes, payload: memoryview) -> None:
        """Write the file under a name of its own, then give it the item's."""
        temporary, descriptor = ec_files.create_temporary(at=place.scratch)
        try:
            ec_files.write_all(descriptor, packed, payload.cast("B"))
            with self._lock(place):
                self._install(place, temporary, header)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=place.scratch)
            raise
        finally:
            os.close(descriptor)

    def _install(self, place: StoreDirectories, temporary: str, header: Header) -> None:
        """Give a finished file its name. The lock is held."""
        name, size = header.key.hex(), header.file_size
        if self._holds(header):
            # Another producer was quicker, and a consumer may be on its way to that file.
            os.utime(name, ns=(self._clock(), self._clock()), dir_fd=place.items, follow_symlinks=False)
            os.unlink(temporary, dir_fd=place.scratch)
            return
        usage, sound = ec_ledger.load(place.ledger)
        if not sound or ec_files.size_of(name, at=place.items) is not None:
            # What has the name now is damaged or of another shape.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=place.items)
            usage = self._recount(place)
        if usage.bytes + size > self.limits.max_bytes or usage.items >= self.limits.max_items:
            usage = self._make_room(place, size)
        os.utime(temporary, ns=(self._clock(), self._clock()), dir_fd=place.scratch)
        ec_ledger.save(place.ledger, usage, dirty=True)
        os.rename(temporary, name, src_dir_fd=place.scratch, dst_dir_fd=place.items)
        ec_ledger.save(place.ledger, usage.add(size, 1), dirty=False)

    def _make_room(self, place: StoreDirectories, size: int, *, by_force: bool = False) -> Usage:
        """Evict, least recently used first, so that a file of `size` bytes fits. The lock is held.

        `by_force`: make that room even where the store is within its limits. Raises PublishRefused if leased items
        are in the way.
        """
        limits = self.limits
        self._reclaim(place)
        usage = self._recount(place, dirty=True)
        low_bytes = usage.bytes - size if by_force else int(limits.max_bytes * _LOW_WATER) - size
        low_items = int(limits.max_items * _LOW_WATER)
        now, lease = self._clock(), int(limits.lease_s * _NANO)
        for name, status in sorted(ec_files.entries(place.items), key=_last_use):
            if usage.bytes <= low_bytes and usage.items <= low_items:
                break
            # A time in the future (a clock that was set back) must not protect for ever.
            if not now - lease < status.st_mtime_ns <= now + lease:
                os.unlink(name, dir_fd=place.items)
                usage = usage.evict(status.st_size)
        ec_ledger.save(place.ledger, usage, dirty=False)
        if usage.bytes + size > limits.max_bytes or usage.items >= limits.max_items:
            raise PublishRefused("full", "what it holds was published or announced less than its lease ago")
        return usage

    def _recount(self, place: StoreDirectories, *, dirty: bool = False) -> Usage:
        """Count the files and record that. The lock is held."""
        sizes = [status.st_size for _, status in ec_files.entries(place.items)]
        recorded, _ = ec_ledger.load(place.ledger)
        usage = Usage(sum(sizes), len(sizes), recorded.evicted_bytes, recorded.evicted_items)
        ec_ledger.save(place.ledger, usage, dirty=dirty)
        return usage

    def _reclaim(self, place: StoreDirectories) -> int:
        """Remove files whose writers are gone. The lock is held, by courtesy only."""
        return sum(ec_files.remove_if_abandoned(name, at=place.scratch) for name in os.listdir(place.scratch))

    def _discard(self, place: StoreDirectories, name: str, status: os.stat_result) -> None:
        """Remove a damaged item, unless a good one has taken its place by now."""
        with contextlib.suppress(OSError), self._lock(place):
            current = os.stat(name, dir_fd=place.items, follow_symlinks=False)
            if (current.st_dev, current.st_ino) != (status.st_dev, status.st_ino):
                return
            usage, sound = ec_ledger.load(place.ledger)
            ec_ledger.save(place.ledger, usage, dirty=True)
            os.unlink(name, dir_fd=place.items)
            ec_ledger.save(place.ledger, usage.add(-current.st_size, -1), dirty=not sound)


def _last_use(entry: tuple[str, os.stat_result]) -> int:
    return max(entry[1].st_atime_ns, entry[1].st_mtime_ns)


def _read_item(descriptor: int, size: int, key: bytes, expected: Expected) -> Item:
    header = Header.parse(os.pread(descriptor, HEADER_SIZE, 0))
    if header.key != key:
        raise FormatError("the file holds another item")
    if header.file_size != size:
        raise FormatError(f"the file has {size} bytes, its header says {header.file_size}")
    if header.rows != expected.rows:
        raise ItemUnusable("rows", f"it has {header.rows} rows, the prompt has places for {expected.rows}")
    if header.width != expected.width:
        raise ItemUnusable("width", f"its rows have {header.width} values, expected {expected.width}")
    if header.dtype != expected.dtype:
        raise ItemUnusable("dtype", f"its values are {header.dtype}, expected {expected.dtype}")
    payload = bytearray(header.payload_size)
    if not ec_files.read_exactly(descriptor, memoryview(payload), HEADER_SIZE):
        raise FormatError("the file ends early")
    if checksum(payload) != header.checksum:
        raise FormatError("the rows are damaged")
    return Item(header, payload)
