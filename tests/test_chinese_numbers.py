"""Checks that a Chinese page has the numbers of the English one: those of each row of a table, and
in the text those that have a unit or several digits. Blocks of code are compared by
tests/test_documents.py."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBER = r"\d+(?:[.,:]\d+)*"
UNIT = r"(?:%|(?:ms|s|min|hours?|minutes?|seconds?|days?|[KMGT]i?B|bytes|times)\b)"
# a single digit without a unit can be a word in Chinese
IN_TEXT = re.compile(rf"{NUMBER}(?= ?{UNIT})|\d[\d.,:]*\d")
PAIRS = [
    (ROOT / "README.md", ROOT / "README_CN.md"),
    *(
        (page.with_name(page.name.replace(".zh.md", ".md")), page)
        for page in sorted((ROOT / "docs").glob("*.zh.md"))
    ),
]


def tables_and_text(page: str) -> tuple[list[str], str]:
    """Returns the rows of the tables, and the other lines that are not code."""
    lines = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE).splitlines()
    return [line for line in lines if line.startswith("|")], "\n".join(
        line for line in lines if not line.startswith("|")
    )


def differences(english: str, chinese: str) -> list[str]:
    """Returns the rows whose numbers differ, and the numbers that the Chinese text lacks."""
    (rows, text), (chinese_rows, chinese_text) = tables_and_text(english), tables_and_text(chinese)
    if len(rows) != len(chinese_rows):
        return [f"{len(rows)} rows of tables in English, {len(chinese_rows)} in Chinese"]
    found = [
        f"{row}   has other numbers than   {other}"
        for row, other in zip(rows, chinese_rows, strict=True)
        if Counter(re.findall(NUMBER, row)) != Counter(re.findall(NUMBER, other))
    ]
    lacking = Counter(IN_TEXT.findall(text)) - Counter(re.findall(NUMBER, chinese_text))
    return found + [
        f"{number} is {count} times less often in Chinese" for number, count in lacking.items()
    ]


@pytest.mark.parametrize("english, chinese", PAIRS, ids=lambda path: path.name)
def test_a_chinese_page_has_the_numbers_of_the_english_one(english, chinese):
    assert differences(english.read_text(), chinese.read_text()) == []


@pytest.mark.parametrize(
    "english, chinese, same",
    [
        ("| a | 1 |\n| b | 2 |", "| a | 2 |\n| b | 1 |", False),
        ("| a | 1 |\n", "", False),
        ("It takes 5 s.", "用时 6 s。", False),
        ("1,077 runs, then 1,077", "1,077 次，然后 1,070", False),
        ("| 2 of 3 | 1.0 |", "| 3 个中的 2 个 | 1.0 |", True),
        ("two ranks save in 3 s", "2 个 rank 在 3 s 内保存", True),
        ("```\n7 s\n```", "```\n8 s\n```", True),
    ],
)
def test_numbers_count_and_order_and_words_are_free(english, chinese, same):
    assert (differences(english, chinese) == []) is same
