"""Counters and position in the data that a resume sets, for each kind of checkpoint and trainer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("mindformers.tools")

from pynative_trainers import DataSet, LaterState, State  # noqa: E402

from mindresume.errors import TrainingCompleteError  # noqa: E402
from mindresume.mindformers.pynative import checkpoint_load  # noqa: E402
from mindresume.mindformers.pynative.training_run import Configuration, TrainingRun  # noqa: E402
from mindresume.mindformers.training_context import ResumePlan, TrainingContext  # noqa: E402
from mindresume.model.training_state import (
    DataPosition,  # noqa: E402
    TrainingState,  # noqa: E402
)

OURS = TrainingState(30, 20, 30, 8, dataset_size=20, consumed=240, data=DataPosition(1, 80))


def restored(monkeypatch, state, batch=8, item=None, steps=100, config=None, **trainer):
    """Returns the run and its trainer after ``restore_counters``. ``item``: as mindformers 2.1.0,
    samples of an item."""
    data = DataSet(item or batch, 160)
    now = (State if item is None else LaterState)(max_steps=steps, epoch_step=len(data.items))
    made = SimpleNamespace(
        global_batch_size=batch,
        train_dataset=data,
        train_epoch_step=len(data.items),
        state=now,
        **trainer,
    )
    if item is not None:
        made._base_units, made._consumed_samples = item, 0
    context = TrainingContext(plan=ResumePlan(choice="chosen"))
    monkeypatch.setattr(checkpoint_load, "selected_state", lambda choice: state)
    run = TrainingRun(made, Configuration(checkpoint={}, **(config or {})), context)
    checkpoint_load.restore_counters(run)
    return run, made


@pytest.mark.parametrize("item, consumed, skip", [(None, None, 10), (2, 240, 40)])
def test_a_checkpoint_of_mindresume(monkeypatch, item, consumed, skip):
    run, trainer = restored(monkeypatch, OURS, item=item)
    assert (trainer.state.global_step, run.skip) == (30, skip)
    assert getattr(trainer.state, "consumed_samples", None) == consumed
    assert getattr(trainer, "_consumed_samples", None) == consumed
    assert run.context.progress.origin.global_step == 30
    trainer.state.consumed_samples = 248
    assert run.data_at(31) == (248, DataPosition(1, 88))


@pytest.mark.parametrize("step, epoch", [(19, 0.0), (20, 1.0), (21, 1.0), (40, 2.0)])
def test_the_epoch_is_that_of_a_training_without_a_resume(monkeypatch, step, epoch):
    """mindformers sets it between two epochs only."""
    state = replace(OURS, step=step, consumed=step * 8)
    assert restored(monkeypatch, state)[1].state.epoch == epoch


@pytest.mark.parametrize(
    "item, consumed, skip", [(None, None, 5), (2, None, 20), (2, 200, 20), (2, 204, 22)]
)
def test_a_checkpoint_of_mindformers_has_no_position(monkeypatch, item, consumed, skip):
    """25 steps of 8 samples are a pass of 160 samples, and 40; 2.1.0 records the samples. It may
    not say its batch size."""
    for batch in (8, None):
        state = TrainingState(25, 100, 25, batch, consumed=consumed)
        run, trainer = restored(monkeypatch, state, item=item)
        assert run.skip == skip and trainer.state.global_step == 25
        assert run.context.progress.origin.consumed == (consumed or 200)


def test_another_batch_size_scales_step_and_optimizer(monkeypatch):
    run, trainer = restored(monkeypatch, OURS, batch=16)
    assert (
        trainer.state.global_step,
        run.context.progress.origin.global_step,
        run.skip,
        trainer.state.epoch,
    ) == (15, 15, 5, 1.0)
    assert run.context.progress.origin.consumed == 240


def test_a_dynamic_batch_keeps_the_steps(monkeypatch):
    """The batch size follows from the samples, so its first value says nothing about steps that are
    done."""
    state = TrainingState(30, 20, 30, 32, consumed=700, data=DataPosition(4, 60))
    run, trainer = restored(monkeypatch, state, batch=8, item=4, dynamic_batch_enabled=True)
    assert (trainer.state.global_step, trainer.state.consumed_samples, run.skip) == (30, 700, 15)


def test_the_loss_scale(monkeypatch):
    state = TrainingState(30, 20, 30, 8, 1024.0, consumed=240, data=DataPosition(1, 80))
    assert restored(monkeypatch, state)[1].state.loss_scale == 1024.0
    assert not hasattr(restored(monkeypatch, OURS)[1].state, "loss_scale")


@pytest.mark.parametrize("steps", [30, 29])
def test_no_step_is_left(monkeypatch, steps):
    with pytest.raises(TrainingCompleteError, match=f"step 30 .* training.steps: {steps}"):
        restored(monkeypatch, OURS, steps=steps)


def test_what_the_configuration_says_of_the_data(monkeypatch):
    """It counts steps and not items."""
    for config, skip in (({"data_skip_steps": 3}, 12), ({"ignore_data_skip": True}, 0)):
        run, trainer = restored(monkeypatch, OURS, item=2, config=config)
        assert run.skip == skip and trainer.state.global_step == 30


IDENTITY = {"files": "a.mindrecord 0123"}


def begun(config=None, item=None, identity=None):
    """Returns the run of a training that does not resume, when its first iterator is made."""
    data = DataSet(item or 8, 160)
    made = SimpleNamespace(
        global_batch_size=8,
        train_dataset=data,
        train_epoch_step=len(data.items),
        state=State(max_steps=100, epoch_step=len(data.items)),
    )
    if item is not None:
        made._base_units = item
    run = TrainingRun(made, Configuration(checkpoint={}, **(config or {})), TrainingContext())
    run.context.progress.dataset_identity = identity or IDENTITY
    checkpoint_load.begin_data(run)
    return run


def test_a_fresh_start_records_its_data_set():
    """Else the first resume takes any other one, whatever on_dataset_change says."""
    run = begun()
    assert run.skip == 0 and run.data_at(3)[1].identity == IDENTITY and run.data_at(3)[0] == 24


@pytest.mark.parametrize("item, skip", [(None, 3), (2, 12)])
def test_data_skip_steps_counts_at_a_fresh_start_too(item, skip):
    run = begun({"data_skip_steps": 3}, item)
    assert run.skip == skip and run.data_at(2)[1].samples == 40


def test_a_permanent_ignore_data_skip_restarts_nothing(monkeypatch):
    """What the configuration says of the beginning of a data set is done once: the record of the
    fresh start says so."""
    config = {"ignore_data_skip": True}
    consumed, position = begun(config).data_at(5)
    state = TrainingState(5, 20, 5, 8, consumed=consumed, data=position)
    assert restored(monkeypatch, state, config=config)[0].skip == 5


@pytest.mark.parametrize("source", [True, False])
def test_balanced_data_is_positioned_by_mindformers(monkeypatch, source):
    """``source`` is a stand-in; a rank that receives its samples from another one has none."""
    calls = []
    balance = (
        SimpleNamespace(restore=lambda consumed, step: calls.append((consumed, step)))
        if source
        else None
    )
    run, _ = restored(
        monkeypatch, OURS, item=2, _balance_source=balance, _uses_data_balance=lambda: True
    )
    assert calls == ([(240, 30)] if source else []) and run.skip == 0
