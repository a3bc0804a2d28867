"""Checks that the figures of README.md, README_CN.md and docs/*.md have the command that prints
them beside them, or a link to the page that has it; and that a page that quotes a figure has the
same one as the page that it links to."""

import json
import re
from pathlib import Path

import pytest
from guide_blocks import PAGES, ROOT, without_blocks

EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
DOCS = ROOT / "docs"
COMMAND = re.compile(
    r"`[^`]*(benchmarks/\w+\.py|tests/[\w/]+\.py|st/\w+\.py|mindresume drill|scripts/\w+\.sh)[^`]*`"
)
SOURCE = re.compile(r"\]\((docs/)?(performance|reliability|releases)(\.zh)?\.md")
# its row has versions, which are no figures
RELEASE = re.compile(r"\| \d+\.\d+\.\d+ \|")
MEASURED = re.compile(
    r"\|\s*(about )?\d[\d,]*(\.\d+)? ?(%|s|ms|MiB|GiB|MB/s)\s*\||\|\s*\d+\.\d+\s*(?=\|)|\| "
    r"(met|missed)\b"
)
PASSED = re.compile(r"\| (passed|通过)\b")
KILL = "## From a death to the next step"


def sections(text: str) -> list[tuple[str, list[str]]]:
    """Returns (section, texts of the sections above it) for each heading."""
    found, above = [], []
    for part in re.split(r"(?m)^(?=#{1,6} )", text):
        depth = len(re.match(r"#*", part)[0])
        above = [(level, other) for level, other in above if level < depth]
        found.append((part, [other for _, other in above]))
        above.append((depth, part))
    return found


def section(page: Path, heading: str) -> str:
    return next(part for part, _ in sections(without_blocks(page)) if part.startswith(heading))


def unproven(text: str) -> list[str]:
    """Returns the first row of figures of each section that has neither a command nor a source, nor
    has one above it."""
    found = []
    for part, above in sections(text):
        cells = [re.sub(r"`[^`]*`", "", row) for row in part.splitlines() if row.startswith("|")]
        rows = [
            row
            for row in cells
            if PASSED.search(row) or MEASURED.search(row) and not RELEASE.match(row)
        ]
        if rows and not any(COMMAND.search(each) or SOURCE.search(each) for each in (part, *above)):
            found.append(rows[0])
    return found


@EACH_PAGE
def test_every_table_of_figures_has_its_command_or_its_source(page):
    assert unproven(without_blocks(page)) == []


def test_a_table_without_its_command_is_noticed():
    table = "\n| what | s |\n|---|---|\n| a save | 0.41 |\n"
    assert unproven("# A page\n" + table) == ["| a save | 0.41 |"]
    assert unproven("# `python benchmarks/save.py`\n## A section\n" + table) == []
    assert unproven("# `python benchmarks/save.py`\n# Another\n" + table) == ["| a save | 0.41 |"]
    assert unproven("# [Measured](performance.md#a)\n" + table) == []
    assert unproven("# A page\n| release | 1.9.0 |\n|---|---|\n| default | 5 |\n") == []


def rounded(text: str) -> set[str]:
    """Returns every number of ``text`` with a fraction, also rounded to fewer digits."""
    found = set(re.findall(r"\d+\.\d+", text))
    return found | {f"{float(number):.{digits}f}" for number in found for digits in (0, 1)}


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "README_CN.md",
        "docs/how_it_works.md",
        "docs/how_it_works.zh.md",
        "docs/supervisor.md",
        "docs/supervisor.zh.md",
    ],
)
def test_the_seconds_of_a_restart_are_those_of_the_measurement(name):
    """What links to the measurement quotes only figures of it: a row of a table, a paragraph, and
    in how_it_works a section."""
    # --save-timeout
    measured = rounded(section(DOCS / "performance.md", KILL)) | {"20"}
    text = re.sub(r"`[^`]*`", "", without_blocks(ROOT / name))
    between = r"(?m)^(?=#)" if "how_it_works" in name else r"\n\n|\n(?=\|)"
    parts = [part for part in re.split(between, text) if re.search(r"performance(\.zh)?\.md", part)]
    quoted = {
        number
        for part in parts
        for number in re.findall(r"(?<![\d.])(\d+(?:\.\d+)?) ?(?:s\b|秒)", part)
    }
    assert len(quoted) > 1 and quoted - measured == set()


@pytest.mark.parametrize("name", ["recovery.svg", "recovery.zh.svg"])
def test_the_drawing_of_a_restart_has_the_seconds_of_the_measurement(name):
    rows = re.findall(
        r"(?m)^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|",
        section(DOCS / "performance.md", KILL),
    )
    measured = {what: tuple(map(float, seconds)) for what, *seconds in rows}
    drawn = [
        float(number)
        for number in re.findall(r">(\d+\.?\d*)(?: s| 秒|<)", (DOCS / "images" / name).read_text())
    ]
    phases = (
        "kill to no process left",
        "start",
        "import",
        "join",
        "select",
        "build",
        "load",
        "compile",
        "first step",
    )
    for side in (0, 1, 2):
        times = [measured[phase][side] for phase in phases]
        sums = {
            round(sum(times[first:last]), 1)
            for first in range(len(times))
            for last in range(first + 1, len(times) + 1)
        }
        drawn = [
            number
            for number in drawn
            if number not in sums | {measured["kill to a new step"][side]}
        ]
    assert [number for number in drawn if number % 10] == []  # what is left is the axis


@pytest.mark.parametrize("name", ["README.md", "README_CN.md"])
def test_the_table_of_releases_is_what_the_matrix_printed(name):
    rows = json.loads((DOCS / "releases.json").read_text())
    rows = rows if isinstance(rows, list) else rows["cells"]
    shown = re.findall(
        r"(?m)^\| (\d+\.\d+\.\d+) \|.*(?:passed|通过).*\|$", (ROOT / name).read_text()
    )
    assert len(shown) == 4
    for release in shown:
        found = {row["outcome"] for row in rows if release in row["cell"]}
        assert "passed" in found and not found & {"failed", "not run"}, release


def test_every_picture_is_made_by_a_script():
    sources = "".join(
        path.read_text()
        for folder in ("scripts", "st", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    )
    pictures = [path.name for path in (DOCS / "images").glob("*.png")]
    assert [name for name in pictures if f'"{name}"' not in sources] == []
