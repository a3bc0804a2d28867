import json
from dataclasses import replace

import pytest

from mindresume.errors import RecordError
from mindresume.model.training_state import (
    DataPosition,
    DataRequest,
    TrainingState,
    crosses_multiple,
    is_transient,
    may_be_absent,
)


@pytest.mark.parametrize(
    "step, per_epoch, epoch, inside",
    [
        (1, 10, 1, 1),
        (10, 10, 1, 10),
        (11, 10, 2, 1),
        # sink size 2: step 24 is named -12_2, step 40 -20_2
        (24, 2, 12, 2),
        (0, 10, 0, 0),
    ],
)
def test_epoch_and_step_follow_from_the_absolute_step(step, per_epoch, epoch, inside):
    state = TrainingState(step, per_epoch, step)
    assert (state.epoch, state.step_in_epoch) == (epoch, inside)


@pytest.mark.parametrize(
    "before, now, interval, due",
    [
        (4, 5, 5, True),
        (19, 20, 5, True),
        # sink size 2: 6, 10, 16, 20
        (4, 6, 5, True),
        (10, 12, 5, False),
        (0, 1, 1, True),
    ],
)
def test_saves_fall_on_absolute_multiples(before, now, interval, due):
    assert crosses_multiple(before, now, interval) is due


@pytest.mark.parametrize(
    "name, absent, transient",
    [
        ("decoder.layers.0.hidden_states_dropout.seed", True, False),
        ("embedding.embedding_dropout.offset", True, False),
        ("indexer_loss", True, False),
        ("decoder.indexer_loss", False, False),
        ("accu_grads.w", True, True),
        ("decoder.layers.0.dropout.weight", False, False),
        ("seed", False, False),
    ],
)
def test_some_saved_parameters_may_be_absent(name, absent, transient):
    assert (may_be_absent(name), is_transient(name)) == (absent, transient)


def test_json_round_trip():
    short = TrainingState(15, 10, 14, 8, 1024.0, None, 10)
    state = replace(
        short,
        metrics={"accuracy": 1.0, "loss": 2.5},
        consumed=120,
        data=DataPosition(1, 40, 0, "", {"type": "MindDataset"}),
        arrangement={"use_a": True, "use_b": False},
        trainer={"skipped_steps": 3, "best": 0.1 + 0.2, "path": "/a", "flag": True, "none": None},
    )
    value = json.loads(json.dumps({**state.to_json(), "of a later version": 1}))
    assert TrainingState.from_json(value) == state and hash(state)
    later = ("metrics", "consumed", "data", "arrangement", "trainer")
    old = {name: field for name, field in value.items() if name not in later}
    assert TrainingState.from_json(old) == short
    # left out if empty, as before these fields
    assert not {"arrangement", "trainer"} & set(short.to_json())


POSITION = {"passes": 1, "samples": 40, "first_epoch": 0, "declared": "", "identity": {}}


@pytest.mark.parametrize(
    "field, value",
    [
        ("data", {**POSITION, "passes": -1}),
        ("data", {**POSITION, "identity": {"a": 1}}),
        ("data", "a text"),
        ("metrics", {"loss": float("nan")}),
        ("arrangement", {"a": 1}),
        ("trainer", {"a": []}),
        ("trainer", {"a": float("nan")}),
        ("trainer", {"a": "x" * 5000}),
    ],
)
def test_a_field_of_another_form_is_refused(field, value):
    with pytest.raises(RecordError, match=f"training state: {field}"):
        TrainingState.from_json({**TrainingState(15, 10, 14).to_json(), field: value})


def test_an_optimizer_that_counts_from_minus_one_can_be_saved_before_its_first_update():
    """FusedAdamW of mindformers; skipped first steps do not count."""
    state = TrainingState(2, 10, -1)
    assert TrainingState.from_json(state.to_json()) == state
    with pytest.raises(RecordError):
        TrainingState.from_json({**state.to_json(), "global_step": -2})


# ---- the position in the data --------------------------------------------------------------------


@pytest.mark.parametrize(
    "passes, samples, steps, size, batch, expected",
    [
        (0, 0, 10, 10, 8, (1, 0)),
        (1, 40, 5, 10, 8, (2, 0)),
        (1, 40, 35, 10, 8, (5, 0)),
        (0, 64, 1, 5, 16, (1, 0)),
        (0, 44, 1, 10, 8, (0, 48)),  # half a step was left over
    ],
)
def test_after_advances_passes_and_samples(passes, samples, steps, size, batch, expected):
    found = DataPosition(passes, samples, 2, "said", {"type": "T"}).after(steps, size, batch)
    assert (found.passes, found.samples) == expected
    assert (found.first_epoch, found.declared, found.identity) == (2, "said", {"type": "T"})


def test_steps_counts_whole_steps():
    assert DataPosition(2, 40).steps(10, 8) == 25
    assert DataPosition(2, 47).steps(10, 8) == 25
    assert DataPosition(0, 400).steps(10, 8) == 10  # never into the next pass


def test_a_data_request_as_text():
    assert [str(DataRequest(*given)) for given in ((), (True,), (False, 3), (False, 0))] == [
        "",
        "ignore_data_skip: True",
        "data_skip_steps: 3",
        "",
    ]
