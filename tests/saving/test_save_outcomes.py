"""What follows from the outcome of a save: an event, an error of the training, and whether the step is saved."""
import pytest

from mindresume.errors import RemoteError, SaveError
from mindresume.events import SaveFailed, SaveWritten, ignore
from mindresume.saving.save_outcomes import SaveOutcomes
from mindresume.saving.sync_saver import Outcome
from mindresume.settings import Settings

FULL = SaveError("no room")


def test_each_save_has_an_event_with_the_time_that_it_stopped_the_training():
    seen = []
    outcomes = SaveOutcomes(Settings(), seen.append, seen.append)
    outcomes.saved |= {5, 10}
    outcomes.set_stall(5, 0.25)
    written, failed = Outcome(5, True, None, 100, 2.0), Outcome(10, False, FULL)
    outcomes.handle([written, failed])
    assert seen == [written, SaveWritten(5, 100, 2.0, 0.25), failed, SaveFailed(10, "no room", 1)]
    assert outcomes.saved == {5}


def test_the_training_goes_on_until_so_many_saves_failed_in_a_row():
    outcomes = SaveOutcomes(Settings(on_save_error="warn", max_failed_saves=2), ignore)
    for _ in range(3):
        outcomes.handle([Outcome(5, False, FULL), Outcome(10, True)])
    assert outcomes.failed_in_a_row == 0
    with pytest.raises(SaveError, match="no room"):
        outcomes.handle([Outcome(15, False, FULL), Outcome(20, False, FULL)])


def test_an_error_beside_a_saved_shard_counts_as_a_failure_of_a_saved_step():
    events = []
    outcomes = SaveOutcomes(Settings(on_save_error="warn"), events.append)
    outcomes.saved.add(5)
    outcomes.handle([Outcome(5, True, FULL, 100, 2.0)])
    assert outcomes.saved == {5} and [event.kind for event in events] == ["save_written", "save_failed"]


def test_on_save_error_raise():
    outcomes = SaveOutcomes(Settings(on_save_error="raise"), ignore)
    with pytest.raises(SaveError, match="no room"):
        outcomes.handle([Outcome(5, False, FULL)])


def test_a_failure_that_is_only_recorded_is_not_raised():
    events = []
    SaveOutcomes(Settings(on_save_error="raise"), events.append).record_failure(None, "the end of the training")
    assert events == [SaveFailed(None, "the end of the training", 1)]


def test_a_failed_upload_stops_the_training_only_with_on_save_error_raise():
    errors = [RemoteError("one"), RemoteError("two")]
    SaveOutcomes(Settings(max_failed_saves=1), ignore).handle_upload_errors(errors)
    with pytest.raises(RemoteError, match="one"):
        SaveOutcomes(Settings(on_save_error="raise"), ignore).handle_upload_errors(errors)
    SaveOutcomes(Settings(on_save_error="raise"), ignore).handle_upload_errors([])
