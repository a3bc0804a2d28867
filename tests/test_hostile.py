"""Hostile and damaged folders: whoever wrote them could compute right checksums, so the seal (first
line) is always valid here.

Refused by name, nothing read or removed elsewhere, in bounded time; and the older good checkpoint
is taken.
"""

import io
import json
import os
import re
import shutil
import signal
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import DEEP, STRANGE, SURROGATE, altered, dump, places
from rank_folders import (
    RUN,
    STORAGE,
    Ranks,
    counters,
    dir_at,
    path_of,
    save,
    state_of,
    write_foreign,
)

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.lease import read_locks
from mindresume.errors import CorruptFileError, RecordError, UnusableCheckpointError
from mindresume.formats import CheckpointDir
from mindresume.formats.scan import scan
from mindresume.model.layout import MAX_RANKS, TensorLayout
from mindresume.model.manifest import (
    DETAILS_LIMIT,
    FOLDER,
    HEAD_LIMIT,
    MANIFEST,
    MANIFEST_LIMIT,
    Details,
    FileRecord,
    Manifest,
    Record,
    TensorRecord,
    attempt_name,
    read_details,
    read_record,
    record_name,
    run_name,
    run_sequence,
)
from mindresume.reshard.strategy_store import StrategyLookup
from mindresume.resume.candidates import list_checkpoints
from mindresume.resume.eligible import SelectionPolicy, unhealthy_files
from mindresume.resume.selection import select_checkpoint
from mindresume.resume.sources import CheckpointSources
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KeepLast
from mindresume.tensor_files import encode, read_header, read_scalar

OLD, NEW, WORLD = 5, 10, 2


# ---- altering sealed files -----------------------------------------------------------------------


def sealed(line, tail=None):
    return (
        b"\n".join(
            [xxhash.xxh3_128_hexdigest(line).encode(), line] + ([] if tail is None else [tail])
        )
        + b"\n"
    )


def resealed(content, change=None, change_details=None):
    """Returns the same record or manifest with another head and other details, and right
    checksums."""
    _, line, *rest = content.rstrip(b"\n").split(b"\n")
    head, tail = json.loads(line), rest[0] if rest else None
    if change_details:
        details = json.loads(tail)
        change_details(details)
        tail = dump(details)
    if tail is not None:
        head["details"] = xxhash.xxh3_128_hexdigest(tail)
    if change:
        change(head)
    return sealed(dump(head), tail)


def setting(*keys, value):
    def change(head):
        target = head
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = value

    return change


def deleting(*keys):
    def change(head):
        target = head
        for key in keys[:-1]:
            target = target[key]
        del target[keys[-1]]

    return change


# ---- readers -------------------------------------------------------------------------------------

LAYOUT = TensorLayout((2, 2), (0, -1))
FILES = tuple(
    (FileRecord(f"rank_{rank}/net_rank_{rank}-1_10.safetensors", "safetensors", 100, "ab" * 16),)
    for rank in range(2)
)
RECORD = Record(RUN, 1, WORLD, state_of(NEW), 1000.0, FILES[1], False).encode(
    Details(
        {
            "w": TensorRecord("float32", (4, 4), "cd" * 16, LAYOUT, (8, 4)),
            "b": TensorRecord("float32", (5,), "ef" * 16),
        },
        {"python": "of rank 1"},
    )
)
COMMIT = Manifest(
    RUN, len(FILES), state_of(NEW), 1000.0, FILES, ("01" * 16, "23" * 16), (), False
).encode()

NO_PATH = [
    "/etc/passwd",
    "../x.safetensors",
    "rank_1/../../x.safetensors",
    "rank_1/..",
    "rank_1/",
    "rank_1//x.safetensors",
    "rank_1/./x.safetensors",
    ".mindresume/x.safetensors",
    "rank_1/a/x.safetensors",
    "rank_0/x.safetensors",
    "rank_01/x.safetensors",
    "rank_11/x.safetensors",
    "rank_1\\x.safetensors",
    "rank_1/..\\x.safetensors",
    "rank_1/a\0.safetensors",
    "rank_1/a\n.safetensors",
    "rank_1/" + "x" * 300 + ".safetensors",
    "rank_1/x.ckpt",
    "rank_1/x",
    "C:\\x.safetensors",
    SURROGATE,
    DEEP,
]


