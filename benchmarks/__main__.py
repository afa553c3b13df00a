"""usage: python -m benchmarks [NAME ...] [--rounds N] [--seconds S]

Runs the benchmarks (all, or those named) and prints ratios of this run; exits 1 if one misses its bar.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from benchmarks import cost, duplicate_keys, epd, latency, memory, pipeline, transfer
from benchmarks.bars import Bar


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What the gateway costs, as ratios.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="cost, epd, memory, latency, duplicate_keys, transfer, pipeline"
    )
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="load per measurement (default 3)")
    asked = parser.parse_args()
    known: dict[str, Callable[[], list[Bar]]] = {
        "cost": lambda: cost.run(asked.rounds, asked.seconds),
        "epd": lambda: epd.run(asked.rounds, asked.seconds),
        "memory": memory.run,
        "latency": latency.run,
        "duplicate_keys": duplicate_keys.run,
        "transfer": lambda: transfer.run(asked.rounds),
        "pipeline": lambda: pipeline.run(asked.rounds),
    }
    unknown = [name for name in asked.names if name not in known]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(known)}")
    bars: list[Bar] = []
    for name, run in known.items():
        if not asked.names or name in asked.names:
            print(f"{name}: {sys.modules[f'benchmarks.{name}'].__doc__}".split("\n", 1)[0], flush=True)
            bars += run()
    print()
    for bar in bars:
        print(bar)
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
