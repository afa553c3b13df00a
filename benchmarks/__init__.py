"""Benchmarks: what the gateway costs beside what others wrote, as ratios of one run. `make bench` runs them all."""