def found_at(document, keys):
    for key in keys:
        document = document[key]
    return document


def whole(least):
    return lambda value: type(value) is int and least <= value < 2**63


def number(value):
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def none_or(allowed):
    return lambda value: value is None or allowed(value)


def shape(value):
    return isinstance(value, list) and len(value) < 100 and all(map(whole(0), value))


def anything(value):
    return True


MAY_HOLD = {  # what a reader may accept in the place of a good value, by field; nothing elsewhere
    "step": whole(0),
    "steps_per_epoch": whole(1),
    "global_step": whole(-1),  # FusedAdamW counts from -1
    "global_batch_size": none_or(whole(1)),
    "sink_size": none_or(whole(1)),
    "dataset_size": none_or(whole(1)),
    "health": none_or(whole(0)),
    "consumed": none_or(whole(0)),
    "loss_scale": none_or(number),
    "metrics": {}.__eq__,
    "data": none_or({}.__eq__),
    "epoch": anything,  # of the state: for people
    "step_in_epoch": anything,
    "saved_at": lambda value: number(value) and 0 <= value < 2**40,
    "version": (1).__eq__,
    "world_size": lambda value: whole(2)(value) and value <= MAX_RANKS,
    "deduplicated": lambda value: isinstance(value, bool),
    "small": [].__eq__,
    "files.2": whole(0),
    "random": lambda value: isinstance(value, dict),
    "python": anything,
    "tensors": {}.__eq__,
    "tensors.w.0": lambda value: isinstance(value, str),
    "tensors.b.0": lambda value: isinstance(value, str),
    "tensors.w.3": none_or((0).__eq__),
    "tensors.w.5": (0).__eq__,
    "tensors.b.1": shape,
    "tensors.b.1.0": whole(0),
    "tensors.b.3": none_or((0).__eq__),
    "tensors.b.4": none_or(shape),
    "tensors.b.5": (0).__eq__,
    "layouts.0.device_matrix.0": whole(1),
    "layouts.0.device_matrix.1": (2).__eq__,
    "optimizer_shards": whole(0),
    "layouts.0.tensor_map.0": whole(0),
    "layouts.0.tensor_map.1": lambda value: value in ([], -1),
}
SAYS = {
    "device_matrix": "layout|matrix",
    "tensor_map": "layout|map",
    "optimizer_shards": "layout|shards",
    "kind": "expected a",
    "tensors": "tensor|missing or wrong",
    "files": "file|missing or wrong",
    "w": "tensor w|missing or wrong",
    "b": "tensor b|missing or wrong",
    "details": "list of tensors|details",
    "records": "records|checksum",
    "small": "small|file",
    "layouts": "layout|missing or wrong",
    "metrics": "metric",
    "run": "run|type|text|expected string",
    "world_size": "world_size|ranks|rank is",
    "files.0": "path",
    "files.1": "format",
    "files.2": "size",
    "files.3": "checksum",
}


STRANGERS = [
    *STRANGE,
    -2,
    10**15,
    MAX_RANKS + 1,
    "ab" * 17,
    "é" * 32,
    "Record",
    [5, -1],
    [0, 0],
    [10**9] * 2,
    [1] * 10_000,
    [2**60] * 30,
    {"loss": 10**400},
    {"loss": True},
    ["a", "ckpt", 1],
    ["a", "ckpt", 1, "x", "more"],
]


