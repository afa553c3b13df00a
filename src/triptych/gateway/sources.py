"""The gateway's settings from flags, environment and a YAML file, in that order of precedence, over the defaults.

Each source becomes a layer: plain values, and for each of them who set it. The layers are merged, the result is
validated once by `GatewaySettings`, and what is wrong is reported with the name that the user wrote.

Not pydantic-settings: it keeps no record of where a value came from, and passes over misspelt variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from triptych.config import yamlfile
from triptych.config.problems import (
    Loc,
    Origin,
    Problem,
    SettingsError,
    did_you_mean,
    dotted,
    field_at,
    from_pydantic,
    inner_model,
    is_list,
    is_optional,
    is_secret,
    names,
    origin_of,
)
from triptych.config.values import host_port
from triptych.gateway.handover import ec_dialects, kv_dialects
from triptych.gateway.settings import ROLES, GatewaySettings, ModelSettings

PREFIX = "TRIPTYCH_"
CONFIG = "TRIPTYCH_CONFIG"

# Set by the project's own processes for each other: no setting, and no misspelt one.
# Read where they are wanted: by engines below, and by TCP connectors.
_INTERNAL = frozenset({"TRIPTYCH_ENGINE_COMPAT", "TRIPTYCH_TRANSFER_SECRET"})

# Kubernetes puts these into every pod of a namespace that has a Service called `triptych` or `triptych-…`.
_KUBERNETES = re.compile(
    r"TRIPTYCH_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)="
    r"|TRIPTYCH_(\w+_)?PORT=\w+://"
)

_SINGLE = frozenset(ModelSettings.model_fields)
_NONE_WORDS = ("none", "disable", "off")

Value = str | bool | tuple[str, ...]


class Flag(NamedTuple):
    """A flag as typed: its name, the setting's location, its text (several for a repeated one)."""

    name: str
    loc: Loc
    value: Value


class Loaded(NamedTuple):
    """Validated settings, and who set each value that is not a default."""

    settings: GatewaySettings
    origins: Mapping[Loc, Origin]


@dataclass
class _Layer:
    """What one source sets: values as the model names them, with the origin of each node."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Loc, Origin] = field(default_factory=dict)

    def put(self, loc: Loc, value: Any, origin: Origin) -> None:
        """Sets one value, and below it all that it holds, as of one origin."""
        at = self.values
        for depth, part in enumerate(loc[:-1], start=1):
            self.origins.setdefault(loc[:depth], Origin(origin.source, dotted(loc[:depth])))
            below = at.setdefault(str(part), {})
            if not isinstance(below, dict):
                return
            at = below
        last = str(loc[-1])
        if isinstance(value, dict) and isinstance(at.get(last), dict):
            at[last] |= value
        else:
            at[last] = value
        self._own(loc, value, origin)

    def _own(self, loc: Loc, value: Any, origin: Origin) -> None:
        self.origins[loc] = Origin(origin.source, dotted(loc))
        members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, member in members:
            self._own((*loc, key), member, origin)


def known_settings() -> dict[Loc, str]:
    """Location of every setting that has a flag and a variable, with its dotted name."""
    found: dict[Loc, str] = {}
    for name in (*names(ModelSettings), *names(GatewaySettings)):
        found[tuple(name.split("."))] = name
    return found


def load(
    flags: Iterable[Flag] = (),
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
    *,
    host: str | None = None,
    port: str | None = None,
) -> Loaded:
    """Merges and validates all sources.

    `config` names the YAML file (else the variable TRIPTYCH_CONFIG does); `host` and `port` are the reference
    proxy's flags of those names and replace their part of `listen`.
    Raises SettingsError with every fault found; no message holds a key.
    """
    environ = environ or {}
    problems: list[Problem] = []
    layers = [
        _collect(_from_file, problems, config, environ),
        _collect(_from_environ, problems, environ),
        _collect(_from_flags, problems, tuple(flags)),
    ]
    merged = _Layer()
    for layer in layers:
        _merge(merged, layer, problems)
    _host_and_port(merged, host, port, problems)
    try:
        settings = GatewaySettings.model_validate(merged.values)
    except ValidationError as error:
        raise SettingsError([*problems, *_faults(error, merged, incomplete=bool(problems))]) from None
    problems += _unknown_dialects(settings, merged.origins)
    if problems:
        raise SettingsError(problems)
    return Loaded(settings, merged.origins)


_NO_ENGINES = (
    "no engines: give --combined URL, or --decode URL (with --prefill URL for P+D), and --encode URL for encoders; "
    "or name a file with --config"
)


def _faults(error: ValidationError, merged: _Layer, *, incomplete: bool) -> Iterable[Problem]:
    faults = from_pydantic(error, GatewaySettings, merged.origins, nowhere="settings", known=known_settings().values())
    for detail, fault in zip(error.errors(include_url=False), faults, strict=True):
        missing = detail["type"] == "missing"
        # A source that could not be read leaves holes: what does not fit together then is no fault of its own.
        if incomplete and (missing or detail["type"] == "setting"):
            continue
        yield Problem("settings", "models", _NO_ENGINES) if missing and detail["loc"] == ("models",) else fault


def _unknown_dialects(settings: GatewaySettings, origins: Mapping[Loc, Origin]) -> Iterable[Problem]:
    """Dialects are a registry that installed packages add to, so the model itself cannot know their names."""
    for index, model in enumerate(settings.models):
        for field_, known in (("ec", ec_dialects()), ("kv", kv_dialects())):
            name = getattr(model, field_)
            if name not in known:
                near, all_ = did_you_mean(name, known), ", ".join(sorted(known))
                what = f"there is no dialect {name!r}{f'{near} There' if near else '; there'} are: {all_}"
                yield Problem(*origin_of(("models", index, field_), origins, "settings"), what)


def _collect(read: Any, problems: list[Problem], *arguments: Any) -> _Layer:
    """One source's layer; an empty one where it cannot be read."""
    layer = _Layer()
    try:
        read(layer, problems, *arguments)
    except SettingsError as error:
        problems.extend(error.problems)
        return _Layer()
    return layer


