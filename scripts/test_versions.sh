#!/usr/bin/env bash
# Makes the environment of each release of mindformers (release_env.sh) and runs the release matrix with the real Trainer
# (st/test_releases.py, st/test_pynative*.py); the long form rewrites the tables in docs/releases.md.
#
#   scripts/test_versions.sh [RELEASE...] [-- ARGUMENT...]      arguments go to pytest; default: all releases
#   scripts/test_versions.sh --short [...]                      without --soak, and without the tests of the calls to the file system
#   scripts/test_versions.sh --short --st [...]                 what test.sh runs: that, and all other system tests, in one call of
#                                                               pytest, so that no core waits for the end of the other (st/conftest.py)
#
# With releases given, only tests that need no other one run; 1.9.0 is always there.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(dirname "$HERE")"
FORM=(--soak) RELEASES=()
FILES=(st/test_releases.py st/test_pynative.py st/test_pynative_job.py st/test_pynative_memory.py)
LONG=(st/test_pynative_operations.py)
while [ $# -gt 0 ]; do
    case "$1" in
        --short) FORM=() LONG=() ;;
        --st) FILES=(st --ignore st/test_pynative_operations.py) ;;
        --) shift; break ;;
        *) RELEASES+=("$1") ;;
    esac
    shift
done
[ ${#RELEASES[@]} -gt 0 ] || RELEASES=(1.8.0 1.9.0 2.0.0 2.1.0)
for release in 1.9.0 "${RELEASES[@]}"; do                       # 1.9.0 first: the others share the packages of its environment
    begun=$SECONDS
    python="$(bash "$HERE/release_env.sh" "$release")"
    [ "$release" != 1.9.0 ] || PYTHON="$python"
    echo "== mindformers $release: $python ($((SECONDS - begun)) s, $(du -shL "$(dirname "$(dirname "$python")")" | cut -f1))"
done
cd "$ROOT"
export ST_RELEASES="1.9.0 ${RELEASES[*]}"
export RELEASE_RESULTS="${RELEASE_RESULTS:-$(mktemp)}"
begun=$SECONDS status=0
"$PYTHON" -m pytest -q --durations=20 -n 2 --dist loadgroup --no-loadscope-reorder --hypothesis-seed=0 \
    "${FORM[@]}" "${FILES[@]}" "${LONG[@]}" "$@" || status=$?
echo "== the system tests took $((SECONDS - begun)) s; its results: $RELEASE_RESULTS"
if [ ${#FORM[@]} -gt 0 ]; then
    "$PYTHON" -m st.release_table "$RELEASE_RESULTS"
fi
exit $status
