"""The guard against bad steps: nothing is saved from a bad step on, all ranks end the job, and the
next start does not take what follows it."""

import json
import math

import pytest
from manager_jobs import Arrays, Job, committed, end_jobs
from rank_folders import STORAGE, Ranks, dir_at

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import BadStepError, ConfigError
from mindresume.events import BadStepFound, GuardEnded
from mindresume.formats.bad_steps import BAD_STEPS, BadStep, read_bad_steps
from mindresume.formats.scan import scan
from mindresume.model.manifest import FOLDER
from mindresume.model.training_state import DataPosition
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.retention import KeepLast, plan
from mindresume.settings import Settings

ROLLBACK = {"nan": "rollback", "loss_spike": "rollback", "min_steps": 4}


@pytest.fixture(autouse=True)
def settled():
    yield
    end_jobs()


class Valued(Arrays):
    """A step of eight samples with a loss. ``losses``: {step: value}, of other steps 2."""

    def __init__(self, job, losses):
        super().__init__(job)
        self.losses = losses

    def values(self):
        return {"loss": self.losses.get(self.step, 2.0)}

    def window(self, steps):
        return self.step, DataPosition(0, 8 * (self.step - 1)), 8 * steps


def train(root, losses, steps, guard=ROLLBACK):
    """Trains until the job ends; returns it and its error."""
    job = Job(root, settings=Settings.load({"guard": guard}, {}))
    try:
        for _ in range(steps):
            job.step += 1
            job.end_step(Valued(job, losses))
        job.end(Valued(job, losses))
    except BadStepError as error:
        job.manager.finish_after_error()
        return job, error
    return job, None


def chosen(root):
    return select_checkpoint(STORAGE, str(root), SingleProcess(), SelectionPolicy(1))


@pytest.mark.parametrize("value", [math.nan, math.inf, 50.0])
def test_the_job_ends_and_the_next_start_takes_the_checkpoint_before(tmp_path, value):
    job, error = train(tmp_path, {10: value}, 12)
    assert error.status == 67 and job.step == 10 and committed(tmp_path) == [5]
    (ended,) = job.emitted(GuardEnded)
    assert (ended.bad_step, ended.rollbacks, ended.samples) == (10, 1, 8)
    found = chosen(tmp_path)
    assert found.chosen.step == 5
    assert [(row.step, row.samples, row.data.samples) for row in found.bad_steps] == [(10, 8, 72)]


def test_what_the_run_has_saved_after_a_bad_step_is_refused(tmp_path):
    """Such as a save of ranks that did not know it yet."""
    train(tmp_path, {}, 10)
    (candidate,) = [found for found in scan(dir_at(tmp_path)).candidates if found.step == 10]
    row = BadStep(candidate.run, candidate.lineage, 8, 10, 0, "loss is nan")
    (tmp_path / FOLDER / BAD_STEPS).write_text(json.dumps([vars(row)]))
    assert read_bad_steps(dir_at(tmp_path)) == (row,)
    found = chosen(tmp_path)
    assert found.chosen.step == 5 and [refusal.step for refusal in found.refused] == [10]
    # nor is it the newest one that is whole
    planned = plan(dir_at(tmp_path), KeepLast(1))
    assert [kept.step for kept in planned.kept] == [10, 5] and not planned.to_delete


def test_a_note_that_cannot_be_read_stops_no_start(tmp_path):
    train(tmp_path, {}, 5)
    (tmp_path / FOLDER / BAD_STEPS).write_text("torn")
    found = chosen(tmp_path)
    assert found.chosen.step == 5 and any(BAD_STEPS in note for note in found.notes)


def test_warn_changes_nothing(tmp_path):
    job, error = train(tmp_path, {9: math.nan, 10: math.nan}, 15, {"nan": "warn"})
    assert error is None and committed(tmp_path) == [5, 10, 15]
    assert [event.step for event in job.emitted(BadStepFound)] == [9]


def test_stop_skips_nothing_and_ends_for_good(tmp_path):
    job, error = train(tmp_path, {7: math.nan}, 10, {"nan": "stop"})
    assert error.status == 68
    (row,) = chosen(tmp_path).bad_steps
    assert (row.samples, row.rollbacks) == (0, 0)


def test_rollbacks_without_a_good_checkpoint_between_them_are_limited(tmp_path):
    job = Job(tmp_path, settings=Settings.load({"guard": ROLLBACK}, {}))
    lineage = job.manager.target.lineage
    job.manager.bad_before = [BadStep("0001-0000aaaa", lineage, 7, 7, 0, "loss is nan", 3, 8)]
    job.step = 3
    with pytest.raises(BadStepError) as caught:
        job.end_step(Valued(job, {3: math.nan}))
    assert caught.value.status == 68


def test_a_note_that_cannot_be_written_is_an_ordinary_failure(tmp_path):
    """Status 67 would start the same steps again at once, and for ever."""
    (tmp_path / FOLDER / BAD_STEPS).mkdir(parents=True)
    assert train(tmp_path, {3: math.nan}, 5)[1].status == 1


def test_the_first_bad_step_of_any_rank_counts(tmp_path):
    """Ranks learn of it at an exchange, some steps later; meanwhile no save becomes complete."""

    def work(group):
        job = Job(tmp_path, group, Settings.load({"guard": ROLLBACK}, {}), every=2)
        losses = {3: math.nan} if group.rank == 1 else {5: math.nan}
        with pytest.raises(BadStepError) as caught:
            for _ in range(200):
                job.step += 1
                job.end_step(Valued(job, losses))
        return caught.value.status, job.emitted(GuardEnded)[0].bad_step

    assert Ranks(2).run(work) == [(67, 3)] * 2
    assert set(committed(tmp_path)) <= {2}
    assert [row.rank for row in read_bad_steps(dir_at(tmp_path))] == [1]


def test_without_the_exchange_a_guard_that_ends_a_job_is_refused():
    section = {"guard": ROLLBACK, "preemption_check_interval": 0}
    with pytest.raises(ConfigError, match="preemption_check_interval"):
        Settings.load(section, {})
    Settings.load({**section, "guard": {"nan": "warn"}}, {})
