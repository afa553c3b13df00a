"""A measured ratio and the bar that it is held to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """limit: the most that `value` may be; None where it is only told."""

    what: str
    value: float
    limit: float | None
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.limit is None or self.value <= self.limit

    def __str__(self) -> str:
        bar = "" if self.limit is None else f"  (bar {self.limit:g}: {'holds' if self.holds else 'MISSED'})"
        return f"{self.what}: {self.value:.2f}{bar}  {self.detail}"
