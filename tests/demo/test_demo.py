"""The demo: its proofs can fail, and it runs to the end, on simulated engines and on real ones."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from triptych.demo.ask import Answer, Told
from triptych.demo.counters import Counts
from triptych.demo.questions import QUESTIONS, png
from triptych.demo.run import proofs, topologies

COMMAND = [sys.executable, "-m", "triptych", "demo"]


def told(**changes: Any) -> list[Told]:
    """What a run tells in which everything went as it should."""
    found = []
    for number, question in enumerate(QUESTIONS):
        answer = Answer("text", (number, 7), f"id-{number}", 0.1)
        plan = "e_p_d" if question.pictures else "p_d"
        counts = Counts(items_taken=question.new_pictures, kv_tokens=60)
        found.append(Told(question, answer, answer, {"plan": plan, "legs": []}, counts))
    if changes:
        found[1] = dataclasses.replace(found[1], **changes)
    return found


def test_proofs_hold_for_a_run_in_which_everything_was_handed_over() -> None:
    assert all(proof.holds for proof in proofs(told()))


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"timeline": {"plan": "p_d", "legs": []}}, "encode → prefill → decode"),
        ({"counts": Counts(items_taken=0, kv_tokens=60)}, "encoder's output"),
        ({"counts": Counts(items_taken=1, items_missed=1, kv_tokens=60)}, "encoder's output"),
        ({"counts": Counts(items_taken=1, kv_tokens=0)}, "prefill's KV"),
        ({"plain": Answer("text", (8, 8), "", 0.1)}, "token for token"),
        ({"answer": Answer("text", (), "", 0.1), "plain": Answer("text", (), "", 0.1)}, "token for token"),
        ({"answer": Answer("t", (0, 7), "", 0.1), "plain": Answer("t", (0, 7), "", 0.1)}, "different answers"),
    ],
)
def test_a_proof_fails_when_what_it_claims_did_not_happen(changes: dict[str, Any], claim: str) -> None:
    (failed,) = [proof for proof in proofs(told(**changes)) if not proof.holds]
    assert claim in failed.claim


def test_both_topologies_start_what_the_demo_shows() -> None:
    split, plain = topologies("vllm", 0, 1)
    assert [role for role, _ in split.engines.groups()] == ["encode", "prefill", "decode"]
    assert ([role for role, _ in plain.engines.groups()], plain.gateway) == (["combined"], False)


def test_pictures_are_png_files() -> None:
    data = png(lambda x, y: (x, y, 0), 16)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")


def test_once_on_simulated_engines_proves_everything() -> None:
    done = subprocess.run([*COMMAND, "--engine", "sim", "--once"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ *yes ", done.stdout, re.MULTILINE)) == 5


def test_it_stays_up_answers_the_curl_line_and_ends_cleanly_on_ctrl_c() -> None:
    with subprocess.Popen([*COMMAND, "--engine", "sim"], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        line = next(line for line in demo.stdout if line.startswith("curl "))
        url, body = re.search(r"(http://\S+).*-d '(.*)'", line).groups()  # type: ignore[union-attr]
        ask = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(ask, timeout=20) as answer:
            assert json.load(answer)["choices"]
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
        assert demo.wait(30) == 0
    assert "Traceback" not in rest


@pytest.mark.vllm
@pytest.mark.timeout(700)
def test_once_on_real_engines_proves_everything() -> None:
    done = subprocess.run([*COMMAND, "--once"], capture_output=True, text=True, timeout=660)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ *yes ", done.stdout, re.MULTILINE)) == 5
