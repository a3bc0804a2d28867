#!/usr/bin/env bash
# The quickstart: a real mindformers training is killed in the middle of a save, the same command is
# run again, and the loss curve goes on as if nothing had happened. Exit status 0 only if it does, bit by bit.
#
#   bash scripts/quickstart.sh           4 processes, data parallel 2 x model parallel 2 (x86-64 Linux), about 5 minutes
#   bash scripts/quickstart.sh --quick   one process, about a minute
#
# Makes .venv and installs everything the first time. Results: output/quickstart (loss.png, the runs, their logs).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
exec "$PYTHON" st/quickstart.py "$@"
