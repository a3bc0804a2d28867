#!/usr/bin/env bash
# Makes .venv if it is missing, then runs ruff, the import contract, mypy and typos, the unit tests (tests/) and the system tests (st/:
# the real Trainer in real processes), and the short form of the release matrix, for which it makes the environments of other releases.
#
#   bash scripts/test.sh [ARGUMENT...]     arguments go to pytest of st/; --soak also to that of tests/: all system tests, the release
#                                          matrix whole, some hours longer, and more schedules of the simulation, some minutes
#   FAST=1 bash scripts/test.sh            without st/
#   RELEASES=1.9.0 bash scripts/test.sh    these releases of mindformers only (default: all, 0.6 GB each)
#
# A first run needs 16 GB: 6 GB of environments, and what the tests write.
#
# Random examples are the same in each run, so that a new failure comes from a change; plain pytest draws new ones. The exception
# is one schedule of each scenario of the simulation: a failure prints it, and MINDRESUME_FIRST_SEED=N runs the same schedules
# again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
echo "== ruff"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check -q .
echo "== layers"
"$VENV/bin/lint-imports" --no-cache
echo "== types"
"$VENV/bin/mypy"
echo "== spelling"
"$VENV/bin/typos"
unpack_programs output/programs prometheus prometheus-node-exporter ||
    echo "This machine lacks prometheus, promtool or prometheus-node-exporter; without them tests of the metrics are skipped." >&2
export PATH="$PATH:$ROOT/output/programs/usr/bin"
export MINDRESUME_FIRST_SEED="${MINDRESUME_FIRST_SEED:-$(($(date +%s) % 1000000000))}"
echo "== unit tests (fresh seeds of the simulation from $MINDRESUME_FIRST_SEED)"
SOAK=()
for argument in "$@"; do
    if [ "$argument" = --soak ]; then SOAK=(--soak); fi
done
"$PYTHON" -m pytest -q --durations=10 -n 2 --dist worksteal --hypothesis-seed=0 "${SOAK[@]}" tests
if [ "${FAST:-0}" != 1 ]; then
    need_system "st/test_syscalls.py traces the system calls of a save" strace strace command -v strace ||
        echo "Or skip that test: test.sh --ignore st/test_syscalls.py" >&2
    need_system "st/test_report_page.py opens the report page in a browser" chromium-driver chromedriver command -v chromedriver ||
        echo "Without it these tests are skipped." >&2
    echo "== system tests, the short form of the release matrix among them"
    # shellcheck disable=SC2086  # a list of words
    bash scripts/test_versions.sh --short --st ${RELEASES:-} -- "$@"
fi
