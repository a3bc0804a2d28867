"""Records and manifests: round trips, and refusal of anything torn, altered or invalid."""

import io
import json
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import tensor_layouts

from mindresume.errors import RecordError
from mindresume.model.layout import TensorLayout
from mindresume.model.manifest import (
    HEAD_LIMIT,
    VERSION,
    Details,
    FileRecord,
    Manifest,
    Record,
    TensorRecord,
    attempt_name,
    attempts,
    encode_head,
    parse_attempt,
    rank_ranges,
    ranks_of_node,
    read_details,
    read_head,
    read_record,
    record_name,
    record_rank,
    run_name,
    run_sequence,
)
from mindresume.model.training_state import TrainingState

RUN = run_name(7, "1f3a9c04")
STATE = TrainingState(15, 10, 14, 8, 1024.0, None, 10)
FILE = FileRecord("rank_1/net_rank_1-2_5.safetensors", "safetensors", 1234, "ab" * 16)
RECORD = Record(RUN, 1, 2, STATE, 1700000000.5, (FILE,), False)
DETAILS = Details(
    {
        "w": TensorRecord(
            "bfloat16", (1, 2), "cd" * 16, TensorLayout((2, 2, 2), ((2, 0), -1), -1), (8, 2)
        ),
        "bias": TensorRecord("float32", (), "ef" * 16),
    },
    {"python": {"gauss": None}},
)
OTHER = FileRecord("rank_0/net_rank_0-2_5.safetensors", "safetensors", 1234, "ab" * 16)
MANIFEST = Manifest(
    RUN, 2, STATE, 1700000000.5, ((OTHER,), (FILE,)), ("01" * 16, "23" * 16), (), False
)


def read_back(content):
    return read_details(io.BytesIO(content))


def changed(content, change):
    """Returns the same file with another head and correct checksums, as a later version or an
    attacker may write it."""
    _, line, tail = content.split(b"\n", 2)
    head = json.loads(line)
    change(head)
    return encode_head(head) + tail


# ---- round trips ---------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
file_names = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\"), max_size=30
)
shapes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)


@st.composite
def tensor_records(draw):
    """Draws tensors of any layout, with the local shape that follows from the global one."""
    layout, whole = draw(st.none() | tensor_layouts()), draw(st.none() | shapes)
    shape = draw(shapes)
    if layout is not None:
        pieces = layout.counts((0,) * len(layout.tensor_map))
        shape = tuple(draw(st.integers(0, 2**40)) for _ in pieces)
        whole = tuple(size * count for size, count in zip(shape, pieces, strict=True))
    return TensorRecord(
        draw(st.sampled_from(["float32", "bfloat16", "str"])), shape, "00" * 16, layout, whole
    )


@settings(max_examples=150)
@given(
    st.dictionaries(names, tensor_records(), max_size=5),
    st.dictionaries(names, st.integers() | names, max_size=3),
)
def test_details_are_read_back_unchanged(tensors, random):
    details = Details(tensors, random)
    record, found = read_back(RECORD.encode(details))
    assert (record, found) == (RECORD, details)
    assert list(found.tensors) == list(tensors)  # the order of the file


@settings(max_examples=80)
@given(
    st.builds(
        TrainingState,
        st.integers(0, 2**50),
        st.integers(1, 2**30),
        st.integers(0, 2**50),
        st.none() | st.integers(1, 2**30),
        st.none() | st.floats(allow_nan=False, allow_infinity=False),
        st.none() | st.integers(1, 2**20),
        st.none() | st.integers(1, 2**40),
    ),
    st.lists(file_names, min_size=1, max_size=6),
)
def test_records_and_manifests_are_read_back_unchanged(state, names):
    files = tuple(
        (FileRecord(f"rank_{rank}/{name}.ckpt", "ckpt", len(name), "00" * 16),)
        for rank, name in enumerate(names)
    )
    manifest = Manifest(
        RUN, len(files), state, 1.5, files, tuple("11" * 16 for _ in files), (), False
    )
    assert Manifest.read(io.BytesIO(manifest.encode())) == manifest
    for rank, file in enumerate(files):
        record = Record(RUN, rank, len(files), state, 1.5, file, False)
        assert read_record(io.BytesIO(record.encode(Details()))) == record


def test_equal_layouts_are_stored_once():
    layout = TensorLayout((2, 1), (1, -1))
    details = Details(
        {f"w{i}": TensorRecord("float32", (4, 4), "00" * 16, layout, (8, 4)) for i in range(50)}
    )
    assert RECORD.encode(details).count(b"device_matrix") == 1


def test_the_checksum_of_a_record_is_that_of_its_head_line():
    content = RECORD.encode(DETAILS)
    checksum = read_record(io.BytesIO(content)).checksum
    assert (
        checksum
        == content.split(b"\n")[0].decode()
        == xxhash.xxh3_128_hexdigest(content.split(b"\n")[1])
    )


def test_the_head_alone_does_not_need_the_details():
    head = b"\n".join(RECORD.encode(DETAILS).split(b"\n")[:2]) + b"\n"
    assert read_record(io.BytesIO(head)) == RECORD


# ---- torn, altered, of another kind --------------------------------------------------------------

READERS = {
    "record": (RECORD.encode(DETAILS), read_back),
    "manifest": (MANIFEST.encode(), lambda content: Manifest.read(io.BytesIO(content))),
}


@pytest.mark.parametrize("kind", READERS)
def test_every_torn_prefix_is_refused(kind):
    content, read = READERS[kind]
    for end in range(len(content) - 1):
        with pytest.raises(RecordError):
            read(content[:end])
    # only the last line break is missing: nothing is lost
    assert read(content[:-1]) == read(content)


