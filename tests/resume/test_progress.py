"""The position at which a resumed run continues: exact if possible, else rounded down and reported;
and what a summary says about it."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mindresume.errors import ConfigError, ProgressError
from mindresume.formats.bad_steps import BadStep
from mindresume.model.training_state import DataPosition, DataRequest, TrainingState
from mindresume.resume.progress import (
    RunSettings,
    check_skip,
    fresh_progress,
    parse_data_request,
    random_state_row,
    resume_progress,
    resume_warnings,
    summary_rows,
)

OURS = {"type": "MindDataset", "files": "1 file, 10 bytes: a"}
OTHER = {"type": "MindDataset", "files": "1 file, 12 bytes: b"}


def state(step, batch=8, size=10, data=None, **more):
    return TrainingState(step, size or 10, step, batch, dataset_size=size, data=data, **more)


def counters(progress):
    return (
        progress.initial_step,
        progress.initial_epoch,
        progress.global_step,
        progress.step_scale,
        progress.data_skip,
    )


@pytest.mark.parametrize(
    "saved, new, expected, repeated",
    [
        # middle of epoch 2: one epoch is done
        (state(15), RunSettings(8, 10), (15, 1, 15, 1.0, 15), 0),
        (state(20), RunSettings(8, 10), (20, 2, 20, 1.0, 20), 0),
        # the batch doubled: half the steps, the same epoch
        (state(20), RunSettings(16, 5), (10, 2, 10, 0.5, 10), 0),
        (state(20, 16, 5), RunSettings(8, 10), (40, 4, 40, 2.0, 40), 0),
        (state(40), RunSettings(8, 10, 2), (40, 20, 40, 1.0, 40), 0),  # sink size 2: 20 sinks
        (state(16), RunSettings(8, 10, 4), (16, 4, 16, 1.0, 16), 0),  # that do not divide an epoch
        # a checkpoint that does not say: no scaling
        (state(7, None, None), RunSettings(8, 10), (7, 0, 7, 1.0, 7), 0),
        (state(14, 8, None), RunSettings(16, 5), (7, 1, 7, 0.5, 7), 0),
        # 35 * 8 / 16 = 17.5 steps: rounded down, and half a step of data is seen again
        (state(35), RunSettings(16, 5), (17, 3, 17, 0.5, 17), 8),
        # 11 steps of 8 in a pass, or 5 of 16 (drop_remainder): step 22 is the end of pass 2 in
        # both, though 22 * 8 / 16 = 11
        (state(22, 8, 11), RunSettings(16, 5), (11, 2, 11, 0.5, 10), 0),
        # sample 80 of 88, of which 80 are left
        (state(21, 8, 11), RunSettings(16, 5), (10, 2, 10, 0.5, 10), 0),
        # a step of 8 samples reads four items of 2: a pass of 10 items is two steps and a half
        (
            TrainingState(3, 2, 3, 8, data=DataPosition(1, 4)),
            RunSettings(8, 10, item_samples=2),
            (3, 1, 3, 1.0, 12),
            0,
        ),
        # a part of an item is read again
        (
            TrainingState(3, 2, 3, 8, data=DataPosition(1, 9)),
            RunSettings(8, 5, item_samples=4),
            (3, 1, 3, 1.0, 7),
            1,
        ),
        # items of a whole step change nothing
        (state(35, 16, 5), RunSettings(8, 10, item_samples=8), (70, 7, 70, 2.0, 70), 0),
    ],
)
def test_counters_of_the_new_run(saved, new, expected, repeated):
    progress = resume_progress(saved, new)
    assert (counters(progress), progress.repeated) == (expected, repeated)


def test_the_samples_that_were_seen_are_those_of_the_checkpoint_not_of_its_position():
    assert resume_progress(state(35, consumed=270), RunSettings(16, 5)).consumed == 270
    assert resume_progress(state(35), RunSettings(16, 5)).consumed == 280


@pytest.mark.parametrize(
    "saved, new, said",
    [
        (
            state(1),
            RunSettings(16, 5),
            "step 1 at global batch size 8 is less than one step at global batch size 16",
        ),
        (
            state(15),
            RunSettings(8, 10, 2),
            "the data of step 15: it begins after 15 steps of the data set, no multiple",
        ),
        (
            state(10),
            RunSettings(8, 10, 2, data_request=DataRequest(False, 3), epochs=4),
            "data_skip_steps: it begins after 3 steps of the data set, no multiple",
        ),
        (
            state(20),
            RunSettings(8, 10, data_request=DataRequest(False, 30), epochs=3),
            "data_skip_steps is 30; the data set has 10 steps, 3 passes over it have 30",
        ),
        (
            state(20),
            RunSettings(8, 10, 4, data_request=DataRequest(False, 28), epochs=3),
            "nothing of it would be left, not even one sink",
        ),
    ],
)
def test_what_would_lose_or_repeat_data_is_refused(saved, new, said):
    with pytest.raises(ProgressError, match=said):
        resume_progress(saved, new)
    if new.data_request.skip:
        with pytest.raises(ProgressError, match=said):
            fresh_progress(new)


# ---- another data set ----------------------------------------------------------------------------


def on(step, position, size=10, batch=8):
    return state(step, batch, size, position)


@pytest.mark.parametrize(
    "data_request, skip, epoch",
    [(DataRequest(True), 0, 3), (DataRequest(False, 2), 2, 3), (DataRequest(False, 12), 12, 3)],
)
def test_a_new_data_set_begins_as_requested(data_request, skip, epoch):
    progress = resume_progress(
        on(35, DataPosition(3, 40, identity=OURS)), RunSettings(8, 10, None, OTHER, data_request)
    )
    assert counters(progress) == (35, epoch, 35, 1.0, skip) and progress.starts_data_set
    assert progress.changed == ("files: 1 file, 10 bytes: a, now 1 file, 12 bytes: b",)
    assert progress.position.identity == OTHER and progress.position.declared == str(data_request)


@pytest.mark.parametrize("data_request", [DataRequest(True), DataRequest(False, 2)])
def test_a_new_data_set_begins_once(data_request):
    """After another interruption the same command continues at the position in the new data set and
    ends at the same step."""
    first = resume_progress(
        on(35, DataPosition(3, 40, identity=OURS)), RunSettings(8, 10, None, OTHER, data_request)
    )
    saved = on(42, first.position.after(7, 10, 8))
    again = resume_progress(saved, RunSettings(8, 10, None, OTHER, data_request))
    assert not again.starts_data_set and again.data_skip == first.data_skip + 7
    assert again.initial_epoch == 3 and not again.changed
    # the request was removed
    later = resume_progress(
        on(50, first.position.after(15, 10, 8)), RunSettings(8, 10, None, OTHER)
    )
    assert later.data_skip == first.data_skip + 15 and later.initial_epoch == 4


@pytest.mark.parametrize(
    "position, identity, data_request, starts, changes",
    [
        # a third one begins by the same request
        (DataPosition(0, 56, 3, "ignore_data_skip: True", OTHER), OURS, True, True, True),
        # the same one from its beginning
        (DataPosition(3, 40, identity=OURS), OURS, True, True, False),
        # an undeclared change continues as without one
        (DataPosition(3, 40, identity=OURS), OTHER, False, False, True),
    ],
)
def test_a_data_set_begins_if_it_or_its_request_is_new(
    position, identity, data_request, starts, changes
):
    progress = resume_progress(
        on(35, position), RunSettings(8, 10, None, identity, DataRequest(data_request))
    )
    assert (progress.starts_data_set, bool(progress.changed)) == (starts, changes)
    assert (progress.data_skip, progress.initial_epoch) == (0 if starts else 35, 3)
    assert progress.position.identity == identity


@given(
    st.lists(st.tuples(st.sampled_from([2, 4, 8, 16]), st.integers(0, 30)), min_size=1, max_size=6)
)
def test_no_sample_is_left_out_with_any_batch_sizes(attempts):
    """Passes have 80 samples. Every attempt continues at or less than one step before the sample at
    which the previous one stopped."""
    position, consumed, step, batch = DataPosition(0, 0), 0, 0, 8
    for new, steps in attempts:
        if step * batch >= new:
            progress = resume_progress(
                TrainingState(
                    step, 80 // batch, step, batch, dataset_size=80 // batch, data=position
                ),
                RunSettings(new, 80 // new),
            )
            seen = progress.position.passes * 80 + progress.position.samples
            assert (
                0 <= consumed - seen == progress.repeated < new and progress.data_skip * new == seen
            )
            position, step, batch, consumed = progress.position, progress.initial_step, new, seen
        position, step, consumed = (
            position.after(steps, 80 // batch, batch),
            step + steps,
            consumed + steps * batch,
        )
        assert position.passes * 80 + position.samples == consumed


# ---- data requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ignore, skip, expected",
    [
        (None, None, ""),
        (False, 0, ""),
        (True, None, "ignore_data_skip: True"),
        (False, 3, "data_skip_steps: 3"),
        (True, 3, "ignore_data_skip: True"),
    ],
)
def test_valid_data_requests_are_parsed(ignore, skip, expected):
    assert str(parse_data_request(ignore, skip)) == expected


@pytest.mark.parametrize("ignore, skip", [("yes", None), (None, -1), (None, True), (None, "2")])
def test_data_requests_of_another_kind_are_errors(ignore, skip):
    with pytest.raises(ConfigError, match=repr(ignore or skip)):
        parse_data_request(ignore, skip)


@pytest.mark.parametrize(
    "skip, said, more",
    [
        (9, "", {"epochs": 3}),
        (10, "begins after 0 steps", {"epochs": 3}),
        (23, "begins after 3 steps of a pass", {"epochs": 3}),
        (100_000, "begins after 0 steps", {}),
        (3, "begins after 2 steps", {"item_samples": 2}),  # 12 items: more than a pass
    ],
)
def test_a_skip_of_more_than_a_pass_is_worth_a_warning(skip, said, more):
    found = check_skip(RunSettings(8, 10, data_request=DataRequest(False, skip), **more))
    assert said in found and bool(found) is bool(said)
    # ignore_data_skip
    assert check_skip(RunSettings(8, 10, data_request=DataRequest(True, skip), **more)) == ""


# ---- trained steps, with and without sinks -------------------------------------------------------


def trained(skip, epoch, new):
    """Steps of the data set, counted from its beginning, that MindSpore trains on: (the first, one
    behind the last). mindformers trainer/utils.py, check_runner_config; mindspore train/model.py,
    _train_process and _train_dataset_sink_process."""
    assert skip < new.dataset_size * new.epochs  # or MindSpore refuses
    if not new.sink_size:
        passes = new.epochs - epoch
        stop = (skip // new.dataset_size + passes) * new.dataset_size
        # or the data ends before the training
        assert skip // new.dataset_size + passes <= new.epochs
        return skip, stop
    sinks = int(new.dataset_size / new.sink_size * new.epochs)
    assert skip % new.sink_size == 0 and epoch < sinks
    stop = skip + (sinks - epoch) * new.sink_size
    assert stop <= -(-sinks * new.sink_size // new.dataset_size) * new.dataset_size
    return skip, stop


def resumed(saved, new):
    progress = resume_progress(saved, new)
    return trained(progress.data_skip, progress.initial_epoch, new)


@pytest.mark.parametrize("sink", [None, 1, 2, 4, 5, -1])
@pytest.mark.parametrize(
    "stood, size, epochs, steps",
    [
        # a smaller data set: sink mode trained 10 of its 20 steps
        (DataPosition(2, 0, identity=OURS), 5, 6, 20),
        # a larger one: 700 instead of 400
        (DataPosition(3, 0, identity=OURS), 200, 5, 400),
        (DataPosition(4, 0, identity=OURS), 5, 5, 5),  # none at all, and status 0
        # the interrupted epoch is trained completely
        (DataPosition(3, 40, identity=OURS), 15, 6, 45),
        (DataPosition(3, 72, identity=OURS), 8, 6, 24),  # by a smaller one, too
        (DataPosition(0, 40, identity=OURS), 20, 1, 20),
        (DataPosition(5, 8, 2, identity=OURS), 30, 9, 60),
    ],
)
def test_a_new_data_set_is_trained_as_often_in_both_modes(stood, size, epochs, steps, sink):
    """In sink mode it is trained for as many sinks as fit."""
    sink = size if sink == -1 else sink
    saved = on(stood.steps(10, 8) + stood.first_epoch * 10, stood)
    first, stop = resumed(saved, RunSettings(8, size, sink, OTHER, DataRequest(True), epochs))
    assert first == 0 and stop == steps // (sink or 1) * (sink or 1)


@pytest.mark.parametrize("sink, steps", [(None, 43), (1, 43), (2, 42), (4, None)])
def test_and_behind_steps_of_it(sink, steps):
    saved, new = (
        on(30, DataPosition(3, 0, identity=OURS)),
        RunSettings(8, 15, sink, OTHER, DataRequest(False, 2), 6),
    )
    if steps is None:
        with pytest.raises(ProgressError, match="after 2 steps"):
            resume_progress(saved, new)
    else:
        assert resumed(saved, new) == (2, 2 + steps)


@pytest.mark.parametrize(
    "skip, sink, first, stop",
    [
        *((skip, sink, 0, 30) for skip in (None, 0, 10, 20) for sink in (None, 1, 2, 5)),
        *((skip, sink, 4, 28 if sink == 4 else 30) for skip in (4, 14) for sink in (None, 1, 2, 4)),
    ],
)
def test_a_run_from_its_beginning(skip, sink, first, stop):
    """Passes that are skipped completely are not part of what MindSpore builds."""
    new = RunSettings(8, 10, sink, OURS, DataRequest(False, skip), 3)
    progress = fresh_progress(new)
    position = progress.position
    assert trained(progress.data_skip, progress.initial_epoch, new) == (first, stop)
    assert (position.samples, position.identity) == (8 * first, OURS)
    assert position.declared == (f"data_skip_steps: {skip}" if skip else "")


@pytest.mark.parametrize(
    "old, sink, size, next_sink",
    [
        (10, None, 7, None),
        (10, 10, 15, 15),
        (15, 4, 20, 2),
        (15, 5, 10, 4),
        (15, 2, 9, 4),
        (7, 7, 10, 10),
        (15, 1, 10, 4),
        (10, 4, 10, 4),
    ],
)
def test_a_new_data_set_each_round(old, sink, size, next_sink):
    """Without a warning: a remainder below one sink at the end of a round neither skips samples of
    the next data set nor refuses it."""
    step = old // (sink or 1) * (sink or 1)
    data = DataPosition(0, 0, identity=OURS).after(step, old, 8)
    saved = TrainingState(step, sink or 1, step, 8, sink_size=sink, dataset_size=old, data=data)
    new = RunSettings(8, size, next_sink, OTHER, epochs=2)
    progress = resume_progress(saved, new)
    position = progress.position
    assert (position.samples, position.first_epoch + position.passes) == (0, 1)
    first, stop = trained(progress.data_skip, progress.initial_epoch, new)
    unit = next_sink or 1
    assert first % size == 0
    assert stop - first in (size // unit * unit, 2 * size // unit * unit - size)


def test_between_two_passes_of_the_same_data_another_sink_begins_at_a_pass_that_it_can():
    for sink in (4, None, 1, 2, 5, 10):
        new = RunSettings(8, 10, sink, OURS, epochs=6)
        progress = resume_progress(on(30, DataPosition(3, 0, identity=OURS)), new)
        assert progress.moved_passes == (-1 if sink == 4 else 0)
        if sink == 4:
            assert (progress.position.passes, progress.position.first_epoch) == (2, 1)
            assert trained(progress.data_skip, progress.initial_epoch, new) == (20, 48)


@given(
    size=st.integers(1, 40),
    sink=st.integers(1, 12),
    epochs=st.integers(1, 9),
    cut=st.integers(1, 400),
)
def test_interrupted_at_any_sink_the_same_data_is_trained_to_its_end(size, sink, epochs, cut):
    """The same steps as without an interruption, whatever sink divides what."""
    new = RunSettings(8, size, sink, OURS, epochs=epochs)
    cut = min(cut, int(size / sink * epochs) - 1)
    assume(cut > 0)
    position = DataPosition(0, 0, identity=OURS).after(cut * sink, size, 8)
    progress = resume_progress(
        TrainingState(
            cut * sink, sink, cut * sink, 8, sink_size=sink, dataset_size=size, data=position
        ),
        new,
    )
    assert (
        progress.initial_step,
        progress.initial_epoch,
        progress.data_skip,
        progress.moved_passes,
    ) == (cut * sink, cut, cut * sink, 0)


@given(
    old=st.integers(1, 30),
    size=st.integers(8, 40),
    sink=st.sampled_from([1, 2, 4, 8]),
    batch=st.sampled_from([4, 8, 16]),
    more=st.integers(1, 8),
    step=st.integers(8, 200),
    attempts=st.lists(st.integers(1, 5), max_size=4),
)
def test_a_new_data_set_interrupted_again_and_again(old, size, sink, batch, more, step, attempts):
    """Also with another batch size: all attempts together train as many whole sinks as fit into the
    remaining epochs."""
    position = DataPosition(0, 0, identity=OURS).after(step, old, 8)
    epochs = position.passes + more
    new = RunSettings(batch, size, sink, OTHER, DataRequest(True), epochs)
    progress, wanted = resume_progress(on(step, position, old), new), more * size // sink
    total, left = int(size / sink * epochs), wanted
    assert total - progress.initial_epoch == left
    for sinks in attempts:
        if sinks >= left:
            break
        stands, at = (
            progress.position.after(sinks * sink, size, batch),
            progress.initial_step + sinks * sink,
        )
        progress = resume_progress(
            TrainingState(at, sink, at, batch, sink_size=sink, dataset_size=size, data=stands), new
        )
        left -= sinks
        assert (
            total - progress.initial_epoch == left and progress.data_skip == (wanted - left) * sink
        )
        assert not progress.starts_data_set


def test_a_requested_skip_counts_steps_though_the_data_set_has_items():
    new = RunSettings(8, 10, data_request=DataRequest(False, 2), item_samples=2)
    for progress in (
        resume_progress(state(15, data=DataPosition(6, 0)), new),
        fresh_progress(new),
    ):
        assert (progress.position.samples, progress.data_skip % 10) == (16, 8)


# ---- summary: each part restored, recomputed, absent or changed ----------------------------------

STOOD = DataPosition(3, 40, identity=OURS)
CHANGE = "files: 1 file, 10 bytes: a, now 1 file, 12 bytes: b"
DIFFERS = f"the data set differs from that of the checkpoint ({CHANGE})"


@pytest.mark.parametrize(
    "saved, new, told",
    [
        (
            state(35, data=STOOD, loss_scale=1024.0),
            RunSettings(8, 10, None, OURS),
            {
                "step": "restored 35",
                "samples": "restored 280 seen",
                "epoch": "restored 3 done",
                "data": "restored pass 4, behind 40 of 80 samples: 35 steps are skipped",
                "data set": "restored the same",
                "learning rate": "restored position of the schedule: step 35 of the optimizer",
                "loss scale": "restored 1024",
            },
        ),
        (
            state(35, data=STOOD),
            RunSettings(16, 5, None, OURS),
            {
                "step": "recomputed 35 * 8 / 16 = 17.5, so 17",
                "samples": "restored 280 seen",
                "epoch": "recomputed 3 done",
                "data": "recomputed pass 4, behind 32 of 80 samples: 17 steps are skipped; "
                "8 samples are seen again",
                "data set": "restored the same",
                "learning rate": "recomputed position of the schedule: 35 * 8 / 16 = 17.5, so 17",
                "loss scale": "absent not in use",
            },
        ),
        # the PyNative trainer of 2.1.0 reads one item for each micro-batch: here two of 4 samples
        # make a step of 8
        (
            state(35, data=STOOD),
            RunSettings(8, 20, None, OURS, item_samples=4),
            {"data": "restored pass 4, behind 40 of 80 samples: 70 items are skipped"},
        ),
        (
            state(35, data=STOOD),
            RunSettings(8, 10, None, OTHER, DataRequest(False, 2)),
            {
                "data": "recomputed as data_skip_steps: 2 says: pass 1, behind 16 of 80 samples: "
                "2 steps are skipped",
                "data set": f"changed {CHANGE}",
            },
        ),
        (
            state(35),
            RunSettings(8, 10),
            {"data set": "absent not in the checkpoint: taken for the same"},
        ),
    ],
)
def test_the_summary_tells_of_each_part(saved, new, told):
    rows = summary_rows(saved, resume_progress(saved, new), new)
    assert {name: f"{how} {text}" for name, how, text in rows if name in told} == told


def test_random_states_by_name():
    restored = ("random state", "restored", "numpy, mindspore")
    assert random_state_row(["numpy", "mindspore"]) == restored
    for reason in ("", "saved by 4 ranks, this job has 2"):
        said = f"{reason or 'not in the checkpoint'}: the seeds of the configuration apply"
        assert random_state_row((), reason) == ("random state", "absent", said)


@pytest.mark.parametrize(
    "data, new, said",
    [
        (STOOD, RunSettings(8, 10, None, OURS), ""),
        (STOOD, RunSettings(8, 10, None, OTHER, DataRequest(True)), ""),
        (STOOD, RunSettings(8, 10), ""),
        (
            STOOD,
            RunSettings(16, 5, None, OURS),
            "8 samples are seen again: the checkpoint is within a step of global batch size 16, "
            "and steps are rounded down",
        ),
        # the request remained in the configuration; without a change it has no effect
        (
            DataPosition(0, 40, 3, "ignore_data_skip: True", OURS),
            RunSettings(8, 10, None, OTHER, DataRequest(True)),
            f"ignore_data_skip: True is still set, and {DIFFERS}, so it starts as that key says.",
        ),
        # incremental training: each round ends with a pass over its data
        (
            DataPosition(1, 0, 3, "ignore_data_skip: True", OURS),
            RunSettings(8, 10, None, OTHER, DataRequest(True)),
            "",
        ),
        (
            DataPosition(1, 0, 3, "data_skip_steps: 2", OURS),
            RunSettings(8, 10, None, OTHER, DataRequest(False, 2)),
            f"data_skip_steps: 2 is still set, and {DIFFERS}, so it starts as that key says.",
        ),
        (
            DataPosition(0, 40, 3, "ignore_data_skip: True", OURS),
            RunSettings(8, 10, None, OURS, DataRequest(True)),
            "",
        ),
    ],
)
def test_a_resume_warns_with_a_reason_only(data, new, said):
    saved = state(35, data=data)
    warnings = resume_warnings(resume_progress(saved, new), new, "error")
    assert len(warnings) == bool(said) and all(text.startswith(said) for text in warnings)


def test_an_undeclared_change_is_a_warning_or_an_error():
    new = RunSettings(8, 10, None, OTHER)
    progress = resume_progress(state(35, data=STOOD), new)
    (sentence,) = resume_warnings(progress, new, "warn")
    assert sentence.startswith(
        f"{DIFFERS}; 35 steps of it are skipped as if it were the same. If it is a new data set, "
        "set ignore_data_skip: True"
    )
    with pytest.raises(
        ProgressError, match="mindresume.on_dataset_change: error.*ignore_data_skip: True"
    ):
        resume_warnings(progress, new, "error")


# ---- samples of bad steps ------------------------------------------------------------------------


def bad(sample, samples=8, passes=0, **more):
    return BadStep("run", "", 1, 1, 0, "nan", 1, samples, DataPosition(passes, sample, **more))


@pytest.mark.parametrize(
    "step, new, rows, skipped, skip, window",
    [
        (5, RunSettings(8, 10), [bad(56)], 0, 5, 7),  # it comes after step 7
        (7, RunSettings(8, 10), [bad(56)], 8, 8, None),
        (9, RunSettings(8, 10), [bad(56)], 0, 9, None),  # it was before
        (7, RunSettings(8, 10), [bad(64), bad(56)], 16, 9, None),
        (7, RunSettings(8, 10), [bad(56), bad(72)], 8, 8, 8),  # another one, a step later
        (9, RunSettings(8, 10), [bad(72, 24)], 24, 12, None),  # over the end of a pass
        (5, RunSettings(8, 10), [bad(56, passes=1)], 0, 5, 17),
        # samples 56 to 63 are in the fourth step of 16
        (6, RunSettings(16, 5), [bad(56)], 16, 4, None),
        (4, RunSettings(4, 20), [bad(56)], 0, 8, 14),
        # in whole sinks of 2: steps 7 and 8
        (4, RunSettings(8, 10, 2), [bad(48, 16)], 0, 4, 6),
        (6, RunSettings(8, 10, 2), [bad(48, 16)], 16, 8, None),
        # a sink of 4: it holds samples 32 to 63
        (4, RunSettings(8, 20, 4), [bad(56)], 32, 8, None),
        (5, RunSettings(8, 10, identity=OURS), [bad(40, identity=OTHER)], 0, 5, None),
        (5, RunSettings(8, 10), [bad(40, first_epoch=1)], 0, 5, None),
        # PyNative: a step of 8 samples reads four items of 2
        (5, RunSettings(8, 40, item_samples=2), [bad(56)], 0, 20, 7),
        (7, RunSettings(8, 40, item_samples=2), [bad(56)], 8, 32, None),
    ],
)
def test_samples_of_bad_steps_are_skipped(step, new, rows, skipped, skip, window):
    size = new.dataset_size * new.samples_at_once // 8
    position = DataPosition(0, 0, identity=new.identity or {}).after(step, size, 8)
    progress = resume_progress(state(step, 8, size, position), new, rows)
    assert (progress.skipped, progress.data_skip, progress.window_step) == (skipped, skip, window)
    assert progress.initial_step == step * 8 // new.global_batch_size


def test_a_fresh_start_skips_them_too():
    assert fresh_progress(RunSettings(8, 10), [bad(0)]).data_skip == 1
    assert fresh_progress(RunSettings(8, 10), [bad(24)]).window_step == 3
