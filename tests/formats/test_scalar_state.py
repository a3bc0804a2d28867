"""Counters of a training, and the state derived from them."""
import pytest

from mindresume.formats.weight_files import state_from_scalars


@pytest.mark.parametrize("step, epoch, within, per_epoch", [(15, 2, 5, 10), (15, 2, 0, 8), (15, 1, 0, 15), (20, None, 0, 20)])
def test_steps_of_an_epoch_follow_from_the_counters(step, epoch, within, per_epoch):
    state = state_from_scalars(step, epoch, None, 8, None, within)
    assert (state.step, state.steps_per_epoch, state.global_step) == (step, per_epoch, step)
    assert state.epoch == (epoch or 1)
