"""TLS for the TCP connector: certificates from files, TLS 1.3 only, both ends ours."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.transfer.errors import ConnectorError

_KEYS = frozenset(("cert", "key", "ca", "hostname"))


class Tls:
    """What option `tls` says: `cert` and `key` (paths of PEM files) are shown to the other end, which is checked
    against `ca`; a listening end with a `ca` asks for certificates too. `hostname`: the name that a sender's
    certificate has to have, where it is not the one that was connected to.
    """

    def __init__(self, given: object) -> None:
        """Raises ConnectorError where a file is missing or is not what it should be."""
        if not isinstance(given, Mapping) or not set(given) <= _KEYS:
            raise ConnectorError(f"tls: a mapping with some of {', '.join(sorted(_KEYS))}")
        cert, key, ca = (self._path(given, name) for name in ("cert", "key", "ca"))
        self.hostname = given.get("hostname")
        self._client: ssl.SSLContext | None = None
        self._server: ssl.SSLContext | None = None
        self.certificate = b""
        """Our own in DER, where there is one."""
        if (cert is None) is not (key is None):
            raise ConnectorError("tls: cert and key come together")
        try:
            if ca is not None:
                self._client = self._context(ssl.PROTOCOL_TLS_CLIENT, cert, key, ca)
            if cert is not None:
                self._server = self._context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca)
                self.certificate = _first(Path(cert).read_text("ascii"))
        except (OSError, ValueError) as error:
            raise ConnectorError(f"tls: {cert or ca}: {error}") from None

    @staticmethod
    def _path(given: Mapping[str, Any], name: str) -> str | None:
        value = given.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not Path(value).is_file():
            raise ConnectorError(f"tls: {name}: {value!r} is not a file")
        return value

    @staticmethod
    def _context(protocol: int, cert: str | None, key: str | None, ca: str | None) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        # No renegotiation there, so that a send never has to wait for something to be received.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if cert is not None:
            context.load_cert_chain(cert, key)
        if ca is not None:
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @property
    def client(self) -> ssl.SSLContext:
        """For connecting. Raises ConnectorError where there is no `ca`."""
        if self._client is None:
            raise ConnectorError("tls: ca is missing: it says whose certificates senders have")
        return self._client

    @property
    def server(self) -> ssl.SSLContext:
        """For listening. Raises ConnectorError where there is no `cert`."""
        if self._server is None:
            raise ConnectorError("tls: cert and key are missing: a sender has to show them")
        return self._server


def _first(pem: str) -> bytes:
    """The first certificate of a PEM file: the one that is shown. Raises ValueError."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    start = pem.index(begin)
    return ssl.PEM_cert_to_DER_cert(pem[start : pem.index(end, start) + len(end)])
