"""What a person sees of a running topology: progress while it starts, prefixed logs, what went wrong.

All writing is done by a thread of its own: a terminal stopped with Ctrl-S, or a slow pipe, must not stop supervision.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

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
from triptych.launch.load import Load
from triptych.launch.supervisor import Supervisor

PALETTE = ("cyan", "magenta", "yellow", "green", "blue", "bright_red", "bright_cyan", "bright_magenta")
STATE_STYLE = {State.READY: "green", State.FAILED: "bold red", State.BACKING_OFF: "yellow"}
# Lines of output that may wait for the terminal; more are only in the log files.
WAITING_LINES = 5000
CLOSING = 2.0
SPINNER = "|/-\\"


class Display:
    """Shows events. `close` it in the end. A terminal gets colours and a live table, anything else plain lines."""

    def __init__(self, file: IO[str], *, plain: bool = False, quiet: bool = False) -> None:
        """`plain`: no colours, no live table, even on a terminal. `quiet`: no lines of the processes' output."""
        self._console = Console(file=file, highlight=False, markup=False, soft_wrap=True, no_color=plain or None)
        self._quiet = quiet
        self._live: Live | None = None
        self._wants_live = self._console.is_terminal and not plain
        self._supervisor: Supervisor | None = None
        self._colours: Mapping[str, str] = {}
        self._width = 0
        self._began = time.monotonic()
        self._dropped = 0
        self._loads: Mapping[str, Load | None] = {}
        self._closing = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="display", daemon=True)
        self._thread.start()

    def watch(self, supervisor: Supervisor) -> None:
        """Shows what this supervisor does, from now on."""
        names = list(supervisor.processes)
        self._supervisor = supervisor
        self._colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}
        self._width = max(map(len, names), default=0)
        if self._wants_live:
            self._work.put(self._start_live)
        supervisor.listen(self._event)

    def say(self, text: str, style: str = "") -> None:
        """Prints the launcher's own words."""
        self._work.put(lambda: self._console.print(Text(text, style)))

    def started(self) -> None:
        """Takes the live table away: all is ready."""
        self._work.put(self._stop_live)

    @property
    def live(self) -> bool:
        """Whether there is a table that changes."""
        return self._wants_live

    def loads(self, loads: Mapping[str, Load | None]) -> None:
        """Shows what the processes have to do, in a live table below everything else, until the display is closed."""
        if self._wants_live:
            self._work.put(lambda: self._show_loads(loads))

    def _show_loads(self, loads: Mapping[str, Load | None]) -> None:
        self._loads = loads
        if self._live is None and not self._closing:
            self._start_live()

    def close(self) -> None:
        """Writes what is left, as far as the terminal takes it, and ends."""
        self._closing = True
        self._work.put(self._stop_live)
        self._work.put(None)
        self._thread.join(CLOSING)

    def _event(self, event: Event) -> None:
        if isinstance(event, Line):
            if self._quiet or not event.text:
                return
            if self._work.qsize() > WAITING_LINES:
                self._dropped += 1
                return
            if self._dropped:
                self.say(f"({self._dropped} lines of output not shown here; they are in the log files)", "dim")
                self._dropped = 0
            name, text = event.process, event.text
            self._work.put(lambda: self._console.print(self._prefix(name), Text(text), sep=""))
        elif said := words(event):
            self.say(*said)

    def _prefix(self, name: str) -> Text:
        return Text(f"{name:<{self._width}} | ", self._colours.get(name, ""))

    def _write(self) -> None:
        while (job := self._work.get()) is not None:
            try:
                job()
            except (OSError, ValueError):
                continue  # the terminal is gone; the log files have it all

    def _start_live(self) -> None:
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=4, transient=True)
        self._live.start(refresh=True)

    def _stop_live(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _table(self) -> Table:
        return self._loads_table() if self._loads else self._starts_table()

    def _loads_table(self) -> Table:
        """Stages (or roles), and what they have to do."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for title in ("", "state", "streams", "waiting", "KV"):
            table.add_column(title, no_wrap=True, justify="left" if title in ("", "state") else "right")
        for status in self._supervisor.status() if self._supervisor else ():
            load = self._loads.get(status.name)
            told = (
                ("-", "-", "")
                if load is None
                else (str(load.running + load.waiting), str(load.waiting), _percent(load))
            )
            table.add_row(
                Text(status.name, self._colours.get(status.name, "")),
                Text(status.state.value, STATE_STYLE.get(status.state, "")),
                *(Text(each, "" if load is not None and load.running + load.waiting else "dim") for each in told),
            )
        return table

    def _starts_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for _ in range(3):
            table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        spin = SPINNER[int(time.monotonic() * 4) % len(SPINNER)]
        for status in self._supervisor.status() if self._supervisor else ():
            working = status.state in (State.STARTING, State.STOPPING)
            table.add_row(
                Text(status.name, self._colours.get(status.name, "")),
                Text(f"{spin if working else ' '} {status.state.value}", STATE_STYLE.get(status.state, "")),
                Text(f"{status.since:4.0f} s" if working else ""),
                Text(status.last_line if status.state is State.STARTING else "", "dim"),
            )
        return table


def _percent(load: Load) -> str:
    return "" if load.cache is None else f"{load.cache * 100:.0f} %"


def words(event: Event) -> tuple[str, str] | None:
    """An event in words for people, and their style; None for lines of output."""
    name = event.process
    match event:
        case Started(pid=pid, attempt=attempt):
            return f"{name} starts{' again' if attempt else ''} (pid {pid})", "dim"
        case Ready(seconds=seconds):
            return f"{name} is ready after {seconds:.1f} s", "green"
        case Exited(code=code):
            return f"{name} {exit_reason(code)}", "bold red"
        case Overdue(seconds=seconds):
            return f"{name} was not ready after {seconds:g} s and is killed", "bold red"
        case BackingOff(seconds=seconds, attempt=attempt, limit=limit):
            return f"{name} starts again in {seconds:g} s (restart {attempt} of at most {limit} in a row)", "yellow"
        case GaveUp(attempts=attempts, last=last):
            tail = "".join(f"\n    {line}" for line in last)
            return f"{name} crashed {attempts} times in a row and stays down; its last lines:{tail}", "bold red"
        case Stopping(seconds=seconds):
            return f"{name} is told to end (within {seconds:g} s)", "dim"
        case Killed():
            return f"{name} did not end in time and is killed", "yellow"
        case Stopped():
            return f"{name} has ended", "dim"
        case _:
            return None