# --- the YAML file


def _from_file(layer: _Layer, problems: list[Problem], config: str | None, environ: Mapping[str, str]) -> None:
    by = "--config" if config else CONFIG
    path = config or environ.get(CONFIG)
    if path is None:
        return
    if not path:
        raise SettingsError([Problem(by, "config", "is empty: give a file's path, or remove it")])
    if not Path(path).is_file():
        raise SettingsError([Problem(by, "config", f"there is no file {path}")])
    document = yamlfile.read(Path(path))
    layer.values = document.value
    layer.origins = {loc: Origin(f"{path}:{line}", dotted(loc)) for loc, line in document.lines.items() if loc}
    for key, value in list(layer.values.items()):
        declared = GatewaySettings.model_fields.get(key)
        # A section of which every line is commented out.
        if value is None and declared and inner_model(declared.annotation) and not is_optional(declared.annotation):
            del layer.values[key]
    _split_lists(layer, (), problems)
    models = layer.values.get("models")
    if isinstance(models, list):
        for index in range(len(models)):
            _split_lists(layer, ("models", index), problems)


def _split_lists(layer: _Layer, at: Loc, problems: list[Problem]) -> None:
    """`a,b` where a list of engines or of words stands, so that each item keeps its origin."""
    group: Any = layer.values
    for part in at:
        group = group[part]
    if not isinstance(group, dict):
        return
    for key, value in list(group.items()):
        loc = (*at, key)
        declared = field_at(ModelSettings if key in _SINGLE else GatewaySettings, (key,))
        if declared is None or key == "models" or not is_list(declared.annotation):
            continue
        origin = layer.origins[loc]
        if value is None:
            group[key] = []
        elif isinstance(value, str):
            items = _items(value, origin, problems, secret=is_secret(declared.annotation))
            group[key] = items
        elif isinstance(value, list) and key in ROLES:
            _flatten(layer, group, key, loc)


def _flatten(layer: _Layer, group: dict[str, Any], key: str, loc: Loc) -> None:
    old = {at: origin for at, origin in layer.origins.items() if at[: len(loc)] == loc and len(at) > len(loc)}
    for at in old:
        del layer.origins[at]
    out: list[Any] = []
    for index, value in enumerate(group[key]):
        parts = [value]
        if isinstance(value, str):
            parts = [p for p in (p.strip() for p in value.split(",")) if p.lower() not in ("", *_NONE_WORDS)]
        for part in parts:
            for at, origin in old.items():
                if at[len(loc)] == index:
                    layer.origins[(*loc, len(out), *at[len(loc) + 1 :])] = origin
            out.append(part)
    group[key] = out


# --- text: flags and variables


def _from_environ(layer: _Layer, problems: list[Problem], environ: Mapping[str, str]) -> None:
    known = known_settings()
    variables = {variable(loc): loc for loc in known}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name == CONFIG or name in _INTERNAL:
            continue
        if loc := variables.get(name):
            _put_text(layer, problems, loc, environ[name], name)
        elif name in ("TRIPTYCH_HOST", "TRIPTYCH_PORT") and "://" not in environ[name]:
            problems.append(Problem(name, "", "no such setting; `TRIPTYCH_LISTEN` takes HOST:PORT"))
        elif not _KUBERNETES.match(f"{name}={environ[name]}"):
            near = did_you_mean(name.removeprefix(PREFIX), (v.removeprefix(PREFIX) for v in (*variables, CONFIG)))
            problems.append(Problem(name, "", f"no such setting{re.sub('`(?=[A-Z])', f'`{PREFIX}', near)}"))


def variable(loc: Loc) -> str:
    """The environment variable of a setting: `("deadlines", "connect")` is TRIPTYCH_DEADLINES__CONNECT."""
    return PREFIX + "__".join(map(str, loc)).upper()


