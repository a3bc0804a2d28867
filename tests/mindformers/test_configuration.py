"""Checkpoint 2.0 in the trainer: both dialects of the keys, the choice, and the numbers that
mindformers computes with."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mindformers.tools")

from mindformers.tools.register import MindFormerConfig  # noqa: E402
from rank_folders import STORAGE, flip_bit, save, state_of, write_rank  # noqa: E402

from mindresume.errors import ConfigError, MissingCheckpointError  # noqa: E402
from mindresume.mindformers import adapter, job_start, training_context  # noqa: E402
from mindresume.mindformers.configuration import (
    TRAIN,
    LoadRequest,
    request_of_iterations,
    request_of_pynative,
)  # noqa: E402
from mindresume.mindformers.counters import common_info  # noqa: E402
from mindresume.mindformers.graph_load import GraphNetwork  # noqa: E402
from mindresume.model.training_state import TrainingState  # noqa: E402
from mindresume.saving.committer import Committer  # noqa: E402
from mindresume.saving.shard_writer import SaveTarget, iteration_shard, write_shard  # noqa: E402
from mindresume.settings import Settings  # noqa: E402


@pytest.fixture
def current():
    before, own = (
        training_context.current(),
        training_context.TrainingContext(Settings(), task=TRAIN),
    )
    yield training_context.set_current(own)
    # its read lock and kept bytes, as at the end of a training
    own.resources.release()
    training_context.set_current(before)


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


def asks(path, resume, balanced=False):
    return LoadRequest(path, resume, iterations=True, balanced=balanced)


@pytest.mark.parametrize(
    "values, asked",
    [
        ({"load_checkpoint": "a", "resume_training": True}, asks("a", True)),
        ({"load_checkpoint": "a", "resume_training": False}, asks("a", False)),
        # mindformers: a key that is not there at all
        ({"load_checkpoint": "a"}, asks("a", True)),
        ({"load_checkpoint": "a", "resume_training": None}, asks("a", False)),
        ({"load_checkpoint": "", "resume_training": True}, asks("", True)),
        (
            {"load_checkpoint": "a", "resume_training": True, "balanced_load": True},
            asks("a", True, True),
        ),
        (
            {"checkpoint": {"load_path": "b"}, "load_checkpoint": "./b/", "resume_training": True},
            asks("b", True),
        ),
        # there it would start at step 0
        ({"checkpoint": {"load_path": "b"}, "resume_training": True}, asks("b", True)),
        (
            {"checkpoint": {"load_path": "b", "no_load_optim": False}, "resume_training": False},
            asks("b", True),
        ),
        (
            {"checkpoint": {"load_path": "b", "no_load_optim": True}, "resume_training": False},
            asks("b", False),
        ),
        (
            {"checkpoint": {"save_max": 3}, "load_checkpoint": "a", "resume_training": True},
            asks("a", True),
        ),
        (
            {
                "checkpoint": {"load_path": "b", "load_balanced": False},
                "balanced_load": True,
                "resume_training": True,
            },
            asks("b", True),
        ),
        (
            {"checkpoint": {"load_path": "b", "load_balanced": True}, "resume_training": True},
            asks("b", True, True),
        ),
    ],
)
def test_both_configuration_dialects_give_the_same_request(values, asked):
    assert request_of_iterations(MindFormerConfig(**values)) == asked


def test_two_paths_are_one_error_that_names_both():
    with pytest.raises(
        ConfigError, match="checkpoint.load_path is b, load_checkpoint is a;.* remove one"
    ):
        request_of_iterations(
            config_of(checkpoint={"load_path": "b"}, load_checkpoint="a", resume_training=True)
        )


@pytest.mark.parametrize("name", ["net_rank_0-2_5.safetensors", "iteration_00000010", "10"])
def test_a_name_is_the_documented_error(name):
    with pytest.raises(
        ConfigError,
        match="The resume_training must be a boolean value .* give its folder as load_checkpoint",
    ):
        request_of_iterations(config_of(load_checkpoint="a", resume_training=name))


def test_a_contradiction_is_an_error():
    with pytest.raises(
        ConfigError, match="resume_training is set.* checkpoint.no_load_optim: True"
    ):
        request_of_iterations(
            config_of(checkpoint={"load_path": "b", "no_load_optim": True}, resume_training=True)
        )


# ---- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [False, True])
def test_both_configuration_dialects_are_set_to_the_selection(tmp_path, current, section):
    saved(tmp_path, 5, 10)
    config = config_of(
        load_checkpoint=str(tmp_path),
        resume_training=True,
        auto_trans_ckpt=True,
        load_ckpt_format="ckpt",
        **({"checkpoint": {"load_path": str(tmp_path)}} if section else {}),
    )
    job_start.select_checkpoint(config, current)
    folder = str(tmp_path / "iteration_00000010")
    assert (
        config.load_checkpoint,
        config.resume_training,
        config.load_ckpt_format,
        config.auto_trans_ckpt,
    ) == (folder, True, "safetensors", False)
    assert not section or (config.checkpoint.load_path, config.checkpoint.no_load_optim) == (
        folder,
        False,
    )
    assert (
        current.plan.resumes
        and current.plan.request.resume
        and current.plan.choice.chosen.step == 10
    )
    assert config.callbacks[0]["checkpoint_format"] == "safetensors"
    current.resources.release()


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


def test_the_folder_above_is_accepted_and_an_unrelated_folder_is_an_error(tmp_path, current):
    (tmp_path / "data.bin").write_bytes(b"x")
    with pytest.raises(
        MissingCheckpointError, match="is not a checkpoint directory: .* found data.bin"
    ):
        job_start.select_checkpoint(
            config_of(load_checkpoint=str(tmp_path), resume_training=True), current
        )
    saved(tmp_path / "checkpoint", 5)
    config = config_of(load_checkpoint=str(tmp_path), resume_training=True)
    job_start.select_checkpoint(config, current)
    assert (
        config.load_checkpoint == str(tmp_path / "checkpoint" / "iteration_00000005")
        and current.plan.choice.chosen.step == 5
    )
    current.resources.release()


def test_a_weights_only_load_is_not_a_resume(tmp_path, current):
    saved(tmp_path, 5)
    config = config_of(
        load_checkpoint=str(tmp_path), resume_training=False, checkpoint={"save_max": 3}
    )
    job_start.select_checkpoint(config, current)
    assert not current.plan.resumes and current.plan.request and not current.plan.request.resume
    assert (config.checkpoint.no_load_optim, config.resume_training) == (True, False)
    current.resources.release()


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
    current.resources.release()


def test_rank_folders_are_selected_if_there_is_nothing_else(tmp_path, current):
    """A job changes to Checkpoint 2.0; after its first save its iteration folders are newer."""
    save(tmp_path, 5, world=2)
    job_start.select_checkpoint(
        config_of(load_checkpoint=str(tmp_path), resume_training=True, output_dir=str(tmp_path)),
        current,
    )
    assert current.plan.choice.chosen.step == 5 and current.plan.choice.chosen.iteration_dir == ""
    assert current.plan.open_source is not None
    current.resources.release()
    saved(tmp_path, 7)
    job_start.select_checkpoint(
        config_of(load_checkpoint=str(tmp_path), resume_training=True, output_dir=str(tmp_path)),
        current,
    )
    assert current.plan.choice.chosen.iteration_dir == "iteration_00000007"
    current.resources.release()


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
    config = config_of(load_checkpoint="", pretrained_model_dir=str(folder), resume_training=False)
    job_start.select_checkpoint(config, current)
    assert (
        current.plan.request.pretrained
        and config.load_checkpoint == str(folder)
        and not current.plan.resumes
    )
    config = config_of(
        load_checkpoint=str(tmp_path / "none"),
        pretrained_model_dir=str(folder),
        resume_training=True,
    )
    job_start.select_checkpoint(config, current)
    assert (
        current.plan.request.pretrained
        and config.load_checkpoint == str(folder)
        and config.resume_training is False
    )
    saved(tmp_path / "none", 5)
    config = config_of(
        load_checkpoint=str(tmp_path / "none"),
        pretrained_model_dir=str(folder),
        resume_training=True,
    )
    job_start.select_checkpoint(config, current)
    # load_checkpoint wins
    assert current.plan.resumes and not current.plan.request.pretrained
    current.resources.release()


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
        current.resources.release()


def test_a_damaged_one_is_refused_with_its_reason(tmp_path, current):
    saved(tmp_path, 5, 10)
    flip_bit(tmp_path / "iteration_00000010" / "net-model-0000000-0000001.safetensors", -3)
    job_start.select_checkpoint(
        config_of(load_checkpoint=str(tmp_path), resume_training=True), current
    )
    assert (
        current.plan.choice.chosen.step == 5
        and "damaged: w" in current.plan.choice.refused[0].reason
    )
    current.resources.release()


# ---- counters ------------------------------------------------------------------------------------


def computed(common, runner, data_size):
    """Evaluates the formulas of mindformers 1.9.0 (trainer/base_trainer.py, training_process)."""
    scale = common["global_batch_size"] / runner.global_batch_size
    step = int(common["step_num"] * scale)
    if runner.sink_mode:
        return step, int(common["epoch_num"] * scale)
    return step, int(common["epoch_num"]) - int(step % data_size != 0)


@pytest.mark.parametrize(
    "step, old, new, data_size, sink, expected",
    [
        (15, 8, 8, 10, None, (15, 1, 15)),
        (20, 8, 8, 10, None, (20, 2, 20)),
        (15, 8, 4, 20, None, (30, 1, 30)),
        (10, 8, 16, 5, None, (5, 1, 5)),
        (20, 8, 8, 10, 2, (20, 10, 20)),
        (20, 8, 4, 20, 4, (40, 10, 40)),
        (20, 8, 8, 10, -1, (20, 2, 20)),
    ],
)
def test_the_formulas_of_mindformers_give_our_progress(
    tmp_path, current, step, old, new, data_size, sink, expected
):
    current.plan = training_context.ResumePlan(
        choice=SimpleNamespace(chosen=SimpleNamespace(state=TrainingState(step, 10, step, old)))
    )
    runner = SimpleNamespace(global_batch_size=new, sink_mode=sink is not None, sink_size=sink)
    config = MindFormerConfig(runner_wrapper={"scale_sense": 64.0})
    config.runner_config = runner
    common = common_info(config, data_size, current)
    assert computed(common, runner, data_size) == expected[:2]
    assert (common["global_step"], current.progress.origin.global_step) == (
        expected[2],
        expected[2],
    )
    assert common["loss_scale"] == 64.0  # none was saved: the configuration applies


@pytest.mark.parametrize("sink, epoch", [(None, 4), (1, 60), (2, 30), (5, 12), (-1, 4)])
def test_a_new_data_set_in_both_modes(current, sink, epoch):
    """Step 40 of 10 a pass; the new data set has 15, of 6 epochs 2 are left."""
    state = TrainingState(40, 10, 40, 8, dataset_size=10)
    current.plan = training_context.ResumePlan(
        choice=SimpleNamespace(chosen=SimpleNamespace(state=state))
    )
    config = MindFormerConfig(ignore_data_skip=True)
    config.runner_config = SimpleNamespace(
        global_batch_size=8, sink_mode=sink is not None, sink_size=sink, epochs=6
    )
    common = common_info(config, 15, current)
    assert computed(common, config.runner_config, 15) == (40, epoch)
    assert (config.data_skip_steps, config.ignore_data_skip) == (0, True)


def test_a_step_that_does_not_scale_is_rounded_down(current):
    current.plan = training_context.ResumePlan(
        choice=SimpleNamespace(chosen=SimpleNamespace(state=TrainingState(15, 10, 15, 8, 1.0)))
    )
    config = MindFormerConfig()
    config.runner_config = SimpleNamespace(global_batch_size=16, sink_mode=False, sink_size=1)
    common = common_info(config, 5, current)
    assert computed(common, config.runner_config, 5) == (7, 1) and (
        config.data_skip_steps,
        config.ignore_data_skip,
    ) == (7, False)


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


@pytest.mark.parametrize(
    "section, count", [({}, 0), ({"reshard_worker_num": 3}, 3), ({"load_worker_number": 2}, 2)]
)
def test_the_number_of_reading_threads(section, count):
    assert request_of_pynative({"checkpoint": section}, "a").workers == count


@pytest.mark.parametrize("value", [-1, True, "4", 1.5])
def test_a_wrong_number_of_reading_threads(value):
    for read in (lambda section: request_of_pynative(section, "a"), request_of_iterations):
        with pytest.raises(ConfigError, match="reshard_worker_num"):
            read({"checkpoint": {"reshard_worker_num": value}})


def test_settings_accept_a_list_or_text():
    assert Settings.load({"allow_missing": ["a*", "b"]}, {}).allow_missing == ("a*", "b")
    assert Settings.load({}, {"MINDRESUME_ALLOW_MISSING": "a*, b"}).allow_missing == ("a*", "b")
    for wrong in (3, [1], [""], {"a": 1}):
        with pytest.raises(ConfigError, match="expected a list of patterns"):
            Settings.load({"allow_missing": wrong}, {})
