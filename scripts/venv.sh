#!/usr/bin/env bash
# Makes the virtual environment DIR with a Python that Triptych runs on; keeps one that works.
#
#   scripts/venv.sh DIR          PYTHON=… names the interpreter to use
set -euo pipefail

directory=$1
usable='import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 14) else 1)'

if [[ -x $directory/bin/python ]] && "$directory/bin/python" -c "$usable" 2>/dev/null &&
    "$directory/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

found=
for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if command -v "$candidate" >/dev/null && "$candidate" -c "$usable" 2>/dev/null; then
        found=$candidate
        break
    fi
done
if [[ -z $found ]]; then
    have=$("${PYTHON:-python3}" --version 2>&1) || have="none"
    echo "Triptych needs Python 3.11 to 3.14, and ${PYTHON:-python3} is: $have." >&2
    echo "Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv), or name it: make setup PYTHON=/path/to/python3" >&2
    exit 1
fi
version=$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if ! "$found" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "$found ($version) cannot make a virtual environment: its venv module is missing." >&2
    echo "Install it (Debian, Ubuntu: apt install python$version-venv), then run make again." >&2
    exit 1
fi

# --clear: what is there is half an environment, left by an interrupted run, or one of another Python.
"$(dirname "$0")/step.sh" "Making $directory with Python $version" "$found" -m venv --clear "$directory"
