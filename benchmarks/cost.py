"""CPU per text request, per 1 MB image request and per SSE event, beside vllm-router (Rust) and nginx (C).

Every gateway stands before the same cheap engine, one after the other, `rounds` times in turn; figures are medians of
the rounds, ratios medians of the rounds' own ratios, since the machine's speed drifts.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bars import Bar
from benchmarks.rig import cpu_per, engine, free_port, request, started, triptych

TEXT = b'{"type":"text","text":"describe this picture please"}'
MB = 1_000_000


def body(*, image: int = 0, stream: bool = False, tail: bytes = b"") -> bytes:
    """A chat request; `image` bytes of inline data, `tail` more members."""
    picture = b""
    if image:
        picture = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,' + b"A" * image + b'"}},'
    head = b'{"model":"m","messages":[{"role":"user","content":[' + picture + TEXT + b']}],"max_tokens":16'
    return head + (b',"stream":true' if stream else b"") + tail + b"}"


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway to measure: its command line, given the port to listen on and the engine's."""

    name: str
    command: Callable[[int, int], Sequence[str]]


def nginx_config(listen: int, upstream: int) -> Sequence[str]:
    """nginx as a plain reverse proxy with keep-alive to the engine."""
    folder = Path(tempfile.mkdtemp(prefix="triptych-bench-nginx-"))
    config = folder / "nginx.conf"
    config.write_text(
        f"""daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 100000000; client_max_body_size 64m; client_body_buffer_size 2m;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 64; keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{listen};
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header connection "";
      proxy_buffering off; }} }}
}}"""
    )
    return ["nginx", "-c", str(config), "-p", str(folder)]


def router() -> str | None:
    """Where vllm-router is installed: in the peers' environment, or on the path."""
    beside = Path(sys.prefix) / "peers" / "bin" / "vllm-router"
    return str(beside) if beside.exists() else shutil.which("vllm-router")


def gateways() -> list[Gateway]:
    """Those that are installed here, ours first."""
    found = [
        Gateway("triptych", lambda listen, up: triptych(listen, "--combined", f"http://127.0.0.1:{up}")),
    ]
    binary = router()
    if binary is not None:
        found.append(
            Gateway(
                "vllm-router",
                lambda listen, up: [
                    *(binary, "--worker-urls", f"http://127.0.0.1:{up}", "--port", str(listen)),
                    *("--policy", "round_robin", "--prometheus-port", str(free_port())),
                ],
            )
        )
    if shutil.which("nginx"):
        found.append(Gateway("nginx", nginx_config))
    return found


@dataclass(frozen=True, slots=True)
class Mode:
    name: str
    body: bytes
    connections: int
    bar: float
    events: bool = False


def modes() -> list[Mode]:
    return [
        Mode("text request", body(), 16, 1.5),
        Mode("1 MB image request", body(image=MB), 16, 0.7),
        Mode("SSE event", body(stream=True), 32, 1.0, events=True),
    ]


def run(rounds: int = 5, seconds: float = 3.0) -> list[Bar]:
    """Measure every gateway in every mode; prints as it goes. The bars are ratios to vllm-router."""
    bars = []
    with engine() as upstream:
        for mode in modes():
            used: dict[str, list[float]] = {gateway.name: [] for gateway in gateways()}
            for number in range(rounds):
                for gateway in gateways():
                    port = free_port()
                    with started(gateway.command(port, upstream), f"http://127.0.0.1:{port}") as process:
                        micros = cpu_per(
                            process, port, request(mode.body), mode.connections, seconds, events=mode.events
                        )
                    used[gateway.name].append(micros)
                line = "  ".join(f"{name} {values[-1]:.0f}" for name, values in used.items())
                print(f"  CPU per {mode.name}, round {number + 1}: {line} µs", flush=True)
            ours = used["triptych"]
            for name, values in used.items():
                if name != "triptych":
                    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, values, strict=True))
                    limit = mode.bar if name == "vllm-router" else None
                    what = f"CPU per {mode.name}, triptych / {name}"
                    detail = f"{statistics.median(ours):.0f} / {statistics.median(values):.0f} µs"
                    bars.append(Bar(what, ratio, limit, detail))
    if "vllm-router" not in used:
        print("  vllm-router is not installed: no ratio to it (pip install vllm-router)")
    return bars
