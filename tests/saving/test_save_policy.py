"""What follows from the outcome of a save: an event, an error of the training, and whether the step
is saved."""

from rank_folders import Ranks

from mindresume import runtime
from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import SaveError
from mindresume.events import SaveFailed, SaveWritten, ignore
from mindresume.saving.save_policy import SaveOptions, SavePolicy
from mindresume.saving.shard_writer import Outcome
from mindresume.settings import Settings

FULL = SaveError("no room")


def policy_of(settings=None, emit=ignore):
    return SavePolicy(
        SaveOptions("/checkpoint", "net"), settings or Settings(), SingleProcess(), emit
    )


def fatal(policy, *outcomes):
    """Returns the errors that end the training."""
    return [error for outcome in outcomes if (error := policy.record(outcome))]


def test_each_save_has_an_event_with_the_time_that_it_stopped_the_training():
    seen = []
    policy = policy_of(emit=seen.append)
    policy.saved |= {5, 10}
    policy.stalls[5] = 0.25
    assert fatal(policy, Outcome(5, True, None, 100, 2.0), Outcome(10, False, FULL)) == []
    assert seen == [SaveWritten(5, 100, 2.0, 0.25), SaveFailed(10, "no room", 1, FULL.code)]
    assert policy.saved == {5}


def test_the_training_goes_on_until_so_many_saves_failed_in_a_row():
    policy = policy_of(Settings(on_save_error="warn", max_failed_saves=2))
    for _ in range(3):
        assert fatal(policy, Outcome(5, False, FULL), Outcome(10, True)) == []
    assert policy.failed_in_a_row == 0
    assert fatal(policy, Outcome(15, False, FULL), Outcome(20, False, FULL)) == [FULL]
    endless = policy_of(Settings(on_save_error="warn", max_failed_saves=0))
    assert fatal(endless, *[Outcome(5, False, FULL)] * 9) == []


def test_an_error_beside_a_saved_shard_counts_as_a_failure_of_a_saved_step():
    events = []
    policy = policy_of(Settings(on_save_error="warn"), events.append)
    policy.saved.add(5)
    assert policy.record(Outcome(5, True, FULL, 100, 2.0)) is None
    assert policy.saved == {5} and [event.kind for event in events] == [
        "save_written",
        "save_failed",
    ]


def test_on_save_error_raise():
    assert policy_of(Settings(on_save_error="raise")).record(Outcome(5, False, FULL)) is FULL


def test_a_failure_of_no_known_step():
    events = []
    policy_of(Settings(on_save_error="raise"), events.append).record_failure(
        None, SaveError("the end of the training")
    )
    assert events == [SaveFailed(None, "the end of the training", 1)]


def test_all_ranks_save_by_the_clock_of_rank_0(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runtime, "monotonic", lambda: now[0])

    def work(group):
        options = SaveOptions(
            str(tmp_path), "net", None, 60.0, since=-100.0 if group.rank == 0 else 0.0
        )
        policy = SavePolicy(options, Settings(), group, ignore)
        return [policy.is_due(step) for step in (1, 2)]

    assert Ranks(2).run(work) == [[True, False]] * 2
