"""Mappings and sets over one field of many records.

A stage input processor knows the adapter by maps such as `request_payload[external_id]`, and a scheduler by sets such
as `upstream_exhausted_requests`. The state itself is one record per stream; these are windows on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSet
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class FieldView(MutableMapping[str, Any], Generic[R]):
    """One field of every record as a map; records whose field is None are not in it.

    Setting a field of a missing record makes the record; deleting one only empties the field. Indexing what is not
    there raises KeyError. A `counter` is an int: absent at 0, and what is not there counts 0.
    """

    __slots__ = ("_absent", "_field", "_make", "_records")

    def __init__(self, records: dict[str, R], field: str, make: Callable[[str], R], *, counter: bool = False) -> None:
        self._records = records
        self._field = field
        self._make = make
        self._absent: int | None = 0 if counter else None

    def __getitem__(self, key: str) -> Any:
        if key in self:
            return getattr(self._records[key], self._field)
        if self._absent is None:
            raise KeyError(key)
        return self._absent

    def __setitem__(self, key: str, value: Any) -> None:
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = self._make(key)
        setattr(record, self._field, value)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        setattr(self._records[key], self._field, self._absent)

    def __contains__(self, key: object) -> bool:
        record = self._records.get(key)  # type: ignore[call-overload]
        if record is None:
            return False
        value = getattr(record, self._field)
        # Values may be tensors, which cannot be compared; counters can.
        return value is not None if self._absent is None else bool(value)

    def __iter__(self) -> Iterator[str]:
        return (key for key in list(self._records) if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"{self._field}: {dict(self)}"


class FlagView(MutableSet[str], Generic[R]):
    """The keys of the records with a flag set, as a set. Adding a missing key makes its record."""

    __slots__ = ("_field", "_make", "_records")

    def __init__(self, records: dict[str, R], field: str, make: Callable[[str], R]) -> None:
        self._records = records
        self._field = field
        self._make = make

    def __contains__(self, key: object) -> bool:
        record = self._records.get(key)  # type: ignore[call-overload]
        return record is not None and bool(getattr(record, self._field))

    def __iter__(self) -> Iterator[str]:
        return (key for key in list(self._records) if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, value: str) -> None:
        record = self._records.get(value)
        if record is None:
            record = self._records[value] = self._make(value)
        setattr(record, self._field, True)

    def discard(self, value: str) -> None:
        record = self._records.get(value)
        if record is not None:
            setattr(record, self._field, False)

    def update(self, values: Iterable[str]) -> None:
        """Add them all."""
        for value in values:
            self.add(value)

    def replace(self, values: Iterable[str]) -> None:
        """Be exactly these."""
        wanted = list(values)
        self.clear()
        self.update(wanted)

    def clear(self) -> None:
        for key in list(self):
            self.discard(key)

    def __repr__(self) -> str:
        return f"{self._field}: {set(self)}"
