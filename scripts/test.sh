#!/usr/bin/env bash
# Sets up .venv if it is missing, then runs everything: ruff, the unit tests (tests/) and the system tests (st/: the real
# Trainer in real processes). Arguments go to pytest of st/.   FAST=1: without st/.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
echo "== ruff"
"$PYTHON" -m ruff check .
echo "== unit tests"
"$PYTHON" -m pytest -q -n 2 --dist worksteal tests
if [ "${FAST:-0}" != 1 ]; then
    need_strace
    echo "== system tests"
    "$PYTHON" -m pytest -q --durations=10 st "$@"
fi
