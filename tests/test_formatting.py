"""Names and lists in a form for people."""

import pytest

from mindresume.formatting import counted, listed, ranks_count, shown


@pytest.mark.parametrize(
    "text, expected",
    [
        ("net_rank_0-1_5.ckpt", "net_rank_0-1_5.ckpt"),
        ("模型 é", "模型 é"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\tc\x7f\x9b", "a\\x0ab\\x09c\\x7f\\x9b"),
        ("\udcff", "\\xff"),
        ("\ud800", "\\ud800"),
        ("\u202egnp", "\\u202egnp"),
        (7, "7"),
    ],
)
def test_shown(text, expected):
    assert shown(text) == expected
    shown(text).encode()


def test_kept_characters_are_not_escaped():
    assert shown("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_texts():
    assert (ranks_count(1), ranks_count(4)) == ("1 rank", "4 ranks")
    assert (counted(0, "file"), counted(1, "file"), counted(2, "file")) == (
        "0 files",
        "1 file",
        "2 files",
    )
    assert listed(range(3)) == "0, 1, 2" and listed(range(10), 2) == "0, 1 and 8 more"
