#!/usr/bin/env bash
# Kills a real mindformers training on this machine in the middle of a save and runs the same command again. Exit status 0 only if
# the loss curve then continues as that of an uninterrupted training, bit for bit.
#
#   bash scripts/quickstart.sh           4 processes, data parallel 2 x model parallel 2 (x86-64 Linux), about 5 minutes
#   bash scripts/quickstart.sh --quick   one process, about a minute
#
# The first call makes .venv and installs everything. Results: output/quickstart (report.html, the runs, their logs).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
exec "$PYTHON" st/quickstart.py "$@"
