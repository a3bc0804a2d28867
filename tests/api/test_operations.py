"""Conversions through the API, on a training's folder: what is held meanwhile."""

import pytest
from rank_folders import leases

import mindresume
from mindresume.errors import ConfigError


@pytest.fixture
def root(training):
    return training / "output" / "checkpoint"


def test_a_checkpoint_can_be_converted(root, training):
    with mindresume.open(root)[200] as checkpoint:
        assert mindresume.convert(checkpoint, training / "new", format="iteration").finished
        assert checkpoint.is_held
        with pytest.raises(ConfigError):
            mindresume.convert(checkpoint, training / "other", step=200)
    assert mindresume.open(training / "new")[200].info.iteration_dir == "iteration_00000200"


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
