"""The path of a user is opened as weights: the selected step, the reasons for refusing others, and
errors."""

import errno
import os
import shutil
import threading
from contextlib import closing, contextmanager

import pytest
from rank_folders import (
    RUN,
    STORAGE,
    dir_at,
    path_of,
    save,
    write_rank,
)
from reshard.plans import (
    COUNTERS,
    STEP,
    Plan,
    Spec,
    foreign,
    put,
    random_tensors,
    recorded,
)
from storages import Hooked, failing, os_error

from mindresume.coordination.lease import read_locks
from mindresume.errors import (
    ConfigError,
    CorruptFileError,
    LoadError,
    MissingCheckpointError,
    NoUsableCheckpointError,
    StrategyError,
    UnreadableFileError,
)
from mindresume.formats.rank_folders import FileName
from mindresume.model.manifest import FOLDER, attempt_name
from mindresume.reshard import open_checkpoint as source_module
from mindresume.reshard.conversion_plan import whole_tensors
from mindresume.reshard.open_checkpoint import ReadHold, identity_of, open_checkpoint
from mindresume.reshard.open_checkpoint import state_of as state_from
from mindresume.reshard.region_load import read_regions
from tests.strategy_files import write_strategy

MODEL = {
    "embedding.weight": Spec((8, 4), 0, "first"),
    "layers.0.weight": Spec((4, 8), 1, 0, "bfloat16"),
    "layers.1.weight": Spec((4, 8), 1, 1, "float16"),
    "norm.weight": Spec((4,), None, "last"),
}
TENSORS = random_tensors(MODEL)
PLAN = Plan.parse("tp2pp2", MODEL)


def opened(path, **options):
    return open_checkpoint(STORAGE, str(path), **options)


def strategy_in(folder, plan=PLAN, fmt="ckpt"):
    write_strategy(plan.strategy(), str(folder), fmt)
    return str(folder)


def check(source, tensors=TENSORS):
    found = read_regions(
        source.weights, whole_tensors({name: source.weights.tensors[name] for name in tensors})
    )
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in tensors.items()
    }


# ---- the selected step ---------------------------------------------------------------------------


def cut_short(root, step):
    path = path_of(root, step, 2)
    os.truncate(path, path.stat().st_size - 1)


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path):
    save(tmp_path, 5, replicas=1)
    storage = failing("rank_00002", "open", number=errno.EIO)
    with pytest.raises(UnreadableFileError, match="cannot be read.*rank_00002.json"):
        open_checkpoint(storage, str(tmp_path))


@pytest.mark.parametrize("spoil", ["incomplete", "damaged"])
def test_the_newest_usable_save_of_a_step_is_opened(tmp_path, spoil):
    """A later run's save of the same step that never completed, or is damaged, does not hide the
    one of the run before."""
    save(tmp_path, 10, 2, replicas=1)
    if spoil == "incomplete":
        write_rank(tmp_path, 10, 0, 2, run="0002-0000bbbb", suffix=1)
    else:
        save(tmp_path, 10, 2, run="0002-0000bbbb", suffix=1, replicas=1)
        os.truncate(next((tmp_path / "rank_1").glob("net_rank_1_1-*")), 5)
    source = opened(tmp_path, step=10)
    assert source.candidate.run == RUN and [refusal.step for refusal in source.refused] == [10]
    os.truncate(path_of(tmp_path, 10, 1), 5)
    with pytest.raises(
        NoUsableCheckpointError, match="holds saves of step 10, but none can be used"
    ) as found:
        opened(tmp_path, step=10)
    assert [refusal.step for refusal in found.value.refused] == [10, 10]


# ---- strategies ----------------------------------------------------------------------------------


