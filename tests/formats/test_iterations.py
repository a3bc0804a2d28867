"""Iteration folders as candidates: recognition, folders without records, and the order that the
tracker gives."""

import ast
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from iteration_folders import (
    FOREIGN,
    folder_of,
    foreign,
    save,
)
from rank_folders import RUN, STORAGE, dir_at

from mindresume.errors import CorruptFileError
from mindresume.formats import MINDFORMERS, CheckpointDir
from mindresume.formats.iterations import (
    COMMON,
    MAX_COMMON,
    MAX_ITERATION,
    MODEL,
    OPTIMIZER,
    TRACKER,
    CommonInfo,
    WeightFile,
    candidate_without_records,
    common_from_state,
    encode_common,
    intent_name,
    intents,
    iteration_name,
    load_common,
    parse_common,
    parse_iteration,
    parse_tracker,
    parse_weight_file,
    state_from_common,
)
from mindresume.formats.metadata import is_file_name, parse_slice_key, slice_key
from mindresume.formats.scan import ITERATION, WEIGHT_FOLDER, kind_of, scan
from mindresume.model.manifest import run_name
from mindresume.model.training_state import TrainingState
from mindresume.storage.posix import PosixStorage

KEYS = ["epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size", "ckpt_status"]
INFO = CommonInfo(2, 20, 19, 1024.0, 8, 0)


# ---- names ---------------------------------------------------------------------------------------


@given(st.integers(0, MAX_ITERATION))
def test_a_folder_name_is_read_back(step):
    assert parse_iteration(iteration_name(step)) == step


def test_folder_names():
    assert (
        iteration_name(20) == "iteration_00000020"
        and iteration_name(10**9) == "iteration_1000000000"
    )
    assert [
        parse_iteration(name) for name in ("iteration_0000001", "iteration_00000001", "iteration_1")
    ] == [1, 1, 1]


@pytest.mark.parametrize(
    "name",
    [
        "iteration_",
        "iteration_1 ",
        "iteration_1.tmp",
        "iteration_1\n",
        "Iteration_1",
        "iteration_١",
        "iteration_" + "1" * 19,
        "rank_0",
    ],
)
def test_other_folders_are_not_iterations(name):
    assert parse_iteration(name) is None


@pytest.mark.parametrize("step", [-1, MAX_ITERATION + 1, True, 1.0])
def test_steps_without_a_name(step):
    with pytest.raises(ValueError, match="step"):
        iteration_name(step)


@pytest.mark.parametrize(
    "name, file",
    [
        ("qwen3-model-0000003-0000008.safetensors", ("qwen3", MODEL, 3, 8)),
        ("model-0000000-0000001.safetensors", (None, MODEL, 0, 1)),
        ("opt-0000000-0000001.safetensors", (None, OPTIMIZER, 0, 1)),
        (
            "a-model-0000000-0000002-opt-0000001-0000002.safetensors",
            ("a-model-0000000-0000002", OPTIMIZER, 1, 2),
        ),
        ("m-opt-9999999-10000000.safetensors", ("m", OPTIMIZER, 9999999, 10000000)),
    ],
)
def test_weight_files(name, file):
    assert parse_weight_file(name) == WeightFile(*file) and str(WeightFile(*file)) == name


@given(
    st.none() | st.text(st.characters(exclude_characters="/\n", exclude_categories=["Cs"])),
    st.sampled_from([MODEL, OPTIMIZER]),
    st.integers(1, 10**9),
    st.data(),
)
def test_every_weight_file_is_read_back(prefix, kind, count, data):
    file = WeightFile(prefix, kind, data.draw(st.integers(0, count - 1)), count)
    assert parse_weight_file(str(file)) == file


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-model-0000008-0000008.safetensors",
        "qwen3-model-000003-0000008.safetensors",
        "qwen3-model-00000003-0000008.safetensors",
        "qwen3-model-0000003-0000008.ckpt",
        "qwen3-model-0000003-0000008.safetensors.tmp",
        "qwen3model-0000003-0000008.safetensors",
        "qwen3-grad-0000003-0000008.safetensors",
        "model-0000000-0000000.safetensors",
        "d/model-0000000-0000001.safetensors",
        "model-000000٠-0000001.safetensors",
        "model.safetensors",
        "",
    ],
)
def test_other_files_are_not_weight_files(name):
    assert parse_weight_file(name) is None


