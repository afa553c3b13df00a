"""As `worker`, over TCP: `tcp_worker send|receive PORT SEED`."""

from __future__ import annotations

import random
import sys
from typing import Any

from tests.transfer.connectors.worker import receive, say, send
from triptych.transfer.connectors.tcp import TcpConnector


def main() -> None:
    """The command line."""
    role, port, seed = sys.argv[1:]
    connector: Any
    if role == "send":
        connector = TcpConnector({"stage_id": 0, "port": int(port), "buffer_bytes": 8 << 20, "tensors": "view"})
        say("up")
        send(connector, random.Random(seed))
    else:
        connector = TcpConnector({"stage_id": 1, "peers": {"0": [f"127.0.0.1:{port}"]}, "tensors": "view"})
        say("up")
        receive(connector)


if __name__ == "__main__":
    main()
