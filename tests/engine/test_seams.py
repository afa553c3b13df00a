"""The private names of vLLM that stages need are checked by name before anything is loaded."""

from __future__ import annotations

import pytest

from triptych.engine.compat import apply, detect
from triptych.engine.seams import SCHEDULING, WORKER, Seam, SeamError, require


@pytest.fixture(autouse=True, scope="module")
def _engine() -> None:
    apply(detect())


def test_the_installed_vllm_has_all_of_them() -> None:
    require(SCHEDULING)
    require(WORKER)


@pytest.mark.parametrize(
    "place",
    [
        "vllm.v1.core.sched.scheduler:Scheduler._gone",
        "vllm.v1.core.sched.scheduler:Scheduler.__init__.gone",
        "vllm.v1.engine:EngineCoreRequestType.GONE",
        "vllm.gone:Scheduler",
        "vllm.v1.core.sched.scheduler:Gone.__init__.waiting",
    ],
)
def test_what_is_missing_is_named_with_its_reason(place: str) -> None:
    with pytest.raises(SeamError, match=r"vLLM 0\.32 has, and this one has not, .*because of a test"):
        require([Seam(place, "because of a test")])


def test_a_function_that_has_lost_a_parameter_is_missing() -> None:
    place = "vllm.v1.core.sched.scheduler:Scheduler._free_request"
    require([Seam(place, "-", ("request",))])
    with pytest.raises(SeamError):
        require([Seam(place, "-", ("request", "gone"))])
