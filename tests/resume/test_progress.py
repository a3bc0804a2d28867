"""Where a resumed run goes on: exact where it can be, rounded down as documented and said where it cannot."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindresume.data import DataPosition, DataWish
from mindresume.errors import ConfigError, ProgressError
from mindresume.resume.progress import Setting, check_skip, data_wish, progress_of
from mindresume.state import TrainingState

OURS = {"type": "MindDataset", "files": "1 file, 10 bytes: a"}
OTHER = {"type": "MindDataset", "files": "1 file, 12 bytes: b"}


def state(step, batch=8, size=10, data=None, **more):
    return TrainingState(step, size or 10, step, batch, dataset_size=size, data=data, **more)


def counters(progress):
    return (progress.initial_step, progress.initial_epoch, progress.global_step, progress.step_scale, progress.data_skip)


@pytest.mark.parametrize("saved, new, expected", [
    (state(15), Setting(8, 10), (15, 1, 15, 1.0, 15)),              # middle of epoch 2: one epoch is done
    (state(20), Setting(8, 10), (20, 2, 20, 1.0, 20)),
    (state(20), Setting(16, 5), (10, 2, 10, 0.5, 10)),              # the batch doubled: half the steps, the same epoch
    (state(20, 16, 5), Setting(8, 10), (40, 4, 40, 2.0, 40)),
    (state(40), Setting(8, 10, 2), (40, 20, 40, 1.0, 40)),          # sink size 2: 20 sinks are done
    (state(16), Setting(8, 10, 4), (16, 4, 16, 1.0, 16)),           # that do not divide an epoch
    (state(7, None, None), Setting(8, 10), (7, 0, 7, 1.0, 7)),      # a checkpoint that does not say: no scaling
    (state(14, 8, None), Setting(16, 5), (7, 1, 7, 0.5, 7)),
])
def test_counters_of_the_new_run(saved, new, expected):
    progress = progress_of(saved, new)
    assert counters(progress) == expected and progress.repeated == 0


def test_what_does_not_scale_is_rounded_down_and_counted():
    """35 * 8 / 16 = 17.5 steps. Half a step of data is seen again."""
    progress = progress_of(state(35, consumed=280), Setting(16, 5))
    assert counters(progress) == (17, 3, 17, 0.5, 17)
    assert (progress.repeated, progress.position.samples, progress.consumed) == (8, 32, 280)


def test_less_than_a_step_is_refused():
    with pytest.raises(ProgressError, match=r"step 1 at global batch size 8 is less than one step at global batch size 16"):
        progress_of(state(1), Setting(16, 5))


def test_a_sink_is_not_cut():
    with pytest.raises(ProgressError, match="step 15 is no multiple of sink_size 2"):
        progress_of(state(15), Setting(8, 10, 2))


def test_a_pass_of_another_length_moves_nothing_else():
    """11 steps of 8 in a pass, or 5 of 16 (drop_remainder): step 22 is the end of pass 2 in both, though 22 * 8 / 16 = 11."""
    progress = progress_of(state(22, 8, 11), Setting(16, 5))
    assert counters(progress) == (11, 2, 11, 0.5, 10) and progress.repeated == 0
    near_the_end = progress_of(state(21, 8, 11), Setting(16, 5))        # sample 80 of 88, of which 80 are left
    assert (near_the_end.position.passes, near_the_end.position.samples, near_the_end.repeated) == (2, 0, 0)


# ---- another data set ----------------------------------------------------------------------------------------------

def on(step, position, size=10, batch=8):
    return state(step, batch, size, position)


@pytest.mark.parametrize("wish, skip, epoch", [(DataWish(True), 0, 3), (DataWish(False, 2), 2, 3), (DataWish(False, 12), 12, 3)])
def test_a_new_data_set_begins_as_it_was_said(wish, skip, epoch):
    progress = progress_of(on(35, DataPosition(3, 40, identity=OURS)), Setting(8, 10, None, OTHER, wish))
    assert counters(progress) == (35, epoch, 35, 1.0, skip) and progress.begins
    assert progress.changed == ("files: 1 file, 10 bytes: a, now 1 file, 12 bytes: b",)
    assert progress.position.identity == OTHER and progress.position.declared == str(wish)


@pytest.mark.parametrize("wish", [DataWish(True), DataWish(False, 2)])
def test_it_begins_once(wish):
    """Interrupted again: the same command goes on where the new data set was, and ends where it would have ended."""
    first = progress_of(on(35, DataPosition(3, 40, identity=OURS)), Setting(8, 10, None, OTHER, wish))
    saved = on(42, first.position.after(7, 10, 8))
    again = progress_of(saved, Setting(8, 10, None, OTHER, wish))
    assert not again.begins and again.data_skip == first.data_skip + 7
    assert again.initial_epoch == 3 and not again.changed
    later = progress_of(on(50, first.position.after(15, 10, 8)), Setting(8, 10, None, OTHER))       # the wish was taken out
    assert later.data_skip == first.data_skip + 15 and later.initial_epoch == 4


def test_a_third_data_set_begins_by_the_same_words():
    second = DataPosition(0, 56, 3, "ignore_data_skip: True", OTHER)
    progress = progress_of(on(42, second), Setting(8, 10, None, OURS, DataWish(True)))
    assert progress.begins and progress.data_skip == 0


def test_the_same_data_set_from_its_beginning():
    progress = progress_of(on(35, DataPosition(3, 40, identity=OURS)), Setting(8, 10, None, OURS, DataWish(True)))
    assert progress.begins and (progress.data_skip, progress.initial_epoch) == (0, 3) and not progress.changed


def test_a_change_that_nobody_declared_goes_on_as_if_there_was_none():
    progress = progress_of(on(35, DataPosition(3, 40, identity=OURS)), Setting(8, 10, None, OTHER))
    assert progress.changed and not progress.begins and progress.data_skip == 35
    assert progress.position.identity == OTHER


def test_a_new_data_set_each_round_begins_at_its_beginning():
    """Incremental training: a pass of 10 steps, then one of 7, then one of 4, at the pass boundaries; nothing is left out."""
    position, step = DataPosition(identity={"files": "0"}), 0
    for number, size in enumerate((10, 7, 4)):
        if step:
            progress = progress_of(state(step, 8, (10, 7, 4)[number - 1], position),
                                   Setting(8, size, None, {"files": str(number)}))
            position = progress.position
            assert progress.position.samples == 0 and progress.initial_epoch == number
        position, step = position.after(size, size, 8), step + size
    assert (position.passes, position.samples) == (3, 0)


@given(st.lists(st.tuples(st.sampled_from([2, 4, 8, 16]), st.integers(0, 30)), min_size=1, max_size=6))
def test_whatever_the_batch_sizes_no_sample_is_left_out(lives):
    """Passes of 80 samples. Every life goes on at or before the sample where the one before was stopped, by less than a step."""
    position, consumed, step, batch = DataPosition(), 0, 0, 8
    for new, steps in lives:
        if step * batch >= new:
            progress = progress_of(TrainingState(step, 80 // batch, step, batch, dataset_size=80 // batch, data=position),
                                   Setting(new, 80 // new))
            seen = progress.position.passes * 80 + progress.position.samples
            assert 0 <= consumed - seen == progress.repeated < new and progress.data_skip * new == seen
            position, step, batch, consumed = progress.position, progress.initial_step, new, seen
        position, step, consumed = position.after(steps, 80 // batch, batch), step + steps, consumed + steps * batch
        assert position.passes * 80 + position.samples == consumed


# ---- wishes --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ignore, skip, expected", [(None, None, ""), (False, 0, ""), (True, None, "ignore_data_skip: True"),
                                                    (False, 3, "data_skip_steps: 3"), (True, 3, "ignore_data_skip: True")])
def test_what_the_configuration_says(ignore, skip, expected):
    assert str(data_wish(ignore, skip)) == expected


@pytest.mark.parametrize("ignore, skip, match", [("yes", None, "ignore_data_skip is 'yes'"), (None, -1, "data_skip_steps is -1"),
                                                 (None, 1.5, "data_skip_steps is 1.5"), (None, True, "data_skip_steps is True"),
                                                 (None, "2", "data_skip_steps is '2'")])
def test_what_cannot_be_meant(ignore, skip, match):
    with pytest.raises(ConfigError, match=match):
        data_wish(ignore, skip)


@pytest.mark.parametrize("skip, said", [(9, ""), (10, "begins in pass 2, behind 0 steps"), (23, "begins in pass 3, behind 3")])
def test_a_skip_of_more_than_a_pass_is_worth_a_warning(skip, said):
    found = check_skip(DataWish(False, skip), 10, 3)
    assert said in found and bool(found) is bool(said)
    assert check_skip(DataWish(True, skip), 10, 3) == ""                        # ignore_data_skip


def test_a_skip_beyond_the_data_is_an_error():
    with pytest.raises(ProgressError, match="data_skip_steps is 30; the data set has 10 steps, 3 passes over it have 30: n"):
        check_skip(DataWish(False, 30), 10, 3)
    assert "pass 10001" in check_skip(DataWish(False, 100_000), 10, None)
    with pytest.raises(ProgressError, match="nothing of it would be left"):
        progress_of(state(20), Setting(8, 10, wish=DataWish(False, 30), epochs=3))
