"""The tables of docs/releases.md and releases.zh.md: which results they keep, and what they say of
a cell that is not green."""

import json

import pytest

from st.release_table import BEGIN, END, PAGES, RESULTS, merged, page


def record(
    outcome: str, cell: tuple[str, str, str] = ("features", "kill", "1.8.0"), reason: str = ""
) -> str:
    return json.dumps(
        {
            "cell": cell,
            "outcome": outcome,
            "reason": reason,
            "test": f"st/test_x.py::test_y[{outcome}]",
            "seconds": 1.0,
        }
    )


def test_a_cell_that_is_not_green_says_why_once():
    rows = merged(
        [],
        [
            record("passed"),
            record("failed", ("features", "kill", "1.9.0"), "step 7:\nloss | other"),
            record("not run", ("features", "async", "1.8.0")),
            record("passed", ("2.0, written with mindresume", "1.8.0", "1.9.0")),
            record("passed", ("1.0, written with mindresume", "1.8.0", "1.9.0")),
        ],
        "day",
    )
    text = page(rows)
    assert "| kill | passed | **failed** (1) |" in text
    assert "1. failed: step 7: loss \\| other (`test_y[failed]`)" in text
    assert "| async | not run |  |" in text
    titles = "2.0, written with mindresume; 1.0, written with mindresume"
    assert f"All 2 cells passed: {titles}." in text
    assert "| written by | read by 1.9.0 |\n|---|---|\n| 1.8.0 | passed: 2 |" in text


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_each_page_has_the_recorded_results(path):
    """``python -m st.release_table /dev/null`` writes them."""
    written = path.read_text().partition(f"{BEGIN}\n")[2].partition(END)[0]
    assert written == page(json.loads(RESULTS.read_text()), PAGES[path])
