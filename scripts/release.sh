#!/usr/bin/env bash
# Builds what a release publishes into dist/, from the commit that is checked out: wheel, sdist, the guide as an archive of the built
# site, the section of CHANGELOG.md, and the SHA-256 of each. The same commit gives the same bytes. It publishes nothing and sets no tag.
#
#   bash scripts/release.sh
#   PYTHON=/path/to/python bash scripts/release.sh     with an interpreter that has build, setuptools>=77 and mindresume's extra
#                                                      "docs" (default: that of .venv, which setup_env.sh makes if it is missing)
#
# Before: set __version__ in mindresume/__init__.py; in CHANGELOG.md name the section Unreleased after that version and the day
# ("## 0.2.0 - 2026-12-01"); commit; run scripts/test.sh.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ -n "${PYTHON:-}" ] || source "$ROOT/scripts/setup_env.sh"
cd "$ROOT"
VERSION=$("$PYTHON" -c 'import mindresume; print(mindresume.__version__)')
NAME="mindresume-$VERSION"
refuse() { echo "no release of $VERSION: $1" >&2; exit 1; }
quiet() { "$@" >"$FOLDER/log" 2>&1 || { cat "$FOLDER/log" >&2; refuse "this failed: $*"; }; }

[ -z "$(git status --porcelain)" ] || refuse "there are changes that are not committed (git status)"
NEWEST=$(grep -m 1 '^## ' CHANGELOG.md || true)
[[ "$NEWEST" =~ ^"## $VERSION - "20[0-9]{2}-[0-9]{2}-[0-9]{2}$ ]] ||
    refuse "the first section of CHANGELOG.md is '$NEWEST', expected '## $VERSION - DAY' with a day such as 2026-12-01"
! git rev-parse --quiet --verify "refs/tags/v$VERSION" >/dev/null || refuse "the tag v$VERSION exists"
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
mkdir "$FOLDER/source" "$FOLDER/dist"
git archive HEAD | tar -x -C "$FOLDER/source"                   # nothing that git does not know can get into the archives
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH NO_MKDOCS_2_WARNING=1
cd "$FOLDER/source"

echo "== wheel and sdist"
quiet "$PYTHON" -m build --no-isolation --outdir "$FOLDER/dist" .
echo "== guide"
quiet env PYTHONPATH=. "$PYTHON" -m mkdocs build --strict --site-dir "$FOLDER/$NAME-guide"
echo "== archives, checksums"
# what the tools write has the time at which they wrote it
same_bytes() {
    tar --format=pax --pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime --sort=name --mtime="@$SOURCE_DATE_EPOCH" \
        --owner=0 --group=0 --numeric-owner --mode=go=rX -C "$FOLDER" -c "$1" | gzip -9n
}
same_bytes "$NAME-guide" >"$FOLDER/dist/$NAME-guide.tar.gz"
tar -xzf "$FOLDER/dist/$NAME.tar.gz" -C "$FOLDER"
same_bytes "$NAME" >"$FOLDER/dist/$NAME.tar.gz"
sed -n "/^## $VERSION - /,/^## /{/^## /!p}" CHANGELOG.md >"$FOLDER/dist/$NAME-notes.md"
(cd "$FOLDER/dist" && sha256sum "$NAME"* >"$NAME.sha256")
echo "== the wheel starts"
quiet "$PYTHON" -m pip install --disable-pip-version-check --no-index --no-deps --target "$FOLDER/installed" "$FOLDER/dist/$NAME"-*.whl
STARTED=$(cd "$FOLDER" && PYTHONPATH="$FOLDER/installed" "$PYTHON" -m mindresume --version)
[[ "$STARTED" == "mindresume $VERSION "* ]] || refuse "the installed wheel says '$STARTED'"

mkdir -p "$ROOT/dist"
rm -f "$ROOT/dist/$NAME"[-.]*
mv "$FOLDER/dist/"* "$ROOT/dist"
cd "$ROOT/dist"
sha256sum --check --quiet "$NAME.sha256"
ls -l "$NAME"[-.]*
echo "next: git tag -a v$VERSION -m 'mindresume $VERSION'; push the tag; attach these files to the release of that tag, with $NAME-notes.md"
echo "as its text; upload wheel and sdist to the package index (twine upload)."
