"""The hooks in mindformers' graph trainer, called by hand: real mindformers and mindspore, no
Trainer. CPU, one process."""

import contextlib
import importlib
import json
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import iteration_folders
import numpy as np
import pytest
import rank_folders
from memory_tiers import make_owned_tier, memory  # noqa: F401  a fixture
from rank_folders import (
    STORAGE,
    dir_at,
    flip_bit,
    path_of,
    save,
    state_of,
    target_of,
    write_foreign,
)

from mindresume.formats import CheckpointDir

pytest.importorskip("mindformers.tools")

import mindspore as ms  # noqa: E402
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister  # noqa: E402
from mindspore import nn  # noqa: E402

import mindresume.plugin  # noqa: E402
from mindresume.coordination import preemption  # noqa: E402
from mindresume.coordination.collectives import SingleProcess  # noqa: E402
from mindresume.coordination.storage_topology import Visibility  # noqa: E402
from mindresume.errors import (  # noqa: E402
    CollectiveError,
    ConfigError,
    LoadError,
    NoUsableCheckpointError,
    TrainingCompleteError,
)
from mindresume.formats.iterations import tracked
from mindresume.formats.rank_folders import FileName
from mindresume.formats.records import scan_records
from mindresume.mindformers import (  # noqa: E402
    adapter,
    configuration,
    counters,
    graph_load,
    job_start,
    loading,
    patches,
    training_context,
    upstream,
)
from mindresume.mindformers.network_state import deferred  # noqa: E402
from mindresume.mindformers.upstream import Kind  # noqa: E402
from mindresume.model.layout import TensorLayout  # noqa: E402
from mindresume.resume import job_selection  # noqa: E402
from mindresume.resume.eligible import (
    Choice,  # noqa: E402
)
from mindresume.saving.committer import Committer  # noqa: E402
from mindresume.saving.shard_writer import rank_shard, write_shard  # noqa: E402
from mindresume.settings import Settings  # noqa: E402

WRAPPED = [
    symbol
    for symbol in upstream.PROFILES[1].symbols
    if symbol.kind in (Kind.WRAPPED, Kind.REPLACED)
]


def place(module, name):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


pytestmark = pytest.mark.usefixtures("current")


def config_of(path="", **values):
    return MindFormerConfig(**{"resume_training": True, "load_checkpoint": str(path), **values})


# ---- installation --------------------------------------------------------------------------------


@pytest.mark.parametrize("symbol", WRAPPED, ids=lambda symbol: symbol.path)
def test_every_function_is_wrapped_once_and_keeps_its_name(symbol):
    hooked = place(symbol.module, symbol.name)
    assert hooked._mindresume and hooked.__name__ == symbol.name.rpartition(".")[2]
    mindresume.plugin.install()
    # a bound method is a new object each time
    assert place(symbol.module, symbol.name) == hooked
    assert not getattr(hooked.__wrapped__, "_mindresume", False)


# ---- configuration -------------------------------------------------------------------------------


class TaskTrainer:
    def __init__(self, model_name=None):
        self.model_name = model_name


def test_data_keys_below_trainer_reach_the_top_level():
    config = MindFormerConfig(
        trainer={"type": "X", "ignore_data_skip": True, "data_skip_steps": 7}, resume_training=False
    )
    checked = patches.WRAPPERS["Trainer._check_config_rules"](
        lambda self: (
            self.config.ignore_data_skip,
            self.config.data_skip_steps,
            dict(self.config.trainer),
        )
    )
    assert checked(SimpleNamespace(config=config)) == (True, 7, {"type": "X"})


