"""Kinds of values that settings are made of: addresses, sizes, secrets, files.

Each refuses what is wrong with a sentence that says what to give instead, and never shows a secret.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PositiveInt, SecretStr, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class Model(BaseModel):
    """What every settings model is: closed, immutable, and silent about what was put in."""

    # hide_input_in_errors: a traceback or a log line that shows a ValidationError shows no key.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )


def refuse(model: type[BaseModel], problems: Iterable[tuple[tuple[str | int, ...], str]]) -> None:
    """Raises one ValidationError that names each field at fault (a plain ValueError would name the whole model)."""
    details: list[InitErrorDetails] = [
        {"type": PydanticCustomError("setting", "{what}", {"what": what}), "loc": loc, "input": None}
        for loc, what in problems
    ]
    if details:
        raise ValidationError.from_exception_data(model.__name__, details, hide_input=True)


def shown_url(url: str) -> str:
    """The URL as it may be shown to a person: without user and password."""
    head, at, tail = url.rpartition("@")
    scheme, colon, _ = head.partition("://")
    return f"{scheme if colon else ''}{colon}***@{tail}" if at else url


def _engine_url(url: str) -> str:
    shown = shown_url(url)
    try:
        parts = urlsplit(url)
    except ValueError:  # an unclosed [
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c <= " " or c == "\x7f" for c in url):
        raise ValueError(f"{shown!r} is not an engine address: write it as http://HOST:PORT or https://HOST:PORT")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{shown!r} must be an address only (http://HOST:PORT), without path, query or user")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"{shown!r} has no usable port: give one from 1 to 65535")
    return f"{parts.scheme}://{parts.netloc.lower()}"


EngineUrl = Annotated[str, AfterValidator(_engine_url)]


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def _size(value: Any) -> Any:
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]+)\s*([a-zA-Z]*)", value.strip())):
        unit = _UNITS.get(match[2].lower())
        if unit is None:
            raise ValueError(f"{value!r} has an unknown unit: give bytes, or a number with KiB, MiB or GiB")
        return int(match[1]) * unit
    return value


Size = Annotated[PositiveInt, BeforeValidator(_size)]


def _secret(value: SecretStr) -> SecretStr:
    key = value.get_secret_value()
    if not key:
        raise ValueError("is empty: give the key, or leave the setting out")
    if not all("!" <= c <= "~" for c in key):
        raise ValueError("holds a space or a character that no HTTP header can carry: is it quoted or cut wrongly?")
    if set(key) == {"*"}:
        raise ValueError("is only asterisks, the mask under which `--check` shows a key: give the key itself")
    return value


Secret = Annotated[SecretStr, AfterValidator(_secret)]


def read_keys(path: Path) -> tuple[SecretStr, ...]:
    """The keys in a file, one a line; blank lines and lines that start with # are none.

    Raises ValueError, which never shows a key, for an unreadable file, a bad key, or no key at all.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ValueError(f"cannot read {path}: {why}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        if (text := line.strip()) and not text.startswith("#"):
            try:
                keys.append(_secret(SecretStr(text)))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: the key {error}") from None
    if not keys:
        raise ValueError(f"{path} holds no key: write one a line, or leave the setting out")
    return tuple(keys)


def _key_file(path: Path) -> Path:
    read_keys(path)
    return path


def _pem_file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give the path of a PEM file")
    return path


def tls_problem(certificate: Path, key: Path) -> str | None:
    """Why a server cannot use this pair of PEM files, or None."""
    try:
        # An encrypted key would otherwise ask on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"{key} is not the key of {certificate}"
        return f"{certificate} and {key} cannot be used: give an X.509 certificate and its key, both PEM, no passphrase"
    except OSError as error:
        return f"{certificate} and {key} cannot be read: {error.strerror}"
    return None


def authorities_problem(file: Path) -> str | None:
    """Why no certificate can be checked against this PEM file, or None."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=file)
    except ssl.SSLError:
        return f"{file} holds no certificate: give a PEM file with the authorities' certificates"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    return None


KeyFile = Annotated[Path, AfterValidator(_key_file)]
PemFile = Annotated[Path, AfterValidator(_pem_file)]


def host_port(address: str) -> tuple[str, int]:
    """`HOST:PORT`, `[v6]:PORT` or `:PORT` as a pair.

    Raises ValueError with what was expected.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535 or any(c <= " " for c in address):
        raise ValueError(f"{address!r} is not of the form HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)