@pytest.mark.parametrize("kind", ["record", "manifest", "details"])
def test_a_value_that_no_rank_can_have_written_is_refused_wherever_it_stands(kind):
    """Each value of a document is replaced by each strange one; a refusal names it at once."""
    content, read = {
        "record": (RECORD, read_record),
        "manifest": (COMMIT, Manifest.read),
        "details": (RECORD, read_details),
    }[kind]
    lines = content.split(b"\n")
    document = json.loads(lines[2 if kind == "details" else 1])
    for keys in places(document):
        if kind == "manifest" and keys[:2] == ("files", 0):
            continue  # as those of rank 1
        names = [key for key in keys if isinstance(key, str)]
        field = ".".join(map(str, keys)) if kind == "details" else names[-1]
        if keys[0] == "files" and not isinstance(found_at(document, keys), list):
            field = f"files.{keys[-1]}"
        allowed = MAY_HOLD.get(field) or MAY_HOLD.get(keys[-1]) or (lambda value: False)
        for value in [*STRANGERS, *(NO_PATH if field == "files.0" else ())]:
            if repr(value) == repr(found_at(document, keys)):
                continue
            change = setting(*keys, value=value)
            altered = resealed(content, *((None, change) if kind == "details" else (change,)))
            try:
                with within(3):
                    read(io.BytesIO(altered))
            except RecordError as error:
                said = str(error)
                assert len(said) < 1200 and said.encode() is not None
                word = SAYS.get(field) or SAYS.get(names[-1]) or names[-1]
                assert re.search(f"{word}|not JSON|UTF-8", said), (keys, value, said)
            else:
                assert allowed(value) or keys == ("details",), (keys, value)


def test_the_unaltered_files_are_good():
    assert read_details(io.BytesIO(resealed(RECORD)))[1].tensors["w"].global_shape == (8, 4)
    assert Manifest.read(io.BytesIO(resealed(COMMIT))).files == FILES


@pytest.mark.parametrize(
    "read, limit",
    [(read_record, HEAD_LIMIT), (read_details, HEAD_LIMIT), (Manifest.read, MANIFEST_LIMIT)],
)
def test_an_endless_line_is_not_read_to_its_end(read, limit):
    with within(5), Endless(b"0" * 32 + b"\n") as file:
        with pytest.raises(RecordError, match=f"more than {limit} bytes"):
            read(file)
        assert file.given <= limit + 200


def test_endless_details_are_not_read_to_their_end():
    _, line, _ = RECORD.split(b"\n", 2)
    with within(5), Endless(sealed(line)) as file:
        with pytest.raises(RecordError, match=f"more than {DETAILS_LIMIT} bytes"):
            read_details(file)
        assert file.given <= DETAILS_LIMIT + 3 * len(line)


class Endless(io.RawIOBase):
    """A file that begins with ``start`` and never ends; counts the bytes it returned."""

    def __init__(self, start):
        self.start, self.given = start, 0

    def readline(self, size=-1):
        assert size >= 0, "a line of any length is asked for"
        line = self.start[self.given : self.given + size].partition(b"\n")
        found = line[0] + line[1] if self.given < len(self.start) else b"x" * size
        self.given += len(found)
        return found


