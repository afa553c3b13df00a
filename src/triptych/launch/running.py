"""A topology, running: `async with launch(topology) as running`."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.launch.check import gateway_front, has_accelerator, missing, model_argument
from triptych.launch.events import Event
from triptych.launch.plan import GATEWAY, Plan, needs, plan
from triptych.launch.ports import Reservations
from triptych.launch.rundir import RunDirectory, disk_base, memory_base
from triptych.launch.site import Site
from triptych.launch.stages import SECRET
from triptych.launch.supervisor import Policy, Process, Status, Supervisor
from triptych.launch.topology import Topology
from triptych.transfer.connectors.survey import collect
from triptych.transfer.errors import ConnectorError

# What our EC connector's store may take in shared memory before its directory goes to disk instead.
MEMORY_NEED = 2 << 30
KEPT_LOG_DIRECTORIES = 10


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """One running process as a user of the library sees it. Live: `pid` changes when it is restarted."""

    _process: Process

    @property
    def name(self) -> str:
        return self._process.spec.name

    @property
    def role(self) -> str:
        return self._process.spec.role

    @property
    def url(self) -> str:
        return self._process.spec.url

    @property
    def log_path(self) -> Path | None:
        return self._process.log.path

    @property
    def pid(self) -> int | None:
        """The process's pid; None while it is down."""
        return self._process.child.pid if self._process.child else None

    @property
    def status(self) -> Status:
        return self._process.status()


class NotInstalled(Exception):
    """What a topology needs is not installed here. The message says what to do."""


class Running:
    """A started topology."""

    def __init__(self, topology: Topology, made: Plan, supervisor: Supervisor, log_dir: Path) -> None:
        self.topology = topology
        self.plan = made
        self.supervisor = supervisor
        self.log_dir = log_dir
        handles = {name: EngineHandle(process) for name, process in supervisor.processes.items()}
        self.gateway: EngineHandle | None = handles.pop(GATEWAY, None)
        self.engines: Mapping[str, EngineHandle] = handles
        self.gateway_url = made.gateway_url
        self.admin_url = made.admin_url


def _tidy() -> None:
    """Take away what ends of edges that have died left behind, of other runs too."""
    with contextlib.suppress(ConnectorError):
        collect()


def _secret() -> str:
    """That of the environment, where edges reach other machines; else one of this run's own."""
    return os.environ.get(SECRET) or secrets.token_hex(32)


@contextlib.asynccontextmanager
async def launch(
    topology: Topology,
    *,
    log_dir: Path | None = None,
    policy: Policy | None = None,
    prepared: Callable[[Running], None] | None = None,
    listener: Callable[[Event], None] | None = None,
) -> AsyncIterator[Running]:
    """Starts a topology, yields once all of it is ready, and stops it at the end.

    `prepared` is called with the `Running` before anything is started; `listener` gets every event.
    Raises SettingsError (gateway settings that do not validate), NotInstalled, PortError, StartError, OSError; nothing
    is left running or reserved then.
    """
    if problem := missing(topology):
        raise NotInstalled(problem)
    with contextlib.ExitStack() as stack:
        if topology.stages:
            _tidy()
            stack.callback(_tidy)
        front = gateway_front(topology)
        reserved = stack.enter_context(Reservations())
        ports = reserved.take(needs(topology, front))
        disk = stack.enter_context(RunDirectory(disk_base())).path
        memory = disk
        if topology.engines.encode and topology.ec.connector == "triptych" and not topology.ec.path:
            memory = stack.enter_context(RunDirectory(memory_base(MEMORY_NEED))).path
        site = Site(
            ports, sys.executable, model_argument(topology, write=True), disk, memory, has_accelerator(), _secret()
        )
        made = plan(topology, site, front)
        for directory in (disk / "kv", disk / "ec", memory / "ec"):
            directory.mkdir(mode=0o700, exist_ok=True)
        if made.gateway_file is not None:
            # It may hold keys; the directory is the user's alone, the file as well.
            fd = os.open(made.gateway_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                json.dump(made.gateway_config, file)
        logs = prepare_logs(topology, log_dir)
        supervisor = Supervisor(made.processes, log_dir=logs, policy=policy or Policy())
        running = Running(topology, made, supervisor, logs)
        if listener is not None:
            supervisor.listen(listener)
        if prepared is not None:
            prepared(running)
        try:
            await supervisor.start()
            yield running
        finally:
            await supervisor.stop()


def prepare_logs(topology: Topology, chosen: Path | None = None) -> Path:
    """A directory for this start's logs: the chosen one, the file's, or a new one under the user's state."""
    if chosen or topology.log_dir:
        directory = chosen or topology.near(topology.log_dir or Path())
        directory.mkdir(parents=True, exist_ok=True)
        return directory
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "triptych" / "logs"
    base.mkdir(parents=True, exist_ok=True)
    directory = base / f"{topology.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    directory.mkdir()
    old = sorted(base.glob(f"{topology.name}-*-*"), key=lambda path: path.stat().st_mtime)
    for path in old[:-KEPT_LOG_DIRECTORIES]:
        shutil.rmtree(path, ignore_errors=True)
    return directory
