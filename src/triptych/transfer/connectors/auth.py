"""How two ends of a connection prove to each other that they know the same secret, without saying it. Sans-IO.

    client  opening     magic, version, nonce, who it is
    server  challenge   version, nonce, who it is
    client  proof       HMAC of the client's part over all of the above
    server  proof       HMAC of the server's part over all of the above

Either may send a refusal instead: why, in words. Both nonces are fresh, so that nothing recorded is of use again; the
parts have labels of their own, so that no end can be made to answer for the other. The client proves first: who merely
connects to a server learns nothing that he could try guesses on. The key is made from the secret and the deployment's
name. Over TLS the server's certificate is a part of what is proved: nobody can stand between with another one.

Without a secret the key is a constant: proofs then show only that versions and deployments are the same.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from triptych.transfer.errors import ConnectorError, WireError

VERSION: Final = 1
MAX_BODY: Final = 2048
"""Bytes of one message of these."""
VARIABLE: Final = "TRIPTYCH_TRANSFER_SECRET"
LEAST: Final = 16
"""Characters of a secret. What is shorter can be guessed."""
_MAGIC: Final = b"triptych transfer"
_NONCE: Final = 32
_NAME: Final = 200


class Secret:
    """A key that is never shown. `given`: there is a secret at all."""

    __slots__ = ("_key", "given")

    def __init__(self, text: str | None, deployment: str) -> None:
        self.given = text is not None
        self._key = hmac.digest((text or "").encode(), b"key 1\0" + deployment.encode(), hashlib.sha256)

    def __repr__(self) -> str:
        return f"<Secret {'given' if self.given else 'none'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a secret is not pickled")

    def proof(self, label: bytes, transcript: bytes) -> bytes:
        """32 bytes."""
        return hmac.digest(self._key, label + b"\0" + transcript, hashlib.sha256)


def find_secret(options: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """The secret that is configured: option `secret`, or the file `secret_file`, or the environment's.

    Raises:
        ConnectorError: it is too short, or the file cannot be read.
    """
    text, where = options.get("secret"), "secret"
    if text is None and (path := options.get("secret_file")) is not None:
        where = f"secret_file {path}"
        try:
            text = Path(str(path)).read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConnectorError(f"{where} cannot be read: {reason}") from None
    if text is None:
        text, where = environment.get(VARIABLE), VARIABLE
    if text is None:
        return None
    if not isinstance(text, str) or len(text) < LEAST:
        raise ConnectorError(f"{where}: a secret has at least {LEAST} characters (openssl rand -hex 32 makes one)")
    return text


def name(text: str, what: str) -> str:
    """A name that fits into a greeting. Raises ConnectorError."""
    if len(text) > _NAME or len(text.encode("utf-8", "replace")) > 3 * _NAME or not text.isprintable():
        raise ConnectorError(f"{what}: {text[:50]!r}… is not a printable name of at most {_NAME} characters")
    return text


class Who(NamedTuple):
    """An end of a connection, as it says and proves. `stage`: that it sends for, or receives for."""

    deployment: str
    stage: str
    pid: int


class Opening(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=1):
    """Client: who I am."""

    nonce: bytes
    deployment: str
    stage: str
    pid: int
    secured: bool


class Challenge(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=2):
    """Server: who I am."""

    nonce: bytes
    deployment: str
    stage: str
    pid: int
    secured: bool


class Proof(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=3):
    """Either: I know the secret."""

    mac: bytes


class Refusal(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=4):
    """Either: no, because."""

    reason: str


class Refused(WireError):
    """The two ends do not belong together. `tell`: what the other end may be told, or None where it told us."""

    def __init__(self, reason: str, tell: str | None) -> None:
        super().__init__(reason)
        self.tell = tell


_Said = Opening | Challenge | Proof | Refusal
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Said)


def _pack(said: _Said) -> bytes:
    # What stays the same in every version comes first.
    return _MAGIC + bytes([VERSION]) + _ENCODER.encode(said)


def refusal(reason: str) -> bytes:
    """What tells the other end why not."""
    return _pack(Refusal(reason[:400]))


def _unpack(body: bytes) -> _Said:
    head = len(_MAGIC)
    if len(body) > MAX_BODY or len(body) <= head or not body.startswith(_MAGIC):
        raise WireError("what it says is no greeting of a Triptych connector")
    if body[head] != VERSION:
        theirs = body[head]
        raise Refused(
            f"it speaks version {theirs} of the transfer protocol, and this end version {VERSION}",
            f"this end speaks version {VERSION} of the transfer protocol, not {theirs}",
        )
    try:
        return _DECODER.decode(body[head + 1 :])
    except msgspec.MsgspecError as error:
        raise WireError(f"its greeting does not decode: {error}") from None


def _check(said: Opening | Challenge, us: Who, secret: Secret) -> Who:
    """Who the other end says that it is. Raises Refused, WireError."""
    if len(said.nonce) != _NONCE or len(said.stage) > _NAME or len(said.deployment) > _NAME:
        raise WireError("its greeting has a nonce or a name of a wrong length")
    if not 0 <= said.pid < 1 << 32:
        raise WireError("its greeting has a process id that is none")
    if said.deployment != us.deployment:
        raise Refused(
            f"it belongs to deployment {said.deployment!r}, and this end to {us.deployment!r}",
            f"this end does not belong to deployment {said.deployment!r}",
        )
    if said.secured != secret.given:
        have, lack = ("it has a secret", "this end has none") if said.secured else ("it has no secret", "this end has")
        raise Refused(
            f"{have}, and {lack}: give both the same (option secret or secret_file, or {VARIABLE})",
            "one end has a secret configured and the other has none",
        )
    return Who(said.deployment, said.stage, said.pid)


def _verify(said: _Said, label: bytes, transcript: bytes, secret: Secret) -> None:
    if not isinstance(said, Proof):
        raise WireError(f"its greeting goes on with {type(said).__name__}, not with a proof")
    if not hmac.compare_digest(said.mac, secret.proof(label, transcript)):
        raise Refused(
            f"its secret is another one than this end's (option secret or secret_file, or {VARIABLE})",
            "the secrets of both ends are not the same",
        )


def _told(said: _Said) -> None:
    if isinstance(said, Refusal):
        raise Refused(f"it refuses: {said.reason[:400]!r}", None)


class Client:
    """The connecting end. `certificate`: the server's, in DER, as this end got it; nothing without TLS."""

    def __init__(self, us: Who, secret: Secret, certificate: bytes = b"") -> None:
        self._us = us
        self._secret = secret
        self.certificate = certificate  # known before anything is received
        self._opening = _pack(Opening(secrets.token_bytes(_NONCE), us.deployment, us.stage, us.pid, secret.given))
        self._transcript: bytes | None = None
        self.peer: Who | None = None  # once it said so; believe it when `done`
        self.done = False

    def opening(self) -> bytes:
        """What to send first."""
        return self._opening

    def receive(self, body: bytes) -> bytes | None:
        """What came: what to answer, if anything.

        Raises:
            Refused: the two do not belong together; the reason is for our user.
            WireError: that is no greeting.
        """
        said = _unpack(body)
        _told(said)
        if self.done:
            raise WireError("its greeting goes on after its end")
        if self._transcript is None:
            if not isinstance(said, Challenge):
                raise WireError(f"its greeting begins with {type(said).__name__}, not with a challenge")
            self.peer = _check(said, self._us, self._secret)
            self._transcript = _transcript(self._opening, body, self.certificate)
            return _pack(Proof(self._secret.proof(b"client", self._transcript)))
        _verify(said, b"server", self._transcript, self._secret)
        self.done = True
        return None


