"""Checkpoint 2.0 in the trainer: both dialects of the keys, the choice, and the numbers that
mindformers computes with."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mindformers.tools")

from huggingface_folders import GROUPED, document  # noqa: E402
from mindformers.tools.register import MindFormerConfig  # noqa: E402
from rank_folders import STORAGE, state_of, write_rank  # noqa: E402

from mindresume.errors import ConfigError, MissingCheckpointError  # noqa: E402
from mindresume.mindformers import adapter, job_start, training_context  # noqa: E402
from mindresume.mindformers.configuration import (
    LoadRequest,
    request_of_iterations,
    request_of_pynative,
    with_publishing,
)  # noqa: E402
from mindresume.mindformers.counters import common_info  # noqa: E402
from mindresume.mindformers.graph_load import GraphNetwork  # noqa: E402
from mindresume.model.training_state import TrainingState  # noqa: E402
from mindresume.saving.committer import Committer  # noqa: E402
from mindresume.saving.shard_writer import SaveTarget, iteration_shard, write_shard  # noqa: E402
from mindresume.settings import Settings  # noqa: E402


def config_of(**values):
    return MindFormerConfig(
        **{
            "use_legacy_format": False,
            "output_dir": "output",
            "callbacks": [{"type": "CheckpointMonitor"}],
            **values,
        }
    )


def saved(root, *steps, optimizer=True):
    for step in steps:
        target = SaveTarget(STORAGE, str(root), "0001-0000aaaa", 0, 1, True)
        write_shard(
            target,
            iteration_shard(
                "net",
                target,
                state_of(step),
                {"w": np.full(3, step, np.float32)},
                {"adam_m.w": np.zeros(3, np.float32)} if optimizer else None,
            ),
        )
        Committer(target).poll(step)
    return root


# ---- the load request ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "section, keys, path, resume, balanced",
    [
        ({}, {"load_checkpoint": "a", "resume_training": True}, "a", True, False),
        ({}, {"load_checkpoint": "a", "resume_training": False}, "a", False, False),
        # mindformers: a key that is not there at all
        ({}, {"load_checkpoint": "a"}, "a", True, False),
        ({}, {"load_checkpoint": "a", "resume_training": None}, "a", False, False),
        ({}, {"load_checkpoint": "", "resume_training": True}, "", True, False),
        ({}, {"load_checkpoint": "a", "balanced_load": True}, "a", True, True),
        ({"load_path": "b"}, {"load_checkpoint": "./b/"}, "b", True, False),
        # there it would start at step 0
        ({"load_path": "b"}, {"resume_training": True}, "b", True, False),
        ({"load_path": "b", "no_load_optim": False}, {"resume_training": False}, "b", True, False),
        ({"load_path": "b", "no_load_optim": True}, {"resume_training": False}, "b", False, False),
        ({"save_max": 3}, {"load_checkpoint": "a"}, "a", True, False),
        ({"load_path": "b", "load_balanced": False}, {"balanced_load": True}, "b", True, False),
        ({"load_path": "b", "load_balanced": True}, {}, "b", True, True),
    ],
)
def test_both_configuration_dialects_give_the_same_request(section, keys, path, resume, balanced):
    config = MindFormerConfig(checkpoint=section, **keys)
    expected = LoadRequest(path, resume, iterations=True, balanced=balanced)
    assert request_of_iterations(config) == expected


@pytest.mark.parametrize(
    "section, path, message",
    [
        ({"load_path": "b"}, "a", "load_path is b, load_checkpoint is a;.* remove one"),
        (
            {"load_path": "b", "no_load_optim": True},
            "",
            "resume_training is set.*no_load_optim",
        ),
    ],
)
def test_dialects_that_contradict_each_other_are_an_error(section, path, message):
    with pytest.raises(ConfigError, match=message):
        request_of_iterations(
            config_of(checkpoint=section, load_checkpoint=path, resume_training=True)
        )


@pytest.mark.parametrize("name", ["net_rank_0-2_5.safetensors", "iteration_00000010", "10"])
def test_a_name_is_the_documented_error(name):
    with pytest.raises(
        ConfigError,
        match="The resume_training must be a boolean value .* give its folder as load_checkpoint",
    ):
        request_of_iterations(config_of(load_checkpoint="a", resume_training=name))


# ---- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("section", [None, {"save_max": 3}])
def test_both_configuration_dialects_are_set_to_the_selection(tmp_path, current, section, resume):
    """A load of weights alone is not a resume."""
    saved(tmp_path, 5, 10)
    config = config_of(
        load_checkpoint=str(tmp_path),
        resume_training=resume,
        auto_trans_ckpt=True,
        load_ckpt_format="ckpt",
        checkpoint=section,
    )
    job_start.select_checkpoint(config, current)
    folder = str(tmp_path / "iteration_00000010")
    assert (config.load_checkpoint, config.resume_training) == (folder, resume)
    assert (config.load_ckpt_format, config.auto_trans_ckpt) == ("safetensors", False)
    if section:
        assert config.checkpoint == {
            "save_max": 3,
            "load_path": folder,
            "no_load_optim": not resume,
        }
    assert current.plan.resumes is current.plan.request.resume is resume
    assert current.plan.choice.chosen.step == 10
    assert config.callbacks[0]["checkpoint_format"] == "safetensors"


@pytest.mark.parametrize("exists", [False, True])
def test_an_empty_folder_is_a_fresh_start_or_an_error_for_weights_only(tmp_path, current, exists):
    if exists:
        (tmp_path / "c").mkdir()
    config = config_of(load_checkpoint=str(tmp_path / "c"), resume_training=True)
    job_start.select_checkpoint(config, current)
    assert (config.load_checkpoint, config.resume_training) == ("", False)
    assert current.plan == training_context.ResumePlan() and not current.plan.resumes
    with pytest.raises(MissingCheckpointError, match=str(tmp_path / "c")):
        job_start.select_checkpoint(
            config_of(load_checkpoint=str(tmp_path / "c"), resume_training=False), current
        )


def test_mindformers_gets_another_folder_if_common_json_is_missing(tmp_path, current):
    saved(tmp_path, 5)
    os.remove(tmp_path / "iteration_00000005" / "common.json")
    config = config_of(load_checkpoint=str(tmp_path), resume_training=True)
    job_start.select_checkpoint(config, current)
    assert (
        os.path.isfile(os.path.join(config.load_checkpoint, "common.json"))
        and current.plan.choice.chosen.step == 5
    )
    assert not config.load_checkpoint.startswith(str(tmp_path / "iteration"))


def test_weights_of_hugging_face(tmp_path, current):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_rank(tmp_path / "x", 5, 0, 1)
    (source,) = (tmp_path / "x" / "rank_0").glob("*.safetensors")
    (folder / "model.safetensors").write_bytes(source.read_bytes())
    with pytest.raises(ConfigError, match="hf holds Hugging Face weights.* resume_training: False"):
        job_start.select_checkpoint(
            config_of(load_checkpoint=str(folder), resume_training=True), current
        )
    none = str(tmp_path / "none")
    # at last there is a checkpoint, and it counts
    for path, resume, steps in (("", False, ()), (none, True, ()), (none, True, (5,))):
        saved(tmp_path / "none", *steps)
        config = config_of(
            load_checkpoint=path, pretrained_model_dir=str(folder), resume_training=resume
        )
        job_start.select_checkpoint(config, current)
        assert current.plan.request.pretrained is not bool(steps)
        assert current.plan.resumes is config.resume_training is bool(steps)
        assert steps or config.load_checkpoint == str(folder)


def test_an_unhealthy_checkpoint_is_refused_unless_requested(tmp_path, current):
    saved(tmp_path, 5)
    target = SaveTarget(STORAGE, str(tmp_path), "0001-0000aaaa", 0, 1, True)
    from dataclasses import replace

    write_shard(
        target,
        iteration_shard(
            "net", target, replace(state_of(10), health=1), {"w": np.ones(3, np.float32)}, {}
        ),
    )
    Committer(target).poll(10)
    monitored = {
        "monitor_config": {"health_checkpoint": {"embedding_local_norm_threshold": 1.0}},
        "resume_training": True,
    }
    for path, step, more in (
        (tmp_path, 5, monitored),
        (tmp_path / "iteration_00000010", 10, monitored),
        (tmp_path, 10, {"resume_training": True}),
    ):
        job_start.select_checkpoint(config_of(load_checkpoint=str(path), **more), current)
        assert current.plan.choice.chosen.step == step


# ---- counters ------------------------------------------------------------------------------------


def computed(common, runner, data_size):
    """Evaluates the formulas of mindformers 1.9.0 (trainer/base_trainer.py, training_process)."""
    scale = common["global_batch_size"] / runner.global_batch_size
    step = int(common["step_num"] * scale)
    if runner.sink_mode:
        return step, int(common["epoch_num"] * scale)
    return step, int(common["epoch_num"]) - int(step % data_size != 0)


@pytest.mark.parametrize(
    "step, old, new, data_size, sink, expected, is_new",
    [
        (15, 8, 8, 10, None, (15, 1), False),
        (20, 8, 8, 10, None, (20, 2), False),
        (15, 8, 4, 20, None, (30, 1), False),
        (15, 8, 16, 5, None, (7, 1), False),  # a step that does not scale is rounded down
        (20, 8, 8, 10, 2, (20, 10), False),
        (20, 8, 8, 10, -1, (20, 2), False),
        # after step 40 of 10 a pass a new data set of 15: of 6 epochs 2 are left
        (40, 8, 8, 15, None, (40, 4), True),
        (40, 8, 8, 15, 5, (40, 12), True),
    ],
)
def test_the_formulas_of_mindformers_give_our_progress(
    current, step, old, new, data_size, sink, expected, is_new
):
    state = TrainingState(step, 10, step, old, dataset_size=10 if is_new else None)
    current.plan = training_context.ResumePlan(
        choice=SimpleNamespace(chosen=SimpleNamespace(state=state))
    )
    config = MindFormerConfig(runner_wrapper={"scale_sense": 64.0}, ignore_data_skip=is_new)
    runner = config.runner_config = SimpleNamespace(
        global_batch_size=new, sink_mode=sink is not None, sink_size=sink, epochs=6
    )
    common = common_info(config, data_size, current)
    assert computed(common, runner, data_size) == expected
    assert common["global_step"] == current.progress.origin.global_step == expected[0]
    assert common["loss_scale"] == 64.0  # none was saved: the configuration applies
    assert config.ignore_data_skip is is_new and is_new is (config.data_skip_steps == 0)


# ---- optional tensors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, may",
    [
        ("accu_grads.w", True),
        ("global_step", True),
        ("scale_sense", True),
        ("lora_a.w", True),
        ("w", False),
        ("adam_m.w", False),
    ],
)
def test_optional_tensors_may_be_missing(current, name, may, monkeypatch):
    current.settings = Settings(allow_missing=("lora_*",))
    current.plan = training_context.ResumePlan(LoadRequest("a", iterations=True))
    monkeypatch.setattr(
        adapter, "parameters_to_load", lambda cell, offered: {name: ((), "float32")}
    )
    model = SimpleNamespace(parameters_dict=lambda: ["w", "lora_a.w"])
    optimizer = SimpleNamespace(parameters_dict=lambda: ["w", "adam_m.w", "global_step"])
    target = GraphNetwork(current, None, None, model, optimizer).target({}, "a")
    assert target.missing(()) == ([] if may else [name])


def test_the_number_of_reading_threads():
    for section, count in (({}, 0), ({"reshard_worker_num": 3}, 3), ({"load_worker_number": 2}, 2)):
        assert request_of_pynative({"checkpoint": section}, "a").workers == count
    for value in (-1, True, "4", 1.5):
        for read in (lambda config: request_of_pynative(config, "a"), request_of_iterations):
            with pytest.raises(ConfigError, match="reshard_worker_num"):
                read({"checkpoint": {"reshard_worker_num": value}})


# ---- what is published ---------------------------------------------------------------------------


def publishing(folder, **values):
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(document(GROUPED)), encoding="utf-8")
    (folder / "other.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")
    monitor = {"type": adapter.ALIAS, "directory": str(folder / "output")}
    config = config_of(callbacks=[monitor], pretrained_model_dir=values.pop("model", ""))
    given = {"every_steps": 10, "dir": str(folder / "weights"), "config": str(model)}
    return with_publishing(Settings.load({"publish": {**given, **values}}), config).publish


def test_the_model_of_published_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    without = Settings.load({"publish": {"every_steps": 10, "dir": "w"}})
    publishing(tmp_path)
    config = config_of(pretrained_model_dir="model", callbacks=[])
    monkeypatch.setattr(adapter, "output_root", lambda: str(tmp_path / "output"))
    assert with_publishing(without, config).publish.config == str(tmp_path / "model")
    off = Settings()
    assert with_publishing(off, config_of()) is off


@pytest.mark.parametrize(
    "values, fact",
    [
        ({"dir": "{}/output/checkpoint"}, "publish.dir"),
        ({"dir": "{}/output/checkpoint/deep"}, "publish.dir"),
        ({"config": "{}/nowhere"}, "nowhere"),
        ({"config": "{}/other.json"}, "other.json"),
        ({"dtype": "float16"}, "publish.dtype"),
        ({"keep": 0}, "publish.keep"),
        ({"dir": ""}, "publish.dir"),
    ],
)
def test_weights_that_cannot_be_published_are_refused(tmp_path, values, fact):
    given = {
        key: value.format(tmp_path) if isinstance(value, str) else value
        for key, value in values.items()
    }
    with pytest.raises(ConfigError, match=fact):
        publishing(tmp_path, **given)


@pytest.mark.parametrize("missing", ["dir", "config"])
def test_a_setting_that_publishing_needs_is_missing(tmp_path, missing):
    section = {"every_steps": 10, "dir": str(tmp_path / "weights"), "config": str(tmp_path)}
    del section[missing]
    with pytest.raises(ConfigError, match=f"publish.{missing}"):
        with_publishing(
            Settings.load({"publish": section}),
            config_of(callbacks=[{"type": adapter.ALIAS, "directory": str(tmp_path / "output")}]),
        )
