"""Every event survives the event file; unknown kinds and fields are ignored."""

import dataclasses
import json
import pickle

import pytest
from events.examples import DOCS, EXAMPLES, WORDS, with_table

from mindresume import events as ev
from mindresume.events import event_from_json


def all_kinds():
    return [
        kind
        for kind in vars(ev).values()
        if isinstance(kind, type) and issubclass(kind, ev.Event) and kind is not ev.Event
    ]


def test_every_event_has_an_example():
    assert {type(event) for event in EXAMPLES} == set(all_kinds())


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: getattr(event, "kind", "none"))
def test_events_survive_json(event):
    assert event_from_json(json.loads(json.dumps(event.to_json(), allow_nan=False))) == event
    # a writer in a process of its own sends them
    assert pickle.loads(pickle.dumps(event)) == event
    assert event.log_level in ("info", "warning", "error")


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.kind)
def test_event_kinds_are_frozen_and_have_only_json_types(kind):
    assert kind.__dataclass_params__.frozen
    assert {field.type.removesuffix(" | None") for field in dataclasses.fields(kind)} <= {
        "int",
        "Annotated[int, Limits(-86400, 86400)]",
        "Count",
        "Measure",
        "str",
        "bool",
        "tuple[Count, ...]",
        "tuple[str, ...]",
        "tuple[Measure, ...]",
        "tuple[tuple[str, str, str], ...]",
    }


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"event": "what_a_later_version_says"},
        {"event": ["save_begun"]},
        {"event": "save_begun"},
        {"event": "save_begun", "step": "5"},
        {"event": "resumed", "step": 5, "summary": [["a", "b"]]},
        {"event": "training_ended", "outcome": "of_a_later_version"},
    ],
)
def test_unknown_events_are_ignored(value):
    assert event_from_json(value) is None


def test_unknown_and_missing_fields():
    found = event_from_json(
        {"event": "save_failed", "step": None, "reason": "full", "colour": "red"}
    )
    assert found == ev.SaveFailed(None, "full", 1)


def test_nan_and_infinity_become_none():
    staged = ev.WeightsLoaded(0, 1, 1)
    lost = ev.Resumed(5, load_seconds=float("nan"))
    assert "load_seconds" not in lost.to_json() and staged.to_json()["event"] == "weights_loaded"


def test_an_outcome_is_one_of_four():
    with pytest.raises(ValueError, match="sunshine"):
        ev.TrainingEnded("sunshine")


@pytest.mark.parametrize("page", WORDS)
def test_the_table_of_each_page_matches_the_handlers(page):
    assert (DOCS / page).read_text(encoding="utf-8") == with_table(page), (
        "run: PYTHONPATH=.:tests python -m events.examples"
    )