def test_the_constructor_of_the_task_trainer_never_sees_them():
    """Asked of the real registry, which other kinds of classes leave untouched."""
    MindFormerRegister.register_cls(
        TaskTrainer, module_type=MindFormerModuleType.TRAINER, alias="TaskTrainerOfTheTest"
    )
    built = MindFormerRegister.get_cls(MindFormerModuleType.TRAINER, "TaskTrainerOfTheTest")(
        model_name="m", ignore_data_skip=True, data_skip_steps=1
    )
    assert type(built) is TaskTrainer and built.model_name == "m"
    with pytest.raises(TypeError, match="something_else"):
        MindFormerRegister.get_cls(MindFormerModuleType.TRAINER, "TaskTrainerOfTheTest")(
            something_else=1
        )
    assert isinstance(
        MindFormerRegister.get_cls(MindFormerModuleType.CALLBACK, "CheckpointMonitor"), type
    )


@pytest.mark.parametrize(
    "values, iterations",
    [
        ({"use_legacy_format": False}, True),
        ({"checkpoint": {"load_path": "x"}}, True),
        ({"use_legacy_format": True}, False),
        ({}, False),
    ],
)
def test_the_format_of_a_job_is_recognized(tmp_path, values, iterations):
    assert (
        job_start.uses_iterations(MindFormerConfig(**{"load_checkpoint": str(tmp_path), **values}))
        is iterations
    )


# ---- the choice ----------------------------------------------------------------------------------


def test_the_selection_sets_the_configuration(tmp_path, current):
    for step in (5, 10):
        save(tmp_path, step, world=1, fmt="ckpt")
    flip_bit(path_of(tmp_path, 10, 0, fmt="ckpt"), 200)
    config = config_of(tmp_path / "rank_0", load_ckpt_format="safetensors")
    job_start.select_checkpoint(config, current)
    assert (config.load_checkpoint, config.resume_training, config.load_ckpt_format) == (
        str(tmp_path),
        True,
        "ckpt",
    )
    assert current.plan.resumes and current.plan.choice.chosen.step == 5 and current.shard.rank == 0
    assert place(upstream.TRAINER, "get_resume_checkpoint")("anything") == "net_rank_0-1_5.ckpt"


@pytest.mark.parametrize(
    "task, found", [(configuration.TRAIN, "/output/checkpoint"), (configuration.EVALUATE, "a file")]
)
def test_resume_from_checkpoint_true_means_the_folder(current, monkeypatch, task, found):
    """The newest file of a rank can be of a save that never completed, and as a file it would be
    requested alone."""
    monkeypatch.setattr(training_context, "_current", [replace(current, task=task)])
    trainer = SimpleNamespace(config=MindFormerConfig(output_dir="/output"))
    assert patches.WRAPPERS["Trainer.get_last_checkpoint"](lambda self: "a file")(trainer) == found


@pytest.mark.parametrize("is_given", [True, False])
def test_an_empty_folder_begins_with_the_pretrained_weights(tmp_path, current, is_given):
    """``is_given`` False: no folder is given."""
    save(tmp_path / "source", 5, world=1)
    weights = tmp_path / "weights"
    mindresume.merge(tmp_path / "source", weights)
    (tmp_path / "checkpoint").mkdir()
    config = config_of(
        tmp_path / "checkpoint" if is_given else "", pretrained_model_dir=str(weights)
    )
    job_start.select_checkpoint(config, current)
    assert (config.resume_training, config.load_checkpoint, current.plan.resumes) == (
        False,
        str(weights),
        False,
    )
    assert current.plan.request.path == str(weights)
    current.resources.release()


@pytest.mark.parametrize("keys", [{"use_checkpoint_health_monitor": True}, {}])
def test_the_selection_sees_the_keys_as_mindformers_converts_them(
    tmp_path, current, monkeypatch, keys
):
    """Checkpoint 2.0 with the older key of the health monitor: mindformers converts it only after
    the selection."""
    from mindformers import Trainer

    config = MindFormerConfig(
        resume_training=True,
        load_checkpoint=str(tmp_path),
        use_legacy_format=False,
        monitor_config=None,
        callbacks=[],
        **keys,
    )
    trainer, asked = object.__new__(Trainer), []
    trainer.config = config
    monkeypatch.setattr(training_context, "_current", [replace(current, task=configuration.TRAIN)])
    monkeypatch.setattr(
        job_start,
        "select_plan",
        lambda config, request, *more: asked.append(request.health_dir is not None),
    )
    patches.WRAPPERS["Trainer._check_config_rules"](lambda self: None)(trainer)
    assert asked == [bool(keys)]


