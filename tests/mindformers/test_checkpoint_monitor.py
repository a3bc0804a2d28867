"""Our CheckpointMonitor with the real mindformers and a tiny real network: arguments, records,
emergencies, what others see."""

# ruff: noqa: F811  fixtures are imported
import inspect
import json
from types import SimpleNamespace

import pytest

from mindresume.formats import CheckpointDir

pytest.importorskip("mindformers.tools")

import mindspore as ms  # noqa: E402
from mindformers.core.callback.callback import CheckpointMonitor as BuiltIn  # noqa: E402
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister  # noqa: E402
from monitor_jobs import (
    INJECTED,
    Job,
    Writer,
    build,
    calls,  # noqa: F401
    committed,
    emergency,
    files,
    own_context,  # noqa: F401
)

import mindresume.plugin  # noqa: E402, F401  registers ours
from mindresume.errors import ConfigError, SaveError  # noqa: E402
from mindresume.events import Resumed, RunOpened  # noqa: E402
from mindresume.formats import OURS  # noqa: E402
from mindresume.formats.scan import scan
from mindresume.mindformers import checkpoint_monitor as module
from mindresume.mindformers import step_proof, training_context, training_saves  # noqa: E402  # noqa: E402
from mindresume.mindformers.checkpoint_monitor import CheckpointMonitor  # noqa: E402
from mindresume.resume.step_ledger import Ledger, LedgerRun, StepRow  # noqa: E402
from mindresume.saving import checkpoint_manager  # noqa: E402
from mindresume.storage.posix import PosixStorage  # noqa: E402
from mindresume.tensor_files import read_header  # noqa: E402

# ---- registry and arguments ----------------------------------------------------------------------


def test_the_registry_returns_our_subclass_of_the_built_in():
    found = MindFormerRegister.get_cls(MindFormerModuleType.CALLBACK, "CheckpointMonitor")
    assert (
        found is CheckpointMonitor
        and issubclass(found, BuiltIn)
        and issubclass(found, ms.ModelCheckpoint)
    )


