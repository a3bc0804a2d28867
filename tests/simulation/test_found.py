"""Schedules that once broke a promise: one JSON file each in ``found/``, as ``python -m sim
--replay`` takes them.

``about`` describes the defect. A schedule names operations by their number, so a later version of
the product may do something else at them: an important defect has a test of its module as well.
"""

import json
from pathlib import Path

import pytest

from sim.search import Failure, replay

FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_found_schedule_passes(path):
    row = json.loads(path.read_text())
    assert row["about"]
    assert replay(Failure.from_json(row)) == []
