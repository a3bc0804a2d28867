"""What a conversion writes is a checkpoint, bit for bit; into which folders it writes, and into
which it does not."""

import errno
import fcntl
import os

import pytest
from rank_folders import (
    folder_contents,
    leaves_nothing,
    tensors_in,
)
from reshard.plans import (
    ALL,
    COUNTERS,
    MODEL,
    STEP,
    TENSORS,
    TINY,
    Plan,
    Spec,
    check_slices,
    foreign,
    put,
    random_tensors,
    recorded,
    shard_file,
    tensors_of_rank,
)

import mindresume
from mindresume.errors import ConfigError


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Returns a recorded checkpoint of two ranks, sharded by tensor parallelism."""
    root = tmp_path_factory.mktemp("source") / "checkpoint"
    recorded(root, Plan.parse("tp2", TINY), TENSORS)
    return root


@pytest.fixture
def convert(tmp_path_factory):
    """Converts to a plan of the reference, given as a strategy."""

    def run(source, target, plan="dp2", fmt=None, model=TINY, **options):
        to = Plan.parse(plan, model).write(tmp_path_factory.mktemp("to"))
        return mindresume.convert(source, target, to=to, format=fmt, engine="direct", **options)

    return run


def stamps(folder):
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in folder.rglob("*")}


# ---- the target ----------------------------------------------------------------------------------

OTHERS = {
    "plan": {"to": "tp=2"},
    "format": {"to": "dp=2", "format": "ckpt"},
    "one rank": {"to": "dp=1"},
    "merged": {},
    "kind": {"hf_index": True},
    "parts": {"part_size_bytes": 64},
    "drop": {"drop": ("embedding*",)},
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_conversion_into_the_same_folder_is_refused(tmp_path, root, convert, what):
    (mindresume.merge if what in ("kind", "parts", "drop") else convert)(root, tmp_path / "new")
    before = stamps(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"new is not empty: it was converted from .*checkpoint, step 15, 2 ranks; .* Nothing "
        r"was changed",
    ):
        (mindresume.convert if "to" in OTHERS[what] else mindresume.merge)(
            root, tmp_path / "new", **OTHERS[what]
        )
    assert stamps(tmp_path) == before


def test_another_strategy_of_the_source_is_another_conversion(tmp_path, convert):
    """Files of mindformers do not contain the cut dimension: the result with a wrong strategy
    differs from the right one and must not be reused for it."""
    model = {"w": Spec((4, 4), 0, "first")}
    tensors = random_tensors(model)
    strategies = {
        "wrong": Plan.parse("tp2", {"w": Spec((4, 4), 1, "first")}),
        "right": Plan.parse("tp2", model),
    }
    foreign(tmp_path / "from", strategies["right"], tensors)
    for name, plan in strategies.items():
        given = plan.write(tmp_path / name)
        if name == "right":
            with pytest.raises(ConfigError, match="is not empty: it was converted from"):
                convert(
                    tmp_path / "from", tmp_path / "new of wrong", "dp1", model=model, strategy=given
                )
        convert(tmp_path / "from", tmp_path / f"new of {name}", "dp1", model=model, strategy=given)
        assert (
            tensors_of_rank(tmp_path / f"new of {name}", 0)["w"].tobytes() == tensors["w"].tobytes()
        ) is (name == "right")


@pytest.mark.parametrize("content", ["notes.txt", ".hidden", "conversion.json", "rank_0/"])
def test_a_target_with_something_in_it_is_refused(tmp_path, root, content, convert):
    path = tmp_path / "new" / content
    path.parent.mkdir()
    path.mkdir() if content.endswith("/") else path.write_text("precious")
    before = stamps(tmp_path)
    with pytest.raises(
        ConfigError,
        match="new is not empty; give a folder that does not exist. Nothing was changed",
    ):
        convert(root, tmp_path / "new")
    assert stamps(tmp_path) == before


@pytest.mark.parametrize("spoil", ["is gone", "has [0-9]+ bytes instead of"])
def test_a_target_that_was_damaged_later_is_refused(tmp_path, root, spoil, convert):
    convert(root, tmp_path / "new")
    path = tmp_path / "new" / "rank_1" / "net_rank_1-2_5.safetensors"
    path.unlink() if spoil == "is gone" else os.truncate(path, 7)
    with pytest.raises(
        ConfigError,
        match=rf"its file rank_1/net_rank_1-2_5.safetensors {spoil}.*; remove the folder",
    ):
        convert(root, tmp_path / "new")


def test_a_target_in_the_source_is_refused(tmp_path, convert):
    source = tmp_path / "checkpoint"
    recorded(source, Plan.parse("tp2", TINY), TENSORS)
    (tmp_path / "link").symlink_to(source)
    before = folder_contents(source)
    for target in (
        source / "new",
        source / "rank_0" / "new",
        tmp_path / "link" / "new",
        source / "rank_7",
        source / "a" / "b",
    ):
        with pytest.raises(
            ConfigError, match=r"lies in .*checkpoint, the source, into which nothing is written"
        ):
            convert(source, target)
    for target in (source, source / "rank_0", tmp_path / "link"):
        with pytest.raises(ConfigError, match="is not empty|lies in"):
            convert(source, target)
    assert folder_contents(source) == before and sorted(os.listdir(tmp_path)) == [
        "checkpoint",
        "link",
    ]
    # a name that begins alike is another folder
    convert(source, tmp_path / "checkpoint2")


def test_a_target_beside_a_single_file(tmp_path, convert):
    put(tmp_path / "net.safetensors", {**TENSORS, **COUNTERS})
    convert(tmp_path / "net.safetensors", tmp_path / "new")
    assert mindresume.open(tmp_path / "new").steps() == (STEP,)


@pytest.mark.parametrize(
    "target", ["new", "new/", "./new", "deep/er/new", "deep/../new", "empty", "empty/"]
)
def test_ways_to_name_a_target(tmp_path, root, monkeypatch, target, convert):
    monkeypatch.chdir(tmp_path)
    os.mkdir("empty")
    os.mkdir("deep") if ".." in target else None
    convert(root, target)
    check_slices(tmp_path / target, Plan.parse("dp2", TINY), TENSORS)
    assert (
        not [*tmp_path.rglob(".new*"), *tmp_path.rglob(".empty*")]
        and convert(root, target).seconds is None
    )


@pytest.mark.parametrize("target", ["link", "dangling", "."])
def test_a_target_that_no_folder_can_be_renamed_to(tmp_path, root, monkeypatch, target, convert):
    """Either it is refused before the first byte, or it works."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path / "empty")
    before = stamps(tmp_path)
    try:
        convert(root, target if target == "." else tmp_path / target)
    except ConfigError:
        assert stamps(tmp_path) == before