def test_the_largest_job_that_is_allowed_can_be_read_back():
    files = tuple(
        (FileRecord(f"rank_{rank}/net_rank_{rank}-1_10.ckpt", "ckpt", 1, "ab" * 16),)
        for rank in range(MAX_RANKS // 10)
    )
    manifest = Manifest(
        RUN, len(files), state_of(NEW), 1000.0, files, ("01" * 16,) * len(files), (), False
    )
    assert len(manifest.encode()) * 10 < MANIFEST_LIMIT / 2
    assert Manifest.read(io.BytesIO(manifest.encode())) == manifest


# ---- names ---------------------------------------------------------------------------------------


def test_no_run_follows_one_of_an_absurd_number():
    last = f"{10**18 - 1}-0000aaaa"
    assert run_sequence(last) == 10**18 - 1
    with pytest.raises(RecordError, match="remove it"):
        run_name(run_sequence(last) + 1, "0000bbbb")


# ---- folders: the older good checkpoint is selected ----------------------------------------------


@contextmanager
def within(seconds):
    """Fails if what is inside takes longer: so many seconds of the processor, which others cannot
    take, or, where a system call blocks, ten minutes."""

    def late(*_):
        # no Exception: nothing in the product can catch it
        pytest.fail(f"still at work after {seconds} s")

    clocks = (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds),
        (signal.SIGALRM, signal.ITIMER_REAL, 600),
    )
    before = [signal.signal(number, late) for number, _, _ in clocks]
    for _, clock, limit in clocks:
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for (number, clock, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile") / "good" / "checkpoint"
    for step in (OLD, NEW):
        save(root, step, WORLD)
    return root


@pytest.fixture
def root(good, tmp_path):
    """Saves steps 5 and 10 of 2 ranks."""
    return shutil.copytree(good, tmp_path / "checkpoint")


def attempt(root, step=NEW):
    return root / FOLDER / attempt_name(step, RUN)


def record_path(root, rank, step=NEW):
    return attempt(root, step) / record_name(rank)


def alter(root, rank=1, change=None, change_details=None, manifest="matching"):
    """Alters the record of one rank of the newest checkpoint. ``manifest``: "matching" is computed
    from the altered records, as an attacker would; "none": the job was killed before it."""
    path = record_path(root, rank)
    commit, content = attempt(root) / MANIFEST, path.read_bytes()
    path.write_bytes(resealed(content, change, change_details))
    if manifest == "none":
        commit.unlink()
    else:
        altered = json.loads(content.split(b"\n")[1])
        if change:
            change(altered)

        def match(head):
            head["records"][rank] = path.read_bytes().split(b"\n")[0].decode()
            if manifest == "matching":
                head["files"][rank] = altered.get("files")

        commit.write_bytes(resealed(commit.read_bytes(), match))


def put_file(root, content, rank=1, name=None, details=None):
    """Replaces the weights of one rank of the newest checkpoint, and records their size and
    checksum."""
    path = path_of(root, NEW, rank) if name is None else root / name
    path.write_bytes(content)

    def change(head):
        head["files"] = [
            [
                os.path.relpath(path, root),
                path.suffix[1:],
                len(content),
                xxhash.xxh3_128_hexdigest(content),
            ]
        ]

    alter(root, rank, change, details)


def choose(root, world=WORLD):
    with within(5):
        return select_checkpoint(
            STORAGE, str(root), SingleProcess(), SelectionPolicy(world, every_rank=True)
        )


def assert_falls_back(root, *says, world=WORLD):
    choice = choose(root, world)
    assert choice.chosen is not None and choice.chosen.step == OLD
    text = "\n".join(map(str, choice.refused))
    assert choice.refused[0].step in (NEW, None) and all(re.search(part, text) for part in says), (
        text
    )
    return choice


@pytest.mark.parametrize("manifest", ["none", "intact", "records only", "matching"])
def test_a_hostile_record(root, manifest):
    intact = (attempt(root) / MANIFEST).read_bytes()
    change = setting("files", 0, 0, value="/etc/passwd")
    alter(root, 1, change, manifest="records only" if manifest == "intact" else manifest)
    if manifest == "intact":
        (attempt(root) / MANIFEST).write_bytes(intact)
    assert_falls_back(root, "rank 1", "/etc/passwd")


@pytest.mark.parametrize(
    "details, says",
    [
        (setting("tensors", "layer.bias", 3, value=0), "tensor layer.bias is"),
        (setting("more", value=DEEP), "JSON"),
    ],
)
@pytest.mark.parametrize("lost", [False, True], ids=["file there", "file lost"])
def test_hostile_details(root, details, says, lost):
    alter(root, 1, None, details)
    if lost:
        path_of(root, NEW, 1).unlink()
    assert_falls_back(root, "rank 1", re.escape(says))


@pytest.mark.parametrize(
    "change",
    [
        setting("files", value=[]),
        setting("state", "step", value=OLD),
        setting("run", value="0009-0000ffff"),
        setting("files", 1, 0, 0, value="rank_0/net_rank_0-1_10.safetensors"),
    ],
)
def test_a_hostile_manifest_is_ignored_and_the_records_decide(root, change):
    path = attempt(root) / MANIFEST
    path.write_bytes(resealed(path.read_bytes(), change))
    choice = choose(root)
    assert choice.chosen.step == NEW and not choice.chosen.committed
    assert any(MANIFEST in note and "using the records" in note for note in choice.notes)
    # without them it was never complete
    record_path(root, 1).unlink()
    assert_falls_back(root, "missing: rank 1")


@pytest.mark.parametrize("name", [MANIFEST, record_name(1)])
@pytest.mark.parametrize("kind", ["folder", "zeros", "loop", "fifo", "dangling"])
def test_no_file_where_a_record_or_manifest_should_be(root, name, kind):
    path = attempt(root) / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"zeros": "/dev/zero", "loop": path, "dangling": root / "nowhere"}[kind])
    if name == MANIFEST:
        assert choose(root).chosen.step == NEW
    else:
        assert_falls_back(root, "rank 1")


