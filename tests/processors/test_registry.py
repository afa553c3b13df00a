"""Finding a processor: by place or by entry point, and an error that helps where there is none."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from triptych.processors import registry
from triptych.processors.registry import GROUP, find


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installed packages offer a processor each, one of them not installed properly."""
    points = EntryPoints(
        [
            EntryPoint("fine", "textwrap:dedent", GROUP),
            EntryPoint("dotted.name", "textwrap:indent", GROUP),
            EntryPoint("broken", "no_such_package.x:y", GROUP),
        ]
    )

    def entry_points(*, group: str) -> Any:
        assert group == GROUP
        return points

    monkeypatch.setattr(registry, "entry_points", entry_points)


@pytest.mark.parametrize("name", ["textwrap:dedent", "textwrap.dedent"])
def test_a_function_is_found_by_its_place(name: str) -> None:
    assert find(name) is textwrap.dedent


def test_a_function_may_be_inside_a_class() -> None:
    assert find("importlib.metadata:EntryPoint.load") is importlib.metadata.EntryPoint.load


@pytest.mark.usefixtures("offered")
def test_a_function_is_found_by_its_entry_point() -> None:
    assert find("fine") is textwrap.dedent
    assert find("dotted.name") is textwrap.indent
    assert find("textwrap:shorten") is textwrap.shorten


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("talker", "there is no stage input processor 'talker': give it as 'package.module:function'"),
        ("talker", "(installed packages offer broken, dotted.name, fine)"),
        ("broken", "'broken': no_such_package.x cannot be imported: No module named 'no_such_package'"),
        ("no_such_package:f", "no_such_package cannot be imported"),
        ("textwrap:dendet", "textwrap has no 'dendet'; what can be called there: TextWrapper, dedent, fill, indent"),
        ("textwrap:__name__", "is a str, which cannot be called"),
        (":dedent", "is not of the form 'package.module:function'"),
        ("textwrap:", "is not of the form 'package.module:function'"),
        ("..dedent", "is not of the form 'package.module:function'"),
        ("text wrap:dedent", "is not of the form 'package.module:function'"),
        ("textwrap:de:dent", "is not of the form 'package.module:function'"),
    ],
)
def test_a_name_that_leads_nowhere_is_explained(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        find(name)


def test_where_no_package_offers_any_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda *, group: EntryPoints([]))
    with pytest.raises(ValueError, match="no installed package offers any"):
        find("talker")


@pytest.mark.parametrize("model", ["personaplex", "nemotron_voicechat"])
def test_the_processors_of_this_package_are_found(model: str) -> None:
    function = find(f"triptych.processors.{model}:talker_to_codec")
    assert function.__module__ == f"triptych.processors.{model}"


def test_looking_for_a_processor_imports_no_torch_by_itself() -> None:
    code = (
        "import sys\nfrom triptych.processors.registry import find\nfind('textwrap:dedent')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
