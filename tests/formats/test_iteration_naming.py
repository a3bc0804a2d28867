import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindresume.errors import CorruptFileError
from mindresume.formats.iterations import (
    MAX_ITERATION,
    MODEL,
    OPTIMIZER,
    CommonInfo,
    WeightFile,
    encode_common,
    iteration_name,
    parse_common,
    parse_iteration,
    parse_tracker,
    parse_weight_file,
)
from mindresume.formats.metadata import is_file_name, parse_slice_key, slice_key

KEYS = ["epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size", "ckpt_status"]
COMMON = CommonInfo(2, 20, 19, 1024.0, 8, 0)


# ---- names -----------------------------------------------------------------------------------------------------------

@given(st.integers(0, MAX_ITERATION))
def test_a_folder_name_is_read_back(step):
    assert parse_iteration(iteration_name(step)) == step


def test_folder_names():
    assert iteration_name(20) == "iteration_00000020" and iteration_name(10**9) == "iteration_1000000000"
    assert [parse_iteration(name) for name in ("iteration_0000001", "iteration_00000001", "iteration_1")] == [1, 1, 1]


@pytest.mark.parametrize("name", ["iteration_", "iteration_-1", "iteration_1 ", "iteration_1.tmp", "xiteration_1", "",
                                  "iteration_1\n", "Iteration_1", "iteration_١", "iteration_" + "1" * 19, "rank_0"])
def test_other_folders_are_not_iterations(name):
    assert parse_iteration(name) is None


@pytest.mark.parametrize("step", [-1, MAX_ITERATION + 1, True, 1.0])
def test_steps_without_a_name(step):
    with pytest.raises(ValueError, match="step"):
        iteration_name(step)


@pytest.mark.parametrize("name, file", [
    ("qwen3-model-0000003-0000008.safetensors", ("qwen3", MODEL, 3, 8)),
    ("model-0000000-0000001.safetensors", (None, MODEL, 0, 1)),
    ("opt-0000000-0000001.safetensors", (None, OPTIMIZER, 0, 1)),
    ("a-model-0000000-0000002-opt-0000001-0000002.safetensors", ("a-model-0000000-0000002", OPTIMIZER, 1, 2)),
    ("llama-2.0_7b-opt-0000001-0000002.safetensors", ("llama-2.0_7b", OPTIMIZER, 1, 2)),
    ("-model-0000000-0000001.safetensors", ("", MODEL, 0, 1)),
    ("m-opt-9999999-10000000.safetensors", ("m", OPTIMIZER, 9999999, 10000000))])
def test_weight_files(name, file):
    assert parse_weight_file(name) == WeightFile(*file) and str(WeightFile(*file)) == name


@given(st.none() | st.text(st.characters(exclude_characters="/\n", exclude_categories=["Cs"])),
       st.sampled_from([MODEL, OPTIMIZER]), st.integers(1, 10**9), st.data())
def test_every_weight_file_is_read_back(prefix, kind, count, data):
    file = WeightFile(prefix, kind, data.draw(st.integers(0, count - 1)), count)
    assert parse_weight_file(str(file)) == file


@pytest.mark.parametrize("name", [
    "qwen3-model-0000008-0000008.safetensors", "qwen3-model-000003-0000008.safetensors",
    "qwen3-model-00000003-0000008.safetensors", "qwen3-model-0000003-0000008.ckpt",
    "qwen3-model-0000003-0000008.safetensors.tmp", "qwen3model-0000003-0000008.safetensors",
    "qwen3-grad-0000003-0000008.safetensors", "model-0000000-0000000.safetensors", "d/model-0000000-0000001.safetensors",
    "model-000000٠-0000001.safetensors", "model.safetensors", ""])
def test_other_files_are_not_weight_files(name):
    assert parse_weight_file(name) is None


@pytest.mark.parametrize("name, good", [
    ("model-0000000-0000001.safetensors", True), ("é..x.safetensors", True), ("a.ckpt", False), (".safetensors", False),
    ("../a.safetensors", False), ("/a.safetensors", False), ("d\\a.safetensors", False), ("a\0.safetensors", False),
    ("a\n.safetensors", False), ("\ud800.safetensors", False), ("a" * 256 + ".safetensors", False), (None, False), (3, False)])
def test_file_names(name, good):
    assert is_file_name(name) is good


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text("'\"\\,() 0\n", max_size=8), st.integers(0, 999_999))
def test_a_key_of_a_slice_is_read_back_for_any_name(name, ordinal):
    key = slice_key(name, ordinal)
    assert key == str((name, (ordinal,)))
    assert parse_slice_key(key) == (name, ordinal)


@given(st.text("'\"\\,() 0w", max_size=20) | st.text(max_size=20))
def test_any_text_is_a_key_or_none(key):
    found = parse_slice_key(key)
    assert found is None or slice_key(*found) == key == str(ast.literal_eval(key))


