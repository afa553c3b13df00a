"""Starts processes, waits until they are ready, restarts what crashes, stops everything in order.

Knows nothing of topologies or roles: it is given `ProcessSpec`s. What happens comes out as events.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.launch import probe
from triptych.launch.child import Child
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
    exit_reason,
)
from triptych.launch.logs import Log
from triptych.launch.plan import ProcessSpec

# Events that a slow reader of `events()` may fall behind before lines of output are dropped for it.
BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Policy:
    """When a crashed process starts again. Times are seconds."""

    first_delay: float = 1.0
    longest_delay: float = 30.0
    limit: int = 5
    """crashes in a row after which a process stays down"""
    stable: float = 60.0
    """ready for so long, and earlier crashes are forgotten"""
    probe_interval: float = 0.1
    """between two looks at a process that starts; grows fivefold while it does"""

    def delay(self, attempt: int) -> float:
        """How long to wait before the `attempt`th start in a row, from 1."""
        return min(self.longest_delay, self.first_delay * 2.0 ** (attempt - 1))


class StartError(Exception):
    """A process did not become ready. `last` holds the last lines of its output."""

    def __init__(self, process: str, reason: str, last: tuple[str, ...], log_path: Path | None) -> None:
        super().__init__(f"{process} {reason}")
        self.process = process
        self.reason = reason
        self.last = last
        self.log_path = log_path

    def report(self) -> str:
        """All that a user needs to see what went wrong."""
        text = str(self)
        if self.last:
            text += "; its last lines:\n" + "\n".join(f"    {line}" for line in self.last)
        return text + (f"\nAll of its output: {self.log_path}" if self.log_path else "")


@dataclass(frozen=True, slots=True)
class Status:
    """One process at this moment."""

    name: str
    role: str
    state: State
    pid: int | None
    url: str
    restarts: int
    """starts after the first one"""
    since: float
    """seconds in this state"""
    last_line: str
    log_path: Path | None


class Process:
    """One supervised process: its specification, its state, its log. Owned by a Supervisor."""

    def __init__(self, spec: ProcessSpec, log: Log) -> None:
        self.spec = spec
        self.log = log
        self.state = State.WAITING
        self.since = time.monotonic()
        self.starts = 0
        self.child: Child | None = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """done once the process was ready for the first time; a StartError if it never will be"""
        self.task: asyncio.Task[None] | None = None

    def status(self) -> Status:
        pid = self.child.pid if self.child else None
        last = self.log.lines[-1] if self.log.lines else ""
        return Status(
            self.spec.name,
            self.spec.role,
            self.state,
            pid,
            self.spec.url,
            max(0, self.starts - 1),
            time.monotonic() - self.since,
            last,
            self.log.path,
        )


class Supervisor:
    """Runs a set of processes. `start` once, `stop` in the end.

    Listeners and `events()` see every event in order. Must be made and used in one running event loop.
    """

    def __init__(
        self,
        specs: Iterable[ProcessSpec],
        *,
        log_dir: Path | None = None,
        policy: Policy | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`environ`: what the processes' environments are laid over; the launcher's own if None."""
        self.processes: dict[str, Process] = {}
        for spec in specs:
            log = Log(log_dir / f"{spec.name}.log" if log_dir else None)
            self.processes[spec.name] = Process(spec, log)
        self._policy = policy or Policy()
        self._environ = dict(os.environ if environ is None else environ)
        self._listeners: list[Callable[[Event], None]] = []
        self._queues: list[asyncio.Queue[Event | None]] = []
        self._stopper: asyncio.Task[None] | None = None
        self._force = asyncio.Event()

    async def start(self) -> None:
        """Starts all processes and waits until all are ready.

        Raises StartError, after everything was stopped again, if one cannot become ready. When cancelled it stops
        everything first, too.
        """
        for process in self.processes.values():
            process.task = asyncio.create_task(self._run(process), name=process.spec.name)
        try:
            started = [process.started for process in self.processes.values()]
            await asyncio.wait(started, return_when=asyncio.FIRST_EXCEPTION)
            for future in started:
                if future.done() and not future.cancelled() and (error := future.exception()):
                    raise error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stops everything: higher tiers first, each process by SIGTERM and after its deadline by SIGKILL.

        Idempotent; goes on in the background if the caller is cancelled. Every descendant is gone on return.
        """
        if self._stopper is None:
            self._stopper = asyncio.create_task(self._stop_all(), name="stop")
        await asyncio.shield(self._stopper)

    def kill(self) -> None:
        """Makes a running or coming `stop` kill at once instead of waiting."""
        self._force.set()

    def status(self) -> tuple[Status, ...]:
        """All processes at this moment."""
        return tuple(process.status() for process in self.processes.values())

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Calls `listener` with every event from now on. It must not block or raise."""
        self._listeners.append(listener)

    def events(self) -> AsyncIterator[Event]:
        """Every event from this call on, until all is stopped. Who reads too slowly misses lines of output, no more."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._queues.append(queue)
        return self._read(queue)

    async def _read(self, queue: asyncio.Queue[Event | None]) -> AsyncIterator[Event]:
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            with contextlib.suppress(ValueError):
                self._queues.remove(queue)

    def _emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)
        for queue in self._queues:
            if queue.qsize() < BACKLOG or not isinstance(event, Line):
                queue.put_nowait(event)

    def _move(self, process: Process, state: State, event: Event | None = None) -> None:
        process.state = state
        process.since = time.monotonic()
        if event is not None:
            self._emit(event)

    async def _run(self, process: Process) -> None:
        """One process's life: until it fails for good, or the task is cancelled because everything stops."""
        spec = process.spec
        for other in self.processes.values():
            if other.spec.tier < spec.tier or other.spec.name in spec.after:
                try:
                    await asyncio.shield(other.started)
                except (StartError, asyncio.CancelledError):
                    process.started.cancel()
                    return
        crashes = 0
        while True:
            reason, ready_for = await self._once(process)
            last = tuple(process.log.lines)
            if not process.started.done():
                self._move(process, State.FAILED)
                process.started.set_exception(StartError(spec.name, reason, last, process.log.path))
                return
            crashes = 1 if ready_for >= self._policy.stable else crashes + 1
            if crashes > self._policy.limit:
                process.log.note(f"gave up after {crashes} crashes in a row")
                self._move(process, State.FAILED, GaveUp(spec.name, crashes, last))
                return
            delay = self._policy.delay(crashes)
            process.log.note(f"{reason}; starts again in {delay:g} s")
            backing_off = BackingOff(spec.name, delay, crashes, self._policy.limit)
            self._move(process, State.BACKING_OFF, backing_off)
            await asyncio.sleep(delay)

    async def _once(self, process: Process) -> tuple[str, float]:
        """One run of a process. Returns why it ended, and for how many seconds it was ready."""
        spec, name = process.spec, process.spec.name
        environ = {**self._environ, **spec.env}
        begun = time.monotonic()
        process.starts += 1
        self._move(process, State.STARTING)
        try:
            child = await Child.start(
                spec.argv,
                {key: value for key, value in environ.items() if value is not None},
                lambda data: self._lines(process, process.log.feed(data)),
            )
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
            return f"could not be started: {error}", 0.0
        process.child = child
        self._emit(Started(name, child.pid, process.starts - 1))
        exited = asyncio.create_task(child.exited())
        probing = asyncio.create_task(self._until_ready(spec.ready_url))
        ready_at: float | None = None
        overdue = False
        try:
            await asyncio.wait({exited, probing}, timeout=spec.start_timeout, return_when=asyncio.FIRST_COMPLETED)
            if probing.done() and not exited.done():
                ready_at = time.monotonic()
                self._move(process, State.READY, Ready(name, ready_at - begun))
                if not process.started.done():
                    process.started.set_result(None)
            elif not exited.done():
                overdue = True
                self._emit(Overdue(name, spec.start_timeout))
                child.kill()
            code = await exited
        finally:
            exited.cancel()
            probing.cancel()
        # Leftover children still end; they may hold the port or the device, so nothing starts before they are gone.
        ready_for = time.monotonic() - ready_at if ready_at is not None else 0.0
        if not overdue:
            self._emit(Exited(name, code))
        await child.gone()
        self._lines(process, process.log.flush())
        process.child = None
        if overdue:
            return f"was not ready on {spec.ready_url} after {spec.start_timeout:g} s", ready_for
        return exit_reason(code), ready_for

    async def _until_ready(self, url: str) -> None:
        interval = self._policy.probe_interval
        while not await probe.ready(url):
            await asyncio.sleep(interval)
            interval = min(interval * 1.2, self._policy.probe_interval * 5)

    def _lines(self, process: Process, lines: list[str]) -> None:
        for line in lines:
            self._emit(Line(process.spec.name, line))

    async def _stop_all(self) -> None:
        # Nothing starts any more, in no tier, before anything is stopped: what waits for an engine would come up.
        for process in self.processes.values():
            if process.task is not None:
                process.task.cancel()
        await asyncio.gather(*(p.task for p in self.processes.values() if p.task), return_exceptions=True)
        for tier in sorted({p.spec.tier for p in self.processes.values()}, reverse=True):
            await asyncio.gather(*(self._stop(p) for p in self.processes.values() if p.spec.tier == tier))
        for process in self.processes.values():
            process.log.close()
            if process.started.done() and not process.started.cancelled():
                process.started.exception()  # was reported by `start`
            process.started.cancel()
        for queue in self._queues:
            queue.put_nowait(None)

    async def _stop(self, process: Process) -> None:
        child, name, deadline = process.child, process.spec.name, process.spec.stop_timeout
        if child is None:
            if process.state is not State.FAILED:
                self._move(process, State.STOPPED)
            return
        self._move(process, State.STOPPING, Stopping(name, deadline))
        child.terminate()
        gone = asyncio.create_task(child.gone())
        forced = asyncio.create_task(self._force.wait())
        await asyncio.wait({gone, forced}, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not gone.done():
            child.kill()
            self._emit(Killed(name))
        await gone
        process.child = None
        self._lines(process, process.log.flush())
        self._move(process, State.STOPPED, Stopped(name))
