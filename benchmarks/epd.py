"""What the encode stage costs: CPU of E+PD per 1 MB image request beside the plain plan's, same gateway."""

from __future__ import annotations

import statistics

from benchmarks.bars import Bar
from benchmarks.cost import MB, body
from benchmarks.rig import cpu_per, engine, free_port, request, started, triptych


def run(rounds: int = 5, seconds: float = 3.0) -> list[Bar]:
    """Plain and E+PD in turn."""
    data = request(body(image=MB))
    used: dict[str, list[float]] = {"plain": [], "E+PD": []}
    with engine() as encoder, engine() as consumer:
        plain = ["--combined", f"http://127.0.0.1:{consumer}"]
        plans = {"plain": plain, "E+PD": ["--encode", f"http://127.0.0.1:{encoder}", *plain]}
        for number in range(rounds):
            for name, flags in plans.items():
                port = free_port()
                with started(triptych(port, *flags), f"http://127.0.0.1:{port}") as process:
                    used[name].append(cpu_per(process, port, data, 16, seconds, events=False))
            line = "  ".join(f"{name} {values[-1]:.0f}" for name, values in used.items())
            print(f"  CPU per 1 MB image request, round {number + 1}: {line} µs", flush=True)
    ratio = statistics.median(e / p for e, p in zip(used["E+PD"], used["plain"], strict=True))
    detail = f"{statistics.median(used['E+PD']):.0f} / {statistics.median(used['plain']):.0f} µs"
    return [Bar("CPU per 1 MB image request, E+PD / plain", ratio, 2.3, detail)]