def test_all_25_arguments_with_the_defaults_of_upstream(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, *arguments = inspect.signature(BuiltIn.__init__).parameters.values()
    defaults = {p.name: p.default for p in arguments}
    assert len(defaults) == 25
    assert CheckpointMonitor(**defaults)._asked == CheckpointMonitor()._asked == defaults


def test_build_callback_with_the_arguments_of_the_trainer(tmp_path):
    built = build(tmp_path, done=15)
    assert type(built) is CheckpointMonitor
    assert (built._append_step_num, built.global_batch_size, built._config.format) == (
        15,
        8,
        "safetensors",
    )


# ---- asynchronous saves --------------------------------------------------------------------------


def test_a_copy_uses_at_most_the_memory_share_of_the_rank(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_manager, "share_of_rank", lambda group: 64)
    Job(build(tmp_path, async_save=True)).steps(5).end()
    assert committed(tmp_path) == [5] and "step 5 is saved in the training thread" in caplog.text
    assert "the share of this rank" in caplog.text


# ---- other jobs in the folder --------------------------------------------------------------------


def test_a_training_that_begins_again_in_its_process_goes_on(tmp_path, monkeypatch):
    """MindIO repairs a training without a restart. The random state must not go back, and no second
    session may open."""
    job, restored = Job(build(tmp_path)), []
    monkeypatch.setattr(training_saves, "restore_random", lambda *given: restored.append(given))
    before = job.monitor._training.manager
    job.steps(3).monitor.on_train_begin(job.context)
    assert job.monitor._training.manager is before and restored == []
    job.steps(2).end()
    job.monitor.on_train_begin(job.context)  # another training of the process
    assert job.monitor._training.manager is not before


# ---- content -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["ckpt", "safetensors"])
def test_the_same_entries_as_the_built_in_writes(tmp_path, fmt):
    job = Job(build(tmp_path / "ours", checkpoint_format=fmt)).steps(5)
    theirs = BuiltIn(
        prefix="net",
        directory=str(tmp_path / "theirs"),
        save_checkpoint_steps=5,
        **{**INJECTED, "checkpoint_format": fmt},
    )
    theirs.step_end(job.context)

    def entries(folder):
        path = folder / "checkpoint" / "rank_0" / f"net_rank_0-1_5.{fmt}"
        with open(path, "rb") as file:
            header = read_header(file, str(path))
        return {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}

    assert entries(tmp_path / "ours") == entries(tmp_path / "theirs")


def test_transient_parameters_are_not_saved(tmp_path):
    job = Job(build(tmp_path))
    job.train.insert_param_to_cell(
        "accu_grads", ms.Parameter(ms.Tensor([1.0]), name="accu_grads.w")
    )
    job.steps(5)
    path = tmp_path / "checkpoint" / "rank_0" / "net_rank_0-1_5.safetensors"
    with open(path, "rb") as file:
        assert "accu_grads.w" not in read_header(file, str(path)).tensors


# ---- left to the built-in ------------------------------------------------------------------------


@pytest.mark.parametrize("other, kind", [(False, "thread"), (True, False)])
def test_an_emergency_save_has_records_and_a_mark(tmp_path, calls, other, kind):
    """Saved by the monitor of the training, or by a second one outside any training, which
    mindformers 1.9.0 creates before it trains: the built-in removes an empty folder, so not while
    the first file is being written to it."""
    spare = build(tmp_path, async_save=kind) if other else None
    job = Job(build(tmp_path, async_save=kind)).steps(7)
    emergency(job, spare)
    job.monitor._training.manager._saver.wait(600)
    assert (
        files(tmp_path) == ["net_rank_0-1_5.safetensors", "net_rank_0-1_7.safetensors"]
        and calls == []
    )
    newest = scan(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint"))).candidates[0]
    assert (newest.step, newest.origin, newest.problem, newest.state.epoch) == (7, OURS, None, 1)
    assert (tmp_path / "checkpoint" / ".mindresume" / newest.name / "emergency").exists()


def test_an_emergency_that_we_cannot_save_is_left_to_the_built_in(tmp_path, calls, monkeypatch):
    """If that would wait for the lost ranks it is an error."""
    job = Job(build(tmp_path)).steps(7)
    monkeypatch.setattr(module.adapter, "rescued_parameters", lambda *_: 1 / 0)
    job.monitor._append_dict["__exception_save__"] = True
    job.monitor._save_ckpt(job.params, True)
    assert calls == ["_save_ckpt"]
    monkeypatch.setattr(module.adapter, "collect_is_collective", lambda *_: True)
    said = "step 7 was not saved before the end on rank 0: division by zero"
    with pytest.raises(SaveError, match=said):
        job.monitor._save_ckpt(job.params, True)
    assert calls == ["_save_ckpt"]


# ---- metrics, and retention by metrics -----------------------------------------------------------


@pytest.mark.parametrize(
    "outputs, expected",
    [
        ((ms.Tensor(0.5), ms.Tensor(False), ms.Tensor(1024.0)), {"loss": 0.5}),
        (ms.Tensor([1.0, 2.0]), {"loss": 1.5}),
        (ms.Tensor(2.0, ms.bfloat16), {"loss": 2.0}),
        (3.0, {"loss": 3.0}),
        (ms.Tensor(float("nan")), {}),
        (None, {}),
        ((), {}),
        ("text", {}),
        ((None, ms.Tensor(1.0)), {}),
    ],
)
def test_the_loss_in_the_outputs_of_a_step(outputs, expected):
    assert training_saves.loss_metric(outputs) == expected


def test_a_metric_has_a_name_and_is_one_number():
    for name in ("", " ", None):
        with pytest.raises(ConfigError, match="report_metric"):
            mindresume.plugin.report_metric(name, 1.0)
    for value in ("1.0", None, True, [1.0, 2.0], []):
        with pytest.raises(ConfigError, match="report_metric"):
            mindresume.plugin.report_metric("loss", value)
    assert training_context.current().progress.metrics == {}


def test_health_is_kept_in_the_list_of_mindformers_and_in_our_records(tmp_path, monkeypatch):
    monitor = build(tmp_path, use_checkpoint_health_monitor=True)
    found = iter([0, 1])
    monkeypatch.setattr(monitor, "get_checkpoint_health_info", lambda params: next(found))
    Job(monitor).steps(10)
    rows = json.loads((tmp_path / "health_ckpts.json").read_text())
    assert [row["is_health"] for row in rows] == [0, 1] and [
        row["ckpt_name"] for row in rows
    ] == sorted(files(tmp_path), key=len)
    states = [
        candidate.state.health
        for candidate in scan(
            CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint"))
        ).candidates
    ]
    assert states == [1, 0]  # newest first


# ---- visible output ------------------------------------------------------------------------------


class Seen:
    """A handler that keeps the events."""

    def __init__(self):
        self.events = []

    def handle(self, event, time_s):
        self.events.append(event)

    def close(self):
        pass


def test_lost_work_of_a_resume_emits_an_event_and_scalars(tmp_path, monkeypatch, own_context):
    writer, seen = Writer(), Seen()
    monkeypatch.setattr("mindformers.utils.tensorboard._GLOBAL_TENSORBOARD_WRITER", writer)
    lost = Ledger(LedgerRun("0001-aaaaaaaa"), {step: StepRow(step) for step in range(11, 15)})
    monkeypatch.setattr(step_proof, "earlier_ledger", lambda *_: lost)
    own_context.emit.add(seen)
    own_context.progress.load_seconds = 2.5
    own_context.plan = training_context.ResumePlan(
        choice=SimpleNamespace(
            chosen=SimpleNamespace(world_size=1, run=None, step=10, saved_at=100.0),
            shards=(),
            root="elsewhere",
            checkpoint_dir="elsewhere",
        ),
    )
    Job(build(tmp_path, done=10), 10)
    assert writer.rows["mindresume/steps-lost"] == {10: 4} and writer.rows[
        "mindresume/load-seconds"
    ] == {10: 2.5}
    [resumed] = [event for event in seen.events if isinstance(event, Resumed)]
    assert (resumed.step, resumed.lost_steps, resumed.load_seconds) == (10, 4, 2.5)
    assert [row[:2] for row in resumed.summary] == [
        ("random state", "absent")
    ] and resumed.lost_seconds > 0
    [opened] = [event for event in seen.events if isinstance(event, RunOpened)]
    assert opened.checkpoint_dir == str(tmp_path / "checkpoint") and opened.world_size == 1
