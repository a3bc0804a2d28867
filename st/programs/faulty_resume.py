"""run_mindformer.py, or with ``--config`` alone the PyNative trainer: its resume goes wrong in one
way, behind everything that mindresume verifies. For st/test_proof.py.

    RESUME_FAULT="one tensor wrong by 0.1 %"       one of FAULTS
    RESUME_FAULT_FOLDER=output/checkpoint          with an older step, for faults that read one

docs/reliability.md has FAULTS as a table; st/test_proof.py compares both.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAULT = "RESUME_FAULT"
FOLDER = "RESUME_FAULT_FOLDER"
Arrays = dict[str, Any]
UNSEEN = "nothing"
# trainings, see st/test_proof.py
ONE, TWO, TENSOR, FOUR = "one rank", "two ranks", "two ranks, tensor parallel", "four ranks"
SINKS, OTHER = "sinks", "another layout"
PYNATIVE, DROPOUT = "PyNative", "PyNative with dropout"


@dataclass(frozen=True)
class Fault:
    """A way in which a resume goes wrong.

    Attributes:
        begin: changes this process before it trains.
        found: what finds it: ``weights``, or the first number of the ledger that differs; UNSEEN.
        step: in which of the steps that are trained again, from 1; 0: before the first.
        words: of the command line, of this resume alone.
        kind: the training that is resumed.
        compiles: it changes the graph, so no compiled one can be taken.
    """

    begin: Callable[[], None]
    found: str
    step: int
    words: str = ""
    kind: str = ONE
    compiles: bool = False


def rank() -> int:
    return int(os.environ.get("RANK_ID", "0"))


def replace(owner: Any, name: str, changed: Callable[..., Any]) -> None:
    """Puts ``changed(original, ...)`` in the place of a function or method."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(functools.partial(changed, original)))


