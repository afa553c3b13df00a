"""What a topology meets on a machine, and one engine of it. Plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.launch.groups import EngineGroup
from triptych.launch.topology import Topology

# Labels of ports.
HTTP = "http"
SIDE = "side channel"
CHUNKS = "chunks"


@dataclass(frozen=True, slots=True)
class Site:
    """What has to be looked up before command lines can be written."""

    ports: Mapping[tuple[str, str], int]
    """first port of each need, by (process, label)"""
    python: str
    """interpreter for all processes"""
    model: str
    """what engines get as their model: a directory or a name on the hub"""
    disk: Path
    """directory of this run on disk"""
    memory: Path
    """directory of this run in memory, where there is some"""
    accelerator: bool
    """whether the machine has a GPU"""
    secret: str = ""
    """what the two ends of a pipeline's edge know of each other"""


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine of a topology."""

    role: str
    """a role, or the id of a stage"""
    index: int
    group: EngineGroup

    @property
    def name(self) -> str:
        """`encode-0`."""
        return f"{self.role}-{self.index}"

    @property
    def devices(self) -> str | None:
        """Its CUDA_VISIBLE_DEVICES, if the topology says."""
        return self.group.devices[self.index] if self.group.devices else None


def replicas(topology: Topology) -> Iterator[Replica]:
    """Every engine, in the order of roles or of stages."""
    groups: list[tuple[str, EngineGroup]] = [*topology.engines.groups(), *((s.id, s) for s in topology.stages)]
    for role, group in groups:
        for index in range(group.replicas):
            yield Replica(role, index, group)
