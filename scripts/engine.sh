#!/usr/bin/env bash
# Installs vLLM into the environment of PYTHON: the stock build where there is an NVIDIA GPU, else the CPU build.
#
#   scripts/engine.sh PYTHON [auto|gpu|cpu]
set -euo pipefail

python=$1
kind=${2:-auto}

fail() {
    echo >&2
    echo "vLLM cannot be installed here: $1." >&2
    echo "Everything but real engines works without it:" >&2
    echo "    make demo ARGS='--engine sim'     the demo with simulated engines" >&2
    echo "    make test-fast                    all tests that start no vLLM" >&2
    exit 1
}

case $kind in
auto | cpu | gpu) ;;
*)
    echo "ENGINE must be auto, cpu or gpu, not $kind" >&2
    exit 2
    ;;
esac
[[ $(uname -s) == Linux ]] || fail "it runs on Linux, and this is $(uname -s)"
"$python" -m triptych.engine.install --kind "$kind" || fail "the installation failed, see above"