@pytest.mark.parametrize(
    "name, good",
    [
        ("model-0000000-0000001.safetensors", True),
        ("é..x.safetensors", True),
        (".safetensors", False),
        ("../a.safetensors", False),
        ("d\\a.safetensors", False),
        ("a\0.safetensors", False),
        ("\ud800.safetensors", False),
        ("a" * 256 + ".safetensors", False),
        (None, False),
    ],
)
def test_file_names(name, good):
    assert is_file_name(name) is good


@given(
    st.text(st.characters(exclude_categories=["Cs"])) | st.text("'\"\\,() 0\n", max_size=8),
    st.integers(0, 999_999),
)
def test_a_key_of_a_slice_is_read_back_for_any_name(name, ordinal):
    key = slice_key(name, ordinal)
    assert key == str((name, (ordinal,)))
    assert parse_slice_key(key) == (name, ordinal)


@given(st.text("'\"\\,() 0w", max_size=20) | st.text(max_size=20))
def test_any_text_is_a_key_or_none(key):
    found = parse_slice_key(key)
    assert found is None or slice_key(*found) == key == str(ast.literal_eval(key))


@pytest.mark.parametrize(
    "key",
    [
        "('w', (0,))x",
        "('w', (0, 0))",
        "('w', (-1,))",
        "('w', (01,))",
        '("w", (0,))',
        "('a' 'b', (0,))",
        "('w', (1234567,))",
        "('\\x', (0,))",
        "('" + "(" * 500 + "', (0,)",
        "('" + "w" * 70000 + "', (0,))",
    ],
)
def test_texts_that_are_not_keys(key):
    assert parse_slice_key(key) is None


# ---- common.json ---------------------------------------------------------------------------------


def test_common_json_is_that_of_mindformers():
    data = encode_common(INFO)
    assert (
        data
        == json.dumps(dict(zip(KEYS, [2, 20, 19, 1024.0, 8, 0], strict=True)), indent=4).encode()
    )
    assert parse_common(data, "common.json") == INFO
    unknown = CommonInfo(2, 20, 19, None, 8, None)
    assert parse_common(encode_common(unknown), "common.json") == unknown


def test_keys_of_later_releases_are_written_only_with_a_value():
    data = encode_common(CommonInfo(2, 20, 19, 1.0, 8))
    assert list(json.loads(data)) == [
        "epoch_num",
        "step_num",
        "global_step",
        "loss_scale",
        "global_batch_size",
    ]
    assert parse_common(data, "common.json") == CommonInfo(2, 20, 19, 1.0, 8)
    later = CommonInfo(2, 20, 19, 1.0, 8, 0, 160)
    assert parse_common(
        encode_common(later), "common.json"
    ) == later and b"consumed_samples" in encode_common(later)


def test_names_of_mindformers_1_8_and_2_1_are_parsed():
    older = (
        b'{"epoch_num": 1, "step_num": 10, "global_step": 10, "loss_scale": 1.0, '
        b'"global_batch_size": 8}'
    )
    newer = (
        b'{"step_num": 10, "consumed_samples": 80, "data_plan_state": {"x": [1]}, '
        b'"ckpt_status": 1, "loss_scale": 2}'
    )
    assert parse_common(older, "c") == CommonInfo(1, 10, 10, 1.0, 8, None)
    assert parse_common(newer, "c") == CommonInfo(
        step_num=10, loss_scale=2, ckpt_status=1, consumed_samples=80
    )


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "empty"),
        (encode_common(INFO)[:-5], "not JSON"),
        (b"[]", "object"),
        (b"{}", "step_num is missing"),
        (b'{"step_num": null}', "step_num is missing"),
        (b'{"step_num": "20"}', "step_num"),
        (b'{"step_num": -1}', "step_num"),
        (b'{"step_num": 1, "loss_scale": NaN}', "loss_scale"),
        (b'{"step_num": 1, "global_batch_size": 0}', "global_batch_size"),
        (b'{"step_num": 1}' + b" " * (1 << 20), "bytes"),
    ],
)
def test_a_damaged_common_json_is_refused_with_its_path(data, reason):
    with pytest.raises(CorruptFileError, match=reason) as caught:
        parse_common(data, "here/common.json")
    assert caught.value.path == "here/common.json" and len(str(caught.value)) < 1000


