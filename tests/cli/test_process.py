"""`triptych gateway` as a process of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NOWHERE = "http://127.0.0.1:1"


@contextmanager
def gateway(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "triptych", "gateway", "--combined", NOWHERE, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_gateway_without_a_traceback(number: signal.Signals) -> None:
    with gateway("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0") as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "listening" in line:
                process.send_signal(number)
        status = process.wait(30)
    assert status in ((0, 130) if number == signal.SIGINT else (0,))
    assert any("listening" in line for line in lines)
    assert "Traceback" not in "".join(lines)


@pytest.mark.parametrize("name", ["listen", "admin"])
def test_a_port_in_use_is_one_message(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        other = {"listen": "admin", "admin": "listen"}[name]
        with gateway(f"--{name}", address, f"--{other}", "127.0.0.1:0") as process:
            _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert f"triptych gateway: cannot listen on {address} (`{name}`, from --{name}): address already in use." in err