@pytest.mark.parametrize("key", ["('w', (0,))x", "('w', (0))", "('w', ())", "('w', (0, 0))", "('w', (-1,))", "('w', (01,))",
                                 "(\"w\", (0,))", "('a' 'b', (0,))", "('a'*9, (0,))", "(f'w', (0,))", "('w', (1234567,))",
                                 "('\\x', (0,))", "('" + "(" * 500 + "', (0,)", "('" + "w" * 70000 + "', (0,))", "w", ""])
def test_texts_that_are_not_keys(key):
    assert parse_slice_key(key) is None


# ---- common.json -----------------------------------------------------------------------------------------------------

def test_common_json_is_that_of_mindformers():
    data = encode_common(COMMON)
    assert data == json.dumps(dict(zip(KEYS, [2, 20, 19, 1024.0, 8, 0], strict=True)), indent=4).encode()
    assert parse_common(data, "common.json") == COMMON
    unknown = CommonInfo(2, 20, 19, None, 8, None)
    assert parse_common(encode_common(unknown), "common.json") == unknown


def test_keys_of_later_releases_are_written_only_with_a_value():
    data = encode_common(CommonInfo(2, 20, 19, 1.0, 8))
    assert list(json.loads(data)) == ["epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size"]
    assert parse_common(data, "common.json") == CommonInfo(2, 20, 19, 1.0, 8)
    later = CommonInfo(2, 20, 19, 1.0, 8, 0, 160)
    assert parse_common(encode_common(later), "common.json") == later and b"consumed_samples" in encode_common(later)



def test_names_of_mindformers_1_8_and_2_1_are_parsed():
    older = b'{"epoch_num": 1, "step_num": 10, "global_step": 10, "loss_scale": 1.0, "global_batch_size": 8}'
    newer = b'{"step_num": 10, "consumed_samples": 80, "data_plan_state": {"x": [1]}, "ckpt_status": 1, "loss_scale": 2}'
    assert parse_common(older, "c") == CommonInfo(1, 10, 10, 1.0, 8, None)
    assert parse_common(newer, "c") == CommonInfo(step_num=10, loss_scale=2, ckpt_status=1, consumed_samples=80)


@pytest.mark.parametrize("data, reason", [
    (b"", "empty"), (b"{", "not JSON"), (encode_common(COMMON)[:-5], "not JSON"), (b"[]", "object"), (b"20", "object"),
    (b"\xff\xfe", "not JSON"), (b"[" * 100_000, "not JSON"), (b"{}", "step_num is missing"),
    (b'{"step_num": null}', "step_num is missing"),
    (b'{"step_num": "20"}', "step_num"), (b'{"step_num": 20.0}', "step_num"), (b'{"step_num": true}', "step_num"),
    (b'{"step_num": -1}', "step_num"), (b'{"step_num": 1' + b"0" * 30 + b"}", "step_num"),
    (b'{"step_num": 1, "step_num": 2}', "twice"),
    (b'{"step_num": 1, "loss_scale": NaN}', "loss_scale"), (b'{"step_num": 1, "loss_scale": "1"}', "loss_scale"),
    (b'{"step_num": 1, "global_batch_size": 0}', "global_batch_size"), (b'{"step_num": 1, "epoch_num": 1.5}', "epoch_num"),
    (b'{"step_num": 1, "ckpt_status": false}', "ckpt_status"), (b'{"step_num": 1}' + b" " * (1 << 20), "bytes")])
def test_a_damaged_common_json_is_refused_with_its_path(data, reason):
    with pytest.raises(CorruptFileError, match=reason) as caught:
        parse_common(data, "here/common.json")
    assert caught.value.path == "here/common.json" and len(str(caught.value)) < 1000


@given(st.binary())
def test_any_bytes_of_a_common_json(data):
    with pytest.raises(CorruptFileError):
        parse_common(data, "c")


@pytest.mark.parametrize("common", [CommonInfo(), CommonInfo(step_num=-1), CommonInfo(step_num=1, loss_scale=float("nan"))])
def test_values_that_could_not_be_read_back_are_refused(common):
    with pytest.raises(ValueError):
        encode_common(common)


# ---- the tracker -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("data, step", [(b"20", 20), (b"0", 0), (b" 20\r\n", 20), (b"00000020\n", 20),
                                        (b"9" * 18, MAX_ITERATION)])
def test_tracker(data, step):
    assert parse_tracker(data) == step


@pytest.mark.parametrize("data, why", [
    (b"", "empty"), (b" \n", "empty"), (b"\xff\xfe", "not text"), (b"\x00\x00", "not a whole number"), (b"-5", "negative"),
    (b"2 0", "not a whole number"), (b"20.0", "not a whole number"), (b"1_0", "not a whole number"),
    ("٢".encode(), "not a whole number"),
    (b"release", "not a whole number"), (b"1" + b"0" * 18, "19 digits"), (b"1" * 10**6, "1000000 digits")])
def test_a_tracker_that_names_no_step_has_a_reason(data, why):
    found = parse_tracker(data)
    assert isinstance(found, str) and why in found and len(found) < 200


@given(st.binary())
def test_any_bytes_of_a_tracker(data):
    assert isinstance(parse_tracker(data), int | str)
