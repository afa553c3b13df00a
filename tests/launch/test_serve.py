"""One topology from start to end: as a library, in a terminal, from the command line."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import types
import urllib.request
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests.launch.helpers import FAKE, Watched, ask, until
from triptych.cli.serve import check
from triptych.cli.serve import serve as serve_command
from triptych.launch import engines, probe
from triptych.launch.display import WAITING_LINES, Display, words
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
from triptych.launch.ports import PortError
from triptych.launch.running import KEPT_LOG_DIRECTORIES, Running, launch, prepare_logs
from triptych.launch.serve import FAILED, FORCED, STOPPED, serve
from triptych.launch.site import HTTP, Replica, Site
from triptych.launch.supervisor import Policy, StartError, Supervisor
from triptych.launch.topology import Topology

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
QUICK = Policy(first_delay=0.01, limit=2, probe_interval=0.01)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated engines are replaced by fake ones, which start at once. Their modes are the topology's args."""

    def fake(topology: Topology, site: Site, engine: Replica) -> engines.Command:
        port = str(site.ports[engine.name, HTTP])
        return [sys.executable, "-I", "-S", FAKE, port, *topology.args, *engine.group.args], {}

    monkeypatch.setattr(engines, "simulated", fake)


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def fake_topology(**data: Any) -> Topology:
    return Topology.model_validate({"engine": "sim", "engines": {"combined": 1}, "gateway": False, **data})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# --- as a library


@pytest.mark.usefixtures("fakes")
async def test_a_launched_topology_has_url_pid_and_log_of_each_engine_and_leaves_nothing() -> None:
    topology = fake_topology(engines={"encode": 1, "combined": 2}, ec="example")
    async with launch(topology, policy=QUICK) as running:
        assert sorted(running.engines) == ["combined-0", "combined-1", "encode-0"]
        engine = running.engines["encode-0"]
        assert engine.role == "encode"
        assert await probe.ready(f"{engine.url}/health")
        assert engine.log_path is not None
        assert "starting" in engine.log_path.read_text()
        assert engine.status.state is State.READY
        watched = Watched(engine.pid or 0 for engine in running.engines.values())
        assert (running.gateway, running.gateway_url) == (None, None)
        first = engine.pid
        events = running.supervisor.events()
        await ask(f"{engine.url}/exit")
        await until(events, Ready)
        assert engine.pid not in (first, None)
    assert watched.left_after(0) == set()
    assert engine.pid is None


async def test_the_gateway_gets_its_settings_in_a_private_file_and_is_ready_before_the_launch_yields(
    monkeypatch: pytest.MonkeyPatch, fakes: None
) -> None:
    monkeypatch.setenv("TRIPTYCH_LISTEN", "127.0.0.1:1")
    settings = {"listen": "127.0.0.1:0", "admin": "off", "api_keys": ["k-1"]}
    async with launch(fake_topology(gateway=settings), policy=QUICK) as running:
        assert running.gateway_url is not None
        assert await probe.ready(f"{running.gateway_url}/readyz")
        file = running.plan.gateway_file
        assert file is not None
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "k-1" in file.read_text()
    assert not file.exists()


@pytest.mark.usefixtures("fakes")
async def test_a_failed_start_gives_ports_and_directories_back() -> None:
    made: list[Running] = []
    with pytest.raises(StartError, match="combined-0 exited with code 3"):
        async with launch(fake_topology(args=["exit=3"]), policy=QUICK, prepared=made.append):
            raise AssertionError("it cannot be ready")
    port = made[0].plan.processes[0].ports[HTTP]
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))


@pytest.mark.usefixtures("fakes")
async def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        topology = fake_topology(engines={"combined": {"ports": port}})
        with pytest.raises(
            PortError, match=f"port {port} on 127.0.0.1, for http of combined-0, is already in use by pid"
        ):
            async with launch(topology):
                pass


def test_log_directories_of_earlier_starts_are_kept_up_to_a_number(tmp_path: Path) -> None:
    base = tmp_path / "state" / "triptych" / "logs"
    for number in range(KEPT_LOG_DIRECTORIES + 3):
        (base / f"topology-2020-{number}").mkdir(parents=True)
        os.utime(base / f"topology-2020-{number}", (number, number))
    (base / "other-2020-1").mkdir()
    new = prepare_logs(fake_topology())
    left = {path.name for path in base.iterdir()}
    assert {new.name, "other-2020-1", f"topology-2020-{KEPT_LOG_DIRECTORIES + 2}"} <= left
    assert len(left) == KEPT_LOG_DIRECTORIES + 1
    assert prepare_logs(fake_topology(), tmp_path / "mine") == tmp_path / "mine"


# --- served: signals and what is said


