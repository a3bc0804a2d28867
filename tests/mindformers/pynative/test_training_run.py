"""What is known of a training: its configuration, and items, steps and samples of its data."""
from types import SimpleNamespace

import pytest

pytest.importorskip("mindformers.tools")

from pynative_trainers import DataSet  # noqa: E402

from mindresume.mindformers.pynative.training_run import TrainingRun, configuration_of  # noqa: E402
from mindresume.mindformers.training_context import RunOrigin, TrainingContext  # noqa: E402
from mindresume.model.training_state import DataPosition  # noqa: E402


def run_of(batch=8, item=None, samples=160, consumed=None, origin=None, dataset=True, skip=0):
    """``item``: samples of an item, as mindformers 2.1.0 says them; None: a release before. ``consumed``: of its state."""
    data = DataSet(item or batch, samples) if dataset else None
    trainer = SimpleNamespace(global_batch_size=batch, train_dataset=data, train_epoch_step=len(data.items) if data else 30,
                              state=SimpleNamespace(consumed_samples=consumed) if item else SimpleNamespace())
    if item is not None:
        trainer._base_units = item
    context = TrainingContext()
    context.progress.origin = origin or RunOrigin()
    return TrainingRun(trainer, {}, context, skip)


def test_a_configuration_has_the_names_of_the_graph_trainer():
    sections = {"training": {"seed": 5}, "checkpoint": {"save_path": "/c"}, "mindresume": {"verify": "full"}}
    config = configuration_of(SimpleNamespace(config=SimpleNamespace(to_dict=lambda: dict(sections))))
    assert config.callbacks == [{"type": "CheckpointMonitor", "directory": "/c"}] and config.seed == 5
    assert config["mindresume"] == {"verify": "full"}
    with pytest.raises(AttributeError):
        _ = config.use_legacy_format


@pytest.mark.parametrize("checkpoint", [None, {}, {"save_path": ""}, {"save_path": "/c", "enable_save": False},
                                        {"save_path": "/c", "save_trainable_only": True}])
def test_a_training_without_saves_of_mindresume_has_no_monitor(checkpoint):
    config = configuration_of(SimpleNamespace(config=SimpleNamespace(to_dict=lambda: {"checkpoint": checkpoint})))
    assert config.callbacks == [] and config.seed is None


@pytest.mark.parametrize("run, items, item_samples, steps", [
    (run_of(), 20, 8, 20), (run_of(item=2), 80, 2, 20), (run_of(item=8), 20, 8, 20), (run_of(item=3), 53, 3, 19),
    (run_of(item=8, batch=64, samples=24), 3, 8, 1), (run_of(dataset=False), None, 8, 30)])
def test_items_and_steps_of_a_pass(run, items, item_samples, steps):
    assert (run.items, run.item_samples, run.steps_per_pass) == (items, item_samples, steps)


@pytest.mark.parametrize("step, consumed, passes, samples", [(0, 0, 0, 0), (13, 104, 0, 104), (20, 160, 1, 0), (45, 360, 2, 40)])
def test_the_position_after_a_step(step, consumed, passes, samples):
    assert run_of().data_at(step) == (consumed, DataPosition(passes, samples))
    assert run_of(item=2, consumed=consumed).data_at(step) == (consumed, DataPosition(passes, samples))


def test_a_step_that_straddles_two_passes():
    """7 items of 2: the fourth step of 4 reads the last item and the first."""
    assert run_of(batch=4, item=2, samples=14, consumed=16).data_at(4) == (16, DataPosition(1, 2))
    assert run_of(batch=4, item=2, samples=14, consumed=12).data_at(3) == (12, DataPosition(0, 12))


def test_the_position_after_a_resume_counts_from_it():
    origin = RunOrigin(10, DataPosition(2, 24, first_epoch=1, declared="ignore_data_skip: True"), 500)
    assert run_of(origin=origin).data_at(12) == (516, DataPosition(2, 40, 1, "ignore_data_skip: True"))
    assert run_of(item=2, consumed=516, origin=origin).data_at(12) == (516, DataPosition(2, 40, 1, "ignore_data_skip: True"))
    assert run_of(origin=RunOrigin(10, DataPosition(0, 0), None)).data_at(12) == (None, None)
    assert run_of(dataset=False).data_at(12) == (None, None)


def test_a_batch_size_that_changes_during_a_run():
    """The samples are those that the trainer counts, whatever the steps were."""
    assert run_of(item=8, consumed=8 * 3 + 16 * 2).data_at(5) == (56, DataPosition(0, 56))


def test_the_skip_is_for_the_first_pass():
    run = run_of(skip=3)
    data = run.trainer.train_dataset
    firsts = []
    for _ in range(3):
        run.begin_pass(data)
        firsts.append(data.first)
    run.begin_pass(DataSet(8))                                  # another one, such as for an evaluation
    assert firsts == [3, 0, 0] and run.iterators == 3


def test_without_a_skip_the_data_set_is_left_as_it_is():
    run = run_of()
    run.trainer.train_dataset.set_init_step(2)                  # a user may have chosen it
    run.begin_pass(run.trainer.train_dataset)
    assert run.trainer.train_dataset.first == 2


def test_balanced_data():
    run = run_of(item=8)
    assert run.is_balanced is False
    run.trainer._uses_data_balance = lambda: True
    assert run.is_balanced is True
