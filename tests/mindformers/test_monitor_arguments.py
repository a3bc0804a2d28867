"""Wrong arguments of CheckpointMonitor are named with what is allowed, before anything is made of
them."""

import pytest

pytest.importorskip("mindformers.tools")
from mindresume.errors import ConfigError  # noqa: E402
from mindresume.mindformers.checkpoint_monitor import check_callbacks, checked_arguments  # noqa: E402


def check(*args, **kwargs):
    return checked_arguments(args, kwargs)


@pytest.mark.parametrize(
    "key, value, allowed",
    [
        ("save_checkpoint_steps", -1, "at least 0"),
        ("save_checkpoint_steps", 2.5, "whole number"),
        ("save_checkpoint_steps", True, "whole number"),
        ("keep_checkpoint_max", "3", "whole number"),
        ("keep_checkpoint_max", "three", "whole number"),
        ("keep_checkpoint_max", 0, "at least 1, or null"),
        ("keep_checkpoint_per_n_minutes", -5, "at least 0"),
        ("save_checkpoint_seconds", "10", "whole number"),
        ("async_save", "fork", "'thread', 'process'"),
        ("async_save", 1, "one of False"),
        ("async_save", None, "one of False"),
        ("checkpoint_format", "npz", "safetensors, ckpt"),
        ("prefix", "", "a text"),
        ("prefix", "a/b", "without /"),
        ("prefix", 3, "a text"),
        ("integrated_save", "yes", "true or false"),
        ("directory", 5, "a path"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(key, value, allowed):
    with pytest.raises(ConfigError) as error:
        check(**{key: value})
    assert f"{key} is {value!r}" in str(error.value) and allowed in str(error.value)


def test_an_unknown_key_is_named_with_the_nearest_and_all():
    with pytest.raises(
        ConfigError,
        match="^unknown key 'keep_max', did you mean 'keep_checkpoint_max'.*prefix, directory",
    ):
        check(keep_max=3)
    with pytest.raises(ConfigError, match="unknown key 'zzz'. The keys are prefix"):
        check(zzz=3)


def test_keys_that_contradict_each_other():
    with pytest.raises(
        ConfigError,
        match=r"save_checkpoint_steps \(10\) and save_checkpoint_seconds \(60\) contradict",
    ):
        check(save_checkpoint_steps=10, save_checkpoint_seconds=60)
    with pytest.raises(
        ConfigError, match="keep_checkpoint_max .* and keep_checkpoint_per_n_minutes"
    ):
        check(keep_checkpoint_max=3, keep_checkpoint_per_n_minutes=10)


@pytest.mark.parametrize("key, value", [("exception_save", True), ("enc_key", b"0" * 16)])
def test_dtypes_that_safetensors_cannot_store_are_errors(key, value):
    with pytest.raises(
        ConfigError,
        match=f"{key} is set, and checkpoint_format is 'safetensors'.*set checkpoint_format: ckpt",
    ):
        check(checkpoint_format="safetensors", **{key: value})
    assert check(**{key: value})[key] == value


def test_the_section_is_checked_before_mindformers_reads_it():
    """mindformers' error would be that save_max in checkpoint_config, which is not in the file,
    should be at least 1."""
    monitor = {"type": "CheckpointMonitor", "keep_checkpoint_max": 0}
    with pytest.raises(
        ConfigError,
        match="^callbacks: CheckpointMonitor: keep_checkpoint_max is 0, expected at least 1",
    ):
        check_callbacks([{"type": "MFLossMonitor", "what": 1}, monitor])
    monitor["keep_checkpoint_per_n_minutes"] = 10
    check_callbacks([monitor, None])
    assert monitor == {
        "type": "CheckpointMonitor",
        "keep_checkpoint_max": None,
        "keep_checkpoint_per_n_minutes": 10,
    }


def test_what_the_user_wrote_and_defaults():
    assert check("net")["prefix"] == "net" and check()["keep_checkpoint_max"] == 5
    for kind in (False, True, "thread", "process"):
        assert check(async_save=kind)["async_save"] is kind
    assert check(save_checkpoint_seconds=60)["save_checkpoint_steps"] == 0
    assert check(keep_checkpoint_per_n_minutes=10)["keep_checkpoint_max"] == 0
    assert check(save_checkpoint_seconds=0)["save_checkpoint_steps"] == 1


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="directory is .*this is a file"):
            check(directory=str(path))
    assert check(directory=str(tmp_path / "not" / "yet"))
