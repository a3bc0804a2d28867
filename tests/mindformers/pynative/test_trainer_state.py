"""What the trainer counts besides steps and samples."""
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest

pytest.importorskip("mindformers.tools")

from pynative_trainers import State  # noqa: E402

from mindresume.mindformers.pynative import training_run  # noqa: E402


def test_fields_of_the_state_and_of_the_trainer():
    trainer = SimpleNamespace(state=State(7, 20, 6, 1.0, skipped_steps=3, best_metric=0.25), _consecutive_skipped_steps=2)
    saved = training_run.saved_fields(trainer)
    assert dict(saved) == {"skipped_steps": 3, "best_metric": 0.25, "consecutive_skipped_steps": 2}
    again = SimpleNamespace(state=State(), _consecutive_skipped_steps=0)
    training_run.restore_fields(again, saved)
    assert (again.state.skipped_steps, again.state.best_metric, again._consecutive_skipped_steps) == (3, 0.25, 2)
    assert (again.state.global_step, again.state.max_steps, again.state.epoch) == (0, 0, 0.0)


@pytest.mark.parametrize("value, found", [
    (ms.Tensor(0.5, ms.float32), 0.5), (np.float64(0.1), 0.1), (np.int64(4), 4), (ms.Tensor([2], ms.int32), 2), (None, None),
    ("/a/path", "/a/path"), (float("inf"), "left out"), (float("nan"), "left out"), ([1], "left out"), (np.zeros(2), "left out")])
def test_values_of_callbacks(value, found):
    saved = dict(training_run.saved_fields(SimpleNamespace(state=State(best_metric=value))))
    assert saved.get("best_metric", "left out") == found


def test_fields_that_a_release_does_not_have():
    trainer = SimpleNamespace(state=State())
    training_run.restore_fields(trainer, {"of a later release": 1, "consecutive_skipped_steps": 2, "global_step": 9})
    assert trainer.state == State() and not hasattr(trainer, "_consecutive_skipped_steps")
