"""Start, readiness, restarts and the end of processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.launch.helpers import Watched, ask, relatives, spec, until, until_line
from triptych.launch.events import (
    BackingOff,
    Event,
    Exited,
    GaveUp,
    Killed,
    Line,
    Overdue,
    Ready,
    Started,
    State,
    Stopped,
    Stopping,
)
from triptych.launch.plan import ProcessSpec
from triptych.launch.ports import Reservations
from triptych.launch.supervisor import BACKLOG, Policy, StartError, Supervisor

QUICK = Policy(first_delay=0.01, longest_delay=0.04, limit=3, probe_interval=0.01)


@contextlib.asynccontextmanager
async def supervised(
    *specs: ProcessSpec, policy: Policy = QUICK, log_dir: Path | None = None
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(specs, policy=policy, log_dir=log_dir)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        supervisor.kill()
        await supervisor.stop()


async def test_all_are_ready_after_start_and_gone_after_stop(ports: Reservations, tmp_path: Path) -> None:
    supervisor = Supervisor([spec("a", ports), spec("b", ports)], policy=QUICK, log_dir=tmp_path)
    seen: list[Event] = []
    supervisor.listen(seen.append)
    await supervisor.start()
    assert [(s.name, s.state, s.restarts) for s in supervisor.status()] == [
        ("a", State.READY, 0),
        ("b", State.READY, 0),
    ]
    watched = Watched(s.pid for s in supervisor.status() if s.pid)
    await supervisor.stop()
    assert watched.left_after(0) == set()
    for name in "ab":
        kinds = [type(event) for event in seen if event.process == name and not isinstance(event, Line)]
        assert kinds == [Started, Ready, Stopping, Stopped]
        assert (tmp_path / f"{name}.log").read_text() == "starting\n"
    assert [s.state for s in supervisor.status()] == [State.STOPPED, State.STOPPED]


async def test_a_higher_tier_starts_after_lower_ones_are_ready_and_ends_before_them(ports: Reservations) -> None:
    supervisor = Supervisor([spec("front", ports, tier=1), spec("a", ports), spec("b", ports)], policy=QUICK)
    seen: list[Event] = []
    supervisor.listen(seen.append)
    await supervisor.start()
    await supervisor.stop()
    order = [(type(event), event.process) for event in seen]
    for name in "ab":
        assert order.index((Ready, name)) < order.index((Started, "front"))
        assert order.index((Stopped, "front")) < order.index((Stopping, name))


async def test_a_process_waits_for_those_it_comes_after(ports: Reservations) -> None:
    seen: list[Event] = []
    supervisor = Supervisor([spec("second", ports, after=("first",)), spec("first", ports)], policy=QUICK)
    supervisor.listen(seen.append)
    await supervisor.start()
    await supervisor.stop()
    order = [(type(event), event.process) for event in seen]
    assert order.index((Ready, "first")) < order.index((Started, "second"))


async def test_a_crashed_process_starts_again_on_the_same_address_with_growing_delays(ports: Reservations) -> None:
    async with supervised(spec("a", ports)) as supervisor:
        events = supervisor.events()
        pids, delays = {supervisor.status()[0].pid}, []
        for path in ("exit", "die", "exit"):
            await ask(f"{supervisor.status()[0].url}/{path}")
            exited = await until(events, Exited)
            assert exited.code == (7 if path == "exit" else -signal.SIGKILL)
            backing_off = await until(events, BackingOff)
            assert (backing_off.attempt, backing_off.limit) == (len(delays) + 1, 3)
            delays.append(backing_off.seconds)
            await until(events, Ready)
            pids.add(supervisor.status()[0].pid)
        assert delays == [0.01, 0.02, 0.04]
        assert len(pids) == 4
        assert supervisor.status()[0].restarts == 3


def test_delays_double_up_to_a_cap() -> None:
    policy = Policy(first_delay=1, longest_delay=30)
    assert [policy.delay(attempt) for attempt in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]


async def test_a_process_that_keeps_crashing_stays_down_and_says_so_with_its_last_lines(
    ports: Reservations, tmp_path: Path
) -> None:
    first = spec("a", ports, f"first={tmp_path / 'seen'}")
    async with supervised(first, spec("b", ports), log_dir=tmp_path) as supervisor:
        events = supervisor.events()
        await ask(f"{first.url}/exit")
        gave_up = await until(events, GaveUp)
        assert (gave_up.process, gave_up.attempts, gave_up.last[-1]) == ("a", 4, "no luck this time")
        states = {status.name: status.state for status in supervisor.status()}
        assert states == {"a": State.FAILED, "b": State.READY}
        assert "gave up after 4 crashes in a row" in (tmp_path / "a.log").read_text()


async def test_crashes_are_forgotten_once_a_process_was_ready_for_long(ports: Reservations) -> None:
    policy = Policy(first_delay=0.01, limit=1, stable=0.0, probe_interval=0.01)
    async with supervised(spec("a", ports), policy=policy) as supervisor:
        events = supervisor.events()
        for _ in range(3):
            await ask(f"{supervisor.status()[0].url}/exit")
            assert (await until(events, BackingOff)).attempt == 1
            await until(events, Ready)


async def test_a_restart_that_is_not_ready_in_time_counts_as_a_crash(ports: Reservations, tmp_path: Path) -> None:
    command = spec("a", ports, start_timeout=0.5)
    async with supervised(command) as supervisor:
        events = supervisor.events()
        process = supervisor.processes["a"]
        process.spec = spec("a", ports, "unready", start_timeout=0.2)
        await ask(f"{command.url}/exit")
        assert (await until(events, BackingOff)).attempt == 1
        await until(events, Overdue)
        assert (await until(events, BackingOff)).attempt == 2


async def test_an_exit_while_starting_fails_the_start_with_name_code_and_last_lines(
    ports: Reservations, tmp_path: Path
) -> None:
    supervisor = Supervisor([spec("good", ports), spec("bad", ports, "exit=9")], policy=QUICK, log_dir=tmp_path)
    events = supervisor.events()
    with pytest.raises(StartError) as caught:
        await supervisor.start()
    assert str(caught.value) == "bad exited with code 9"
    assert caught.value.report() == (
        "bad exited with code 9; its last lines:\n    starting exit=9\n    cannot go on\n"
        f"All of its output: {tmp_path / 'bad.log'}"
    )
    # A failed start leaves nothing behind, and the events end.
    assert {s.state for s in supervisor.status()} == {State.STOPPED, State.FAILED}
    assert [e async for e in events if isinstance(e, Stopped)] == [Stopped("good")]


async def test_never_healthy_names_the_process_the_address_and_the_deadline(ports: Reservations) -> None:
    never = spec("never", ports, "unready", start_timeout=1.5)
    supervisor = Supervisor([never], policy=QUICK)
    with pytest.raises(StartError, match=r"^never was not ready on http.*/health after 1\.5 s$") as caught:
        await supervisor.start()
    assert caught.value.last == ("starting unready",)


async def test_a_command_that_cannot_be_run_says_why(ports: Reservations) -> None:
    supervisor = Supervisor([spec("a", ports, argv=("/no/such/program",))], policy=QUICK)
    with pytest.raises(StartError) as caught:
        await supervisor.start()
    assert str(caught.value) == "a exited with code 127"
    assert caught.value.last == ("cannot run /no/such/program: No such file or directory",)


async def test_stop_while_starting_leaves_nothing(ports: Reservations) -> None:
    supervisor = Supervisor([spec("a", ports), spec("b", ports, "unready"), spec("c", ports, tier=1)], policy=QUICK)
    events = supervisor.events()
    start = asyncio.create_task(supervisor.start())
    await until(events, Ready, "a")
    watched = Watched(s.pid for s in supervisor.status() if s.pid)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert watched.left_after(0) == set()
    assert {s.state for s in supervisor.status()} == {State.STOPPED}


async def test_stop_before_the_first_process_runs_leaves_nothing(ports: Reservations) -> None:
    supervisor = Supervisor([spec("a", ports)], policy=QUICK)
    start = asyncio.create_task(supervisor.start())
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert [s.state for s in supervisor.status()] == [State.STOPPED]


async def test_what_ignores_sigterm_is_killed_at_its_deadline(ports: Reservations) -> None:
    supervisor = Supervisor([spec("a", ports, "stubborn", stop_timeout=0.2)], policy=QUICK)
    seen: list[Event] = []
    supervisor.listen(seen.append)
    await supervisor.start()
    await supervisor.stop()
    assert [type(e) for e in seen if not isinstance(e, Line)] == [Started, Ready, Stopping, Killed, Stopped]


async def test_a_polite_process_may_end_by_itself(ports: Reservations) -> None:
    supervisor = Supervisor([spec("a", ports, "polite")], policy=QUICK)
    seen: list[Event] = []
    supervisor.listen(seen.append)
    await supervisor.start()
    await supervisor.stop()
    assert Line("a", "goodbye") in seen
    assert Killed("a") not in seen


async def test_kill_cuts_the_deadline_short(ports: Reservations) -> None:
    supervisor = Supervisor([spec("a", ports, "stubborn", stop_timeout=600)], policy=QUICK)
    events = supervisor.events()
    await supervisor.start()
    stop = asyncio.create_task(supervisor.stop())
    await until(events, Stopping)
    supervisor.kill()
    await asyncio.wait_for(stop, 10)
    assert [type(e) async for e in events] == [Killed, Stopped]


async def test_a_cancelled_stop_goes_on_and_can_be_awaited_again(ports: Reservations) -> None:
    supervisor = Supervisor([spec("a", ports, "stubborn", stop_timeout=0.3)], policy=QUICK)
    events = supervisor.events()
    await supervisor.start()
    watched = Watched([supervisor.status()[0].pid or 0])
    stop = asyncio.create_task(supervisor.stop())
    await until(events, Stopping)
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    await supervisor.stop()
    assert watched.left_after(0) == set()


async def test_descendants_are_gone_after_stop_also_those_that_left_session_and_parent(ports: Reservations) -> None:
    supervisor = Supervisor([spec("a", ports, "family")], policy=QUICK)
    events = supervisor.events()
    await supervisor.start()
    watched = Watched(relatives(await until_line(events, "family")))
    await supervisor.stop()
    assert watched.left_after(0) == set()


async def test_descendants_of_a_crashed_process_are_gone_before_it_starts_again(ports: Reservations) -> None:
    async with supervised(spec("a", ports, "family")) as supervisor:
        events = supervisor.events()
        first = supervisor.status()[0].url
        # The first family's line came before `events` was asked for: it is in the log.
        line = next(line for line in supervisor.processes["a"].log.lines if line.startswith("family"))
        watched = Watched(relatives(line))
        await ask(f"{first}/die")
        await until(events, Started)
        assert watched.left_after(0) == set()


async def test_a_lost_guardian_takes_its_process_along_and_it_starts_again(ports: Reservations) -> None:
    async with supervised(spec("a", ports)) as supervisor:
        events = supervisor.events()
        child = supervisor.processes["a"].child
        assert child is not None
        watched = Watched([child.pid])
        os.kill(child._process.pid, signal.SIGKILL)
        assert (await until(events, Exited)).code is None
        await until(events, Ready)
        assert watched.left_after(0) == set()


async def test_a_slow_reader_of_events_misses_lines_but_no_event(ports: Reservations) -> None:
    supervisor = Supervisor([spec("a", ports)], policy=QUICK)
    events = supervisor.events()
    for number in range(BACKLOG + 10):
        supervisor._emit(Line("a", str(number)))
    await supervisor.start()
    await supervisor.stop()
    seen = [event async for event in events]
    assert sum(isinstance(e, Line) for e in seen) == BACKLOG
    assert [type(e) for e in seen if not isinstance(e, Line)] == [Started, Ready, Stopping, Stopped]


async def test_environment_is_laid_over_the_launchers_and_none_removes(ports: Reservations) -> None:
    show = ("/usr/bin/env",)
    supervisor = Supervisor(
        [spec("a", ports, argv=show, env={"ADDED": "1", "KEPT": "new", "GONE": None})],
        policy=QUICK,
        environ={"GONE": "x", "KEPT": "old", "PLAIN": "y"},
    )
    with pytest.raises(StartError) as caught:
        await supervisor.start()
    # In the C locale Python itself, which the guardian is, adds LC_CTYPE.
    assert {line for line in caught.value.last if "LC_CTYPE" not in line} == {"ADDED=1", "KEPT=new", "PLAIN=y"}
