"""What is in the network at the first step is what was loaded, whoever ran in between."""

import ml_dtypes
import numpy as np
import pytest

ms = pytest.importorskip("mindspore")

from rank_folders import Threads  # noqa: E402

from mindresume.errors import AlteredWeightsError  # noqa: E402
from mindresume.mindformers.network_state import _BLOCK, _WHOLE, LoadedWeights  # noqa: E402
from mindresume.mindformers.training_context import Resources  # noqa: E402


class Backup:
    """Stands for a callback that loads weights of its own."""


def arrays():
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((8, 4)).astype(np.float32),
        "b": np.arange(6).astype(ml_dtypes.bfloat16),
        "large": rng.integers(0, 256, _WHOLE + 3, np.uint8),
        "scale": np.array(65536.0, np.float32),
        "none": np.zeros((0, 3)),
    }


def test_the_same_weights():
    assert (
        LoadedWeights.of(arrays()).difference(
            [*arrays().items(), ("another", np.ones(3))], [Backup()]
        )
        == ""
    )


@pytest.mark.parametrize(
    "name, index", [("w", (7, 3)), ("b", 0), ("large", 0), ("large", -1), ("large", _BLOCK - 1)]
)
def test_another_value_is_named(name, index):
    found = arrays()
    loaded = LoadedWeights.of(found)
    found[name][index] += np.array(1, found[name].dtype)
    text = loaded.difference(found.items(), [Backup()])
    assert (
        text.startswith(f"1 of 3 tensors are not what was loaded: {name}")
        and "callbacks of this training: Backup" in text
    )


def test_a_callback_may_set_a_single_number():
    """A learning rate of its own, or the flag by which a training is asked to stop, which
    OnRequestExit sets before a step."""
    found = arrays()
    loaded = LoadedWeights.of({**found, "graceful_init": np.array([0], np.int32)})
    assert (
        loaded.difference(
            {**found, "scale": np.float32(1), "graceful_init": np.array([1], np.int32)}.items(), ()
        )
        == ""
    )


def test_parameters_of_mindspore():
    values = {"w": arrays()["w"], "b": arrays()["b"]}
    loaded = LoadedWeights.of(values)
    parameters = {
        "w": ms.Parameter(ms.Tensor(values["w"]), name="w"),
        "b": ms.Parameter(ms.Tensor(values["b"].astype(np.float32), ms.bfloat16), name="b"),
    }
    assert loaded.difference(parameters.items(), ()) == ""
    parameters["w"].set_data(ms.Tensor(values["w"] * 2))
    assert "1 of 2 tensors are not what was loaded: w" in loaded.difference(parameters.items(), ())


def test_the_smallest_tensors_are_compared_if_there_are_too_many_bytes():
    loaded = LoadedWeights.of(arrays(), budget=200)
    assert set(loaded.fingerprints) == {"b", "w"}


def test_all_ranks_end_if_one_has_other_weights():
    def start(group):
        resources, found = Resources(group), arrays()
        resources.loaded = LoadedWeights.of(found)
        if group.rank == 1:
            found["w"] *= 2
        with pytest.raises(
            AlteredWeightsError, match="rank 1: 1 of 3 tensors are not what was loaded: w"
        ):
            resources.check_loaded(found.items(), (), True)
        resources.check_loaded(found.items(), (), True)  # once is enough
        return True

    assert Threads(3).run(start) == [True] * 3


def test_other_weights_on_top_of_loaded_ones_are_a_warning_where_nothing_is_resumed():
    def start(group):
        events, found = [], arrays()
        resources = Resources(group, events.append)
        resources.loaded = LoadedWeights.of(found)
        found["w"] *= 2
        resources.check_loaded(found.items(), [Backup()], False)
        return [event.text for event in events]

    (text,), *others = Threads(2).run(start)
    assert (
        others == [[]]
        and "rank 0: 1 of 3 tensors are not what was loaded: w" in text
        and "Backup" in text
    )