def _from_flags(layer: _Layer, problems: list[Problem], flags: Sequence[Flag]) -> None:
    by_loc: dict[Loc, str] = {}
    for flag in flags:
        other = by_loc.setdefault(flag.loc, flag.name)
        if other != flag.name:
            problems.append(
                Problem(flag.name, dotted(flag.loc), f"is the same setting as {other}: give one of the two")
            )
        elif isinstance(flag.value, bool):
            layer.put(flag.loc, flag.value, Origin(flag.name, dotted(flag.loc)))
        else:
            for text in (flag.value,) if isinstance(flag.value, str) else flag.value:
                _put_text(layer, problems, flag.loc, text, flag.name, more=True)


def _put_text(layer: _Layer, problems: list[Problem], loc: Loc, text: str, source: str, *, more: bool = False) -> None:
    """Sets a value that was given as text; `more` adds to a list that is already there."""
    origin = Origin(source, dotted(loc))
    if not text.strip():
        problems.append(Problem(*origin, "is empty: give a value, or leave it out"))
        return
    declared = field_at(ModelSettings if loc[0] in _SINGLE else GatewaySettings, loc)
    if declared is None:
        raise AssertionError(loc)
    secret = is_secret(declared.annotation)
    value: Any = text
    if is_list(declared.annotation):
        value = _items(text, origin, problems, secret=secret)
        if more:
            value = [*layer.values.get(str(loc[0]), []), *value]
    elif inner_model(declared.annotation) and not _is_none(text):
        value = _json(text, origin, problems)
        if value is None:
            return
    elif is_optional(declared.annotation) and _is_none(text) and not secret:
        value = None
    layer.put(loc, value, origin)


def _is_none(text: str) -> bool:
    return text.strip().lower() in _NONE_WORDS


def _items(text: str, origin: Origin, problems: list[Problem], *, secret: bool) -> list[Any]:
    if text.lstrip().startswith(("[", "{")):
        value = _json(text, origin, problems)
        return value if isinstance(value, list) else [] if value is None else [value]
    parts = [part for part in (part.strip() for part in text.split(",")) if part]
    return parts if secret else [part for part in parts if not _is_none(part)]


def _json(text: str, origin: Origin, problems: list[Problem]) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f" (character {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else ""
        problems.append(Problem(*origin, f"is not JSON{where}: write it as {{…}} or […]"))
        return None


# --- merging


def _merge(base: _Layer, layer: _Layer, problems: list[Problem]) -> None:
    """Puts a layer over what lower ones set: groups by member, everything else as a whole."""
    single = {key: value for key, value in layer.values.items() if key in _SINGLE}
    if "models" in layer.values:
        for key in single:
            what = "stands beside `models`: put it inside the model that it belongs to"
            problems.append(Problem(layer.origins[(key,)].source, key, what))
        _replace(base, layer, ("models",), ("models",))
    elif single:
        models = base.values.setdefault("models", [{}])
        if isinstance(models, list) and len(models) == 1 and isinstance(models[0], dict):
            for key in single:
                origin = layer.origins[(key,)]
                base.origins.setdefault(("models", 0), Origin(origin.source, ""))
                _replace(base, layer, (key,), ("models", 0, key))
        else:
            for key in single:
                what = "there are several models, and this does not say which: set it inside one, in the file"
                problems.append(Problem(layer.origins[(key,)].source, key, what))
    for key, value in layer.values.items():
        if key in _SINGLE or key == "models":
            continue
        if isinstance(value, dict) and isinstance(base.values.get(key), dict):
            for member in value:
                _replace(base, layer, (key, member), (key, member))
        else:
            _replace(base, layer, (key,), (key,))


def _replace(base: _Layer, layer: _Layer, source: Loc, target: Loc) -> None:
    for loc in [loc for loc in base.origins if loc[: len(target)] == target]:
        del base.origins[loc]
    value: Any = layer.values
    for part in source:
        value = value[part]
    at: Any = base.values
    for part in target[:-1]:
        at = at[part]
    at[target[-1]] = value
    for loc, origin in layer.origins.items():
        if loc[: len(source)] == source:
            base.origins[(*target, *loc[len(source) :])] = origin


def _host_and_port(merged: _Layer, host: str | None, port: str | None, problems: list[Problem]) -> None:
    given = [name for name, value in (("--host", host), ("--port", port)) if value is not None]
    if not given:
        return
    origin = Origin(" ".join(given), "listen")
    lower = merged.origins.get(("listen",))
    if lower and lower.source == "--listen":
        problems.append(Problem(*origin, "is the same setting as --listen: give one of the two"))
        return
    try:
        old_host, old_port = host_port(str(merged.values.get("listen", GatewaySettings.model_fields["listen"].default)))
    except ValueError:
        old_host, old_port = "0.0.0.0", 8000
    name = old_host if host is None else host
    merged.values["listen"] = f"{f'[{name}]' if ':' in name else name}:{old_port if port is None else port}"
    merged.origins[("listen",)] = origin
