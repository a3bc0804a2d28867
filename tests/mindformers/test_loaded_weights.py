"""What is in the network at the first step is what was loaded, whoever ran in between."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

ms = pytest.importorskip("mindspore")

from rank_folders import Threads  # noqa: E402

from mindresume.errors import AlteredWeightsError  # noqa: E402
from mindresume.mindformers import adapter, network_state  # noqa: E402
from mindresume.mindformers.network_state import _BLOCK, _ROWS, _WHOLE, LoadedWeights  # noqa: E402
from mindresume.mindformers.training_context import Resources  # noqa: E402


class Backup:
    """Stands for a callback that loads weights of its own."""

    def on_train_begin(self, run_context):
        pass


class OnDevice:
    """A tensor on a device: it is copied to the host in parts, which may be cut wrongly."""

    device = "Ascend:0"

    def __init__(self, array, is_right=True):
        self.array, self.is_right, self.copied = array, is_right, []

    def __getattr__(self, name):
        if name == "has_init":
            raise AttributeError
        return getattr(self.array, name)

    def _part(self, array):
        found = OnDevice(array, self.is_right)
        found.copied = self.copied
        return found

    def reshape(self, *shape):
        if self.is_right is None:
            raise RuntimeError("no kernel")
        return self._part(self.array.reshape(*shape))

    def __getitem__(self, places):
        array = self.array[places]
        return self._part(array if self.is_right else np.zeros_like(array))

    def asnumpy(self):
        self.copied.append(self.array.nbytes)
        return self.array


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
        text.startswith(f"1 of 3 tensors are not what was loaded: {name} (xxh3 ")
        and f"(xxh3 {loaded.digests[name]}, found " in text
        and "callbacks that ran in between: Backup (on_train_begin)" in text
    )


def test_only_callbacks_that_act_before_the_first_step_are_named():
    class Counter(ms.Callback):
        def on_train_step_end(self, run_context):
            pass

    class Loader(ms.Callback):
        def epoch_begin(self, run_context):
            pass

    found = arrays()
    loaded = LoadedWeights.of(found)
    found["w"] += 1
    assert "in between: none" in loaded.difference(found.items(), [Counter()])
    assert "in between: Loader (epoch_begin)." in loaded.difference(
        found.items(), [Counter(), Loader()]
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


@pytest.mark.parametrize("proof", ["full", "sample"])
def test_full_finds_each_byte_and_a_sample_a_part_of_each_tensor(proof):
    found = arrays()
    loaded = LoadedWeights.of(found, proof)
    size = found["large"].nbytes
    row = size // _ROWS
    counts = (1, 152 - 12 + _BLOCK * (_ROWS + 1), size + 140)
    assert loaded.counts == ((0, *counts[2:] * 2) if proof == "full" else counts)
    sampled = {0, _BLOCK - 1, row * 7, row * (_ROWS - 1) + _BLOCK - 1, size - _BLOCK, size - 1}
    for place in (*sampled, _BLOCK, row - 1, size - _BLOCK - 1):
        found["large"][place] ^= 1
        seen = loaded.difference(found.items(), ())
        assert bool(seen) == (proof == "full" or place in sampled), place
        found["large"][place] ^= 1
    for name in ("w", "b", "large"):
        other = {**found, name: found[name] + found[name].dtype.type(1)}
        assert f"loaded: {name} " in loaded.difference(other.items(), ())


@pytest.mark.parametrize(
    "device, limit, counts",
    [("CPU", 0, 0), ("Ascend", 1 << 30, 0), ("Ascend", _WHOLE, 1)],
)
def test_by_default_size_and_device_decide(monkeypatch, device, limit, counts):
    monkeypatch.setattr(network_state, "LIMIT", limit)
    monkeypatch.setattr(network_state, "_is_cpu", lambda: device == "CPU")
    assert LoadedWeights.of(arrays(), "auto").counts[0] == counts


def test_off_compares_nothing_and_still_exchanges_with_the_other_ranks():
    def start(group):
        resources, found = Resources(group), arrays()
        resources.loaded = LoadedWeights.of(found, "off" if group.rank == 0 else "full")
        found["w"] *= 2
        with pytest.raises(AlteredWeightsError, match="rank 1: 1 of 3"):
            resources.check_loaded(found.items(), (), True)
        return resources.proved

    size = arrays()["large"].nbytes + 140
    expected = {"sampled_tensors": 0, "compared_bytes": size, "weight_bytes": 2 * size}
    assert Threads(2).run(start) == [{"tensors": 0, **expected}, {"tensors": 3, **expected}]


@pytest.mark.parametrize("proof", ["full", "sample"])
def test_of_a_tensor_on_a_device_only_the_compared_parts_are_copied(monkeypatch, proof):
    monkeypatch.setattr(network_state, "_PART", 1 << 18)
    found = {"large": arrays()["large"].reshape(1, -1)}
    loaded, held = LoadedWeights.of(found, proof), OnDevice(found["large"])
    assert loaded.difference([("large", held)], ()) == ""
    assert max(held.copied) <= 1 << 18 and sum(held.copied) == loaded.counts[1]
    small = LoadedWeights.of(arrays(), proof), OnDevice(arrays()["w"])
    assert small[0].difference([("w", small[1])], ()) == "" and small[1].copied == [128]


@pytest.mark.parametrize("is_right", [True, False, None])
def test_what_was_cut_on_a_device_is_no_difference_before_the_whole_was_copied(is_right):
    found = {"large": arrays()["large"]}
    loaded, size = LoadedWeights.of(found, "sample"), found["large"].nbytes
    held = OnDevice(found["large"], is_right)
    assert loaded.difference([("large", held)], ()) == ""
    assert (size in held.copied) is (is_right is not True)
    held = OnDevice(found["large"] + np.uint8(1), is_right)
    assert "1 of 1" in loaded.difference([("large", held)], ()) and size in held.copied


def test_no_load_leaves_out_the_comparison():
    """Checkpoint 1.0 and 2.0, Hugging Face weights, the PyNative trainer: what hands arrays to
    parameters is called by ``loading.restore`` alone, which takes the digests before."""
    taken = re.compile(r"(?<!def )\b(assign|load_into|restore_parameters|load_param_into_net)\(")
    folder, found = Path(network_state.__file__).parent, []
    for path in sorted(folder.rglob("*.py")):
        function = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if name := re.match(r"\s*def (\w+)", line):
                function = name[1]
            found += [(path.stem, function, call) for call in taken.findall(line)]
    assert found == [
        ("adapter", "load_into", "load_param_into_net"),
        ("graph_load", "assign", "load_into"),
        ("loading", "restore", "assign"),
        ("checkpoint_load", "assign", "restore_parameters"),
        ("training_run", "restore_parameters", "load_into"),
    ]


def test_parts_that_mindspore_cuts_are_those_of_the_array():
    for array in (arrays()["large"], np.arange(300_000).astype(ml_dtypes.bfloat16)):
        array = np.tile(array, (2, 1))
        tensor = adapter.to_tensor(array.copy())
        for whole in (True, False):
            assert network_state._digest(tensor, whole) == network_state._digest(array, whole)


def test_all_ranks_end_if_one_has_other_weights():
    def start(group):
        resources, found = Resources(group), arrays()
        resources.loaded = LoadedWeights.of(found)
        if group.rank:
            found["w"] *= 2
        with pytest.raises(
            AlteredWeightsError,
            match=r"ranks 1, 2: 1 of 3 tensors are not what was loaded: w",
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
        and "ranks 0, 1: 1 of 3 tensors are not what was loaded: w" in text
        and "Backup" in text
    )
