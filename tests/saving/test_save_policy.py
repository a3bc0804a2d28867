"""What follows from the outcome of a save: an event, an error of the training, and whether the step is saved."""
import pytest

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import SaveError
from mindresume.events import SaveBegun, SaveFailed, SaveWritten, ignore
from mindresume.saving.save_policy import SaveOptions, SavePolicy
from mindresume.saving.shard_writer import Outcome
from mindresume.settings import Settings

FULL = SaveError("no room")


def policy_of(settings=None, emit=ignore):
    return SavePolicy(SaveOptions("/checkpoint", "net"), settings or Settings(), SingleProcess(), emit)


def handle(policy, *outcomes):
    for outcome in outcomes:
        policy.handle(outcome)


def test_each_save_has_an_event_with_the_time_that_it_stopped_the_training():
    seen = []
    policy = policy_of(emit=seen.append)
    policy.saved |= {5, 10}
    policy.begin_save(5)
    stall = policy.end_stall(5)
    handle(policy, Outcome(5, True, None, 100, 2.0), Outcome(10, False, FULL))
    assert seen == [SaveBegun(5), SaveWritten(5, 100, 2.0, stall), SaveFailed(10, "no room", 1)]
    assert policy.saved == {5}


def test_the_training_goes_on_until_so_many_saves_failed_in_a_row():
    policy = policy_of(Settings(on_save_error="warn", max_failed_saves=2))
    for _ in range(3):
        handle(policy, Outcome(5, False, FULL), Outcome(10, True))
    assert policy.failed_in_a_row == 0
    with pytest.raises(SaveError, match="no room"):
        handle(policy, Outcome(15, False, FULL), Outcome(20, False, FULL))


def test_an_error_beside_a_saved_shard_counts_as_a_failure_of_a_saved_step():
    events = []
    policy = policy_of(Settings(on_save_error="warn"), events.append)
    policy.saved.add(5)
    policy.handle(Outcome(5, True, FULL, 100, 2.0))
    assert policy.saved == {5} and [event.kind for event in events] == ["save_written", "save_failed"]


def test_on_save_error_raise():
    with pytest.raises(SaveError, match="no room"):
        policy_of(Settings(on_save_error="raise")).handle(Outcome(5, False, FULL))


def test_a_failure_that_is_only_recorded_is_not_raised():
    events = []
    policy_of(Settings(on_save_error="raise"), events.append).record_failure(None, "the end of the training")
    assert events == [SaveFailed(None, "the end of the training", 1)]
