"""What a topology meets on a machine, and one engine of it. Plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.launch.topology import EngineGroup, Role, Topology

# Labels of ports.
HTTP = "http"
SIDE = "side channel"


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


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine of a topology."""

    role: Role
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
    """Every engine, in the order of roles."""
    for role, group in topology.engines.groups():
        for index in range(group.replicas):
            yield Replica(role, index, group)
