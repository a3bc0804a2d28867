"""Our CheckpointMonitor with the real mindformers and a tiny real network, without its Trainer.

``Job`` mimics the contract of mindspore.train.Model.train towards a callback: ``on_train_begin``, ``step_end`` with
``cur_step_num`` counted from the start of the process (1, 2, ...) and ``cur_epoch_num``, ``end``. CPU, one process.
"""
import inspect
import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from senders import from_outside

from mindresume.formats import CheckpointDir

pytest.importorskip("mindformers.tools")

import mindspore as ms  # noqa: E402
from mindformers.core.callback.build_callback import build_callback  # noqa: E402
from mindformers.core.callback.callback import CheckpointMonitor as BuiltIn  # noqa: E402
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister  # noqa: E402
from mindspore import nn  # noqa: E402

import mindresume.plugin  # noqa: E402, F401  registers ours
from mindresume import runtime
from mindresume.coordination.lease import Lease, holder_of_this_process, lease_holders  # noqa: E402
from mindresume.errors import ConfigError, LeaseHeldError, SaveError  # noqa: E402
from mindresume.events import Resumed, RunOpened  # noqa: E402
from mindresume.formats import OURS  # noqa: E402
from mindresume.formats.scan import scan
from mindresume.mindformers import checkpoint_monitor as module  # noqa: E402
from mindresume.mindformers import (  # noqa: E402
    state_collector,
    training_context,
)
from mindresume.mindformers.checkpoint_monitor import CheckpointMonitor  # noqa: E402
from mindresume.model.manifest import run_name  # noqa: E402
from mindresume.resume.choice import Choice  # noqa: E402
from mindresume.resume.job_selection import LostWork  # noqa: E402
from mindresume.saving import checkpoint_manager  # noqa: E402
from mindresume.settings import RetentionSettings, Settings  # noqa: E402
from mindresume.storage.posix import PosixStorage  # noqa: E402
from mindresume.tensor_files import read_header  # noqa: E402

PER_EPOCH = 10
INJECTED = {"append_info": [{"epoch_num": 0, "step_num": 0, "global_step": 0, "loss_scale": 1}], "global_batch_size": 8,
            "remove_redundancy": False, "checkpoint_format": "safetensors", "embedding_size": 64,
            "embedding_local_norm_threshold": 1.0, "use_checkpoint_health_monitor": False, "use_legacy_format": True}


UNFINISHED: list["Job"] = []


def finish_all():
    """No job of a test outlives it: at the exit of the interpreter its monitor would write to a log that is closed."""
    while UNFINISHED:
        UNFINISHED.pop().monitor.finish_after_error()


class Job:
    """One run of a training process."""

    def __init__(self, monitor, done=0, per_epoch=PER_EPOCH):
        net = nn.Dense(3, 2)
        self.optimizer = nn.Adam(net.trainable_params(), 0.1)
        train = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), self.optimizer)
        self.net, self.train = net, train
        self.monitor, self.done = monitor, done
        self.params = SimpleNamespace(cur_step_num=0, cur_epoch_num=0, batch_num=per_epoch, list_callback=[],
                                      train_network=train, network=train, optimizer=self.optimizer,
                                      net_outputs=(ms.Tensor(0.5), ms.Tensor(False), ms.Tensor(1024.0)))
        self.context = SimpleNamespace(original_args=lambda: self.params)
        UNFINISHED.append(self)
        monitor.on_train_begin(self.context)

    def steps(self, count, stride=1):
        for _ in range(count):
            self.params.cur_step_num += stride
            step = self.done + self.params.cur_step_num
            self.params.cur_epoch_num = (step - 1) // self.params.batch_num + 1
            self.optimizer.global_step.set_data(ms.Tensor([step], ms.int32))
            self.net.weight.set_data(ms.Tensor(np.full((2, 3), step, np.float32)))
            self.monitor.step_end(self.context)
        return self

    def end(self):
        self.monitor.end(self.context)
        return self