def replace_method(owner: Any, name: str, changed: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return changed(original, self, *args, **kwargs)

    setattr(owner, name, method)


# ---- what is loaded ------------------------------------------------------------------------------


def change_arrays(change: Callable[[Arrays], None]) -> None:
    """Changes the arrays before their fingerprints are taken: as a reader that reads wrong."""
    from mindresume.mindformers.network_state import LoadedWeights

    of = LoadedWeights.of.__func__

    def changed(cls, arrays, *rest, **more):
        change(arrays)
        return of(cls, arrays, *rest, **more)

    LoadedWeights.of = classmethod(changed)


def change_after_load(change: Callable[[Arrays], None]) -> None:
    """Changes the arrays when the network takes them."""
    from mindresume.mindformers import adapter

    def changed(load_into, network, arrays, *rest):
        change(arrays)
        return load_into(network, arrays, *rest)

    replace(adapter, "load_into", changed)


def weights(arrays: Arrays) -> list[str]:
    """Returns the names of the matrices of the network, not of the optimizer."""
    return [name for name in sorted(arrays) if arrays[name].ndim == 2 and "adam_" not in name]


def of_network(name: str) -> bool:
    return not of_optimizer(name) and name != "global_step"


def of_optimizer(name: str) -> bool:
    return "adam_" in name


def older_step(of_rank: int | None = None) -> Arrays:
    """Returns the tensors of the oldest file of a rank in FOLDER."""
    from safetensors.numpy import load_file

    number = rank() if of_rank is None else of_rank
    files = Path(os.environ[FOLDER], f"rank_{number}").glob("*.safetensors")
    return load_file(min(files, key=lambda path: path.stat().st_mtime))


def take(arrays: Arrays, others: Mapping[str, Any], wanted: Callable[[str], bool]) -> None:
    for name in arrays:
        if wanted(name) and arrays[name].ndim and name in others:
            arrays[name] = others[name].reshape(arrays[name].shape).astype(arrays[name].dtype)


def older(wanted: Callable[[str], bool] = lambda name: True) -> Callable[[Arrays], None]:
    return lambda arrays: take(arrays, older_step(), wanted)


def one_tensor_wrong(arrays: Arrays) -> None:
    name = weights(arrays)[0]
    arrays[name] = arrays[name] * arrays[name].dtype.type(0.999)


def one_tensor_older(arrays: Arrays) -> None:
    name = weights(arrays)[1]
    take(arrays, older_step(), lambda other: other == name)


def swapped_tensors(arrays: Arrays) -> None:
    # both have one shape
    first, second = "embedding.word_embeddings.weight", "output_layer.weight"
    arrays[first], arrays[second] = arrays[second], arrays[first]


def swapped_moments(arrays: Arrays) -> None:
    for name in list(arrays):
        if name.startswith("adam_m"):
            other = name.replace("adam_m", "adam_v", 1)
            arrays[name], arrays[other] = arrays[other], arrays[name]


def moment_for_weight(arrays: Arrays) -> None:
    name = weights(arrays)[0]
    arrays[name] = arrays[f"adam_m.{name}"].copy()


def rows_in_another_order(arrays: Arrays) -> None:
    """As another arrangement of query, key and value."""
    name = next(name for name in weights(arrays) if "linear_qkv" in name)
    rows = arrays[name]
    arrays[name] = rows.reshape(3, -1, rows.shape[1]).swapaxes(0, 1).reshape(rows.shape).copy()


def flip_bit(arrays: Arrays, name: str, byte: int, bit: int) -> None:
    """Flips a bit of the number in the middle of a tensor."""
    import numpy as np

    data = bytearray(arrays[name].tobytes())
    data[len(data) // 8 * 4 + byte] ^= bit
    arrays[name] = np.frombuffer(bytes(data), arrays[name].dtype).reshape(arrays[name].shape)


def flipped_bit(arrays: Arrays) -> None:
    flip_bit(arrays, weights(arrays)[-1], 2, 0x40)


def flipped_bit_of_a_moment(arrays: Arrays) -> None:
    # of the exponent
    flip_bit(arrays, f"adam_m.{weights(arrays)[-1]}", 3, 0x02)


def initial_values(arrays: Arrays) -> None:
    for name in arrays:
        if of_network(name) and name.endswith("layernorm.weight"):
            arrays[name] = arrays[name] * 0 + 1


def rounded(arrays: Arrays) -> None:
    import ml_dtypes

    for name in weights(arrays):
        arrays[name] = arrays[name].astype(ml_dtypes.bfloat16).astype(arrays[name].dtype)


def zero_moments(arrays: Arrays) -> None:
    for name in filter(of_optimizer, arrays):
        arrays[name] = arrays[name] * 0


def no_second_moments(arrays: Arrays) -> None:
    for name in arrays:
        if name.startswith("adam_v"):
            arrays[name] = arrays[name] * 0


def other_loss_scale(arrays: Arrays) -> None:
    arrays["scale_sense"] += 1


def counter(change: Callable[[int], int]) -> Callable[[Arrays], None]:
    def changed(arrays: Arrays) -> None:
        arrays["global_step"] = arrays["global_step"] * 0 + change(arrays["global_step"])

    return changed


def of_one_rank(number: int, change: Callable[[Arrays], None]) -> Callable[[Arrays], None]:
    return lambda arrays: change(arrays) if rank() == number else None


def of_the_other_rank(arrays: Arrays) -> None:
    """The file of the same step of the other of two ranks, the second newest of the training."""
    from safetensors.numpy import load_file

    files = Path(os.environ[FOLDER], f"rank_{1 - rank()}").glob("*.safetensors")
    _, same, _ = sorted(files, key=lambda path: path.stat().st_mtime)
    take(arrays, load_file(same), lambda name: name != "global_step")


# ---- callbacks -----------------------------------------------------------------------------------


def load_in_callback(event: str) -> None:
    """A callback that loads the weights of an older file, as OnRequestExit of MindSpore does."""
    from mindformers.core.callback.callback import MFLossMonitor

    def changed(original, self, run_context):
        original(self, run_context)
        if not getattr(self, "has_loaded", False):
            self.has_loaded = True
            from mindspore import Parameter, Tensor, load_param_into_net

            network = run_context.original_args().train_network
            tensors = {
                name: Parameter(Tensor(array), name=name)
                for name, array in older_step().items()
                if of_network(name) and array.ndim
            }
            load_param_into_net(network, tensors)

    replace_method(MFLossMonitor, event, changed)


def second_begin() -> None:
    """MindIO begins a training again in its process; without the guard for it everything is opened
    and restored twice."""
    from mindresume.mindformers.checkpoint_monitor import CheckpointMonitor

    def changed(begin, self, run_context):
        begin(self, run_context)
        self._training = None
        begin(self, run_context)

    replace_method(CheckpointMonitor, "on_train_begin", changed)


def random_state_lost() -> None:
    from mindresume.mindformers import network_state

    network_state.restore_random = lambda state: ["MindSpore's default generator"]


# ---- counters ------------------------------------------------------------------------------------


def change_progress(change: Callable[[Any, Any], None]) -> None:
    """Changes the configuration, or the context, after the counters are restored."""
    from mindresume.mindformers import counters

    def changed(restore, config, dataset_size, context):
        restore(config, dataset_size, context)
        change(config, context)

    replace(counters, "restore_progress", changed)


def skip(steps: int) -> Callable[[Any, Any], None]:
    def changed(config, context):
        config.data_skip_steps += steps

    return changed


def first_step(steps: int) -> Callable[[Any, Any], None]:
    def changed(config, context):
        config.runner_config.initial_step += steps

    return changed


def first_epoch(epochs: int) -> Callable[[Any, Any], None]:
    def changed(config, context):
        config.runner_config.initial_epoch += epochs

    return changed


def samples_counted_from_zero(config: Any, context: Any) -> None:
    import dataclasses

    progress = context.progress
    progress.origin = dataclasses.replace(progress.origin, consumed=0)


# ---- data ----------------------------------------------------------------------------------------


def change_data(before: Any = None, after: Any = None) -> None:
    """Changes the data set before its samples are put together to batches, or after."""
    import mindspore.dataset as ds

    def changed(batch, self, *args, **kwargs):
        found = batch(before(self) if before else self, *args, **kwargs)
        return after(found) if after else found

    replace_method(ds.MindDataset, "batch", changed)


def more_samples(count: int) -> None:
    """Reads some more samples, for those that ``change_data`` takes away."""
    import mindspore.dataset as ds

    def changed(init, self, *args, **kwargs):
        init(self, *args, **{**kwargs, "num_samples": kwargs["num_samples"] + count})

    replace_method(ds.MindDataset, "__init__", changed)


def shifted_by_one_sample() -> None:
    more_samples(1)
    change_data(lambda dataset: dataset.skip(1))


def one_sample_left_out() -> None:
    """The 70th of each pass, in its ninth step."""
    import numpy as np

    def without(dataset):
        rows = dataset.create_dict_iterator(num_epochs=1, output_numpy=True)
        left_out = [row["input_ids"] for row in rows][69]
        return dataset.filter(
            lambda sample: not np.array_equal(sample, left_out), input_columns=["input_ids"]
        )

    more_samples(1)
    change_data(without)


def map_columns(change: Callable[[Any], Any], *columns: str) -> Callable[[Any], Any]:
    def changed(dataset):
        for column in columns:
            dataset = dataset.map(change, input_columns=[column])
        return dataset

    return changed


def turned(array: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(array[::-1])


def shifted(array: Any) -> Any:
    import numpy as np

    return np.roll(array, 1)


def another_file() -> None:
    """The same names, sizes and numbers; other samples."""
    change_data(after=map_columns(lambda array: array ^ 1, "input_ids"))


COLUMNS = ("input_ids", "labels", "loss_mask", "position_ids")


# ---- the network ---------------------------------------------------------------------------------


def frozen_layer() -> None:
    """The optimizer does not get the parameters of a part."""
    import mindspore.nn as nn

    def changed(trainable, self, *args):
        return [row for row in trainable(self, *args) if "linear_fc1" not in row.name]

    replace_method(nn.Cell, "trainable_params", changed)


# ---- several ranks -------------------------------------------------------------------------------


def folded_shards() -> None:
    """MindSpore's description of a layout, in which an optimizer shard is not told from tensor
    parallelism, counts alone when the checkpoint is saved: see ``reorder``."""
    from mindresume.mindformers import loading

    def changed(read, weights, regions, *rest, **more):
        arrays, size = read(weights, regions, *rest, **more)
        for name, array in arrays.items():
            if array.ndim == 2 and array.shape[0] % 4 == 0:
                quarters = array.reshape(2, 2, -1, array.shape[1])
                arrays[name] = quarters.swapaxes(0, 1).reshape(array.shape).copy()
        return arrays, size

    replace(loading, "read_balanced", changed)


# ---- PyNative ------------------------------------------------------------------------------------


def pynative_position(items: int | None) -> None:
    """The data continues at another position; None: at its beginning."""
    from mindresume.mindformers.pynative import checkpoint_load

    def changed(set_position, run, origin):
        set_position(run, origin)
        run.skip = 0 if items is None else run.skip + items

    replace(checkpoint_load, "_set_position", changed)


def pynative_unknown_data() -> None:
    """No data set is known, so that a change of it stays unnoticed; the test gives another one."""
    from mindresume.mindformers import job_start

    job_start.fingerprint = lambda *_: {}


def nothing() -> None:
    pass


def arrays(change: Callable[[Arrays], None], found: str, step: int, **more: Any) -> Fault:
    return Fault(functools.partial(change_arrays, change), found, step, **more)


def loaded(change: Callable[[Arrays], None]) -> Fault:
    return Fault(functools.partial(change_after_load, change), "weights", 0)


def progress(change: Callable[[Any, Any], None], found: str, step: int, **more: Any) -> Fault:
    return Fault(functools.partial(change_progress, change), found, step, **more)


def data(found: str, step: int, **change: Any) -> Fault:
    return Fault(functools.partial(change_data, **change), found, step)


def words(text: str, found: str, step: int) -> Fault:
    return Fault(nothing, found, step, text)


FAULTS: dict[str, Fault] = {
    # the weights
    "one bit changed after the load": loaded(flipped_bit),
    "two tensors swapped after the load": loaded(swapped_tensors),
    "a weight gets its moment": loaded(moment_for_weight),
    "a callback loads an old file at the begin of the training": Fault(
        functools.partial(load_in_callback, "on_train_begin"), "weights", 0
    ),
    "a callback loads an old file at the begin of the first step": Fault(
        functools.partial(load_in_callback, "on_train_step_begin"), "weights", 0
    ),
    "one tensor read wrong by 0.1 %": arrays(one_tensor_wrong, "loss", 1),
    "one bit read wrong": arrays(flipped_bit, "loss", 1),
    "two tensors swapped by the reader": arrays(swapped_tensors, "loss", 1),
    "query, key and value in another order": arrays(rows_in_another_order, "loss", 1),
    "norms keep their initial values": arrays(initial_values, "loss", 1),
    "weights rounded to bfloat16": arrays(rounded, "loss", 1),
    "one tensor of an older step": arrays(one_tensor_older, "loss", 1),
    "all weights of an older step": arrays(older(of_network), "loss", 1),
    # the optimizer
    "moments of an older step": arrays(older(of_optimizer), "loss", 2),
    "moments zero": arrays(zero_moments, "loss", 2),
    "second moments zero": arrays(no_second_moments, "loss", 2),
    "both moments swapped": arrays(swapped_moments, "loss", 2),
    "one bit of a moment read wrong": arrays(flipped_bit_of_a_moment, "loss", 2),
    "learning rate one step ahead": arrays(counter(lambda step: step + 1), "learning_rate", 1),
    "learning rate one step behind": arrays(counter(lambda step: step - 1), "learning_rate", 1),
    "`global_step` not restored, so that the warm-up begins again": arrays(
        counter(lambda step: 0), "learning_rate", 1
    ),
    "another loss scale": arrays(other_loss_scale, "loss_scale", 1),
    "no weight decay": words("--optimizer.weight_decay 0.0", "loss", 2),
    "other betas": words("--optimizer.betas [0.9,0.99]", "loss", 2),
    "no gradient clipping": words("--runner_wrapper.max_grad_norm 1000.0", "loss", 2),
    "a layer frozen": Fault(frozen_layer, "loss", 2, compiles=True),
    "another epsilon of the norms": words("--model.model_config.rms_norm_eps 1.0e-4", "loss", 1),
    # data and counters
    "data one step ahead": progress(skip(1), "batch", 1),
    "data one step behind": progress(skip(-1), "batch", 1),
    "samples shifted by one": Fault(shifted_by_one_sample, "batch", 1),
    "one sample left out, in the fourth step": Fault(one_sample_left_out, "batch", 4),
    "samples of a batch in another order": data("batch", 1, after=map_columns(turned, *COLUMNS)),
    "labels shifted by a token": data("batch", 1, before=map_columns(shifted, "labels")),
    "another file of the same name and size": Fault(another_file, "batch", 1),
    "data shuffled anew": data("batch", 1, before=lambda dataset: dataset.shuffle(80)),
    "step counter one step ahead": progress(first_step(1), "learning_rate", 2),
    "epoch one less": progress(first_epoch(-1), "epoch", 1),
    "samples counted from 0": progress(samples_counted_from_zero, "samples", 1),
    "data one step ahead, in sink mode": progress(skip(1), "loss", 1, kind=SINKS),
    # several ranks
    "one rank of two with an older copy": arrays(of_one_rank(1, older()), "loss", 1, kind=TWO),
    "two ranks' slices swapped": arrays(of_the_other_rank, "loss", 1, kind=TENSOR),
    "one rank of four with an older slice": arrays(of_one_rank(3, older()), "loss", 1, kind=FOUR),
    "optimizer shards joined as slices of tensor parallelism": Fault(
        folded_shards, "loss", 1, kind=OTHER
    ),
    # PyNative
    "data from the beginning, PyNative": Fault(
        functools.partial(pynative_position, None), "batch", 1, kind=PYNATIVE
    ),
    "data one step ahead, PyNative": Fault(
        functools.partial(pynative_position, 1), "batch", 1, kind=PYNATIVE
    ),
    "another data set, which has no fingerprint, PyNative": Fault(
        pynative_unknown_data, "batch", 1, kind=PYNATIVE
    ),
    "moments zero, PyNative": arrays(zero_moments, "loss", 2, kind=PYNATIVE),
    "random state not restored, PyNative with dropout": Fault(
        random_state_lost, "loss", 1, kind=DROPOUT
    ),
    # what shows nothing on a CPU
    "a second `on_train_begin`": Fault(second_begin, UNSEEN, 0),
    "random state not restored, graph trainer": Fault(random_state_lost, UNSEEN, 0),
}


def main() -> None:
    import mindresume.plugin  # noqa: F401  what is changed is imported before the training

    if fault := os.environ.get(FAULT):
        FAULTS[fault].begin()
    name = "run_mindformer.py" if "--run_mode" in sys.argv else "st/programs/pynative_train.py"
    runpy.run_path(os.path.join(sys.path[0], name), run_name="__main__")


if __name__ == "__main__":
    # the repository, as run_mindformer.py has it
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main())
