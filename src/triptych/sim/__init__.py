"""A stand-in engine for load, faults and quick tests."""