@pytest.mark.parametrize("there", [True, False])
def test_checkpoints_seen_by_another_rank_prevent_a_fresh_start(
    tmp_path, current, monkeypatch, there
):
    """An older one may be selected with a warning, but never none."""
    late = Visibility(
        65, ("rank 1 sees /x/manifest.json, and rank 0 does not list it, after 65 s",)
    )
    monkeypatch.setattr(job_selection, "wait_until_visible", lambda *_: late)
    if there:
        save(tmp_path, 5, world=1)
        job_start.select_checkpoint(config_of(tmp_path), current)
        assert current.plan.choice.chosen.step == 5
    else:
        with pytest.raises(NoUsableCheckpointError, match="rank 1 sees /x/manifest.json"):
            job_start.select_checkpoint(config_of(tmp_path), current)


# ---- a training and its end ----------------------------------------------------------------------


def load_by_mindformers(
    config, model, network, dataset, optimizer=None, do_eval=False, do_predict=False
):
    raise AssertionError("mindformers loads what mindresume has chosen")


class FakeTrainer:
    config = MindFormerConfig()


@pytest.fixture(autouse=True)
def output(tmp_path_factory, monkeypatch):
    """Sets the output folder of mindformers."""
    folder = tmp_path_factory.mktemp("output") / "output"
    monkeypatch.setattr(adapter, "output_root", lambda: str(folder))
    return folder


def train_with(train):
    return patches.WRAPPERS["Trainer.train"](train)(FakeTrainer())


def recorded(output):
    """Returns the events in the one event file."""
    [path] = (output / "mindresume_events").iterdir()
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def ends(error=None, stop_reason=""):
    """Returns a training whose step 7 is its last."""

    def train(self):
        progress = training_context.current().progress
        progress.step, progress.stop_reason = 7, stop_reason
        if error is not None:
            raise error
        return "trained"

    return train


@pytest.mark.parametrize(
    "error, stop_reason, raised, outcome, reason",
    [
        (None, "", None, "finished", ""),
        (None, "a graceful exit", None, "preempted", "a graceful exit"),
        (None, preemption.BY_SIGNAL, SystemExit, "preempted", preemption.BY_SIGNAL),
        (TrainingCompleteError("step 40 is the end"), "", None, "nothing_to_train", "step 40 is"),
        (ValueError("loss is nan"), "", ValueError, "failed", "ValueError: loss is nan"),
        # ``sys.exit(0)`` out of a training was recorded as a failure
        (SystemExit(0), "", SystemExit, "finished", ""),
        (SystemExit(None), "", SystemExit, "finished", ""),
        (SystemExit(0), "a graceful exit", SystemExit, "preempted", "a graceful exit"),
        (SystemExit(preemption.STATUS), "", SystemExit, "preempted", preemption.BY_SIGNAL),
        (SystemExit(3), "", SystemExit, "failed", "SystemExit: 3"),
    ],
)
def test_the_event_file_records_how_a_training_ended(
    output, error, stop_reason, raised, outcome, reason
):
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        result = train_with(ends(error, stop_reason))
        assert result == (None if error else "trained")
    first, last = recorded(output)
    assert (first["event"], first["world_size"]) == ("training_started", 1)
    assert first["utc_offset_seconds"] == time.localtime().tm_gmtoff
    assert (last["event"], last["outcome"]) == ("training_ended", outcome)
    assert last["reason"].startswith(reason) and bool(last["reason"]) is bool(reason)
    assert last.get("step") == (None if outcome == "nothing_to_train" else 7)
    assert training_context.current().task == ""
    assert training_context.current().progress.step is None