WRONG = {
    "fewer ranks": ("tp2", r"is of rank 2, the strategy .* is of 2 ranks"),
    "more ranks": (
        "tp4pp2",
        r"the files of all ranks from 4 to 7, a whole pipeline stage, are missing",
    ),
    "other pieces": (
        "tp4",
        r"embedding.weight .* is nowhere: it should be in the file of rank 2, which has no such "
        r"tensor",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_strategy_of_another_job(tmp_path, case):
    text, message = WRONG[case]
    foreign(tmp_path / "checkpoint", PLAN, TENSORS)
    with pytest.raises((StrategyError, LoadError, CorruptFileError), match=message):
        opened(
            tmp_path / "checkpoint",
            strategy=strategy_in(tmp_path / "wrong", Plan.parse(text, MODEL)),
        )


# ---- missing, mixed or damaged files -------------------------------------------------------------


@pytest.mark.parametrize("write", [foreign, recorded])
@pytest.mark.parametrize("lost", [[0], [1, 2], [0, 3]])
def test_a_rank_is_missing_whose_copy_is_there(tmp_path, write, lost):
    plan = Plan.parse("dp2tp2", MODEL)
    write(tmp_path / "checkpoint", plan, TENSORS)
    for rank in lost:
        path_of(tmp_path / "checkpoint", STEP, rank).unlink()
    source = opened(tmp_path / "checkpoint", strategy=strategy_in(tmp_path / "strategy", plan))
    check(source, {**TENSORS, **COUNTERS})
    assert source.what.endswith("4 ranks") and source.state.step == STEP


@pytest.mark.parametrize("write", [foreign, recorded])
def test_a_stage_is_missing(tmp_path, write):
    write(tmp_path / "checkpoint", PLAN, TENSORS)
    for rank in (2, 3):
        shutil.rmtree(tmp_path / "checkpoint" / f"rank_{rank}")
    with pytest.raises(
        (LoadError, CorruptFileError),
        match=r"ranks from 2 to 3, a whole pipeline stage, are missing|"
        r"the file of rank 2 is missing, and",
    ):
        opened(tmp_path / "checkpoint", strategy=strategy_in(tmp_path / "strategy"))


def test_consolidated_weights_of_both_formats(tmp_path):
    put(tmp_path / "a" / "one.ckpt", {"a": TENSORS["norm.weight"]})
    put(tmp_path / "a" / "two.safetensors", {"b": TENSORS["norm.weight"]})
    with pytest.raises(
        ConfigError, match="expected files of one format, found one.ckpt and two.safetensors"
    ):
        opened(tmp_path / "a")


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
@pytest.mark.parametrize("spoil", ["header", "short", "empty"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_damaged_file_of_mindformers(tmp_path, fmt, spoil, rank):
    foreign(tmp_path / "checkpoint", PLAN, TENSORS, fmt)
    path = path_of(tmp_path / "checkpoint", STEP, rank, 0, fmt)
    if spoil == "header":
        content = bytearray(path.read_bytes())
        content[2:10] = b"\xff" * 8
        path.write_bytes(content)
    else:
        os.truncate(path, path.stat().st_size - 1 if spoil == "short" else 0)
    with pytest.raises(CorruptFileError, match=rf"{path.name}.*rank {rank}") as found:
        opened(tmp_path / "checkpoint", strategy=strategy_in(tmp_path / "strategy"))
    assert found.value.path == str(path)


@pytest.fixture
def after_the_view(monkeypatch):
    """Calls what is appended to it with each path that is opened after the view was made."""
    made, calls = [], []
    checkpoint_of = source_module.checkpoint_of

    def noted(*arguments, **options):
        found = checkpoint_of(*arguments, **options)
        made.append(found)
        return found

    monkeypatch.setattr(source_module, "checkpoint_of", noted)

    def before(operation, path):
        for call in calls if made and operation == "open" else ():
            call(path)

    return calls, Hooked(before)


def test_an_error_of_the_disk_that_passes_is_one_of_ours(tmp_path, after_the_view):
    calls, storage = after_the_view
    foreign(tmp_path / "checkpoint", PLAN, TENSORS)
    failed = []

    def fail_once(path):
        if not failed:
            failed.append(path)
            raise os_error(errno.ESTALE, path)

    calls.append(fail_once)
    strategy = strategy_in(tmp_path / "strategy")
    with pytest.raises(UnreadableFileError) as found:
        open_checkpoint(storage, str(tmp_path / "checkpoint"), strategy=strategy)
    assert failed == [found.value.path]


def test_the_files_that_are_read_first_are_read_side_by_side(tmp_path, after_the_view):
    """Each waits for the disk. One after the other, the first would wait for ever."""
    calls, storage = after_the_view
    foreign(tmp_path / "checkpoint", PLAN, TENSORS)
    both, met = threading.Barrier(2, timeout=60), []

    def wait_for_another(path):
        if len(met) < 2:
            met.append(path)
            both.wait()

    calls.append(wait_for_another)
    strategy = strategy_in(tmp_path / "strategy")
    check(open_checkpoint(storage, str(tmp_path / "checkpoint"), strategy=strategy))
    assert len(set(met)) == 2


def test_weights_only(tmp_path):
    foreign(tmp_path / "checkpoint", PLAN, TENSORS, extra={})
    source = opened(tmp_path / "checkpoint", strategy=strategy_in(tmp_path / "strategy"))
    check(source)
    assert source.state is None and source.what.endswith("checkpoint, weights only, 4 ranks")
    with pytest.raises(
        MissingCheckpointError, match="has no step 15; there are: weights without a step"
    ):
        opened(tmp_path / "checkpoint", step=15)


# ---- reported facts ------------------------------------------------------------------------------


def test_identities(tmp_path):
    """Equal for the same files, different for others; with records independent of the folder."""
    recorded(tmp_path / "a", PLAN, TENSORS)
    recorded(tmp_path / "b", PLAN, random_tensors(MODEL, 1))
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    a, b, c = (opened(tmp_path / name).identity for name in "abc")
    assert a == c != b and len(a) == 2 + 4
    foreign(tmp_path / "d", PLAN, TENSORS)
    strategy = strategy_in(tmp_path / "strategy")
    before = opened(tmp_path / "d", strategy=strategy).identity
    assert opened(tmp_path / "d", strategy=strategy).identity == before
    os.utime(path_of(tmp_path / "d", STEP, 3), (1, 1))
    source = opened(tmp_path / "d", strategy=strategy)
    assert source.identity != before
    path_of(tmp_path / "d", STEP, 3).unlink()
    assert identity_of(dir_at(tmp_path / "d"), source.candidate)[3][2:] == [None, None]


EIGHT = {"step_num": 8, "epoch_num": 1, "global_batch_size": 4, "loss_scale": 2.0}


@pytest.mark.parametrize(
    "values, name, expected",
    [
        ({"step_num": 15}, FileName("net", 0, 0, 2, 5, "ckpt"), (15, 10, 15, None, None)),
        (
            {**EIGHT, "global_step": 0},
            FileName("net", 0, 0, 1, 8, "ckpt"),
            (8, 8, 0, 4, 2.0),
        ),
        (
            {**EIGHT, "global_step": -1},
            FileName("net", 0, 0, 1, 8, "ckpt"),
            (8, 8, -1, 4, 2.0),
        ),
        (
            {**EIGHT, "global_step": 7},
            FileName("net", 0, 0, 1, 8, "ckpt"),
            (8, 8, 7, 4, 2.0),
        ),
        # the end of an epoch
        (
            {"step_num": 20, "epoch_num": 2},
            FileName("net", 0, 0, 2, 10, "ckpt"),
            (20, 10, 20, None, None),
        ),
        ({"step_num": 15, "epoch_num": 1}, None, (15, 15, 15, None, None)),
        ({"step_num": 30, "epoch_num": 3}, None, (30, 10, 30, None, None)),
        ({"step_num": 3}, None, (3, 3, 3, None, None)),
        ({"step_num": 0}, None, None),
        ({"epoch_num": 2}, None, None),
        ({}, FileName("net", 0, 0, 2, 5, "ckpt"), None),
    ],
)
def test_the_state_is_derived_from_counters(values, name, expected):
    found = state_from(values, name)
    assert (
        None
        if found is None
        else (
            found.step,
            found.steps_per_epoch,
            found.global_step,
            found.global_batch_size,
            found.loss_scale,
        )
    ) == expected
    if found and name:
        assert (found.epoch, found.step_in_epoch) == (name.epoch, name.step)
    elif found:
        assert found.epoch == values.get("epoch_num", 1)


# ---- beside a job --------------------------------------------------------------------------------


@contextmanager
def held(root):
    with closing(ReadHold()) as hold:
        yield open_checkpoint(STORAGE, str(root), hold=hold)


def test_a_refused_checkpoint_is_not_locked(tmp_path):
    for step in (5, 10):
        save(tmp_path, step, replicas=1)
    cut_short(tmp_path, 10)
    with held(tmp_path) as source:
        assert source.state.step == 5 and list(read_locks(dir_at(tmp_path))) == [
            source.candidate.name
        ]


def test_the_scan_is_repeated_if_a_checkpoint_is_renamed_while_it_is_opened(tmp_path, monkeypatch):
    save(tmp_path, 5, replicas=1)
    commit_dir, aside = tmp_path / FOLDER / attempt_name(5, RUN), tmp_path / "aside"
    open_one, scan = source_module.open_candidate, source_module.find_candidates

    def moved(*values):
        monkeypatch.setattr(source_module, "open_candidate", open_one)
        commit_dir.rename(aside)
        return open_one(*values)

    def looked(*values):
        if aside.exists():
            aside.rename(commit_dir)
        return scan(*values)

    monkeypatch.setattr(source_module, "open_candidate", moved)
    monkeypatch.setattr(source_module, "find_candidates", looked)
    assert opened(tmp_path).state.step == 5


def test_a_folder_that_keeps_changing_is_an_error_in_the_end(tmp_path, monkeypatch):
    save(tmp_path, 5, replicas=1)
    monkeypatch.setattr(source_module, "acquire_read_lock", lambda *_, **how: None)
    with (
        pytest.raises(
            MissingCheckpointError, match="step 5 .* was removed before it could be read"
        ),
        held(tmp_path),
    ):
        pass
