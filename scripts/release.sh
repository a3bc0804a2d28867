#!/usr/bin/env bash
# Builds what a release publishes into dist/, from the commit that is checked out, and prints what to do with it. It publishes
# nothing and sets no tag.
#
#   bash scripts/release.sh
#
# Before: set __version__ in mindresume/__init__.py, give the section [Unreleased] of CHANGELOG.md that version and the day, commit,
# and run scripts/test.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
VERSION=$("$PYTHON" -c 'import mindresume; print(mindresume.__version__)')
refuse() { echo "no release of $VERSION: $1" >&2; exit 1; }

[ -z "$(git status --porcelain)" ] || refuse "there are changes that are not committed (git status)"
grep -q "^## \[$VERSION\] - 20..-..-..$" CHANGELOG.md || refuse "CHANGELOG.md has no section '## [$VERSION] - DAY'"
! git rev-parse --quiet --verify "refs/tags/v$VERSION" >/dev/null || refuse "the tag v$VERSION exists"
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
git archive HEAD | tar -x -C "$FOLDER"                          # nothing that git does not know can get into the archives
"$PYTHON" -m build --no-isolation --outdir "$ROOT/dist" "$FOLDER" >"$FOLDER/.build.log" 2>&1 ||
    { cat "$FOLDER/.build.log" >&2; refuse "the build failed"; }
echo "built:"
ls -l "$ROOT/dist/mindresume-$VERSION"*
echo "next: git tag -a v$VERSION -m 'mindresume $VERSION'; push the tag; upload the two files to the package index, and the section of"
echo "CHANGELOG.md as the notes of the release."
