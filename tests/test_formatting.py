"""Names and lists in a form for people."""

import pytest

from mindresume.formatting import counted, listed, ranks_count, shown, with_short_checksums


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


DIGITS = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    "text",
    [
        f"/runs/{DIGITS}/checkpoint",
        f"{DIGITS}/checkpoint",
        f"/runs/{DIGITS}: holds no checkpoint",
        f"in {DIGITS}.safetensors",
        f"job-{DIGITS}",
    ],
)
def test_a_path_with_an_identity_of_32_digits_stays_whole(text):
    assert with_short_checksums(text) == text


def test_checksums_are_shortened():
    text = f"(checksum {DIGITS}, recorded {DIGITS}). xxh3 {DIGITS}."
    assert with_short_checksums(text) == (
        "(checksum 01234567..., recorded 01234567...). xxh3 01234567...."
    )


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
