"""docs/epd.md says what there is: every metric, closed thing, reason, deadline, limit and admin call; and the table of
mutants fits the source and its tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.contract.kit import Gate, Scripted
from tests.gateway.raw import Raw
from triptych.gateway.metrics import ENCODE_STATUSES
from triptych.gateway.settings import Deadlines, Limits, Opening

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "epd.md").read_text()
WORDS = set(re.findall(r"`([^`\n]+)`", TEXT)) | set(re.findall(r"[a-z_]+", TEXT))


async def test_every_metric_is_listed_and_nothing_else_is() -> None:
    async with Scripted() as c, Gate(combined=[c.url]) as gate:
        _, text = gate.gateway.metrics.render()
    real = set()
    for family in text_string_to_metric_families(text.decode()):
        if not family.name.startswith("triptych_process_"):
            real.add(family.name + ("_total" if family.type == "counter" else ""))
    listed = set(re.findall(r"`(triptych_[a-z_]+[a-z])[`{]", TEXT))
    assert listed == real


def test_every_status_of_a_leg_is_named() -> None:
    assert set(ENCODE_STATUSES) <= WORDS


def test_every_closed_thing_stands_beside_what_opens_it() -> None:
    table = TEXT[TEXT.index("## What a client may not send") : TEXT.index("## Hand-over dialects")]
    opened = {row.split("|")[3].strip(" `") for row in table.splitlines() if row.startswith("| ")} - {"opened by"}
    assert opened == set(get_args(Opening))


def test_every_deadline_and_limit_is_explained() -> None:
    names = {n for n in (*Deadlines.model_fields, *Limits.model_fields) if n != "drain"}
    assert [n for n in sorted(names) if f"`{n}`" not in TEXT and f"limits.{n}`" not in TEXT] == []
    assert "`deadlines.drain`" in TEXT


def test_every_reason_of_a_lesser_plan_is_explained() -> None:
    source = "".join((ROOT / "src" / "triptych" / at).read_text() for at in ("gateway/plan.py", "body/items.py"))
    reasons = set(re.findall(r'degraded\.append\("(\w+)"\)', source)) | set(
        re.findall(r'Final = "(media_\w+)"', source)
    )
    hazards = re.findall(r'return "(\w+)"', (ROOT / "src" / "triptych" / "body" / "request.py").read_text())
    reasons |= {f"no_hop_{hazard}" for hazard in hazards}
    assert len(reasons) > 10
    assert reasons <= WORDS


async def test_every_admin_call_is_listed() -> None:
    async with Scripted() as c, Gate(combined=[c.url], admin="127.0.0.1:0") as gate:
        host, port = gate.running.admin[0]
        async with Raw(host, port) as client:
            client.get("/", headers={"host": "localhost"})
            calls = (await client.answer()).json
    for call in calls:
        if call not in ("GET /", "GET /health"):
            assert f"`{call}`" in TEXT, call


def test_every_mutant_applies_to_the_source_its_test_is_there_and_the_document_lists_it() -> None:
    """Where this fails after a change of the source: mend scripts/mutants.yaml, run the mutants in question, then
    `python scripts/mutants.py --doc`."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "mutants.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