# ---- hostile weights -----------------------------------------------------------------------------


def safetensors(text):
    return len(text).to_bytes(8, "little") + text


# more headers: tests/tensor_files
hostile_weights = {
    "gigabytes of header": (2**40).to_bytes(8, "little") + b"{}",
    "list": safetensors(b"[]"),
    "nothing but lists": safetensors(b'{"a":[' + b"[]," * 9_000_000 + b"[]]}"),
    "nested shape": safetensors(
        b'{"a":{"dtype":"F32","shape":%s,"data_offsets":[0,0]}}' % (b"[" * 500 + b"]" * 500)
    ),
    "pickle": b"\x80\x04cos\nsystem\n(S'false'\ntR.",
}


@pytest.mark.parametrize("content", hostile_weights.values(), ids=hostile_weights)
def test_hostile_weights_with_a_right_record(root, content):
    put_file(root, content)
    assert_falls_back(root, "rank 1|rank_1", "net_rank_1-1_10.safetensors")


@pytest.mark.parametrize("content", hostile_weights.values(), ids=hostile_weights)
def test_hostile_weights_without_a_record(root, content):
    write_foreign(root, 20, WORLD, suffix=1)
    path_of(root, 20, 1, 1).write_bytes(content)
    choice = choose(root)
    assert choice.chosen.step == NEW and "net_rank_1_1-2_10.safetensors" in str(choice.refused[0])


def foreign_file(path, **tensors):
    path.write_bytes(
        b"".join(
            bytes(piece)
            for _, piece in encode("safetensors", {**counters(20), **tensors}, {"format": "ms"})
        )
    )


@pytest.mark.parametrize("step", [np.array([20, 20]), np.array(-5), np.array(np.nan)])
def test_an_invalid_step_is_refused(root, step):
    for rank in range(WORLD):
        foreign_file(path_of(root, 20, rank, 1), step_num=step)
    choice = choose(root)
    assert choice.chosen.step == NEW and "net_rank_0_1-2_10.safetensors" in str(choice.refused[0])


