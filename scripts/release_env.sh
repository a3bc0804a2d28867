#!/usr/bin/env bash
# Makes the environment of one release of mindformers if it is missing, and prints the path of its Python.
#
#   scripts/release_env.sh 1.8.0 | 1.9.0 | 2.0.0 | 2.1.0        (PYTHON_BOOTSTRAP: see setup_env.sh)
#
# 1.9.0 is in .venv (setup_env.sh). Each other release is in .venv-RELEASE, which contains only mindformers and mindspore, without
# the plug-ins for GPU and Ascend. The other packages and mindresume come from .venv, through a .pth file. A .venv-RELEASE that is a
# link is used as it is.
set -euo pipefail
RELEASE="${1:-}"
case "$RELEASE" in
    1.8.0) MINDSPORE=2.7.2 ;;
    1.9.0) MINDSPORE=2.9.0 ;;
    2.0.0 | 2.1.0) MINDSPORE=2.10.0 ;;            # 2.1.0 asks for mindspore 2.11, of which there is no package
    *) echo "usage: $0 1.8.0 | 1.9.0 | 2.0.0 | 2.1.0    ('$RELEASE' is no release that mindresume is tested with)" >&2; exit 2 ;;
esac
OTHER="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv-$RELEASE"

# checked PYTHON: prints it, or says why mindformers of the release cannot be imported.
checked() {
    local found
    found=$("$1" -c 'from importlib.metadata import version; print(version("mindformers"), version("mindspore"))' 2>/dev/null) || found="none"
    [ "$found" = "$RELEASE $MINDSPORE" ] || {
        echo "$1 has mindformers and mindspore $found, expected $RELEASE $MINDSPORE. Remove its folder; this script makes it again." >&2
        exit 1
    }
    echo "$1"
}

if [ -L "$OTHER" ]; then
    checked "$OTHER/bin/python"
    exit
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh" >&2
if [ "$RELEASE" = 1.9.0 ]; then
    checked "$PYTHON"
    exit
fi
exec 9<"$VENV"
flock 9                                                         # of two callers at once the second waits, and finds it made
PACKAGES=("mindformers==$RELEASE" "mindspore==$MINDSPORE")
STAMP="$OTHER/.complete-$(echo "${PACKAGES[*]} $("$PYTHON" --version)" | cksum | tr ' ' '-')"
if [ ! -e "$STAMP" ]; then
    free=$(df --output=avail -B1M "$ROOT" | tail -1)
    [ "$free" -ge 4000 ] || { echo "$ROOT has $free MB free; making $OTHER needs 4000 MB (0.6 GB afterwards)" >&2; exit 1; }
    echo "== making $OTHER (${PACKAGES[*]})" >&2
    "$PYTHON" -m venv --clear --without-pip "$OTHER"            # also clears what an interrupted call left
    quietly "$PYTHON" -m pip --python "$OTHER/bin/python" install --quiet --disable-pip-version-check --no-compile --no-deps \
        "${PACKAGES[@]}" || { echo "pip could not install ${PACKAGES[*]} into $OTHER; its messages are above" >&2; exit 1; }
    PLACE="$("$OTHER/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    rm -rf "$PLACE"/mindspore/lib/plugin/{,libmindspore_}{gpu,ascend,ops_ascend}* "$PLACE/mindspore/include"   # 2 GB
    # addsitedir also reads the .pth files there, of which one is mindresume's
    echo 'import os, site, sys; site.addsitedir(os.path.join(os.path.dirname(sys.prefix), ".venv", os.path.relpath(' \
         'next(path for path in sys.path if path.startswith(sys.prefix)), sys.prefix)))' >"$PLACE/shared.pth"
    checked "$OTHER/bin/python" >/dev/null
    "$OTHER/bin/python" -c 'import mindspore, mindresume' >/dev/null 2>&1 || {
        echo "mindspore or mindresume of $OTHER cannot be imported. The reason: $OTHER/bin/python -c 'import mindspore, mindresume'" >&2
        exit 1
    }
    touch "$STAMP"
fi
echo "$OTHER/bin/python"