@pytest.mark.parametrize("kind", READERS)
def test_every_altered_byte_is_refused(kind):
    content, read = READERS[kind]
    for position in range(len(content)):
        # also into "\n" and into 0
        for mask in (0x01, 0x20, 0x80, content[position] ^ 0x0A, content[position]):
            if not mask:
                continue
            altered = bytearray(content)
            altered[position] ^= mask
            with pytest.raises(RecordError):
                read(bytes(altered))


def test_details_of_another_record_are_refused():
    head, other = (
        RECORD.encode(DETAILS),
        RECORD.encode(Details({"v": TensorRecord("float32", (1,), "00" * 16)})),
    )
    mixed = b"\n".join(head.split(b"\n")[:2]) + b"\n" + other.split(b"\n")[2] + b"\n"
    with pytest.raises(RecordError, match="list of tensors is truncated or altered"):
        read_back(mixed)


def test_details_of_millions_of_entries_are_refused_before_they_are_parsed():
    tail = (
        b'{"tensors":{'
        + b",".join([b'"%07d":[]' % number for number in range(3_000_000)])
        + b'},"layouts":[],"random":{}}'
    )
    head = json.loads(RECORD.encode(DETAILS).split(b"\n")[1]) | {
        "details": xxhash.xxh3_128_hexdigest(tail)
    }
    with pytest.raises(RecordError, match="some 3000003 keys, expected at most"):
        read_back(encode_head(head) + tail + b"\n")


# ---- versions and fields -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", READERS)
def test_a_newer_version_is_refused_with_advice(kind):
    content, read = READERS[kind]
    newer = changed(content, lambda head: head.update(version=VERSION + 1))
    with pytest.raises(
        RecordError, match=rf"{kind} of version {VERSION + 1}.*up to {VERSION}: install a newer one"
    ):
        read(newer)


@pytest.mark.parametrize("kind", READERS)
def test_unknown_fields_are_ignored(kind):
    content, read = READERS[kind]

    def add(head):
        head["of a later minor version"] = {"a": 1}
        head["state"]["also new"] = [1]

    assert read(changed(content, add)) == read(content)


def test_two_dots_within_a_name_are_a_name():
    record = replace(RECORD, files=(FILE._replace(path="rank_1/a..b.safetensors"),))
    assert read_back(record.encode(DETAILS))[0] == record


# ---- heads and ranks ---------------------------------------------------------------------------


def test_a_head_is_read_back_with_its_checksum():
    head = {"version": 1, "kind": "claim", "text": "ä"}
    content = encode_head(head)
    found, checksum = read_head(io.BytesIO(content), "claim")
    assert found == head and content.split(b"\n")[0].decode() == checksum


def test_a_head_that_could_not_be_read_back_is_not_written():
    with pytest.raises(ValueError, match=f"at most {HEAD_LIMIT} can be read back"):
        encode_head({"a": "x" * HEAD_LIMIT})


@pytest.mark.parametrize(
    "ranks, ranges", [((), []), ((0,), [[0, 0]]), ((0, 1, 2, 5, 7, 8), [[0, 2], [5, 5], [7, 8]])]
)
def test_ranks_as_ranges(ranks, ranges):
    assert rank_ranges(ranks) == ranges
    for part in (ranges, list(ranks)) if ranks else ():
        assert ranks_of_node({"part": part, "world_size": 10}) == list(ranks)


@pytest.mark.parametrize(
    "value",
    [
        [],
        [0, 1],
        [1, 0],
        [2],
        [True],
        [[0, 0], [0, 0]],
        "0",
    ],
)
def test_invalid_subsets_of_ranks_are_refused(value):
    with pytest.raises(RecordError, match="part"):
        ranks_of_node({"part": value, "world_size": 2})


# ---- names ---------------------------------------------------------------------------------------


@given(st.integers(1, 10**6), st.integers(0, 2**32 - 1), st.integers(0, 10**12))
def test_names_of_runs_and_attempts_are_read_back(number, token, step):
    run = run_name(number, f"{token:08x}")
    assert run_sequence(run) == number
    assert parse_attempt(attempt_name(step, run)) == (step, run)


@given(st.integers(0, 10**6))
def test_names_of_records_are_read_back(rank):
    assert record_rank(record_name(rank)) == rank


def test_names_are_as_documented():
    assert run_name(1, "1f3a9c04") == "0001-1f3a9c04"
    assert attempt_name(15, run_name(1, "1f3a9c04")) == "step-0000000015-run-0001-1f3a9c04"
    assert record_name(0) == "rank_00000.json"


@pytest.mark.parametrize(
    "name",
    [
        "1-1f3a9c04",
        "0001-1F3A9C04",
        "x0001-1f3a9c04",
        "0001-1f3a9c04\n",
    ],
)
def test_invalid_run_ids_are_refused(name):
    with pytest.raises(RecordError, match="is not a run id"):
        run_sequence(name)


@pytest.mark.parametrize(
    "name",
    [
        "step-15-run-0001-1f3a9c04",
        "trash-step-0000000015-run-0001-1f3a9c04",
        "step-0000000015-run-0001-1f3a9c04.tmp",
        "step-00000000015-run-0001-0000aaaa",
        "step-0000000015-run-00001-0000aaaa",
        "step-0000000015-run-٠٠٠١-0000aaaa",
        f"step-0000000015-run-{'9' * 100}-0000aaaa",
    ],
)
def test_other_names_are_not_attempts(name):
    assert parse_attempt(name) is None and list(attempts([name])) == []


@pytest.mark.parametrize(
    "name",
    [
        "rank_0.json",
        ".rank_00000.json.x.mindresume-tmp",
        "rank_000001.json",
        "rank_٠٠٠٠١.json",
        f"rank_{'9' * 100}.json",
    ],
)
def test_other_names_are_not_records(name):
    assert record_rank(name) is None
