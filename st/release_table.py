"""Writes the results of the release matrix into docs/releases.md and docs/releases.zh.md.

    # what a run recorded (RELEASE_RESULTS, st/conftest.py)
    python -m st.release_table RESULTS.jsonl

docs/releases.json holds the last result of each cell, with its day; a run replaces those that it
ran. The pages are rewritten between two marks; the text around them is written by hand.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mindresume.mindformers.upstream import PROFILES
from st.training_run import ROOT

RESULTS = ROOT / "docs" / "releases.json"
BEGIN, END = "<!-- results: begin, written by st/release_table.py -->", "<!-- results: end -->"
ORDER = {"not run": 0, "skipped": 1, "passed": 2, "failed": 3}
# only such a result replaces another one of these
RAN = ("passed", "failed")
TITLES = {
    "features": "Features",
    "changes": "One training that changes the release",
    "PyNative": "The PyNative trainer",
}
ACROSS = ", written with "  # in the name of a table: one release wrote, another one read
FIRST = {"changes": "releases, one attempt each"}
Row = dict[str, Any]


class Language(dict[str, str]):
    """The words of a page by the English ones, which stand for themselves where they have no entry.
    Names of rows and reasons are English in each language."""

    def __missing__(self, english: str) -> str:
        return english


ENGLISH = Language()
CHINESE = Language(
    {
        "not run": "未运行",
        "skipped": "跳过",
        "passed": "通过",
        "failed": "失败",
        "no reason was recorded": "没有记录原因",
        "{0} {1}": "{1} {0}",
        ", ": "，",
        "; ": "；",
        "none": "无",
        "{} to {}": "{} 至 {}",
        "{}: {}": "{}：{}",
        "**{}** ({})": "**{}**（{}）",
        "{} (since {}): {}": "{}（自 {} 起提供）：{}",
        "{} cells: {}. Last runs: {}.": "共 {} 格：{}。最近运行日期：{}。",
        "Features": "功能",
        "with mindresume": "使用 mindresume",
        "The PyNative trainer": "PyNative Trainer",
        "{}, written with {}": "{}，由 {} 写入",
        "written by": "写入的版本",
        "read by {}": "由 {} 读取",
        "Across releases": "跨版本读取",
        "All {} cells passed: {}.": "全部 {} 格通过：{}。",
        "Passed in each of {}: {}.": "在以下各项中全部通过（{}）：{}。",
        "One training that changes the release": "一次训练先后使用多个版本",
        "releases, one attempt each": "依次使用的版本，每个启动一次",
        "Not available, because the release does not have it": "因该版本没有而不可用的功能",
        "- {}, tested with mindspore {}: {}": "- {}（测试所用的 mindspore 为 {}）：{}",
    }
)
PAGES = {ROOT / "docs" / "releases.md": ENGLISH, ROOT / "docs" / "releases.zh.md": CHINESE}


def merged(known: list[Row], lines: Iterable[str], day: str) -> list[Row]:
    """Returns the results with those of a run. ``lines``: its records, one JSON object each."""
    found: dict[tuple[str, ...], Row] = {}
    # of one run the worst counts: several tests may have the same cell
    for line in lines:
        row = {**json.loads(line), "day": day}
        before = found.get(tuple(row["cell"]))
        if before is None or ORDER[row["outcome"]] > ORDER[before["outcome"]]:
            found[tuple(row["cell"])] = row
    results = {tuple(row["cell"]): row for row in known}
    for cell, row in found.items():
        if (
            cell not in results
            or row["outcome"] in RAN
            or results[cell]["outcome"] not in RAN
            and row["outcome"] == "skipped"
        ):
            results[cell] = row
    return list(results.values())


def page(results: list[Row], language: Language = ENGLISH) -> str:
    """Returns the part of the page between the marks."""
    notes: list[str] = []
    tables: dict[str, list[Row]] = {}
    for row in results:
        tables.setdefault(row["cell"][0], []).append(row)
    whole = {
        name: rows
        for name, rows in tables.items()
        if ACROSS in name and all(row["outcome"] == "passed" for row in rows)
    }
    parts = [_passed_across(whole, language)] if whole else []
    parts += [
        _table(name, rows, notes, language) for name, rows in tables.items() if name not in whole
    ]
    run = [row for row in results if row["outcome"] in RAN]
    days = sorted({row["day"] for row in run})
    last = (
        language["{} to {}"].format(days[0], days[-1])
        if len(days) > 1
        else (days or [language["none"]])[0]
    )
    counts = language[", "].join(
        language["{0} {1}"].format(
            sum(row["outcome"] == outcome for row in results), language[outcome]
        )
        for outcome in ORDER
    )
    head = language["{} cells: {}. Last runs: {}."].format(len(results), counts, last)
    return "\n".join(
        [
            head,
            *(f"\n{part}" for part in parts),
            "",
            *(f"{number}. {note}" for number, note in enumerate(notes, 1)),
            "",
            _unavailable(language),
        ]
    )


def _title(name: str, language: Language) -> str:
    checkpoint, across, writer = name.partition(ACROSS)
    return (
        language["{}, written with {}"].format(checkpoint, writer)
        if across
        else language[TITLES.get(name, name)]
    )


def _passed_across(tables: dict[str, list[Row]], language: Language) -> str:
    """Returns one table of the kinds of checkpoints of which each cell passed: how many passed."""
    counts = Counter((row["cell"][1], row["cell"][2]) for rows in tables.values() for row in rows)
    writers, readers = (sorted({cell[side] for cell in counts}) for side in (0, 1))
    titles = language["; "].join(_title(name, language) for name in tables)
    heads = [language["written by"], *(language["read by {}"].format(name) for name in readers)]
    lines = [
        f"### {language['Across releases']}",
        "",
        language["All {} cells passed: {}."].format(counts.total(), titles),
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for writer in writers:
        found = [counts[writer, reader] for reader in readers]
        cells = [f"{language['passed']}: {count}" if count else "" for count in found]
        lines.append(f"| {' | '.join([writer, *cells])} |")
    return "\n".join(lines)


def _table(name: str, rows: list[Row], notes: list[str], language: Language) -> str:
    """Returns one table; appends to ``notes`` why a cell is not green. Rows of passed cells alone
    are a sentence."""
    across = ACROSS in name
    title = _title(name, language)
    columns = sorted({row["cell"][2] for row in rows})
    cells = {(row["cell"][1], row["cell"][2]): row for row in rows}
    heads = [language["read by {}"].format(column) for column in columns] if across else columns
    names = list(dict.fromkeys(row["cell"][1] for row in rows))
    whole = [
        name
        for name in names
        if all(cells.get((name, each), {}).get("outcome") == "passed" for each in columns)
    ]
    lines = [f"### {title}", ""]
    if whole:
        sentence = language["Passed in each of {}: {}."]
        lines += [sentence.format(", ".join(columns), language["; "].join(whole))]
    if whole != names:
        lines += [""] if whole else []
        first = language[FIRST.get(name, "written by" if across else "with mindresume")]
        lines += [f"| {first} | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
        for row in names:
            if row not in whole:
                found = [_cell(cells.get((row, column)), notes, language) for column in columns]
                lines.append(f"| {row} | {' | '.join(found)} |")
    return "\n".join(lines)


def _cell(row: Row | None, notes: list[str], language: Language) -> str:
    if row is None:
        return ""
    outcome = language[row["outcome"]]
    if row["outcome"] in ("passed", "not run"):
        return outcome
    reason = " ".join(row["reason"].split())[:300].replace("|", "\\|").removeprefix("Skipped: ")
    test = f" (`{row['test'].rpartition('::')[2]}`)" if row["outcome"] == "failed" else ""
    note = language["{}: {}"].format(outcome, reason or language["no reason was recorded"]) + test
    if note not in notes:
        notes.append(note)
    return language["**{}** ({})"].format(outcome, notes.index(note) + 1)


def _unavailable(language: Language) -> str:
    """Returns what releases themselves lack, from their profiles."""
    lines = ["### " + language["Not available, because the release does not have it"], ""]
    for profile in PROFILES:
        lacks = language["; "].join(
            language["{} (since {}): {}"].format(feature.name, feature.since, feature.without)
            for feature in profile.off
        )
        if lacks:
            lines.append(
                language["- {}, tested with mindspore {}: {}"].format(
                    profile.name, profile.versions["mindspore"], lacks
                )
            )
    return "\n".join([*lines, ""])


def main(path: str) -> None:
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    results = merged(known, Path(path).read_text(encoding="utf-8").splitlines(), day)
    for written, language in PAGES.items():
        text = written.read_text(encoding="utf-8")
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        written.write_text(
            f"{before}{BEGIN}\n{page(results, language)}{END}{after}", encoding="utf-8"
        )
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