def test_a_file_system_without_locks(tmp_path, root, monkeypatch, convert):
    def no_locks(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert "[Errno 37] No locks available" in convert(root, tmp_path / "new").notes[0]
    check_slices(tmp_path / "new", Plan.parse("dp2", TINY), TENSORS)


# ---- the target is a checkpoint ------------------------------------------------------------------


# for each kind one; st/test_engines.py has more, with numpy and MindSpore's engine
PAIRS = """
    tp2>tp4 tp4>tp1 tp1>tp8 dp8>dp4 dp8opt8>dp4opt4 dp8opt-1>dp4opt-1 dp4opt4>dp8opt2 dp4>dp4opt4 pp2>pp1 pp1>pp2 tp2pp2>tp4
    tp2>tp2pp2 tp2pp4>tp2pp2 dp2tp2pp2opt2>tp8 dp1>dp2tp4 dp2tp4opt2>dp4tp2opt2 dp2tp2opt-1>tp4
    dp2tp2axes10>dp2tp2axes01""".split()  # noqa: E501, SIM905
KINDS = [
    (source, given, made)
    for given, made in (
        ("safetensors", "safetensors"),
        ("ckpt", "safetensors"),
        ("ckpt", "ckpt"),
        ("safetensors", "ckpt"),
    )
    for source in (
        "foreign",
        "recorded",
        "foreign dedup",
        "recorded dedup",
        "recorded and strategy",
    )
    # mindformers refuses to write that
    if (source, given) != ("foreign dedup", "ckpt")
]
CASES = [
    (*pair.split(">"), *kind, 1 + number // 4 % 4)
    for number, (pair, kind) in enumerate(zip(PAIRS, KINDS, strict=True))
]


def written(root, plan, tensors, kind="recorded", fmt="safetensors"):
    """Writes a checkpoint, with its strategy beside it if that is needed. Returns its path."""
    (foreign if "foreign" in kind else recorded)(
        root / "checkpoint", plan, tensors, fmt, dedup="dedup" in kind
    )
    if "foreign" in kind or "strategy" in kind:
        plan.write(root / "strategy")
    return root / "checkpoint"


@pytest.mark.parametrize("given, wanted, kind, source_format, target_format, workers", CASES)
def test_any_plan_becomes_any_other(
    tmp_path, convert, given, wanted, kind, source_format, target_format, workers
):
    plan = Plan.parse(wanted)
    source = written(tmp_path / "a", Plan.parse(given), ALL, kind, source_format)
    with leaves_nothing(source, tmp_path / "b"):
        checkpoint = mindresume.open(source, hold=False).latest()
        found = convert(
            checkpoint, tmp_path / "b", wanted, target_format, model=MODEL, workers=workers
        )
    check_slices(tmp_path / "b", plan, ALL)
    assert [row.state for row in mindresume.open(tmp_path / "b").verify().checkpoints] == [
        "verified"
    ]
    assert found.bytes_written == sum(
        array.nbytes
        for rank in range(plan.world_size)
        for array in (*plan.shard(ALL, rank).values(), *COUNTERS.values())
    )
    assert found.bytes_read == found.bytes_to_read and found.bytes_verified == (
        found.bytes_read if "recorded" in kind else 0
    )


SMALL = {
    "scale": Spec((), None, 0),
    "one": Spec((1,), None, 0, "bfloat16"),
    "bool": Spec((), None, 1, "bool"),
    "wide": Spec((), None, 1, "int64"),
    "byte": Spec((1, 1), None, 0, "int8"),
    "none": Spec((0,), None, 1),
    "no rows": Spec((0, 4), 1, 0, "bfloat16"),
    "no columns": Spec((8, 0), 0, 1, "float16"),
    "weight": Spec((8, 4), 0, 0),
    "after": Spec((8, 4), 1, 1),
    "aa": Spec((4, 0, 2), None, 0, "int8"),
    "zz": Spec((0,), None, 0, "int8"),
}


@pytest.mark.parametrize(
    "given, wanted", [("tp2", "dp2"), ("dp2opt2", "tp4"), ("pp2", "tp1"), ("tp1", "dp2tp2pp2opt2")]
)
@pytest.mark.parametrize(
    "source_format, target_format", [("safetensors", "ckpt"), ("ckpt", "safetensors")]
)
def test_numbers_and_empty_tensors(tmp_path, convert, given, wanted, source_format, target_format):
    tensors = random_tensors(SMALL)
    recorded(tmp_path / "a", Plan.parse(given, SMALL), tensors, source_format)
    convert(tmp_path / "a", tmp_path / "b", wanted, target_format, model=SMALL)
    check_slices(tmp_path / "b", Plan.parse(wanted, SMALL), tensors)


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_other_names(tmp_path, fmt, convert):
    """Files of MindSpore's transform are called ``checkpoint_<rank>``; with counters they get the
    name of a training."""
    plan = Plan.parse("tp2", TINY)
    for extra, name in ((COUNTERS, "checkpoint_rank_1-"), ({}, f"checkpoint_1.{fmt}")):
        folder = tmp_path / str(len(extra))
        for rank in range(2):
            put(
                folder / "a" / f"rank_{rank}" / f"checkpoint_{rank}.{fmt}",
                shard_file(plan, TENSORS, rank, extra=extra),
            )
        plan.write(folder / "strategy")
        convert(folder / "a", folder / "b", "dp2", fmt)
        (made,) = [
            path.name for path in (folder / "b" / "rank_1").iterdir() if path.name != "meta.json"
        ]
        assert made.startswith(name) and made.endswith(fmt)
        check_slices(folder / "b", Plan.parse("dp2", TINY), TENSORS, extra)


# ---- consolidated weights ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (), (8, 0)])
def test_a_parameter_of_one_number_is_not_a_counter(tmp_path, shape):
    model = {**TINY, "logit_scale": Spec(shape, None, "last")}
    recorded(tmp_path / "a", Plan.parse("tp2", model), random_tensors(model))
    for hf_index in (False, True):
        mindresume.merge(tmp_path / "a", tmp_path / str(hf_index), hf_index=hf_index)
        assert "logit_scale" in mindresume.open(tmp_path / str(hf_index)).latest().tensors


@pytest.mark.parametrize("part_bytes", [1, 100, 512, 1 << 20])
def test_sizes_of_parts(tmp_path, part_bytes):
    recorded(tmp_path / "a", Plan.parse("tp2"), ALL)
    mindresume.merge(tmp_path / "a", tmp_path / "merged", part_size_bytes=part_bytes)
    parts = [list(tensors_in(path)) for path in (tmp_path / "merged").glob("part*.safetensors")]
    assert all(
        len(names) == 1 or sum(ALL[name].nbytes for name in names) <= part_bytes for names in parts
    )
    # the empty one needs no part of its own
    assert len(parts) == {1: len(ALL) - 1, 1 << 20: 1}.get(part_bytes, len(parts))


def test_nothing_is_left_to_write(tmp_path, root):
    for drop, hf_index in (("*", False), ("*.weight", True)):
        with pytest.raises(
            ConfigError, match=r"checkpoint: of 7 tensors none is left to be written after \*"
        ):
            mindresume.merge(root, tmp_path / "merged", drop=(drop,), hf_index=hf_index)
    assert os.listdir(tmp_path) == []