class Server:
    """The listening end. `certificate`: its own, in DER; nothing without TLS."""

    def __init__(self, us: Who, secret: Secret, certificate: bytes = b"") -> None:
        self._us = us
        self._secret = secret
        self._certificate = certificate
        self._transcript: bytes | None = None
        self.peer: Who | None = None
        self.done = False

    def receive(self, body: bytes) -> bytes:
        """What came: what to answer. Raises Refused, WireError, as `Client.receive`."""
        said = _unpack(body)
        _told(said)
        if self.done:
            raise WireError("its greeting goes on after its end")
        if self._transcript is None:
            if not isinstance(said, Opening):
                raise WireError(f"its greeting begins with {type(said).__name__}, not with an opening")
            self.peer = _check(said, self._us, self._secret)
            us = self._us
            nonce = secrets.token_bytes(_NONCE)
            answer = _pack(Challenge(nonce, us.deployment, us.stage, us.pid, self._secret.given))
            self._transcript = _transcript(body, answer, self._certificate)
            return answer
        _verify(said, b"client", self._transcript, self._secret)
        self.done = True
        return _pack(Proof(self._secret.proof(b"server", self._transcript)))


def _transcript(opening: bytes, challenge: bytes, certificate: bytes) -> bytes:
    # With its length, so that no byte of the one can count as the other's.
    return len(opening).to_bytes(4, "big") + opening + challenge + hashlib.sha256(certificate).digest()
