#!/usr/bin/env bash
# Makes .venv-mf180 if it is missing: mindformers 1.8.0 with mindspore 2.7.2, for the tests in which another version reads and
# writes checkpoints (st/test_versions.py). Prints the path of its Python. About one minute and 0.6 GB, 3 GB while it installs.
#
#   scripts/other_version.sh 1.8.0        (PYTHON_BOOTSTRAP: see setup_env.sh)
#
# It contains only these two packages. The others (numpy, transformers, safetensors ...) have the same versions in both and come
# from .venv, through a .pth file. mindresume cannot be imported there: .pth files of a folder that a .pth file names are not
# read.
set -euo pipefail
case "${1:-}" in
    1.8.0) PACKAGES=(mindformers==1.8.0 mindspore==2.7.2) NAME=.venv-mf180 ;;
    *) echo "usage: $0 1.8.0    (1.9.0 is in .venv, see setup_env.sh)" >&2; exit 2 ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" >&2
OTHER="$ROOT/$NAME"
exec 9<"$VENV"
flock 9                                                         # of two callers at once the second waits, and finds it made
STAMP="$OTHER/.complete-$(echo "${PACKAGES[*]} $("$PYTHON" --version)" | cksum | tr ' ' '-')"
if [ ! -e "$STAMP" ]; then
    echo "== making $OTHER (${PACKAGES[*]}), about one minute" >&2
    "$PYTHON" -m venv --clear --without-pip "$OTHER"            # also clears what an interrupted call left
    "$PYTHON" -m pip --python "$OTHER/bin/python" install --quiet --disable-pip-version-check --no-compile --no-deps "${PACKAGES[@]}" >&2
    PLACE="$("$OTHER/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    rm -rf "$PLACE"/mindspore/lib/plugin/{,libmindspore_}{gpu,ascend,ops_ascend}* "$PLACE/mindspore/include"   # 2 GB
    "$PYTHON" -c 'import os, sys, sysconfig; print(os.path.relpath(sysconfig.get_path("purelib"), sys.argv[1]))' \
        "$PLACE" >"$PLACE/shared.pth"
    "$OTHER/bin/python" -c 'import mindformers.checkpoint.checkpoint' >/dev/null 2>&1 || {
        echo "mindformers of $OTHER cannot be imported. The reason: $OTHER/bin/python -c 'import mindformers'" >&2; exit 1; }
    touch "$STAMP"
fi
echo "$OTHER/bin/python"