def test_only_a_rank_that_fails_writes_a_file_besides_rank_0(output, monkeypatch):
    monkeypatch.setattr(training_context, "group_of_job", lambda: SimpleNamespace(rank=3, size=4))
    train_with(ends())
    assert not output.exists()
    with pytest.raises(ValueError, match="loss is nan"):
        train_with(ends(ValueError("loss is nan")))
    assert [row["rank"] for row in recorded(output)] == [3, 3]
    assert recorded(output)[-1]["outcome"] == "failed"


def test_all_resources_are_closed_once_although_one_fails(output):
    """The save in flight is finished, the event file closed, and the context idle, whatever the
    release does."""
    closed = []

    def train(self):
        current = training_context.current()
        current.resources.read_lock = SimpleNamespace(release=lambda: 1 / 0)
        manager = SimpleNamespace(finish_after_error=lambda: closed.append("settled"))
        current.saves = SimpleNamespace(manager=manager)

    with pytest.raises(ZeroDivisionError):
        train_with(train)
    assert (
        closed == ["settled"]
        and training_context.current().task == ""
        and recorded(output)[-1]["event"] == "training_ended"
    )


def test_an_evaluation_within_a_training_leaves_its_context_alone():
    def train(self):
        current = training_context.current()
        assert current.task == configuration.TRAIN
        patches.WRAPPERS[f"Trainer.{configuration.EVALUATE}"](
            lambda self: training_context.current().task
        )(FakeTrainer())
        return training_context.current() is current

    assert train_with(train) is True


@pytest.mark.parametrize(
    "error",
    [RuntimeError("loss is nan"), LoadError("changed"), KeyboardInterrupt(), SystemExit(143)],
)
def test_the_load_attempt_receives_the_error_of_the_training(error):
    failures = []

    def train(self):
        training_context.current().resources.pending_load.attempt = SimpleNamespace(
            failed=failures.append
        )
        raise error

    with pytest.raises(type(error)):
        train_with(train)
    assert failures == [error] and training_context.current().resources.pending_load.attempt is None


def test_a_training_that_is_complete_with_a_save_in_memory_writes_it_to_disk(tmp_path, memory):  # noqa: F811
    tier = make_owned_tier(memory, tmp_path / "checkpoint")
    save(tier, 40, world=1)
    (chosen,) = scan_records(dir_at(tier))[0]

    def done(self):
        choice = Choice(
            chosen, (), (), False, (), str(tier), directory=str(tmp_path / "checkpoint")
        )
        training_context.current().plan = training_context.ResumePlan(
            choice=choice, selected=choice
        )
        raise TrainingCompleteError("the training is complete: step 40")

    assert train_with(done) is None
    (written,) = scan_records(dir_at(tmp_path / "checkpoint"))[0]
    assert (written.step, written.committed) == (40, True)


