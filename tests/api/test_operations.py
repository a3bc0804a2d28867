"""Conversions through the API, on a training's folder: what is held meanwhile."""

import pytest
from rank_folders import leases

import mindresume


@pytest.fixture
def root(training):
    return training / "output" / "checkpoint"


def test_the_source_is_locked_while_it_is_converted(root, training):
    held = []

    class Looker:
        def expect(self, count):
            held.append(leases(root))

        def advance(self, count):
            pass

    mindresume.convert(root, training / "new", to="tp=4", progress=Looker())
    mindresume.compare(root, training / "new", progress=Looker())
    assert [len(names) for names in held] == [1, 1] and leases(root) == []
