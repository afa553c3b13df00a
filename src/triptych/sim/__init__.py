"""A stand-in engine for load, faults and quick tests."""

from triptych.sim.config import Costs, SimConfig
from triptych.sim.faults import Fault
from triptych.sim.seen import Cancel, Seen, SeenRequest
from triptych.sim.sim import Sim
from triptych.sim.store import MemoryStore

__all__ = ["Cancel", "Costs", "Fault", "MemoryStore", "Seen", "SeenRequest", "Sim", "SimConfig"]
