import pytest
from memory_tiers import memory

__all__ = ["memory"]


@pytest.fixture
def current():
    """Returns the context of this test, which is the current one. At its end its read lock and kept
    bytes are released, as at the end of a training."""
    pytest.importorskip("mindformers.tools")
    from mindresume.mindformers import training_context

    before, own = training_context.current(), training_context.TrainingContext()
    yield training_context.set_current(own)
    own.resources.release()
    training_context.set_current(before)
