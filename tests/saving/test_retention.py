from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindresume.errors import ConfigError
from mindresume.saving.retention import (
    KEEP_ALL,
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEverySteps,
    KeepLast,
    KeepPerMinutes,
    any_of,
    policy_of,
    surplus,
)
from mindresume.settings import RetentionSettings


@dataclass(frozen=True)
class Saved:
    step: int | None
    saved_at: float | None = None
    metrics: dict = field(default_factory=dict)


# one a minute, newest first
MINUTES = [Saved(step, 60.0 * step) for step in range(9, -1, -1)]
# sink size 4: no multiple of 10 but 20
SINK = [Saved(step) for step in (32, 24, 20, 16, 12, 8, 4)]


def with_losses(*losses):
    """Returns candidates newest first, with descending steps."""
    return [
        Saved(len(losses) - index, metrics={} if loss is None else {"loss": loss})
        for index, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    "policy, gone",
    [
        (KeepAll(), []),
        (KeepLast(3), [3, 4, 5, 6, 7, 8, 9]),
        (KeepLast(20), []),
        (KeepPerMinutes(3), [1, 2, 4, 5, 7, 8]),  # steps 0, 3, 6, 9 stay
        (KeepPerMinutes(0.5), []),
        (KeepEverySteps(4), [2, 3, 4, 6, 7, 8, 9]),  # steps 4, 8, and 9, the newest
        (KeepEverySteps(1), [9]),  # step 0 lies before the first multiple
    ],
)
def test_policies_select_the_surplus(policy, gone):
    assert surplus(policy, MINUTES) == gone


@pytest.mark.parametrize(
    "interval, steps",
    [
        (10, {12, 20, 32}),
        (100, set()),
        (4, {4, 8, 12, 16, 20, 24, 32}),
        (8, {8, 16, 24, 32}),
    ],
)
def test_every_steps_keeps_the_first_at_or_after_each_multiple(interval, steps):
    assert {SINK[index].step for index in KeepEverySteps(interval).keeps(SINK)} == steps


def test_every_steps_of_two_runs_that_saved_the_same_step_keeps_the_newer_ones():
    assert KeepEverySteps(10).keeps([Saved(20), Saved(10), Saved(25), Saved(20), Saved(10)]) == {
        0,
        1,
    }
    assert KeepEverySteps(10).keeps([Saved(25), Saved(20)]) == {1}
    assert KeepEverySteps(10).keeps([Saved(None), Saved(10)]) == {1}


@pytest.mark.parametrize(
    "clock, kept",
    [
        ([300.0, 240.0, 60.0, 0.0], {0, 3}),  # forward: 0 opens, 300 is the next
        # set back by 1000 s: 100 lies before 1000, it starts again
        ([130.0, 100.0, 1060.0, 1000.0], {1, 3}),
        ([900.0, 950.0, 1000.0], {0, 1, 2}),  # every one before the one kept before it
        ([None, None, 600.0], {1, 2}),  # unknown: does not count as newer
    ],
)
def test_a_clock_that_was_set_back_removes_nothing(clock, kept):
    assert (
        KeepPerMinutes(5).keeps([Saved(10 - index, at) for index, at in enumerate(clock)]) == kept
    )


@pytest.mark.parametrize(
    "policy, losses, kept",
    [
        (KeepBest("loss", 1), [3.0, 1.0, 2.0], {1}),
        (KeepBest("loss", 2), [3.0, 1.0, 2.0], {1, 2}),
        (KeepBest("loss", 1, "max"), [3.0, 1.0, 2.0], {0}),
        (KeepBest("loss", 9), [3.0, None, 2.0], {0, 2}),
        # ties: the newer
        (KeepBest("loss", 1), [2.0, 1.0, 1.0], {1}),
        (KeepBest("loss", 1, "max"), [1.0, 2.0, 2.0], {1}),
        (KeepBest("loss", 2), [None, float("nan"), 7.0, None], {2}),
        (KeepBest("accuracy", 1), [1.0], set()),
    ],
)
def test_the_best(policy, losses, kept):
    assert policy.keeps(with_losses(*losses)) == kept


@pytest.mark.parametrize(
    "policy, text",
    [
        (KEEP_ALL, "all"),
        (KeepLast(3), "the last 3"),
        (KeepLast(1), "the last one"),
        (KeepPerMinutes(30), "one every 30 minutes"),
        (KeepEverySteps(1000), "one every 1000 steps"),
        (KeepBest("loss", 2), "the best 2 by loss (smallest)"),
        (KeepBest("bleu", 1, "max"), "the best one by bleu (largest)"),
        (KeepAny((KeepLast(3), KeepEverySteps(10))), "the last 3, one every 10 steps"),
    ],
)
def test_policies_have_a_readable_text(policy, text):
    assert str(policy) == text