@given(st.binary())
def test_any_bytes_of_a_common_json(data):
    with pytest.raises(CorruptFileError):
        parse_common(data, "c")


@pytest.mark.parametrize(
    "common",
    [CommonInfo(), CommonInfo(step_num=-1), CommonInfo(step_num=1, loss_scale=float("nan"))],
)
def test_values_that_could_not_be_read_back_are_refused(common):
    with pytest.raises(ValueError):
        encode_common(common)


# ---- the tracker ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data, step",
    [(b"20", 20), (b"0", 0), (b" 20\r\n", 20), (b"00000020\n", 20), (b"9" * 18, MAX_ITERATION)],
)
def test_tracker(data, step):
    assert parse_tracker(data) == step


@pytest.mark.parametrize(
    "data, why",
    [
        (b"", "empty"),
        (b"\xff\xfe", "not text"),
        (b"-5", "negative"),
        (b"2 0", "not a whole number"),
        ("٢".encode(), "not a whole number"),
        (b"release", "not a whole number"),
        (b"1" + b"0" * 18, "19 digits"),
    ],
)
def test_a_tracker_that_names_no_step_has_a_reason(data, why):
    found = parse_tracker(data)
    assert isinstance(found, str) and why in found and len(found) < 200


@given(st.binary())
def test_any_bytes_of_a_tracker(data):
    assert isinstance(parse_tracker(data), int | str)


NEXT = run_name(2, "0000bbbb")


def found(root):
    return [(c.step, c.run) for c in scan(dir_at(root)).candidates]


# ---- recognition of iterations -------------------------------------------------------------------


def test_an_iteration_folder_is_recognised_by_its_name_or_its_files(tmp_path):
    save(tmp_path, 10)
    foreign(tmp_path, "mf190_20_single", (15,))
    for step in (10, 15):
        assert kind_of(STORAGE, str(folder_of(tmp_path, step))) == ITERATION
        os.rename(folder_of(tmp_path, step), tmp_path / f"best {step}")
        assert kind_of(STORAGE, str(tmp_path / f"best {step}")) == ITERATION
    assert ITERATION not in (
        kind_of(STORAGE, str(tmp_path)),
        kind_of(STORAGE, str(tmp_path / "none")),
    )
    (tmp_path / "iteration_00000020").write_text("")
    assert kind_of(STORAGE, str(tmp_path / "iteration_00000020")) != ITERATION
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "net-model-0000000-0000001.safetensors").write_bytes(b"")
    # weights alone: no counters to resume from
    assert kind_of(STORAGE, str(tmp_path / "weights")) == WEIGHT_FOLDER


# ---- order ---------------------------------------------------------------------------------------


def test_the_later_run_comes_first_without_a_tracker(tmp_path):
    save(tmp_path, 10, 30)
    save(tmp_path, 20, run=NEXT)
    os.remove(tmp_path / TRACKER)
    assert found(tmp_path) == [(20, NEXT), (30, RUN), (10, RUN)]


@pytest.mark.parametrize("time", [1.0, 4e9])
def test_foreign_folders_are_ordered_between_our_runs_by_step_not_by_time(tmp_path, time):
    foreign(tmp_path, "mf190_20_single", (10, 15))
    save(tmp_path, 12)
    save(tmp_path, 20, run=NEXT)
    os.remove(tmp_path / TRACKER)
    for step in (10, 15):
        for path in folder_of(tmp_path, step).iterdir():
            os.utime(path, (time, time))
    assert found(tmp_path) == [(20, NEXT), (15, None), (12, RUN), (10, None)]


# ---- tracker and intents -------------------------------------------------------------------------


def test_intents_are_distinguished_from_other_names():
    assert intents([intent_name(step) for step in (0, 20, 10**17)]) == {0, 20, 10**17}
    others = [
        f".{intent_name(20)}.{RUN}.mindresume-tmp",
        "tracker-20",
        "tracker-",
        "trash-x",
        f"claim-{RUN}.json",
    ]
    assert intents(others) == set()


