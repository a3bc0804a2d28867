"""Lines of any length, and holes, in bounded memory."""

import pytest

from mindresume.report.log_parser import pieces_of

LIMIT = 1 << 14  # as long as what Python buffers, or longer


def pieces(path, *parts, total=None):
    path.write_bytes(b"".join(parts))
    with open(path, "rb") as file:
        return list(pieces_of(file, LIMIT, total))


@pytest.mark.parametrize("size", [1, 100, LIMIT - 3, LIMIT, LIMIT + 1, 5 * LIMIT + 7, 1 << 20])
def test_zero_bytes_before_a_line_are_skipped_and_no_line_is_repeated(tmp_path, size):
    lines = [b"%d\n" % number for number in range(10_000)]
    assert pieces(tmp_path / "x", b"first\n", bytes(size), *lines) == [b"first\n", *lines]


def test_a_hole_of_any_size(tmp_path):
    path = tmp_path / "x"
    with open(path, "wb") as file:
        file.write(b"first\n")
        file.seek(1 << 40)
        file.write(b"last\n")
    with open(path, "rb") as file:
        assert list(pieces_of(file, LIMIT)) == [b"first\n", b"last\n"]
    with open(path, "r+b") as file:
        file.truncate(1 << 30)
    with open(path, "rb") as file:
        assert list(pieces_of(file, LIMIT)) == [b"first\n"]


def test_a_long_line_is_split_and_the_last_newline_may_be_missing(tmp_path):
    found = pieces(tmp_path / "x", b"x" * (2 * LIMIT + 5), b"\nend")
    assert [len(piece) for piece in found] == [LIMIT, LIMIT, 6, 3]


def test_no_more_than_a_total_is_read(tmp_path):
    assert pieces(tmp_path / "x", b"12345\n" * 100, total=13) == [b"12345\n"] * 3