def test_processes_of_msrun_that_do_not_communicate_do_not_train(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    with pytest.raises(ConfigError, match="2 processes, but they do not communicate"):
        train_with(lambda self: pytest.fail("it trains"))


def test_files_are_not_hf_checkpoints(tmp_path):
    is_hf = place("mindformers.trainer.utils", "is_hf_checkpoint")
    (tmp_path / "a.ckpt").write_bytes(b"")
    assert is_hf(str(tmp_path / "a.ckpt")) is False and is_hf(str(tmp_path / "missing")) is False


def test_preload_is_left_out_where_mindresume_loads(tmp_path, current):
    preload = patches.WRAPPERS["preload_ckpt"](lambda config: "loaded")
    assert preload(None) == "loaded"
    weights = configuration.LoadRequest(str(tmp_path), resume=False, trains=False)
    current.plan = training_context.ResumePlan(weights)
    assert preload(None) is None
    save(tmp_path, 5, world=1)
    job_start.select_checkpoint(config_of(tmp_path), current)
    assert preload(None) is None


@pytest.mark.parametrize("epochs, complete", [(2, True), (3, False)])
def test_a_training_that_is_complete_already(tmp_path, current, epochs, complete):
    save(tmp_path, 20, world=1)
    job_start.select_checkpoint(config_of(tmp_path), current)
    config = MindFormerConfig(
        data_size=10,
        runner_config={
            "epochs": epochs,
            "origin_epochs": epochs,
            "initial_epoch": 2,
            "initial_step": 20,
            "sink_mode": False,
            "sink_size": 1,
        },
    )
    check = patches.WRAPPERS["check_runner_config"](lambda config, dataset: None)
    if complete:
        with pytest.raises(
            TrainingCompleteError,
            match="step 20 is the end of 2 epochs of 10 steps.*raise runner_config.epochs",
        ):
            check(config, None)
    else:
        check(config, None)
    assert (current.progress.dataset_size, current.progress.sink_size) == (10, None)


# ---- counters ------------------------------------------------------------------------------------


def runner(batch=8, sink_mode=False, sink_size=1, scale_sense=None, **more):
    return MindFormerConfig(
        runner_config={"global_batch_size": batch, "sink_mode": sink_mode, "sink_size": sink_size},
        runner_wrapper={"type": "W", "scale_sense": scale_sense},
        **more,
    )


def chosen(tmp_path, current, step=15, foreign=False, **values):
    (write_foreign if foreign else save)(tmp_path, step, world=1)
    job_start.select_checkpoint(config_of(tmp_path), current)


def test_a_run_from_its_beginning_that_skips_data(current):
    """In sink mode the skipped sinks are not trained after the end of the data; a whole pass cannot
    be skipped."""
    skips = []
    dataset = SimpleNamespace(set_init_step=skips.append)
    for skip, sink, epoch, position in (
        (4, None, 0, 32),
        (4, 2, 2, 32),
        (14, 2, 2, 32),
        (14, None, 0, 32),
        (None, 2, 0, 0),
    ):
        config = runner(
            sink_mode=sink is not None, sink_size=sink or -1, data_size=10, data_skip_steps=skip
        )
        config.runner_config.origin_epochs = 3
        counters.skip_data(config, dataset, current)
        origin = current.progress.origin
        assert (
            config.runner_config.initial_epoch,
            origin.position.passes,
            origin.position.samples,
        ) == (epoch, 0, position)
    # of the 14; mindformers itself did the others
    assert skips == [4, 4]


@pytest.mark.parametrize(
    "saved, sense, expected",
    [
        (4096.0, 1.0, 4096.0),
        (4096.0, {"type": "S", "loss_scale_value": 1.0}, 4096.0),
        (4096.0, SimpleNamespace(loss_scale_value=1.0), 4096.0),
        (None, 7.0, 7.0),
        (4096.0, None, None),  # none configured, none invented
    ],
)
def test_the_loss_scale_is_set_on_its_owner(current, saved, sense, expected):
    state = replace(state_of(15), loss_scale=saved)
    current.plan = SimpleNamespace(choice=SimpleNamespace(chosen=SimpleNamespace(state=state)))
    config = runner()
    config.runner_wrapper = MindFormerConfig(scale_sense=sense)
    counters.restore_progress(config, 10, current)
    found = config.runner_wrapper.scale_sense
    assert getattr(found, "loss_scale_value", found) == expected
    del config["runner_wrapper"]
    counters.restore_progress(config, 10, current)
    assert config.get("runner_wrapper") is None


# ---- loading -------------------------------------------------------------------------------------


def network(value, dtype=ms.float32):
    net = nn.Dense(3, 2, dtype=dtype)
    net.weight.set_data(ms.Tensor(np.full((2, 3), value), dtype))
    return nn.TrainOneStepCell(
        nn.WithLossCell(net, nn.MSELoss()), nn.Adam(net.trainable_params(), 0.1)
    )


def saved_network(root, net, step=5, drop=()):
    tensors = deferred([(p.name, p) for p in net.get_parameters() if p.name not in drop])
    write_shard(
        target_of(root, 0, 1),
        rank_shard(
            FileName("net", 0, 0, 1, step, "safetensors"),
            state_of(step),
            tensors,
            metadata={"format": "ms", "remove_redundancy": "False"},
        ),
    )
    Committer(target_of(root, 0, 1)).poll(step)


def load_shard(net, current, storage=STORAGE):
    current.resources.storage = storage
    loading.load(graph_load.GraphNetwork(current, config_of(), net), current)


@pytest.mark.parametrize("beside", [True, False])
def test_load_ckpt_async_reads_while_the_graph_is_compiled(tmp_path, current, monkeypatch, beside):
    saved_network(tmp_path, network(1.7))
    job_start.select_checkpoint(config_of(tmp_path), current)
    current.resources.storage = STORAGE
    net, reading, seen, read = network(0.0), threading.Event(), [], loading.read_shard

    def read_and_tell(*arguments):
        reading.set()
        return read(*arguments)

    monkeypatch.setattr(loading, "read_shard", read_and_tell)
    monkeypatch.setattr(adapter, "is_parallel", lambda: True)
    monkeypatch.setattr(
        adapter,
        "parameters_to_load",
        lambda net, offered: {
            p.name: (p.shape, "float32") for p in net.get_parameters() if p.name == "weight"
        },
    )
    monkeypatch.setattr(
        adapter,
        "compile_for_load",
        lambda *arguments: seen.append(reading.wait(600 if beside else 0)),
    )
    graph_load.load_resume(
        config_of(tmp_path, load_ckpt_async=beside, use_parallel=True),
        SimpleNamespace(_train_network=net),
        None,
        current,
    )
    assert seen == [beside] and float(
        net.parameters_dict()["weight"].asnumpy()[0, 0]
    ) == np.float32(1.7)


@pytest.mark.parametrize(
    "layout",
    [TensorLayout((2,), (0, -1)), TensorLayout((2,), (-1, -1), 2), TensorLayout((2,), (-1, -1))],
)
def test_the_file_of_one_rank_is_not_loaded_by_all_ranks_of_a_job_that_cuts_tensors(
    tmp_path, current, monkeypatch, layout
):
    """It fits in shape, and each rank would load the slices of that one. Without cuts each rank
    holds everything."""

    class Pair(SingleProcess):
        def gather(self, message):
            return [message, message]

    tensors = {
        **deferred([(p.name, p) for p in network(1.0).get_parameters()]),
        **rank_folders.counters(5),
    }
    write_shard(
        target_of(tmp_path / "other", 0, 1),
        rank_shard(FileName("net", 0, 0, 1, 5, "safetensors"), state_of(5), tensors),
    )
    path = shutil.copy(tmp_path / "other" / "rank_0" / "net_rank_0-1_5.safetensors", tmp_path)
    current.resources.group = Pair(0, 2)
    job_start.select_checkpoint(config_of(path), current)
    # of a network that was compiled for two ranks
    full = layout.global_shape((2, 3))
    monkeypatch.setattr(graph_load, "job_layouts", lambda *given: {"weight": (layout, full)})
    said = f"{path} is one file, which each of the 2 ranks would load.*the slices of one rank"
    cuts = full != (2, 3)
    with pytest.raises(CollectiveError, match=said) if cuts else contextlib.nullcontext():
        load_shard(network(5.0), current)


def test_a_file_that_changed_between_proof_and_load_is_not_loaded(tmp_path, current):
    """Also if it is read while the graph is compiled."""
    saved_network(tmp_path, network(1.0))
    job_start.select_checkpoint(config_of(tmp_path), current)
    path = tmp_path / "rank_0" / "net_rank_0-1_5.safetensors"
    flip_bit(path)
    changed = "rank 0: LoadError: .*changed after it was checked; start the job again"
    with pytest.raises(CollectiveError, match=changed):
        load_shard(network(5.0), current)
    config = config_of(tmp_path, load_ckpt_async=True, use_parallel=False)
    with pytest.raises(CollectiveError, match=changed):
        graph_load.load_resume(config, SimpleNamespace(_train_network=network(5.0)), None, current)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CollectiveError, match="CorruptFileError"):
        load_shard(network(5.0), current)