def test_a_counter_of_gigabytes_is_not_read(tmp_path):
    """A sparse file of 64 GiB whose header declares one number."""
    path, nbytes = tmp_path / "x.safetensors", 2**36
    path.write_bytes(
        safetensors(
            b'{"step_num":{"dtype":"I64","shape":[%d],"data_offsets":[0,%d]}}'
            % (nbytes // 8, nbytes)
        )
    )
    os.truncate(path, path.stat().st_size + nbytes)
    with within(3), open(path, "rb") as file:
        header = read_header(file, str(path))
        with pytest.raises(CorruptFileError, match="expected one number in step_num"):
            read_scalar(file, header, "step_num")


# ---- consistent by itself, but not with the rest -------------------------------------------------


def test_details_that_describe_another_file(root):
    """All checksums are right, but the list of tensors is not that of the file."""
    alter(root, 1, None, setting("tensors", "layer.bias", 1, value=[7]))
    assert_falls_back(root, "rank_1/net_rank_1-1_10.safetensors", "layer.bias")


def test_details_that_lack_a_tensor_of_the_file(root):
    alter(root, 1, None, deleting("tensors", "layer.bias"))
    assert_falls_back(root, "rank_1/net_rank_1-1_10.safetensors", "layer.bias")


@pytest.mark.parametrize("manifest", ["matching", "records only", "none"])
def test_a_record_that_names_the_file_of_another_step(root, manifest):
    """The older weights must never be loaded as those of the newer step."""
    older = json.loads(record_path(root, 1, OLD).read_bytes().split(b"\n")[1])["files"]
    alter(root, 1, setting("files", value=older), manifest=manifest)
    assert_falls_back(root, "rank 1")


def test_a_record_that_the_manifest_does_not_agree_with(root):
    """Another file of the same rank and step, in all points good."""
    other = "rank_1/net_rank_1_7-1_10.safetensors"
    content = path_of(root, NEW, 1).read_bytes()
    (root / other).write_bytes(content)
    alter(root, 1, setting("files", 0, 0, value=other), manifest="records only")
    assert_falls_back(root, "rank 1")


def test_records_of_jobs_of_different_sizes(root):
    alter(root, 0, setting("world_size", value=1), manifest="none")
    assert_falls_back(root, "world_size|ranks")


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_record_of_another_world_size_than_its_manifest(root, rank):
    alter(root, rank, setting("world_size", value=4), manifest="records only")
    assert_falls_back(root, f"rank {rank}")


def test_all_ranks_of_a_job_come_to_the_same_result(root):
    alter(root, 1, setting("world_size", value=10**15))
    with within(10):
        choices = Ranks(WORLD).run(lambda group: select_checkpoint(STORAGE, str(root), group))
    assert [choice.chosen.step for choice in choices] == [OLD] * WORLD
    assert len({str(choice.refused) for choice in choices}) == 1


# ---- files beside them ---------------------------------------------------------------------------


def sparse(path, size=64 << 30):
    """A file whose header declares gigabytes that it does not have."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)


def deep(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize("fill", [sparse, deep])
@pytest.mark.parametrize(
    "name",
    [
        f"{FOLDER}/trial-{attempt_name(NEW, RUN)}",
        f"{FOLDER}/common",
        f"{FOLDER}/tracker-0000000010",
        "rank_0/meta.json",
        "latest_checkpointed_iteration.txt",
        "../strategy_0123abcd/used_for.json",
        f"{FOLDER}/claim-{RUN}.json",
        "iteration_00000030/common.json",
        "../strategy/ckpt_strategy_rank_0.ckpt",
    ],
)
def test_a_small_file_of_any_size_and_depth_costs_nothing(root, name, fill):
    write_foreign(root, 20, WORLD, suffix=1)  # so that a strategy is asked for
    (root / "rank_1" / path_of(root, 20, 1, 1).name).unlink()
    fill(root / name)
    with within(5):
        list_checkpoints(STORAGE, str(root), StrategyLookup(STORAGE))
        choice = select_checkpoint(
            STORAGE,
            str(root),
            SingleProcess(),
            SelectionPolicy(WORLD, every_rank=True, max_failed_loads=2),
            CheckpointSources(StrategyLookup(STORAGE)),
        )
        assert read_locks(CheckpointDir(STORAGE, str(root))) is not None
    assert choice.chosen.step == NEW


def test_a_list_of_unhealthy_checkpoints_of_any_size_costs_nothing(tmp_path):
    sparse(tmp_path / "health_ckpts.json")
    with within(5):
        names, problem = unhealthy_files(STORAGE, str(tmp_path))
    assert not names and "more than" in problem


@pytest.mark.parametrize("count", [2, 10**6, 10**12, 10**18 - 1])
def test_a_count_in_a_name_is_not_counted_to(root, count):
    folder = root / "iteration_00000030"
    folder.mkdir()
    for name in (f"x-model-0000000-{count:07d}.safetensors", "common.json", "metadata.json"):
        (folder / name).write_bytes(b"{}")
    (root / "latest_checkpointed_iteration.txt").write_text("30")
    with within(5):
        reason = next(c.problem.reason for c in scan(dir_at(root)).candidates if c.step == 30)
    assert f"1 of {count} model files are there, missing: 1" in reason and len(reason) < 300


def loop(path):
    path.unlink()
    path.symlink_to(path)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def test_weights_that_are_a_link_to_themselves(root):
    loop(path_of(root, NEW, 1))
    assert_falls_back(root, "net_rank_1-1_10.safetensors")


@pytest.mark.parametrize("make", [loop, pipe])
def test_weights_of_mindformers_that_are_no_file(root, make):
    write_foreign(root, 20, WORLD, suffix=1)
    make(path_of(root, 20, 1, 1))
    assert choose(root).chosen.step == NEW


# ---- nothing is removed that is not the checkpoint's ---------------------------------------------


def files_below(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def prune(root):
    """Prunes as the next run does after its commit of a newer checkpoint; step 5 must be
    removed."""
    run = run_name(2, "0000bbbb")
    committer = save(root, 15, WORLD, run=run)
    with within(10):
        return Committer(committer.target, KeepLast(2)).prune()


def test_a_good_prune_for_comparison(root):
    assert prune(root) == [OLD] and not path_of(root, OLD, 0).exists()


@pytest.mark.parametrize(
    "name",
    [
        "rank_0/../../target.ckpt",
        "/{outside}/target.ckpt",
        "target.ckpt",
        ".mindresume/target.ckpt",
        "rank_0/net_rank_0-1_7.safetensors",
    ],
)
def test_prune_removes_no_file_that_a_hostile_record_names(root, name):
    """Every record of the oldest checkpoint names something else: outside, or what mindformers
    saved."""
    write_foreign(root, 7, WORLD, meta=False)
    name = name.format(outside=str(root.parent).strip("/"))
    for path in (root.parent / "target.ckpt", root / "target.ckpt", root / FOLDER / "target.ckpt"):
        path.write_bytes(b"not yours")
    for rank in range(WORLD):
        path = record_path(root, rank, OLD)
        path.write_bytes(resealed(path.read_bytes(), setting("files", 0, 0, value=name)))
    before = files_below(root.parent)
    prune(root)
    gone = before - files_below(root.parent)
    ours = {str(path_of(root, OLD, rank).relative_to(root.parent)) for rank in range(WORLD)}
    assert {path for path in gone if FOLDER not in path} <= ours
    assert {path for path in gone if FOLDER in path} <= {
        path for path in before if attempt_name(OLD, RUN) in path
    }


@pytest.mark.parametrize("trash", ["", "trash-"], ids=["attempt", "trash"])
def test_prune_removes_nothing_through_a_link(root, tmp_path, trash):
    """The folder of records of the oldest checkpoint is in another folder, whose files are kept."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious.txt").write_text("not yours")
    for path in attempt(root, OLD).iterdir():
        shutil.copy(path, elsewhere)
    before = files_below(elsewhere)
    shutil.rmtree(attempt(root, OLD))
    (root / FOLDER / (trash + attempt_name(OLD, RUN))).symlink_to(elsewhere)
    prune(root)
    assert files_below(elsewhere) == before
    assert path_of(root, NEW, 0).exists()


