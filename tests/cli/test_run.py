"""``mindresume run`` writes what only memory has to disk when it does not start a failed job
again."""

from types import SimpleNamespace

import pytest
from memory_tiers import ALIVE, make_owned_tier
from rank_folders import committed_steps, save

from mindresume.cli.run import _flush_memory
from mindresume.events import Notice


@pytest.fixture
def root(tmp_path):
    return tmp_path / "output" / "checkpoint"


def write(root, is_hurried=lambda: False):
    return _flush_memory(str(root.parent), SimpleNamespace(is_hurried=is_hurried))


def test_a_save_that_only_memory_has_is_written(memory, root):
    save(root, 5, world=2)
    save(make_owned_tier(memory, root), 9, world=2)
    assert isinstance(write(root), Notice) and committed_steps(root) == [9, 5]
    assert write(root) is None  # the disk is up to date


def test_nothing_needs_to_be_on_disk(memory, root):
    save(make_owned_tier(memory, root), 9, world=2)
    assert isinstance(write(root), Notice) and committed_steps(root) == [9]


def test_without_memory_nothing_is_said(root):
    assert write(root) is None  # there is no folder at all
    save(root, 5, world=2)
    assert write(root) is None


def test_a_second_signal_stops_it(memory, root):
    save(root, 5, world=2)
    save(make_owned_tier(memory, root), 9, world=2)
    assert write(root, lambda: True).level == "warning" and committed_steps(root) == [5]
    assert isinstance(write(root), Notice) and committed_steps(root) == [9, 5]


def test_the_tier_of_a_living_job_is_left_alone(memory, root):
    save(root, 5, world=2)
    save(make_owned_tier(memory, root, processes=ALIVE), 9, world=2)
    assert "mindresume flush" in write(root).text and committed_steps(root) == [5]