# ---- shared paths --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [row.module for row in WRAPPED if row.name == "is_publicly_accessible_path"]
)
def test_shared_paths_as_mindformers_sees_them(module, monkeypatch):
    """A job of more devices than one node has: /data01 is no part of /data."""
    monkeypatch.setattr("mindformers.utils.file_utils.get_real_group_size", lambda: 16)
    monkeypatch.setenv("SHARED_PATHS", "/mnt/other,/data")
    asked = place(module, "is_publicly_accessible_path")
    assert asked("/data/job") and not asked("/data01/job")
    monkeypatch.setenv("MA_JOB_DIR", "/home")
    # on ModelArts everything counts as shared
    assert asked("/data01/job")
    monkeypatch.delenv("MA_JOB_DIR")
    monkeypatch.setattr("mindformers.utils.file_utils.get_real_group_size", lambda: 8)
    assert asked("/data01/job")  # one node


def test_verified_files_are_loaded_from_memory(tmp_path, current):
    """The file is read once: what becomes of it afterwards does not matter. Without memory for it,
    it is read twice."""
    saved_network(tmp_path, network(1.0))
    path = tmp_path / "rank_0" / "net_rank_0-1_5.safetensors"
    content = path.read_bytes()
    job_start.select_checkpoint(config_of(tmp_path), current)
    flip_bit(path)
    loaded = network(5.0)
    load_shard(loaded, current, current.resources.storage)
    assert float(loaded.weight.asnumpy().ravel()[0]) == 1.0
    current.resources.release()
    with pytest.raises(CollectiveError, match="changed after it was checked"):
        load_shard(network(5.0), current, current.resources.storage)
    path.write_bytes(content)
    for settings in (Settings(staging_gib=1e-9), Settings(verify="quick")):
        current.settings = settings
        job_start.select_checkpoint(config_of(tmp_path), current)
        assert getattr(current.resources.storage, "size", 0) == 0