class Acting(Display):
    """Writes into `file`; sends this process a signal when an event of one of these kinds comes, or all is ready."""

    def __init__(
        self,
        signals: dict[type[Event], signal.Signals],
        file: io.StringIO | None = None,
        when_ready: signal.Signals | None = None,
    ) -> None:
        self.file = file or io.StringIO()
        self._when_ready = when_ready
        self._signals = signals
        super().__init__(self.file)

    def watch(self, supervisor: Supervisor) -> None:
        super().watch(supervisor)
        supervisor.listen(self._act)

    def started(self) -> None:
        super().started()
        if self._when_ready:
            os.kill(os.getpid(), self._when_ready)

    def _act(self, event: Event) -> None:
        if type(event) in self._signals:
            os.kill(os.getpid(), self._signals[type(event)])

    def text(self) -> str:
        self.close()
        return self.file.getvalue()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_stops_everything_in_order_with_status_zero(number: signal.Signals) -> None:
    display = Acting({}, when_ready=number)
    status = await asyncio.wait_for(serve(fake_topology(), display, policy=QUICK), 30)
    text = display.text()
    assert status == STOPPED
    assert f"{number.name}: stopping; once more to kill" in text
    assert text.endswith("combined-0 has ended\n")


@pytest.mark.usefixtures("fakes")
async def test_a_signal_while_starting_stops_what_there_is() -> None:
    display = Acting({Started: signal.SIGINT})
    assert await asyncio.wait_for(serve(fake_topology(args=["unready"]), display, policy=QUICK), 30) == STOPPED
    assert display.text().endswith("combined-0 has ended\n")


@pytest.mark.usefixtures("fakes")
async def test_a_second_signal_kills() -> None:
    display = Acting({Stopping: signal.SIGINT}, when_ready=signal.SIGINT)
    topology = fake_topology(args=["stubborn"], stop_timeout=600)
    assert await asyncio.wait_for(serve(topology, display, policy=QUICK), 30) == FORCED
    assert "combined-0 did not end in time and is killed" in display.text()


@pytest.mark.usefixtures("fakes")
async def test_a_failed_start_is_reported_with_the_last_lines_and_where_to_read_more() -> None:
    display = Acting({})
    assert await serve(fake_topology(args=["exit=9"]), display, policy=QUICK) == FAILED
    text = display.text()
    assert "triptych: combined-0 exited with code 9; its last lines:\n    starting exit=9\n    cannot go on\n" in text
    assert re.search(r"All of its output: \S+/combined-0\.log\n$", text)


@pytest.mark.usefixtures("fakes")
async def test_everything_ends_when_the_gateway_stays_down() -> None:
    display = Acting({})
    settings = {"listen": "127.0.0.1:0", "admin": "off"}
    gateways: list[int] = []

    def kill_gateway(supervisor: Supervisor) -> None:
        Acting.watch(display, supervisor)
        supervisor.listen(on_event)

    def on_event(event: Event) -> None:
        if isinstance(event, Started) and event.process == "gateway":
            gateways.append(event.pid)
        if isinstance(event, Ready) and event.process == "gateway":
            os.kill(gateways[-1], signal.SIGKILL)

    display.watch = kill_gateway  # type: ignore[method-assign]
    policy = Policy(first_delay=0.01, limit=0, probe_interval=0.01)
    assert await asyncio.wait_for(serve(fake_topology(gateway=settings), display, policy=policy), 60) == FAILED
    text = display.text()
    assert "gateway was killed by SIGKILL" in text
    assert "gateway crashed 1 times in a row and stays down" in text
    assert text.endswith("combined-0 has ended\n")


# --- what is shown


@pytest.mark.usefixtures("fakes")
async def test_plain_output_has_a_prefix_for_each_engine_and_no_escapes() -> None:
    display = Acting({}, when_ready=signal.SIGINT)
    await serve(fake_topology(engines={"encode": 1, "combined": 1}, ec="example"), display, policy=QUICK)
    text = display.text()
    assert "\nencode-0   | starting\n" in text
    assert "\ncombined-0 | starting\n" in text
    assert "\x1b" not in text


@pytest.mark.usefixtures("fakes")
async def test_quiet_output_has_no_lines_of_engines() -> None:
    display = Acting({}, when_ready=signal.SIGINT)
    display._quiet = True
    await serve(fake_topology(), display, policy=QUICK)
    text = display.text()
    assert "combined-0 is ready" in text
    assert "| starting" not in text


@pytest.mark.usefixtures("fakes")
async def test_a_terminal_shows_a_live_table_while_starting_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    display = Acting({}, Terminal(), signal.SIGINT)
    await serve(fake_topology(engines={"encode": 1, "combined": 1}, ec="example"), display, policy=QUICK)
    text = display.text()
    assert re.search(r"encode-0 +[|/\\-]? (waiting|starting)", re.sub(r"\x1b\[[0-9;]*m", "", text))
    assert "\x1b[36m" in text  # the first engine's colour
    assert "\x1b[?25h" in text  # the cursor is back


