"""The table of faults in docs/reliability.md is that of the system test (st/test_proof.py)."""

import re
from pathlib import Path

from st.programs.faulty_resume import FAULTS, UNSEEN

DOCS = Path(__file__).parents[1] / "docs"
NAMES = {
    "weights": "weights (`proof: full`; status 65)",
    "batch": "input",
    "learning_rate": "learning rate",
    "loss_scale": "loss scale",
    UNSEEN: "nothing, on a CPU",
}
STEPS = {0: "before the first", 1: "first", 2: "second", 3: "third", 4: "fourth"}


def table() -> str:
    """Returns the rows for the English page: how many faults are found by what, and when."""
    rows: dict[tuple[str, int], int] = {}
    for fault in FAULTS.values():
        place = (fault.found, fault.step)
        rows[place] = rows.get(place, 0) + 1
    return "\n".join(
        f"| {NAMES.get(found, found)} | {'' if found == UNSEEN else STEPS[step]} | {count} |"
        for (found, step), count in rows.items()
    )


def test_the_table_has_the_faults_of_the_system_test():
    """If this fails: ``python -c "from tests.test_faults_of_a_resume import *; print(table())"``"""
    text = (DOCS / "reliability.md").read_text(encoding="utf-8")
    assert f"| found by | step | faults |\n|---|---|---|\n{table()}\n" in text
    assert f"{len(FAULTS)} ways" in text


def test_the_chinese_table_has_as_many_in_each_row():
    text = (DOCS / "reliability.zh.md").read_text(encoding="utf-8")
    found = text.partition("| 由什么发现 | 步 | 种数 |\n|---|---|---|\n")[2].partition("\n\n")[0]
    counts = [row.split(" | ")[-1] for row in found.splitlines()]
    assert counts == [row.split(" | ")[-1] for row in table().splitlines()]
    assert re.search(rf"{len(FAULTS)} 种", text)
