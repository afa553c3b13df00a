"""Asks an HTTP server once whether it is ready."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit


async def ready(url: str, timeout: float = 2.0) -> bool:
    """True when `url` answers 200 within `timeout` seconds; False for anything else, never raises."""
    parts = urlsplit(url)
    context: ssl.SSLContext | None = None
    if parts.scheme == "https":
        # Only whether our own child is up is asked: its certificate is made for the name that clients use.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if context else 80), ssl=context, limit=1 << 16
            )
            writer.write(
                f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
            )
            status = await reader.readline()
        return status.split(b" ")[1:2] == [b"200"]
    except (OSError, TimeoutError, ValueError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()