# ---- anything at all -----------------------------------------------------------------------------

alterations = st.randoms(use_true_random=False).map(
    lambda draw: lambda document: altered(document, draw)
)


@settings(max_examples=250)
@given(alterations, alterations)
def test_any_altered_document_is_read_or_refused(change, change_details):
    for content, read in (
        (resealed(RECORD, change), read_record),
        (resealed(RECORD, None, change_details), lambda file: read_details(file)[0]),
        (resealed(COMMIT, change), Manifest.read),
    ):
        try:
            found = read(io.BytesIO(content))
        except RecordError as error:
            assert len(str(error)) < 1200
            continue
        files = enumerate(found.files) if read == Manifest.read else [(found.rank, found.files)]
        for rank, (file,) in files:
            assert file.path.split("/")[0] == f"rank_{rank}" and rank < found.world_size
        assert 0 < found.world_size <= MAX_RANKS
        json.dumps(found.state.to_json(), allow_nan=False)


@settings(max_examples=60)
@given(
    alterations,
    alterations,
    st.sampled_from(["record", "details", "manifest"]),
    st.sampled_from([WORLD, None]),
)
def test_a_checkpoint_is_selected_after_any_alteration(good, change, also, part, world):
    """The older checkpoint is unchanged, so one of the two is selected whatever the alteration, and
    no error ends the job."""
    kept = {path: path.read_bytes() for path in attempt(good).iterdir()}
    try:
        if part == "manifest":
            path = attempt(good) / MANIFEST
            path.write_bytes(resealed(path.read_bytes(), change))
        else:
            alter(
                good, 1, change if part == "record" else None, also if part == "details" else None
            )
        try:
            chosen = choose(good, world).chosen
        except UnusableCheckpointError as error:
            pytest.fail(f"the older one is good: {error}")
        assert chosen is not None and chosen.step in (OLD, NEW)
        assert all(
            not os.path.isabs(file.path) and ".." not in file.path for file in chosen.all_files
        )
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
