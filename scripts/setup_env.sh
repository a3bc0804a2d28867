#!/usr/bin/env bash
# Makes .venv if it is missing and installs mindresume with everything that its tests and the quickstart need.
# Sourced by quickstart.sh and test.sh; sets PYTHON to the interpreter of .venv. Does nothing if everything is installed already.
# As root, apt-get installs missing system packages (machine.sh); otherwise they are named.
#
#   PYTHON_BOOTSTRAP=/path/to/python3.11   the interpreter to make .venv with (default: python3)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"
BOOTSTRAP="${PYTHON_BOOTSTRAP:-python3}"
source "$ROOT/scripts/machine.sh"

if ! "$BOOTSTRAP" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null; then
    echo "mindformers 1.9.0 with mindspore 2.9.0 needs Python 3.10 or 3.11; found: $("$BOOTSTRAP" --version 2>&1 || true)." >&2
    echo "Install one and name it: PYTHON_BOOTSTRAP=/path/to/python3.11 $0" >&2
    exit 2
fi
need_system "MindSpore is linked with libgomp.so.1" libgomp1 libgomp has_library "$BOOTSTRAP" libgomp.so.1 || exit 2
if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then              # missing, or an earlier call was interrupted
    echo "== making $VENV"
    make_venv "$BOOTSTRAP" "$VENV" || exit 2
fi
STAMP="$VENV/.mindresume-$(cat "$ROOT/pyproject.toml" "$ROOT/mindresume/__init__.py" | cksum | tr ' ' '-')"
if [ ! -e "$STAMP" ]; then
    echo "== installing mindformers, mindspore and mindresume into .venv (about 4 GB, 5 to 10 minutes the first time)"
    quietly "$PYTHON" -m pip install --quiet --disable-pip-version-check "setuptools>=77,<81" wheel || exit 1
    # --no-compile: many modules are never imported; the others are compiled at their first import
    quietly "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile --no-build-isolation \
        -e "$ROOT[mindformers,test]" || exit 1
    rm -f "$VENV"/.mindresume-*
    touch "$STAMP"
fi

export PYTHON PATH="$VENV/bin:$PATH"
