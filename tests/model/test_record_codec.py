"""Lines of records and manifests: round trips and refusals."""

import io

import pytest

from mindresume.errors import RecordError
from mindresume.model.manifest import HEAD_LIMIT, encode_head, parse_ranks, rank_ranges, read_head


def test_a_head_is_read_back_with_its_checksum():
    head = {"version": 1, "kind": "claim", "text": "ä"}
    content = encode_head(head)
    found, checksum = read_head(io.BytesIO(content), "claim")
    assert found == head and content.split(b"\n")[0].decode() == checksum


@pytest.mark.parametrize("head", [[], "text", 7, None])
def test_a_head_that_is_not_an_object_is_refused(head):
    with pytest.raises(RecordError):
        read_head(io.BytesIO(encode_head(head)), "record")


def test_a_head_that_could_not_be_read_back_is_not_written():
    with pytest.raises(ValueError, match=f"at most {HEAD_LIMIT} can be read back"):
        encode_head({"a": "x" * HEAD_LIMIT})


@pytest.mark.parametrize(
    "ranks, ranges", [((), []), ((0,), [[0, 0]]), ((0, 1, 2, 5, 7, 8), [[0, 2], [5, 5], [7, 8]])]
)
def test_ranks_as_ranges(ranks, ranges):
    assert rank_ranges(ranks) == ranges
    assert not ranks or parse_ranks(ranges, 10) == parse_ranks(list(ranks), 10) == ranks


@pytest.mark.parametrize(
    "value",
    [
        [],
        [0, 1],
        [[0, 1]],
        [1, 0],
        [0, 0],
        [2],
        [-1],
        [True],
        [[1, 0]],
        [[0, 0], [0, 0]],
        "0",
        [None],
    ],
)
def test_invalid_subsets_of_ranks_are_refused(value):
    with pytest.raises(RecordError, match="part"):
        parse_ranks(value, 2)
