"""Results as JSON."""

import json
from dataclasses import FrozenInstanceError, dataclass

import pytest

import mindresume
from mindresume.api.results import Result


@dataclass(frozen=True)
class Sample(Result):
    rows: tuple
    inner: Result | None = None


def test_keys_are_the_names_of_the_fields():
    found = Sample((1, (2, None)), Sample(({"a": (True,)},)))
    assert found.to_json() == {
        "rows": [1, [2, None]],
        "inner": {"rows": [{"a": [True]}], "inner": None},
    }


def test_numbers_that_json_does_not_have_are_texts():
    value = Sample(({"a": [float("inf"), -float("inf"), float("nan"), 1.5]},)).to_json()["rows"]
    assert json.loads(json.dumps(value, allow_nan=False)) == [{"a": ["inf", "-inf", "nan", 1.5]}]


def test_results_cannot_be_changed():
    problem = mindresume.Problem(5, "damaged")
    with pytest.raises(FrozenInstanceError):
        problem.step = 6