def test_a_terminal_that_takes_nothing_does_not_stop_the_launcher() -> None:
    class Stopped(io.StringIO):
        def write(self, text: str) -> int:
            held.wait(30)
            return len(text)

    held = threading.Event()
    display = Display(Stopped())
    supervisor = types.SimpleNamespace(processes={"a": None}, listen=lambda _: None)
    display.watch(supervisor)  # type: ignore[arg-type]
    for number in range(WAITING_LINES + 1000):
        display._event(Line("a", str(number)))
    assert display._work.qsize() <= WAITING_LINES + 1
    held.set()
    display.close()


def test_every_event_but_lines_has_words() -> None:
    made = {
        Started: Started("a", 1, 1), Ready: Ready("a", 1.0), Exited: Exited("a", None), Overdue: Overdue("a", 1.0),
        BackingOff: BackingOff("a", 1.0, 1, 5), GaveUp: GaveUp("a", 6, ("x",)), Stopping: Stopping("a", 1.0),
        Killed: Killed("a"), Stopped: Stopped("a"),
    }  # fmt: skip
    assert {kind.__name__ for kind in (*made, Line)} == {kind.__name__ for kind in Event.__subclasses__()}
    for event in made.values():
        said = words(event)
        assert said is not None
        assert said[0].startswith("a ")
    assert words(Line("a", "x")) is None


# --- from the command line


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_every_example_checks(file: Path) -> None:
    result = CliRunner().invoke(check, [str(file), "--commands"])
    assert result.exit_code == 0, result.output
    # A stage of a pipeline has no gateway of its own.
    assert ("clients -> gateway http://127.0.0.1:8000" in result.output) == ("stage" not in file.name)


def test_the_shortest_real_example_is_short() -> None:
    lines = (ROOT / "examples" / "e-pd.yaml").read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) < 15


def test_check_prints_the_graph_and_commands_that_a_shell_takes(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(
        "model: {tiny: image}\nlight: 'on'\nenv: {A: 'a b'}\n"
        "engines:\n  encode: {replicas: 2, ports: 7201}\n  combined: {ports: 7203}\n"
        "gateway: {listen: 127.0.0.1:7200, api_keys: [secret]}\n"
    )
    output = CliRunner().invoke(check, [str(file), "--commands"]).output
    assert output.startswith(
        "model tiny: 3 vLLM engines\n\n"
        "  clients -> gateway http://127.0.0.1:7200\n"
        "             |- encode x 2: http://127.0.0.1:7201, http://127.0.0.1:7202\n"
        "             `- combined x 1: http://127.0.0.1:7203\n\n"
        "  encode -> combined: EC triptych\n"
    )
    assert "secret" not in output
    command = next(line for line in output.splitlines() if "--port 7203" in line)
    words = shlex.split(command)
    assert words[:3] == ["env", "-u", "VLLM_CPU_KVCACHE_SPACE"]
    assert "A=a b" in words
    assert json.loads(words[words.index("--ec-transfer-config") + 1])["ec_role"] == "ec_consumer"


@pytest.mark.parametrize("command", [check, serve_command])
def test_a_wrong_file_ends_with_status_2_and_its_faults(command: click.Command, tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("engine: sim\nengines: {combined: 1}\ngateway: {listen: here}\n")
    result = CliRunner().invoke(command, [str(file)])
    assert result.exit_code == 2
    assert result.stderr == f"{file}:3: gateway.listen: 'here' is not of the form HOST:PORT\n"


def test_a_taken_port_ends_with_status_1_and_names_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        file = tmp_path / "t.yaml"
        file.write_text(f"engine: sim\nengines: {{combined: {{ports: {port}}}}}\ngateway: false\n")
        result = CliRunner().invoke(serve_command, [str(file)])
    assert result.exit_code == FAILED
    assert f"triptych: port {port} on 127.0.0.1, for http of combined-0, is already in use by pid" in result.output


def test_serve_from_the_command_line_answers_through_the_gateway_until_ctrl_c(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("engine: sim\nengines: {combined: 1}\ngateway: {listen: 127.0.0.1:0, admin: 'off'}\n")
    command = [sys.executable, "-m", "triptych", "serve", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pids, url, body = [], "", ""
        for line in process.stdout:
            if match := re.search(r"starts \(pid (\d+)\)", line):
                pids.append(int(match[1]))
            if match := re.search(r"curl (\S+) .* -d '(.*)'", line):
                url, body = match[1], match[2]
            if "Ctrl-C stops everything" in line:
                break
        watched = Watched(pids)
        request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == STOPPED
    assert watched.left_after(0) == set()
    assert rest.index("gateway has ended") < rest.index("combined-0 is told to end")
