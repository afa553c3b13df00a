"""One real topology, started as a user does, and killed as no user should."""

from __future__ import annotations

import base64
import json
import re
import struct
import subprocess
import sys
import urllib.request
import zlib
from pathlib import Path

import pytest

from tests.launch.helpers import Watched
from triptych.engine.check import vllm_problem
from triptych.launch.guardian import children_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]


def png(side: int) -> str:
    """A data URL of a square image, of noise that depends on its size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes((x * 7 + y * 13 + x * y) % 256 for x in range(side * 3)) for y in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_e_pd_on_real_vllm_hands_encoder_output_over_and_leaves_no_process_after_sigkill(tmp_path: Path) -> None:
    if problem := vllm_problem():
        pytest.skip(problem)
    file = tmp_path / "e-pd.yaml"
    example = (ROOT / "examples" / "e-pd.yaml").read_text()
    file.write_text(example.replace("127.0.0.1:8000", "127.0.0.1:0\n  admin: 'off'"))
    command = [sys.executable, "-m", "triptych", "serve", str(file), "--log-dir", str(tmp_path / "logs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        seen = []
        for line in process.stdout:
            seen.append(line)
            if "Ctrl-C stops everything" in line:
                break
        output = "".join(seen)
        try:
            url = re.search(r"is served on (\S+)", output)
            assert url, output
            content = [{"type": "image_url", "image_url": {"url": png(112)}}, {"type": "text", "text": "describe"}]
            body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
            request = urllib.request.Request(
                f"{url[1]}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert json.load(answer)["choices"][0]["message"]["content"]
            logs = {path.stem: path.read_text() for path in (tmp_path / "logs").glob("*.log")}
            published = re.search(r"EC published: item (\w+)", logs["encode-0"])
            assert published, logs["encode-0"]
            assert f"EC hit: item {published[1]}" in logs["combined-0"]
            pids = children_of(process.pid)
            assert len(pids) >= 8  # three guardians; gateway; and of each engine the server and its core
            watched = Watched(pids)
        finally:
            process.kill()
        assert watched.left_after(2.0) == set()
