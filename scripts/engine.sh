#!/usr/bin/env bash
# Installs vLLM into the environment of PYTHON: the stock build where there is an NVIDIA GPU, else the CPU build.
#
#   scripts/engine.sh PYTHON [auto|gpu|cpu]
set -euo pipefail

python=$1
kind=${2:-auto}
here=$(dirname "$0")

if [[ $kind == auto ]]; then
    kind=cpu
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then kind=gpu; fi
fi

fail() {
    echo >&2
    echo "vLLM cannot be installed here: $1." >&2
    echo "Everything but real engines works without it:" >&2
    echo "    make demo ARGS='--engine sim'     the demo with simulated engines" >&2
    echo "    make test-fast                    all tests that start no vLLM" >&2
    exit 1
}

[[ $(uname -s) == Linux ]] || fail "it runs on Linux, and this is $(uname -s)"

case $kind in
gpu)
    "$here/step.sh" "Installing vLLM for the GPU (several GB, minutes, once)" \
        "$python" -m pip install -e '.[engine]' av soundfile soxr nixl || fail "pip failed, see above"
    ;;
cpu)
    "$here/step.sh" "Installing vLLM for the CPU (3.5 GB, minutes, once)" \
        bash "$here/setup-engine.sh" "$python" || fail "the installation failed, see above"
    ;;
*)
    echo "ENGINE must be auto, cpu or gpu, not $kind" >&2
    exit 2
    ;;
esac
