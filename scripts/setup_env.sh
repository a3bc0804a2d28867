#!/usr/bin/env bash
# Makes .venv if it is missing and installs mindresume with everything that its tests and its demonstration need.
# Sourced by quickstart.sh and test.sh; sets PYTHON to the interpreter of .venv. Does nothing when all is there already.
#
#   PYTHON_BOOTSTRAP=/path/to/python3.11   the interpreter to make .venv with (default: python3)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"
BOOTSTRAP="${PYTHON_BOOTSTRAP:-python3}"

if ! "$BOOTSTRAP" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null; then
    echo "mindformers 1.9.0 with mindspore 2.9.0 needs Python 3.10 or 3.11; found: $("$BOOTSTRAP" --version 2>&1 || true)." >&2
    echo "Install one and name it: PYTHON_BOOTSTRAP=/path/to/python3.11 $0" >&2
    exit 2
fi
if [ ! -x "$PYTHON" ]; then
    echo "== making $VENV"
    if ! "$BOOTSTRAP" -m venv "$VENV" 2>/dev/null; then          # Debian without python3-venv has no ensurepip
        "$BOOTSTRAP" -m venv --clear --without-pip "$VENV"
        "$BOOTSTRAP" -m pip --python "$PYTHON" install --quiet pip
    fi
fi
STAMP="$VENV/.mindresume-$(cat "$ROOT/setup.py" "$ROOT/mindresume/__init__.py" | cksum | tr ' ' '-')"
if [ ! -e "$STAMP" ]; then
    echo "== installing mindformers, mindspore and mindresume into .venv (about 1.5 GB, 5 to 10 minutes the first time)"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check "setuptools>=64,<81" wheel
    # --no-compile: what is never imported need not be compiled; the rest is when it is
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile --no-build-isolation -e "$ROOT[mindformers,test]"
    rm -f "$VENV"/.mindresume-*
    touch "$STAMP"
fi

# strace, with which st/test_syscalls.py looks at the system calls of a save. Called by test.sh; never ends the script: without
# strace that test fails and says so.
need_strace() {
    command -v strace >/dev/null && return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "== installing strace (for st/test_syscalls.py)"
        export DEBIAN_FRONTEND=noninteractive
        apt-get install -y -qq strace >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq strace >/dev/null; } || true
    fi
    command -v strace >/dev/null && return 0
    echo "strace is missing and cannot be installed from here (that needs root and apt-get). st/test_syscalls.py will fail." >&2
    echo "Install it (apt-get install strace, dnf install strace), or leave it out: test.sh --ignore st/test_syscalls.py" >&2
}
export PYTHON PATH="$VENV/bin:$PATH"
