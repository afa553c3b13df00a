"""Shared storage of the file dialects: a folder between processes, or a dictionary inside one."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path
from typing import Any, Protocol

import msgspec


class Store(Protocol):
    """Small JSON objects by name. `inside` tells whether a name stays in the folder."""

    def inside(self, name: str) -> bool: ...
    def put(self, name: str, value: dict[str, Any]) -> None: ...
    def get(self, name: str) -> dict[str, Any] | None: ...


class MemoryStore:
    """A store for engines of one process."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}

    def inside(self, name: str) -> bool:
        return _plain(name)

    def put(self, name: str, value: dict[str, Any]) -> None:
        self.items.setdefault(name, value)

    def get(self, name: str) -> dict[str, Any] | None:
        return self.items.get(name)


class FolderStore:
    """`<folder>/<name>/<file>`, the layout of vLLM's example connectors, each file a safetensors header.

    A name that would leave the folder is never touched (a real engine would follow it): callers ask `inside`.
    """

    def __init__(self, folder: str | Path, file: str) -> None:
        self.folder = Path(folder)
        self.file = file

    def inside(self, name: str) -> bool:
        return _plain(name)

    def put(self, name: str, value: dict[str, Any]) -> None:
        target = self.folder / name / self.file
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        header = msgspec.json.encode({"__metadata__": {"sim": msgspec.json.encode(value).decode()}})
        handle, path = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
        Path(path).replace(target)

    def get(self, name: str) -> dict[str, Any] | None:
        try:
            raw = (self.folder / name / self.file).read_bytes()
            header = msgspec.json.decode(raw[8:])
            value: dict[str, Any] = msgspec.json.decode(header["__metadata__"]["sim"])
        except (OSError, msgspec.DecodeError, KeyError, TypeError):
            return None
        return value


def open_store(where: str | Path | MemoryStore, file: str) -> Store:
    """The store that a setting names; `file` is what each item's file is called."""
    return where if isinstance(where, MemoryStore) else FolderStore(where, file)


def bounded(cache: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Put an entry last and drop the oldest one over the limit."""
    cache.pop(key, None)
    cache[key] = value
    if len(cache) > limit:
        del cache[next(iter(cache))]


def _plain(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and name not in (".", "..") and len(name) < 256