@pytest.mark.parametrize(
    "build, word",
    [
        (lambda: KeepLast(0), "at least 1"),
        (lambda: KeepLast(2.5), "whole number"),
        (lambda: KeepLast(True), "True"),
        (lambda: KeepEverySteps(0), "steps between"),
        (lambda: KeepPerMinutes(0), "above 0"),
        (lambda: KeepPerMinutes(float("nan")), "nan"),
        (lambda: KeepBest("loss", 0), "best"),
        (lambda: KeepBest("loss", 1, "least"), "min, max"),
        (lambda: KeepBest("", 1), "name"),
        (lambda: KeepAny(()), "at least one"),
    ],
)
def test_nonsense_is_refused(build, word):
    with pytest.raises(ConfigError, match=word):
        build()


def test_the_keys_of_the_yaml():
    assert policy_of(5, 10, RetentionSettings()) == KeepLast(5)
    assert policy_of(0, 10, RetentionSettings()) == KeepPerMinutes(10)
    assert policy_of(None, 0, RetentionSettings()) == KeepAll()
    assert policy_of(0, 10, RetentionSettings(0, 2, "bleu", "max")) == KeepAny(
        (KeepPerMinutes(10), KeepBest("bleu", 2, "max"))
    )
    assert policy_of(5, 0, RetentionSettings(1000, 2)) == KeepAny(
        (KeepLast(5), KeepEverySteps(1000), KeepBest("loss", 2))
    )


@pytest.mark.parametrize(
    "more, keys",
    [
        ({"keep_best": 1}, ["keep_best"]),
        ({"keep_every_steps": 10, "keep_best": 1}, ["keep_every_steps", "keep_best"]),
    ],
)
def test_keeping_more_than_everything_is_a_contradiction(more, keys):
    with pytest.raises(ConfigError) as raised:
        policy_of(None, 0, RetentionSettings(**more))
    assert all(
        key in str(raised.value)
        for key in [*keys, "keep_checkpoint_max", "keep_checkpoint_per_n_minutes"]
    )


def test_a_single_policy_is_not_wrapped():
    assert any_of([KeepLast(3)]) == KeepLast(3)
    # values
    assert len({KeepLast(3), KeepLast(3), KeepAny([KeepLast(3)]), KeepAny((KeepLast(3),))}) == 2


# ---- of all policies -----------------------------------------------------------------------------

simple = st.one_of(
    st.just(KEEP_ALL),
    st.builds(KeepLast, st.integers(1, 5)),
    st.builds(KeepPerMinutes, st.integers(1, 10)),
    st.builds(KeepEverySteps, st.integers(1, 12)),
    st.builds(KeepBest, st.just("loss"), st.integers(1, 4), st.sampled_from(["min", "max"])),
)
policies = st.one_of(simple, st.builds(KeepAny, st.lists(simple, min_size=1, max_size=4)))
checkpoints = st.lists(
    st.builds(
        Saved,
        st.integers(0, 60),
        st.floats(0, 3000),
        st.one_of(st.just({}), st.builds(lambda value: {"loss": value}, st.floats(allow_nan=True))),
    ),
    max_size=20,
)


@given(policies, checkpoints)
def test_the_newest_is_kept_and_nothing_is_named_twice(policy, found):
    gone = surplus(policy, found)
    assert 0 not in gone and len(set(gone)) == len(gone) and set(gone) <= set(range(len(found)))


@given(st.lists(simple, min_size=1, max_size=4), checkpoints)
def test_any_keeps_exactly_what_one_of_them_keeps(parts, found):
    everything = set().union(*(policy.keeps(found) for policy in parts))
    assert KeepAny(tuple(parts)).keeps(found) == everything
    assert set(surplus(KeepAny(tuple(parts)), found)) == set.intersection(
        *(set(surplus(policy, found)) for policy in parts)
    )


@given(policies, checkpoints, st.sets(st.integers(0, 19)))
def test_checkpoints_that_could_not_be_removed_do_not_change_the_plan(policy, found, held):
    """Locked ones are kept beside the others; the next plan removes the same ones and no more."""
    gone = set(surplus(policy, found))
    left = [
        (index, saved) for index, saved in enumerate(found) if index not in gone or index in held
    ]
    again = {left[index][0] for index in surplus(policy, [saved for _, saved in left])}
    assert again == gone & held