def build(folder, done=0, **options):
    """Builds the callback as base_trainer.py does: the YAML block and the injected arguments."""
    injected = {**INJECTED, "health_ckpts_record_dir": str(folder)}
    injected.update({key: options.pop(key) for key in list(options) if key in injected})
    if done:
        injected["append_info"] = [{"step_num": done, "epoch_num": done // PER_EPOCH, "loss_scale": 1}]
    block = {"type": "CheckpointMonitor", "prefix": "net", "directory": str(folder), "save_checkpoint_steps": 5,
             "keep_checkpoint_max": 99, **options}
    return build_callback(dict(block), default_args=injected)


def resume(root, step):
    """Sets the state that the hooks leave before the training starts: step ``step`` is selected. Without it a training is a fresh
    start."""
    found = next(c for c in scan(CheckpointDir(PosixStorage(), str(root))).candidates if c.step == step)
    training_context.current().plan = training_context.ResumePlan(choice=Choice(found, (), (), False, (), str(root)))


def files(folder, kind="checkpoint", fmt="safetensors"):
    path = folder / kind / "rank_0"
    return sorted(name for name in os.listdir(path) if name.endswith(fmt)) if path.is_dir() else []


def committed(folder):
    return sorted(c.step for c in scan(CheckpointDir(PosixStorage(), str(folder / "checkpoint"))).candidates if c.committed)


@pytest.fixture(autouse=True)
def own_context():
    before = training_context.current()
    yield training_context.set_current(training_context.TrainingContext(Settings()))
    finish_all()
    training_context.set_current(before)


# ---- the load attempt -------------------------------------------------------------------------------------------------

class FakeLoadAttempt:
    def __init__(self):
        self.calls, self.begun = [], False

    def begin(self):
        self.calls.append(f"begins, run {self.run[:4]}, {self.hosts} host")
        self.begun = True

    def passed(self):
        self.calls.append("passed")


@pytest.mark.parametrize("signalled", [False, True])
def test_a_load_attempt_lasts_from_the_compilation_to_the_end_of_the_first_step(tmp_path, signalled):
    load_attempt = FakeLoadAttempt()
    training_context.current().resources.pending_load.attempt = load_attempt
    job = Job(build(tmp_path))
    job.monitor.on_train_step_begin(job.context)
    assert load_attempt.calls == []
    job.monitor._checkpoints.preemption.signalled = signalled                  # while it was compiled
    job.monitor.begin_load_attempt()
    assert load_attempt.calls == ([] if signalled else ["begins, run 0001, 1 host"])
    job.monitor._checkpoints.preemption.signalled = False
    job.steps(2)
    job.monitor.on_train_step_begin(job.context)
    assert load_attempt.calls[-1:] == ["passed"] and load_attempt.calls.count("passed") == 1
    job.end()


# ---- registry and arguments ------------------------------------------------------------------------------------------

def test_the_registry_returns_our_subclass_of_the_built_in():
    found = MindFormerRegister.get_cls(MindFormerModuleType.CALLBACK, "CheckpointMonitor")
    assert found is CheckpointMonitor and issubclass(found, BuiltIn) and issubclass(found, ms.ModelCheckpoint)


def upstream():
    return [p for p in inspect.signature(BuiltIn.__init__).parameters.values() if p.name != "self"]


def test_all_25_arguments_with_the_defaults_of_upstream(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(upstream()) == 25
    everything = CheckpointMonitor(**{p.name: p.default for p in upstream()})
    nothing = CheckpointMonitor()
    for p in upstream():
        assert everything._asked[p.name] == nothing._asked[p.name] == p.default


@pytest.mark.parametrize("argument", [p.name for p in upstream()])
def test_each_argument_alone_by_name(tmp_path, monkeypatch, argument):
    monkeypatch.chdir(tmp_path)
    default = {p.name: p.default for p in upstream()}[argument]
    assert CheckpointMonitor(**{argument: default})._asked[argument] == default


def test_positional_arguments_are_those_of_upstream(tmp_path):
    built = CheckpointMonitor("mine", str(tmp_path), None, 7)
    assert (built.origin_prefix, built._asked["save_checkpoint_steps"]) == ("mine", 7)


def test_an_unknown_argument_is_named_once(tmp_path):
    with pytest.raises(ConfigError, match="^unknown key 'keep_max', did you mean 'keep_checkpoint_max'"):
        CheckpointMonitor(directory=str(tmp_path), keep_max=3)
    with pytest.raises(ConfigError, match="^CheckpointMonitor: unknown key 'keep_max'"):        # of the registry
        build(tmp_path, keep_max=3)


def test_build_callback_with_the_arguments_of_the_trainer(tmp_path):
    built = build(tmp_path, done=15)
    assert type(built) is CheckpointMonitor
    assert (built._append_step_num, built.global_batch_size, built._config.format) == (15, 8, "safetensors")


# ---- due steps and names --------------------------------------------------------------------------------------

def test_names_meta_json_records_and_the_last_step_once(tmp_path):
    Job(build(tmp_path)).steps(12).end()
    assert files(tmp_path) == ["net_rank_0-1_10.safetensors", "net_rank_0-1_5.safetensors", "net_rank_0-2_2.safetensors"]
    meta = json.loads((tmp_path / "checkpoint" / "rank_0" / "meta.json").read_text())
    assert meta == {"last_epoch": 2, "last_step": 2, "last_ckpt_file": "net_rank_0-2_2.safetensors"}
    assert committed(tmp_path) == [5, 10, 12]


def test_a_last_step_that_is_saved_already_is_not_saved_again(tmp_path):
    Job(build(tmp_path)).steps(10).end()
    assert len(files(tmp_path)) == 2 and committed(tmp_path) == [5, 10]


@pytest.mark.parametrize("done, expected", [(7, [10, 15, 19]), (10, [15, 20, 22]), (13, [15, 20, 25])])
def test_saves_fall_on_absolute_multiples_after_a_resume(tmp_path, done, expected):
    Job(build(tmp_path, done=done), done).steps(12).end()
    assert committed(tmp_path) == expected
    last = expected[-1]
    assert f"net_rank_0-{(last - 1) // 10 + 1}_{(last - 1) % 10 + 1}.safetensors" in files(tmp_path)


def test_sinks_of_two_steps(tmp_path):
    """An epoch is one sink: the first callback at or after a multiple saves."""
    Job(build(tmp_path, save_checkpoint_steps=5), per_epoch=2).steps(8, stride=2).end()
    assert committed(tmp_path) == [6, 10, 16]
    assert files(tmp_path) == ["net_rank_0-3_2.safetensors", "net_rank_0-5_2.safetensors", "net_rank_0-8_2.safetensors"]


def test_by_seconds(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(runtime, "monotonic", lambda: now[0])
    job = Job(build(tmp_path, save_checkpoint_steps=0, save_checkpoint_seconds=60))
    for seconds, steps in ((61, [1]), (30, [1]), (31, [1, 3]), (59, [1, 3]), (2, [1, 3, 5])):
        now[0] += seconds
        job.steps(1)
        assert committed(tmp_path) == steps


@pytest.mark.parametrize("steps, seconds", [(0, 0), (None, None)])
def test_neither_steps_nor_seconds_saves_the_end_only(tmp_path, steps, seconds):
    Job(build(tmp_path, save_checkpoint_steps=steps, save_checkpoint_seconds=seconds)).steps(7).end()
    assert committed(tmp_path) == [7]


def test_the_suffix_grows_with_each_run_and_nothing_is_overwritten(tmp_path):
    Job(build(tmp_path)).steps(5)
    first = (tmp_path / "checkpoint" / "rank_0" / "net_rank_0-1_5.safetensors").read_bytes()
    Job(build(tmp_path)).steps(5)
    Job(build(tmp_path)).steps(5)
    assert files(tmp_path) == ["net_rank_0-1_5.safetensors", "net_rank_0_1-1_5.safetensors", "net_rank_0_2-1_5.safetensors"]
    assert (tmp_path / "checkpoint" / "rank_0" / "net_rank_0-1_5.safetensors").read_bytes() == first
    runs = [c.run for c in scan(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint"))).candidates]
    assert [run[:4] for run in runs] == ["0003", "0002", "0001"] and len(set(runs)) == 3


def test_a_recorded_name_is_not_reused_after_its_file_is_lost(tmp_path):
    Job(build(tmp_path)).steps(5)
    for path in (tmp_path / "checkpoint" / "rank_0").iterdir():
        path.unlink()
    Job(build(tmp_path)).steps(5)
    assert files(tmp_path) == ["net_rank_0_1-1_5.safetensors"]


def test_keep_checkpoint_max_counts_over_runs_and_removes_after_the_commit(tmp_path):
    Job(build(tmp_path, keep_checkpoint_max=2)).steps(15)
    assert committed(tmp_path) == [10, 15] and len(files(tmp_path)) == 2
    resume(tmp_path / "checkpoint", 15)
    Job(build(tmp_path, done=15, keep_checkpoint_max=2), 15).steps(5)
    assert committed(tmp_path) == [15, 20]
    assert files(tmp_path) == ["net_rank_0-2_5.safetensors", "net_rank_0_1-2_10.safetensors"]


def test_a_fresh_start_beside_another_training_keeps_its_checkpoints_with_a_warning(tmp_path, caplog):
    Job(build(tmp_path, keep_checkpoint_max=2)).steps(15).end()
    caplog.clear()
    Job(build(tmp_path, keep_checkpoint_max=1)).steps(12).end()
    assert "holds 2 checkpoints of another training, step 10, 15, which this run does not continue" in caplog.text
    assert committed(tmp_path) == [10, 12, 15]
    resume(tmp_path / "checkpoint", 12)
    Job(build(tmp_path, done=12, keep_checkpoint_max=1), 12).steps(8).end()        # its own are counted over its runs
    assert committed(tmp_path) == [10, 15, 20]


@pytest.mark.parametrize("where", ["transformed", "elsewhere"])
def test_a_resume_from_another_folder_belongs_to_that_training(tmp_path, where):
    Job(build(tmp_path, keep_checkpoint_max=2)).steps(10).end()
    other = tmp_path / where
    shutil.copytree(tmp_path / "checkpoint", other)
    resume(other, 10)
    if where == "transformed":                                  # of the chosen one, to another layout: now that is loaded
        current = training_context.current()
        selected = Choice(current.plan.choice.chosen, (), (), False, (), str(tmp_path / "checkpoint"))
        converted = replace(current.plan.choice, chosen=replace(selected.chosen, lineage="", run="0001-ffffffff"))
        current.plan = training_context.ResumePlan(choice=converted, selected=selected)
    Job(build(tmp_path, done=10, keep_checkpoint_max=2), 10).steps(10).end()
    assert committed(tmp_path) == [15, 20]


# ---- asynchronous saves ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", [True, "thread", "process"])
@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_async_save_writes_the_weights_of_its_step(tmp_path, kind, fmt):
    job = Job(build(tmp_path, async_save=kind, checkpoint_format=fmt, keep_checkpoint_max=3)).steps(22).end()
    assert committed(tmp_path) == [10, 15, 20, 22][-3:] and job.monitor._checkpoints.policy.failed_in_a_row == 0
    for candidate in scan(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint"))).candidates:
        found = ms.load_checkpoint(str(tmp_path / "checkpoint" / candidate.files[0][0].path), format=fmt)
        assert (found["weight"].asnumpy() == candidate.step).all() and int(found["step_num"]) == candidate.step
    meta = json.loads((tmp_path / "checkpoint" / "rank_0" / "meta.json").read_text())
    assert meta["last_ckpt_file"].endswith(f"-3_2.{fmt}")


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_error_of_the_writer_is_raised_at_a_later_step(tmp_path, own_context, kind):
    own_context.settings = Settings(on_save_error="raise")
    job = Job(build(tmp_path, async_save=kind))
    (tmp_path / "checkpoint" / "rank_0").mkdir(parents=True, exist_ok=True)
    (tmp_path / "checkpoint" / "rank_0" / "net_rank_0-1_5.safetensors").write_text("in the way")
    job.steps(5)
    job.monitor._checkpoints._saver._wait_until_idle(600)         # until it has failed; the failure is not reported yet
    with pytest.raises(SaveError, match="exists already"):
        job.steps(1)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_last_save_that_failed_is_tried_again_at_the_end(tmp_path, kind):
    job = Job(build(tmp_path, async_save=kind)).steps(4)
    way = tmp_path / "checkpoint" / "rank_0" / "net_rank_0-1_5.safetensors"
    way.parent.mkdir(parents=True, exist_ok=True)
    way.write_text("in the way")
    job.steps(1)
    for outcome in job.monitor._checkpoints._saver.wait(600):
        job.monitor._checkpoints._handle([outcome])
    way.unlink()
    job.end()
    assert committed(tmp_path) == [5]


def test_a_copy_uses_at_most_the_memory_share_of_the_rank(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_manager, "share_of_rank", lambda group: 64)
    Job(build(tmp_path, async_save=True)).steps(5).end()
    assert committed(tmp_path) == [5] and "step 5 is saved in the training thread" in caplog.text
    assert "the share of this rank" in caplog.text


def test_a_save_due_during_another_is_skipped_if_configured(tmp_path, own_context, monkeypatch):
    own_context.settings = Settings(async_when_busy="skip")
    job = Job(build(tmp_path, async_save=True)).steps(5)
    job.monitor._checkpoints._saver.wait(600)
    monkeypatch.setattr(job.monitor._checkpoints._saver, "busy", lambda: True)
    job.steps(5)
    assert job.monitor._checkpoints.policy.skipped == 1
    monkeypatch.undo()
    job.steps(5).end()
    assert committed(tmp_path) == [5, 15]


def test_async_save_writes_weights_only_files(tmp_path):
    Job(build(tmp_path, async_save=True, save_network_params=True)).steps(10).end()
    assert files(tmp_path, "checkpoint_network") == ["net_rank_0-network-1_10.safetensors", "net_rank_0-network-1_5.safetensors"]


# ---- other jobs in the folder --------------------------------------------------------------------------------------------

def test_a_lease_exists_while_it_trains_and_not_afterwards(tmp_path):
    job = Job(build(tmp_path)).steps(5)
    assert [holder.run
            for holder in lease_holders(CheckpointDir(PosixStorage(),
                                                      str(tmp_path / "checkpoint")))] == [job.monitor._checkpoints.target.run]
    job.end()
    assert lease_holders(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint"))) == []


def test_a_training_that_begins_again_in_its_process_goes_on(tmp_path, monkeypatch):
    """MindIO repairs a training without a restart. The random state must not go back, and no second session may open."""
    job, restored = Job(build(tmp_path)), []
    monkeypatch.setattr(module.training_saves, "restore_random", lambda *given: restored.append(given))
    before = job.monitor._checkpoints
    job.steps(3).monitor.on_train_begin(job.context)
    assert job.monitor._checkpoints is before and restored == []
    job.steps(2).end()
    job.monitor.on_train_begin(job.context)                 # another training of the process
    assert job.monitor._checkpoints is not before


def test_a_job_that_lost_its_lease_ends_and_names_the_holder(tmp_path):
    job = Job(build(tmp_path)).steps(5)
    later = Lease(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint")),
                  replace(holder_of_this_process("saving", 8), run=run_name(7, "0000ffff"), host="node9"))
    later.publish()
    later.beat()                                                # it has acquired the folder
    with pytest.raises(LeaseHeldError, match="run 0007-0000ffff on host node9"):
        job.steps(5)
    assert committed(tmp_path) == [5]
    later.release()


# ---- content ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fmt", ["ckpt", "safetensors"])
def test_mindspore_loads_our_files_with_equal_values_and_counters(tmp_path, fmt):
    job = Job(build(tmp_path, done=20, checkpoint_format=fmt), 20).steps(5)
    name, = files(tmp_path, fmt=fmt)
    assert name == f"net_rank_0-3_5.{fmt}"
    found = ms.load_checkpoint(str(tmp_path / "checkpoint" / "rank_0" / name), format=fmt)
    for parameter in job.train.get_parameters():
        assert np.array_equal(found[parameter.name].asnumpy(), parameter.asnumpy()), parameter.name
        assert found[parameter.name].dtype == parameter.dtype and found[parameter.name].shape == parameter.shape
    counters = {name: found[name].asnumpy().reshape(-1)[0] for name in
                ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size")}
    assert counters == {"epoch_num": 3, "step_num": 25, "global_step": 25, "loss_scale": 1024.0, "global_batch_size": 8}


@pytest.mark.parametrize("fmt", ["ckpt", "safetensors"])
def test_the_same_entries_as_the_built_in_writes(tmp_path, fmt):
    job = Job(build(tmp_path / "ours", checkpoint_format=fmt)).steps(5)
    theirs = BuiltIn(prefix="net", directory=str(tmp_path / "theirs"), save_checkpoint_steps=5,
                     **{**INJECTED, "checkpoint_format": fmt})
    theirs.step_end(job.context)

    def entries(folder):
        path = folder / "checkpoint" / "rank_0" / f"net_rank_0-1_5.{fmt}"
        with open(path, "rb") as file:
            header = read_header(file, str(path))
        return {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}
    assert entries(tmp_path / "ours") == entries(tmp_path / "theirs")


def test_the_state_in_the_record(tmp_path):
    current = training_context.current()
    current.progress.sink_size, current.progress.dataset_size = None, 40
    Job(build(tmp_path, done=20), 20).steps(5)
    state = scan(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint"))).candidates[0].state
    assert (state.step, state.steps_per_epoch, state.global_step, state.global_batch_size, state.loss_scale, state.dataset_size
            ) == (25, 10, 25, 8, 1024.0, 40)


def test_without_loss_scale_in_append_info_none_is_saved(tmp_path):
    Job(build(tmp_path, append_info=[{"epoch_num": 0, "step_num": 0}])).steps(5)
    candidate = scan(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint"))).candidates[0]
    assert candidate.state.loss_scale is None


def test_transient_parameters_are_not_saved(tmp_path):
    job = Job(build(tmp_path))
    job.train.insert_param_to_cell("accu_grads", ms.Parameter(ms.Tensor([1.0]), name="accu_grads.w"))
    job.steps(5)
    path = tmp_path / "checkpoint" / "rank_0" / "net_rank_0-1_5.safetensors"
    with open(path, "rb") as file:
        assert "accu_grads.w" not in read_header(file, str(path)).tensors


def test_weights_only_files_are_saved(tmp_path):
    job = Job(build(tmp_path, save_network_params=True, save_trainable_params=True, keep_checkpoint_max=2))
    job.net.bias.requires_grad = False
    job.steps(15)
    assert files(tmp_path, "checkpoint_network") == ["net_rank_0-network-1_10.safetensors", "net_rank_0-network-2_5.safetensors"]
    assert files(tmp_path, "checkpoint_trainable") == ["net_rank_0-trainable_params-1_10.safetensors",
                                                       "net_rank_0-trainable_params-2_5.safetensors"]
    network = ms.load_checkpoint(str(tmp_path / "checkpoint_network/rank_0/net_rank_0-network-2_5.safetensors"),
                                 format="safetensors")
    assert set(network) == {"weight", "bias"} and float(network["weight"].asnumpy()[0, 0]) == 15.0
    trainable = ms.load_checkpoint(str(tmp_path / "checkpoint_trainable/rank_0/net_rank_0-trainable_params-2_5.safetensors"),
                                   format="safetensors")
    assert set(trainable) == {"weight"}


# ---- failures ---------------------------------------------------------------------------------------------------------

def spoil(folder):
    """Puts a file in place of the folder of rank 0: nothing can be written there, not even by root."""
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint" / "rank_0").write_text("in the way")


def test_on_save_error_raise(tmp_path, own_context):
    own_context.settings = Settings(on_save_error="raise")
    job = Job(build(tmp_path)).steps(4)
    spoil(tmp_path)
    with pytest.raises(SaveError, match="step 5 was not saved on rank 0"):
        job.steps(1)


def test_the_hooks_finish_the_saves_of_a_failed_training(tmp_path, own_context, monkeypatch):
    job = Job(build(tmp_path, async_save="thread")).steps(5)
    assert own_context.monitor is job.monitor
    job.monitor.finish_after_error()
    assert committed(tmp_path) == [5]


def test_after_its_end_a_training_has_no_monitor(tmp_path, own_context):
    Job(build(tmp_path)).steps(5).end()
    assert own_context.monitor is None


def test_a_stop_of_all_ranks_ends_the_training(tmp_path, own_context):
    job = Job(build(tmp_path)).steps(2)
    stopped = []
    job.context.request_stop = lambda: stopped.append(True)
    from_outside()
    job.steps(1)
    assert (committed(tmp_path), own_context.progress.stop_reason, stopped) == ([3], "SIGTERM", [True])


def test_a_monitor_in_a_second_training_saves_its_steps(tmp_path):
    """The steps of the first training counted as saved, so the second saved nothing."""
    job = Job(build(tmp_path)).steps(10).end()
    second = Job(job.monitor).steps(10).end()
    assert files(tmp_path)[-2:] == ["net_rank_0_1-1_10.safetensors", "net_rank_0_1-1_5.safetensors"]
    assert second.monitor._checkpoints.policy.saved == {5, 10}


# ---- left to the built-in ------------------------------------------------------------------------------------

@pytest.fixture
def calls(monkeypatch):
    """Returns the names of the called methods of the built-in; they do nothing."""
    called = []
    for name in ("on_train_begin", "step_end", "end", "_save_ckpt", "save_checkpoint", "save_checkpoint_network"):
        monkeypatch.setattr(BuiltIn, name, lambda self, *args, name=name: called.append(name), raising=False)
    return called


def test_encryption_is_left_to_the_built_in(tmp_path, calls):
    Job(build(tmp_path, enc_key=b"0123456789abcdef", checkpoint_format="ckpt")).steps(1).end()
    assert calls == ["on_train_begin", "step_end", "end"]


def test_an_encrypted_file_is_written_by_the_built_in(tmp_path):
    Job(build(tmp_path, enc_key=b"0123456789abcdef", checkpoint_format="ckpt")).steps(5)
    assert files(tmp_path, fmt="ckpt") == ["net_rank_0-1_5.ckpt"] and not (tmp_path / "checkpoint" / ".mindresume").exists()


def emergency(job, monitor=None):
    """Saves as mindformers base_trainer.py, ckpt_save_func, with the arguments of MindIO TTP."""
    monitor = monitor or job.monitor
    monitor._append_dict.update({"__exception_save__": True})
    monitor._save_ckpt(job.params, True)
    assert "__exception_save__" not in monitor._append_dict


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("kind", [False, "thread"])
def test_an_emergency_save_has_records_and_a_mark(tmp_path, calls, other, kind):
    """Saved by the monitor of the training, or by a second one outside any training, which mindformers 1.9.0 creates before it
    trains: the built-in removes an empty folder, so not while the first file is being written to it."""
    spare = build(tmp_path, async_save=kind) if other else None
    job = Job(build(tmp_path, async_save=kind)).steps(7)
    emergency(job, spare)
    job.monitor._checkpoints._saver.wait(600)
    assert files(tmp_path) == ["net_rank_0-1_5.safetensors", "net_rank_0-1_7.safetensors"] and calls == []
    newest = scan(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint"))).candidates[0]
    assert (newest.step, newest.origin, newest.problem, newest.state.epoch) == (7, OURS, None, 1)
    assert (tmp_path / "checkpoint" / ".mindresume" / newest.name / "emergency").exists()


def test_an_emergency_in_a_saved_step_writes_nothing_again(tmp_path):
    job = Job(build(tmp_path)).steps(5)
    emergency(job)
    assert files(tmp_path) == ["net_rank_0-1_5.safetensors"] and committed(tmp_path) == [5]
    job.steps(5).end()                                                  # MindIO repaired it, and the training went on
    assert committed(tmp_path) == [5, 10]


def test_an_emergency_that_we_cannot_save_is_left_to_the_built_in(tmp_path, calls, monkeypatch):
    job = Job(build(tmp_path)).steps(7)
    monkeypatch.setattr(module.adapter, "rescued_parameters", lambda *_: 1 / 0)
    job.monitor._append_dict["__exception_save__"] = True
    job.monitor._save_ckpt(job.params, True)
    assert calls == ["_save_ckpt"]


def test_an_emergency_save_that_needs_the_lost_ranks_is_an_error(tmp_path, calls, monkeypatch):
    """The built-in would wait for the lost ranks."""
    job = Job(build(tmp_path)).steps(7)
    monkeypatch.setattr(module.adapter, "rescued_parameters", lambda *_: 1 / 0)
    monkeypatch.setattr(module.adapter, "collect_is_collective", lambda *_: True)
    job.monitor._append_dict["__exception_save__"] = True
    with pytest.raises(SaveError, match="step 7 was not saved before the end on rank 0: division by zero"):
        job.monitor._save_ckpt(job.params, True)
    assert calls == []


def test_an_emergency_outside_any_training_is_left_to_the_built_in(tmp_path, calls):
    job = Job(build(tmp_path)).steps(5).end()
    job.monitor._append_dict["__exception_save__"] = True
    job.monitor._save_ckpt(job.params, True)
    assert "_save_ckpt" in calls


def test_a_monitor_whose_training_never_began_leaves_saving_to_the_built_in(tmp_path):
    job = Job(build(tmp_path / "other"))
    monitor = build(tmp_path)                                           # as the second monitor for MindIO TTP
    job.params.cur_step_num, job.params.cur_epoch_num = 3, 1
    monitor._save_ckpt(job.params, True)
    assert files(tmp_path) == ["net_rank_0-1_3.safetensors"] and committed(tmp_path) == []


# ---- metrics, and retention by metrics ------------------------------------------------------------------------

@pytest.mark.parametrize("outputs, expected", [
    ((ms.Tensor(0.5), ms.Tensor(False), ms.Tensor(1024.0)), {"loss": 0.5}), (ms.Tensor([1.0, 2.0]), {"loss": 1.5}),
    (ms.Tensor(2.0, ms.bfloat16), {"loss": 2.0}), ([np.float32(0.25), None], {"loss": 0.25}), (3.0, {"loss": 3.0}),
    (ms.Tensor(float("nan")), {}), (np.array([np.inf]), {}), (None, {}), ((), {}), ("text", {}), (True, {}),
    ((None, ms.Tensor(1.0)), {})])
def test_the_loss_in_the_outputs_of_a_step(outputs, expected):
    assert state_collector.loss_metric(outputs) == expected


def test_the_loss_and_reported_metrics_are_recorded(tmp_path):
    def newest():
        return dict(scan(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint"))).candidates[0].metrics)
    job = Job(build(tmp_path)).steps(5)
    assert newest() == {"loss": 0.5}
    mindresume.plugin.report_metric("eval_loss", ms.Tensor([2.5]))
    mindresume.plugin.report_metric("bleu", ms.Tensor(30, ms.bfloat16))
    job.steps(5)
    assert newest() == {"loss": 0.5, "eval_loss": 2.5, "bleu": 30.0}
    mindresume.plugin.report_metric("eval_loss", float("nan"))              # the older value would be wrong now
    mindresume.plugin.report_metric("loss", 0.75)                           # the user knows better than the last batch
    job.steps(5)
    assert newest() == {"loss": 0.75, "bleu": 30.0}


@pytest.mark.parametrize("name, value", [("", 1.0), (" ", 1.0), (None, 1.0), ("loss", "1.0"), ("loss", None), ("loss", True),
                                         ("loss", [1.0, 2.0]), ("loss", [])])
def test_a_metric_that_is_none(name, value):
    with pytest.raises(ConfigError, match="report_metric"):
        mindresume.plugin.report_metric(name, value)
    assert training_context.current().progress.metrics == {}


def test_a_training_keeps_the_checkpoints_of_its_settings(tmp_path):
    training_context.set_current(training_context.TrainingContext(Settings(retention=RetentionSettings(
        keep_every_steps=20, keep_best=1, keep_best_metric="score", keep_best_mode="max"))))
    job = Job(build(tmp_path, keep_checkpoint_max=2))
    for score in (1, 9, 3, 2, 5, 4, 8):                                     # steps 5, 10, ... 35
        mindresume.plugin.report_metric("score", score)
        job.steps(5)
    assert committed(tmp_path) == [10, 20, 30, 35]


def test_keys_that_contradict_each_other_stop_the_start(tmp_path):
    training_context.set_current(training_context.TrainingContext(Settings(retention=RetentionSettings(keep_best=1))))
    with pytest.raises(ConfigError, match="keep_best is set, but neither keep_checkpoint_max"):
        Job(build(tmp_path, keep_checkpoint_max=None))


def test_health_is_kept_in_the_list_of_mindformers_and_in_our_records(tmp_path, monkeypatch):
    monitor = build(tmp_path, use_checkpoint_health_monitor=True)
    found = iter([0, 1])
    monkeypatch.setattr(monitor, "get_checkpoint_health_info", lambda params: next(found))
    Job(monitor).steps(10)
    rows = json.loads((tmp_path / "health_ckpts.json").read_text())
    assert [row["is_health"] for row in rows] == [0, 1] and [row["ckpt_name"] for row in rows] == sorted(files(tmp_path), key=len)
    states = [candidate.state.health for candidate in scan(CheckpointDir(PosixStorage(),
                                                                         str(tmp_path / "checkpoint"))).candidates]
    assert states == [1, 0]                                     # newest first


def test_a_health_that_cannot_be_recorded_fails_the_save_to_disk_alone(tmp_path, monkeypatch):
    monitor, given = build(tmp_path, use_checkpoint_health_monitor=True), []
    monkeypatch.setattr(monitor, "get_checkpoint_health_info", lambda params: 0)

    def fail(health, name):
        raise SaveError("no space")
    monkeypatch.setattr(monitor, "_record_health", fail)
    job = Job(monitor)
    monkeypatch.setattr(monitor._checkpoints, "_tier", SimpleNamespace(step_end=lambda state, collected: given.append(collected)))
    job.steps(5)
    assert given[-1].step == 5 and committed(tmp_path) == []


# ---- visible output ----------------------------------------------------------------------------------------------

class Seen:
    """A handler that keeps the events."""

    def __init__(self):
        self.events = []

    def handle(self, event, time_s):
        self.events.append(event)

    def close(self):
        pass


class Writer:
    def __init__(self):
        self.rows = {}

    def add_scalar(self, tag, value, global_step):
        self.rows.setdefault(tag, {})[global_step] = value


@pytest.mark.parametrize("kind", [False, "thread"])
def test_saves_write_scalars_if_tensorboard_is_enabled(tmp_path, monkeypatch, kind):
    writer = Writer()
    monkeypatch.setattr("mindformers.utils.tensorboard._GLOBAL_TENSORBOARD_WRITER", writer)
    Job(build(tmp_path, async_save=kind)).steps(10).end()
    for tag in ("save-seconds", "save-stall-seconds", "save-MiB"):
        assert set(writer.rows[f"mindresume/{tag}"]) == {5, 10} and min(writer.rows[f"mindresume/{tag}"].values()) >= 0
    assert writer.rows["mindresume/save-MiB"][5] * 2**20 == (
        tmp_path / "checkpoint" / "rank_0" / "net_rank_0-1_5.safetensors").stat().st_size
    assert "mindresume/steps-lost" not in writer.rows                           # no job failed


def test_lost_work_of_a_resume_emits_an_event_and_scalars(tmp_path, monkeypatch, own_context):
    writer, seen = Writer(), Seen()
    monkeypatch.setattr("mindformers.utils.tensorboard._GLOBAL_TENSORBOARD_WRITER", writer)
    own_context.emit.add(seen)
    own_context.progress.load_seconds = 2.5
    own_context.plan = training_context.ResumePlan(lost=LostWork(4, 100.0), choice=SimpleNamespace(
        chosen=SimpleNamespace(world_size=1, run=None), shards=(), root="elsewhere", checkpoint_dir="elsewhere"))
    Job(build(tmp_path, done=10), 10)
    assert writer.rows["mindresume/steps-lost"] == {10: 4} and writer.rows["mindresume/load-seconds"] == {10: 2.5}
    [resumed] = [event for event in seen.events if isinstance(event, Resumed)]
    assert (resumed.step, resumed.lost_steps, resumed.load_seconds) == (10, 4, 2.5)
    assert [row[:2] for row in resumed.summary] == [("random state", "absent")] and resumed.lost_seconds > 0
    [opened] = [event for event in seen.events if isinstance(event, RunOpened)]
    assert opened.checkpoint_dir == str(tmp_path / "checkpoint") and opened.world_size == 1


def test_the_lease_has_the_step_of_the_training(tmp_path):
    job = Job(build(tmp_path)).steps(7)
    lease = job.monitor._checkpoints.session.lease
    lease.beat()
    assert [holder.step for holder in lease_holders(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint")))] == [7]
