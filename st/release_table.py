"""Writes the results of the release matrix into docs/releases.md.

    python -m st.release_table RESULTS.jsonl        # what a run recorded (RELEASE_RESULTS, st/conftest.py)

docs/releases.json holds the last result of each cell, with its day; a run replaces those that it ran. The page is rewritten
between two marks; the text around them is written by hand.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mindresume.mindformers.upstream import PROFILES
from st.training_run import ROOT

PAGE, RESULTS = ROOT / "docs" / "releases.md", ROOT / "docs" / "releases.json"
BEGIN, END = "<!-- results: begin, written by st/release_table.py -->", "<!-- results: end -->"
ORDER = {"not run": 0, "skipped": 1, "passed": 2, "failed": 3}
RAN = ("passed", "failed")                              # only such a result replaces another one of these
TITLES = {"features": "Features", "changes": "One training that changes the release", "PyNative": "The PyNative trainer"}
FIRST = {"changes": "releases, one attempt each"}
Row = dict[str, Any]


def merged(known: list[Row], lines: Iterable[str], day: str) -> list[Row]:
    """Returns the results with those of a run. ``lines``: its records, one JSON object each."""
    found: dict[tuple[str, ...], Row] = {}
    for line in lines:                                  # of one run the worst counts: several tests may have the same cell
        row = {**json.loads(line), "day": day}
        before = found.get(tuple(row["cell"]))
        if before is None or ORDER[row["outcome"]] > ORDER[before["outcome"]]:
            found[tuple(row["cell"])] = row
    results = {tuple(row["cell"]): row for row in known}
    for cell, row in found.items():
        if cell not in results or row["outcome"] in RAN or results[cell]["outcome"] not in RAN and row["outcome"] == "skipped":
            results[cell] = row
    return list(results.values())


def page(results: list[Row]) -> str:
    """Returns the part of the page between the marks."""
    notes: list[str] = []
    tables = list(dict.fromkeys(row["cell"][0] for row in results))
    parts = [_table(name, [row for row in results if row["cell"][0] == name], notes) for name in tables]
    run = [row for row in results if row["outcome"] in RAN]
    days = sorted({row["day"] for row in run})
    counts = ", ".join(f"{sum(row['outcome'] == outcome for row in results)} {outcome}" for outcome in ORDER)
    head = f"{len(results)} cells: {counts}. Last runs: {' to '.join(dict.fromkeys([*days[:1], *days[-1:]])) or 'none'}.\n"
    return "\n".join([head, *parts, *(f"{number}. {note}" for number, note in enumerate(notes, 1)), "", _unavailable()])


def _table(name: str, rows: list[Row], notes: list[str]) -> str:
    """Returns one table; appends to ``notes`` why a cell is not green."""
    across = ", written with " in name
    columns = sorted({row["cell"][2] for row in rows})
    cells = {(row["cell"][1], row["cell"][2]): row for row in rows}
    heads = [f"read by {column}" for column in columns] if across else columns
    first = FIRST.get(name, "written by" if across else "with mindresume")
    lines = [f"### {TITLES.get(name, name)}", "", f"| {first} | {' | '.join(heads)} |",
             "|---" * (len(columns) + 1) + "|"]
    for row in dict.fromkeys(row["cell"][1] for row in rows):
        found = [_cell(cells.get((row, column)), notes) for column in columns]
        lines.append(f"| {row} | {' | '.join(found)} |")
    return "\n".join([*lines, ""])


def _cell(row: Row | None, notes: list[str]) -> str:
    if row is None:
        return ""
    if row["outcome"] in ("passed", "not run"):
        return row["outcome"]
    reason = " ".join(row["reason"].split())[:300].replace("|", "\\|")
    test = f" (`{row['test'].rpartition('::')[2]}`)" if row["outcome"] == "failed" else ""
    note = f"{row['outcome']}: {reason.removeprefix('Skipped: ') or 'no reason was recorded'}{test}"
    if note not in notes:
        notes.append(note)
    return f"**{row['outcome']}** ({notes.index(note) + 1})"


def _unavailable() -> str:
    """Returns what a release itself lacks, from its profile."""
    lines = ["### Not available, because the release does not have it", ""]
    for profile in PROFILES:
        lacks = "; ".join(f"{feature.name} (since {since}): {feature.without}" for feature, since in profile.off.items())
        lines.append(f"- {profile.name}, tested with mindspore {profile.versions['mindspore']}: {lacks or 'nothing'}")
    return "\n".join([*lines, ""])


def main(path: str) -> None:
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    results = merged(known, Path(path).read_text(encoding="utf-8").splitlines(), day)
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{page(results)}{END}{after}", encoding="utf-8")
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
