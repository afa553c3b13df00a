"""Command line and environment of one engine of a pipeline, and what the gateway is told of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from triptych.engine.light import CPU_ENVIRONMENT, CPU_FLAGS, CPU_UNSET
from triptych.launch.pipeline import StageGroup
from triptych.launch.ports import reachable
from triptych.launch.site import CHUNKS, HTTP, Replica, Site, replicas
from triptych.launch.topology import Topology

SECRET = "TRIPTYCH_TRANSFER_SECRET"
"""Environment variable of what both ends of a TCP edge know (`triptych.transfer.connectors.auth`)."""
_SCHEDULER = "triptych.scheduling"
_WORKER = "triptych.stage"
# Beside what all light engines get: as many streams as a pipeline may carry, and whole chunks in one step.
_LIGHT = ("--max-num-seqs=32",)


class Started(Protocol):
    """What is known of a planned process."""

    @property
    def url(self) -> str: ...
    @property
    def ports(self) -> Mapping[str, int]: ...


def command(topology: Topology, site: Site, engine: Replica, *, light: bool) -> tuple[list[str], dict[str, str | None]]:
    """A stock vLLM server with a stage's scheduler and worker. Later words win in vLLM, so the file's come last."""
    stage = _stage(engine)
    argv = [site.python, "-m", "triptych.engine.vllm", "serve", model(topology, site, stage)]
    argv += ["--host", topology.host, "--port", str(site.ports[engine.name, HTTP])]
    argv += ["--served-model-name", topology.served_name, *((*CPU_FLAGS, *_LIGHT) if light else ())]
    kind = "gpu" if site.accelerator else "cpu"
    if stage.worker == "generation":
        argv += ["--scheduler-cls", f"{_SCHEDULER}.generation.GenerationScheduler", "--no-async-scheduling"]
    else:
        name = "AsyncARScheduler" if site.accelerator else "ARScheduler"
        argv += ["--scheduler-cls", f"{_SCHEDULER}.ar.{name}"]
        if stage.id != topology.stages[0].id:
            argv.append("--enable-prompt-embeds")  # what its chunks bring becomes embeddings
    argv += ["--worker-cls", f"{_WORKER}.{kind}.StageWorker"]
    argv += ["--additional-config", json.dumps({"stage": stage_config(topology, site, engine)})]
    argv += [*topology.args, *stage.args]
    env: dict[str, str | None] = {}
    if light:
        env |= dict.fromkeys(CPU_UNSET) | dict(CPU_ENVIRONMENT)
        if not _is_written(topology):
            del env["HF_HUB_OFFLINE"]  # a name on the hub may have to be fetched
    if site.accelerator:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the hooks are in the first one
    env |= topology.env | stage.env | secret(topology, site)
    if engine.devices is not None:
        env["CUDA_VISIBLE_DEVICES"] = engine.devices
    return argv, env


def secret(topology: Topology, site: Site) -> dict[str, str | None]:
    """The environment by which both ends of each edge know each other, where the edge is a network's."""
    return {SECRET: site.secret} if _is_tcp(topology) else {}


def model(topology: Topology, site: Site, stage: StageGroup) -> str:
    """What vLLM gets as a stage's model."""
    if stage.model and stage.model.startswith(("/", "./", "../", "~")):
        return str(topology.near_text(stage.model))
    if _is_written(topology):
        return f"{site.model}/{stage.model or stage.id}"
    return stage.model or site.model


def _is_written(topology: Topology) -> bool:
    """Whether the pipeline's model is a directory with one for each stage."""
    return bool(topology.model.tiny or topology.model_directory)


def stage_config(topology: Topology, site: Site, engine: Replica) -> dict[str, Any]:
    """What the stage is told of itself (`triptych.scheduling.config`)."""
    stage = _stage(engine)
    number = [each.id for each in topology.stages].index(stage.id)
    extra = {**stage.connector.extra, **stage.chunk, **_ours(topology, site)}
    extra["port"] = site.ports[engine.name, CHUNKS]
    if _is_tcp(topology):
        extra["host"] = topology.host
        extra["advertise"] = reachable(topology.host).strip("[]")
    config: dict[str, Any] = {
        "id": number,
        "name": stage.id,
        "role": "both" if number else "sender",
        "worker": stage.worker,
        "connector": {"name": stage.connector.name, "extra": extra},
        "processor": stage.processor,
        "window": stage.window,
        "chunk_timeout": stage.chunk_timeout,
    }
    if stage.take:
        config["take"] = stage.take
    if not topology.overlap:
        config["overlap"] = False
    return config


def gateway_config(topology: Topology, site: Site | None, known: Mapping[str, Started]) -> dict[str, Any]:
    """The gateway's settings of the pools and of the sound. A process not known has a stand-in, to be validated."""
    pools: dict[str, list[dict[str, Any]]] = {stage.id: [] for stage in topology.stages}
    host = reachable(topology.host).strip("[]")
    for number, engine in enumerate(replicas(topology), 1):
        spec = known.get(engine.name)
        port = spec.ports[CHUNKS] if spec else number
        url = spec.url if spec else f"http://{engine.role}:{engine.index + 1}"
        pools[engine.role].append({"url": url, "source": f"{host}:{port}"})
    first, *later = topology.stages
    last = topology.stages[-1]
    extra = {
        **last.connector.extra,
        **({} if site is None else _ours(topology, site)),
        "stage_id": len(topology.stages),
    }
    sound: dict[str, Any] = {"connector": last.connector.name, "extra": extra, "text_stage": first.id}
    if "max_tokens" in first.model_fields_set:
        sound["text_tokens"] = first.max_tokens
    return {
        "combined": pools[first.id],
        "stages": [{"id": stage.id, "max_tokens": stage.max_tokens, "engines": pools[stage.id]} for stage in later],
        "sound": sound,
    }


def edges(topology: Topology) -> Iterable[tuple[str, str, str]]:
    """What goes from where to where, and how."""
    for stage, following in zip(topology.stages, [*(s.id for s in topology.stages[1:]), "gateway"], strict=True):
        yield stage.id, following, f"chunks by {stage.connector.name}, made by {stage.processor}"


def _ours(topology: Topology, site: Site) -> dict[str, Any]:
    """What keeps the edges of one run apart from those of another."""
    return {"deployment": f"{topology.name}-{site.disk.name}"}


def _is_tcp(topology: Topology) -> bool:
    return any(stage.connector.name == "tcp" for stage in topology.stages)


def _stage(engine: Replica) -> StageGroup:
    assert isinstance(engine.group, StageGroup)
    return engine.group