# ---- folders of mindformers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_folder(tmp_path, name):
    foreign(tmp_path, name, (10,))
    candidate = candidate_without_records(dir_at(tmp_path), "iteration_00000010")
    world = {"mf190_20_single": 1, "mf190_20_dp2tp2opt": 4, "mf180_20_tp2": 2}[name]
    assert (candidate.step, candidate.origin, candidate.world_size, candidate.problem) == (
        10,
        MINDFORMERS,
        world,
        None,
    )
    assert {rank: [file.path for file in files] for rank, files in candidate.files.items()} == {
        rank: [
            f"iteration_00000010/qwen3-{kind}-{rank:07d}-{world:07d}.safetensors"
            for kind in ("model", "opt")
        ]
        for rank in range(world)
    }
    state = candidate.state
    assert (state.step, state.global_step, state.global_batch_size, candidate.epoch) == (
        10,
        10,
        8,
        1,
    )
    assert (candidate.records_dir, candidate.commit_dir, candidate.name, candidate.committed) == (
        None,
        "",
        "",
        False,
    )


def test_a_foreign_folder_under_another_name_has_the_step_of_its_common(tmp_path):
    foreign(tmp_path, "mf190_20_single", (10,))
    os.rename(folder_of(tmp_path, 10), tmp_path / "best")
    candidate = candidate_without_records(dir_at(tmp_path), "best")
    assert (candidate.step, candidate.problem) == (10, None)


def test_a_refusal_carries_the_step_of_the_folder(tmp_path):
    foreign(tmp_path, "mf190_20_single", (10,))
    os.rename(folder_of(tmp_path, 10), folder_of(tmp_path, 20))
    candidate = candidate_without_records(dir_at(tmp_path), "iteration_00000020")
    assert (candidate.step, candidate.problem.step) == (
        20,
        20,
    ) and "common.json is of step 10" in candidate.problem.reason


def test_weights_without_optimizer_are_complete(tmp_path):
    """save_optimizer: False."""
    foreign(tmp_path, "mf190_20_dp2tp2opt", (10,))
    for path in folder_of(tmp_path, 10).glob("*-opt-*"):
        path.unlink()
    assert candidate_without_records(dir_at(tmp_path), "iteration_00000010").problem is None


def test_a_file_is_not_a_candidate(tmp_path):
    (tmp_path / "iteration_00000010").write_text("")
    assert candidate_without_records(dir_at(tmp_path), "iteration_00000010") is None
    assert candidate_without_records(dir_at(tmp_path), "iteration_00000020") is None


def test_common_that_cannot_be_read(tmp_path):
    folder_of(tmp_path, 10).mkdir()
    with pytest.raises(CorruptFileError, match="No such file"):
        load_common(dir_at(tmp_path), "iteration_00000010")
    path = folder_of(tmp_path, 10) / COMMON
    path.write_bytes(b" " * (MAX_COMMON + 1))
    with pytest.raises(CorruptFileError, match="at most"):
        load_common(dir_at(tmp_path), "iteration_00000010")

    class FailingStorage(PosixStorage):
        def open(self, path):
            raise OSError(116, "Stale file handle", path)

    with pytest.raises(CorruptFileError, match="Stale file handle"):
        load_common(CheckpointDir(FailingStorage(), str(tmp_path)), "iteration_00000010")


def test_counters_survive_common_json():
    state = TrainingState(15, 10, 15, 8, 1024.0, None, 10, health=1)
    common = common_from_state(state)
    assert common == CommonInfo(2, 15, 15, 1024.0, 8, 1)
    again = state_from_common(common)
    assert (
        again.step,
        again.epoch,
        again.global_step,
        again.global_batch_size,
        again.loss_scale,
        again.health,
    ) == (15, 2, 15, 8, 1024.0, 1)
    assert state_from_common(CommonInfo(step_num=7)).step == 7


@pytest.mark.parametrize(
    "consumed, with_samples, written",
    [
        # 120: step 15 of batches of 8
        (130, True, 130),
        (120, True, None),
        (None, True, None),
        (130, False, None),
    ],
)
def test_consumed_samples_are_written_where_they_are_known_and_cannot_be_inferred(
    consumed, with_samples, written
):
    common = common_from_state(TrainingState(15, 10, 15, 8, consumed=consumed), with_samples)
    assert common.consumed_samples == written and (
        b"consumed_samples" in encode_common(common)
    ) == (written is not None)
    assert state_from_common(common).consumed == written