def test_the_tracker_that_the_selection_waited_for_counts(tmp_path, current, monkeypatch):
    """A tracker read before the selection, while waiting for other hosts, stayed in the cache and
    decided."""
    iteration_folders.save(tmp_path, 5)
    iteration_folders.save(tmp_path, 10)
    iteration_folders.track(tmp_path, "5")

    def wait(storage, path, *arguments):
        assert tracked(CheckpointDir(storage, path)) == 5
        iteration_folders.track(tmp_path, "10")
        return Visibility(1)

    monkeypatch.setattr(job_selection, "wait_until_visible", wait)
    job_start.select_checkpoint(
        config_of(tmp_path, use_legacy_format=False, output_dir=str(tmp_path / "output")), current
    )
    assert current.plan.choice.chosen.step == 10


def test_nothing_is_cached_for_a_plain_load_nor_kept_after_the_load(tmp_path, current):
    """Files of mindformers are not verified by their bytes; reading them kept a second copy, for
    the whole training without a CheckpointMonitor."""
    chosen(tmp_path, current, foreign=True)
    loading.read_shard(CheckpointDir(current.resources.storage, str(tmp_path)), current.shard)
    assert path_of(tmp_path, 15, 0).stat().st_size > current.resources.storage.size
    saved_network(tmp_path / "ours", network(1.0))
    job_start.select_checkpoint(config_of(tmp_path / "ours"), current)
    assert current.resources.storage.size > 0
    net, load = network(5.0), patches.WRAPPERS["transform_and_load_checkpoint"](load_by_mindformers)
    config = SimpleNamespace(only_save_strategy=False, load_ckpt_async=False, use_parallel=False)
    load(config, SimpleNamespace(_train_network=net), net, None)
    assert float(net.weight.asnumpy().ravel()[0]) == 1.0 and current.resources.storage.size == 0
