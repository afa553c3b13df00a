"""Who is asking, under which id, and which headers travel on to engines and back.

Rules: contract, "What a client may not send" and "Headers".
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Sequence

from pydantic import SecretStr

from triptych.gateway.endpoints import Api
from triptych.gateway.errors import ApiError
from triptych.http.head import Header, find

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")

# Headers of one hop (RFC 9110, 7.6.1), and those that the relay computes for each hop by itself.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
    }
)
# Not passed on to legs: set anew per leg, or answered here. `accept-encoding`: the gateway reads every leg's answer
# (handles, events), which a compressed one would hide.
_SET_PER_LEG = frozenset({b"host", b"expect", b"x-request-id", b"accept-encoding"})
_RANK = frozenset({b"x-data-parallel-rank"})
_KEYS = frozenset({b"authorization", b"x-api-key"})
_NOT_IN_ANSWERS = HOP_BY_HOP | {b"x-request-id"}


def request_id(headers: Sequence[Header], rng: random.Random) -> str:
    """The client's `X-Request-Id` if it has the accepted form, else one of ours: unlikely to repeat, no secret."""
    given = find(headers, b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return f"{rng.getrandbits(128):032x}"


class Keyring:
    """The keys that clients may show. Looked up by digest, so that timing tells nothing of a key's characters."""

    def __init__(self, keys: Iterable[SecretStr], tenant_header: str | None) -> None:
        self._digests = frozenset(_digest(k.get_secret_value().encode()) for k in keys)
        self._tenant_header = tenant_header.encode("latin-1") if tenant_header else None

    @property
    def checks(self) -> bool:
        """Whether clients must show a key."""
        return bool(self._digests)

    def check(self, headers: Sequence[Header], api: Api) -> None:
        """Raises ApiError 401 if keys are configured and none of them is shown."""
        if self._digests:
            self.tenant(headers, api)

    def tenant(self, headers: Sequence[Header], api: Api) -> bytes:
        """The namespace of whoever asks: their key, within it the tenant header's value where one is configured.

        Raises ApiError 401 if keys are configured and none of them is shown.
        """
        shown = client_key(headers, api)
        digest = b"" if shown is None else _digest(shown)
        if self._digests and digest not in self._digests:
            raise ApiError(
                401,
                "missing API key: send `Authorization: Bearer KEY`" if shown is None else "unknown API key",
                reason="unauthorized",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        named = find(headers, self._tenant_header) if self._tenant_header else None
        return digest if named is None else _digest(digest + b"\0" + named)


def client_key(headers: Sequence[Header], api: Api) -> bytes | None:
    """The API key that the client shows: a bearer token, or on `/v1/messages` `x-api-key`."""
    authorization = find(headers, b"authorization")
    if authorization is not None:
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() == b"bearer" and token.strip():
            return token.strip()
    return find(headers, b"x-api-key") if api == "messages" else None


class LegHeaders:
    """Which of a client's headers travel on to the legs of one deployment."""

    def __init__(self, *, engine_key: str | None, checks_keys: bool, pass_rank: bool) -> None:
        """engine_key: shown to the engines. checks_keys: clients' keys are for the gateway. pass_rank: a client may
        choose the data-parallel rank."""
        closed = _KEYS if engine_key is not None or checks_keys else frozenset[bytes]()
        self._drop = HOP_BY_HOP | _SET_PER_LEG | closed | (frozenset() if pass_rank else _RANK)
        self._own: tuple[Header, ...] = ()
        if engine_key is not None:
            self._own = ((b"authorization", b"Bearer " + engine_key.encode()),)

    def of(self, headers: Sequence[Header]) -> list[Header]:
        """The end-to-end headers that every leg gets; each leg adds its own id to them."""
        return [*_without(headers, self._drop), *self._own]


def answer_headers(headers: Sequence[Header]) -> list[Header]:
    """The engine's end-to-end headers that the client gets; the request id is ours."""
    return _without(headers, _NOT_IN_ANSWERS)


def _without(headers: Sequence[Header], drop: frozenset[bytes]) -> list[Header]:
    """The headers but for those called as in `drop`, and those that a `connection` header names."""
    kept = []
    named: set[bytes] = set()
    for header in headers:
        name = header[0]
        if name not in drop:
            kept.append(header)
        elif name == b"connection":
            named.update(token.strip().lower() for token in header[1].split(b","))
    return [header for header in kept if header[0] not in named] if named else kept


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
