"""A checkpoint on which jobs die is suspected, and taken last; one step clears it."""
import os

import pytest
from folders import STORAGE, save

from mindresume.agree import Solo
from mindresume.manifest import FOLDER
from mindresume.resume.select import select
from mindresume.resume.trials import Trial, key_of, trials


def choose(root, limit=2, named=None):
    return select(STORAGE, str(root), Solo(), 1, named, poison_limit=limit)


def load(root, limit=2, named=None, output="/output"):
    """What the next job loads, and its trial."""
    choice = choose(root, limit, named)
    return choice.chosen.step, Trial.begin(STORAGE, str(root), choice.chosen, output), choice


@pytest.fixture
def root(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step, world=1)
    return tmp_path


def test_two_deaths_and_the_older_one_is_tried(root):
    assert [load(root)[0] for _ in range(2)] == [15, 15]
    step, _, choice = load(root)
    assert step == 10
    assert [str(refusal) for refusal in choice.refused] == [
        "step 15: it is suspected: 2 jobs in a row loaded it and died before their first step was done (mindresume.poison_limit: "
        "2); name it to take it all the same"]


def test_a_step_clears_it(root):
    load(root)
    load(root)[1].passed()
    assert trials(STORAGE, str(root)) == {} and [load(root)[0] for _ in range(2)] == [15, 15]


def test_a_job_that_ends_for_another_reason_does_not_count(root):
    for _ in range(3):
        load(root)[1].withdraw()
    assert trials(STORAGE, str(root)) == {}
    load(root)
    load(root)[1].withdraw()
    assert list(trials(STORAGE, str(root)).values()) == [1] and load(root)[0] == 15


def test_all_suspected_is_better_than_nothing(root):
    """Never stuck: the newest one again, with what is known of the others."""
    assert [load(root)[0] for _ in range(6)] == [15, 15, 10, 10, 5, 5]
    step, _, choice = load(root)
    assert step == 15 and [refusal.step for refusal in choice.refused] == [15, 10, 5]


def test_jobs_that_begin_with_it_at_the_same_time_are_not_in_a_row(root):
    """Several trainings from one source; one of them has done its first step."""
    loaded = [load(root, output=f"/output/{number}") for number in range(5)]
    assert [step for step, _, _ in loaded] == [15] * 5
    loaded[2][1].passed()
    assert trials(STORAGE, str(root)) == {}
    assert [load(root, output="/output/0")[0] for _ in range(3)] == [15, 15, 10]


def test_a_name_wins(root):
    for _ in range(2):
        load(root)
    assert load(root, named="net_rank_0-2_5")[0] == 15


def test_a_limit_of_none(root):
    assert [load(root, limit=0)[0] for _ in range(4)] == [15] * 4


def test_a_save_of_the_same_step_by_a_later_run_is_another_checkpoint(root):
    for _ in range(2):
        load(root)
    step, _, choice = load(root)
    assert step == 10 and key_of(choice.chosen) not in {name for name, count in trials(STORAGE, str(root)).items() if count > 1}


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"two", b"-3", b"9" * 30, b"2.0"])
def test_a_note_that_cannot_be_read_costs_no_checkpoint(root, content):
    load(root)
    (name,) = (name for name in os.listdir(root / FOLDER) if name.startswith("trial-"))
    (root / FOLDER / name).write_bytes(content)
    assert trials(STORAGE, str(root)) == {} and load(root)[0] == 15
