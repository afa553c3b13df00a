"""The state that a stage adds to vLLM's, and that nothing else is changed by importing us."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.vllm


def run(script: str) -> str:
    script = "from triptych.engine.compat import apply, detect; apply(detect())\n" + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_importing_triptych_changes_nothing_in_vllm_and_registering_adds_one_state_once() -> None:
    out = run(
        """
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.request import RequestStatus
        before = dict(vars(Scheduler)), dict(RequestStatus.__members__)
        import triptych.scheduling.ar, triptych.scheduling.generation, triptych.scheduling.status as status
        import triptych.transfer.adapter.adapter
        assert (dict(vars(Scheduler)), dict(RequestStatus.__members__)) == before
        one, two = status.register_status(), status.register_status()
        assert one is two is RequestStatus.WAITING_FOR_CHUNK is RequestStatus["WAITING_FOR_CHUNK"]
        assert one is RequestStatus(-1)
        assert not RequestStatus.is_finished(one)
        import pickle
        assert pickle.loads(pickle.dumps(one)) is one
        print(one, len(RequestStatus) - len(before[1]))
        """
    )
    assert out.split()[-2:] == ["WAITING_FOR_CHUNK", "1"] or out.split()[-2:] == ["-1", "1"]
