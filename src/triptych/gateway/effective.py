"""The settings in force, as YAML that says who set each value and hides every key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, SecretStr

from triptych.config.problems import Loc, Origin
from triptych.gateway.settings import EngineSettings
from triptych.gateway.sources import Loaded

MASK = "**********"
_PLAIN = re.compile(r"[A-Za-z/][\w./:@-]*")
_COMMENT_COLUMN = 56


def effective(loaded: Loaded) -> str:
    """A settings file that gives the same settings, but for keys: those are masked, and the mask is refused as one."""
    settings = loaded.settings
    lines: list[str] = []
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if name == "models" and len(value) == 1:
            lines += _group(value[0], ("models", 0), loaded.origins, "")
        else:
            lines += _member(name, value, (name,), loaded.origins, "")
    return "\n".join(lines) + "\n"


def _group(model: BaseModel, loc: Loc, origins: Mapping[Loc, Origin], indent: str) -> Iterator[str]:
    for name in type(model).model_fields:
        yield from _member(name, getattr(model, name), (*loc, name), origins, indent)


def _member(name: str, value: Any, loc: Loc, origins: Mapping[Loc, Origin], indent: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield f"{indent}{name}:"
        yield from _group(value, loc, origins, indent + "  ")
    elif isinstance(value, tuple) and value and isinstance(value[0], EngineSettings):
        yield f"{indent}{name}:"
        for index, engine in enumerate(value):
            yield _commented(f"{indent}  - {_engine(engine)}", (*loc, index), origins)
    elif name == "models":
        yield f"{indent}{name}:"
        for index, model in enumerate(value):
            first, *rest = _group(model, (*loc, index), origins, indent + "    ")
            yield f"{indent}  - {first.lstrip()}"
            yield from rest
    else:
        size = name if name.endswith("bytes") and isinstance(value, int) else ""
        yield _commented(f"{indent}{name}: {size_text(value) if size else _scalar(value)}", loc, origins)


def _commented(line: str, loc: Loc, origins: Mapping[Loc, Origin]) -> str:
    return f"{line.ljust(_COMMENT_COLUMN)}  # {_who(loc, origins)}"


def _who(loc: Loc, origins: Mapping[Loc, Origin]) -> str:
    candidates = [loc, loc[:-1]] if isinstance(loc[-1], int) else [loc, (*loc[:-1], f"{loc[-1]}_file")]
    return next((origins[at].source for at in candidates if at in origins), "default")


def _engine(engine: EngineSettings) -> str:
    given = engine.model_dump(exclude_defaults=True)
    if set(given) == {"url"}:
        return _scalar(engine.url)
    return "{" + ", ".join(f"{name}: {_scalar(value)}" for name, value in given.items()) + "}"


def size_text(value: int) -> str:
    """Bytes as a person writes them: `67108864` is `64MiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value % size == 0:
            return f"{value // size}{unit}"
    return str(value)


def _scalar(value: Any) -> str:
    if isinstance(value, SecretStr):
        return f"'{MASK}'"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(name)}: {_scalar(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, tuple | list | frozenset):
        return f"[{', '.join(sorted(map(_scalar, value)) if isinstance(value, frozenset) else map(_scalar, value))}]"
    text = str(value)
    plain = _PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false") and not text.endswith(":")
    return text if plain else json.dumps(text, ensure_ascii=False)
