"""`python -m triptych.engine.vllm serve MODEL …`: stock vLLM's command line, in a process where it can start.

Same arguments, same output, same signals as `vllm`. What is different: an unsupported vLLM is refused before anything
is loaded, and the traps that triptych.engine.compat describes are cured in this process and in all below it.
"""

from __future__ import annotations

import os
import sys

from triptych.engine import compat
from triptych.engine.check import vllm_problem

#: Exit status where no usable vLLM is installed (EX_CONFIG of sysexits.h).
EXIT_UNUSABLE = 78


def main() -> int:
    """Run vLLM's command line with this process's arguments; returns the exit status."""
    problem = vllm_problem()
    if problem is not None:
        print(f"triptych: {problem}", file=sys.stderr)
        return EXIT_UNUSABLE
    found = compat.detect()
    compat.apply(found)
    compat.export(found, os.environ)

    from vllm.entrypoints.cli.main import main as vllm_main  # noqa: PLC0415 - only now can it be imported

    # argparse names the program after the script; this one is vLLM's in all but the start.
    sys.argv[0] = "vllm"
    vllm_main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
