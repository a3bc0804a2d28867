"""run_mindformer.py whose resume goes wrong in one way, behind everything that mindresume verifies.
For st/test_proof.py.

RESUME_FAULT=stale tensor        one of FAULTS
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULT = "RESUME_FAULT"


def change_arrays(change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the arrays before their fingerprints are taken: as a reader that reads wrong."""
    from mindresume.mindformers.network_state import LoadedWeights

    of = LoadedWeights.of.__func__

    def changed(cls, arrays, *rest):
        change(arrays)
        return of(cls, arrays, *rest)

    LoadedWeights.of = classmethod(changed)


def change_after_load(change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the arrays when the network takes them."""
    from mindresume.mindformers import adapter

    load_into = adapter.load_into

    def changed(network, arrays, *rest):
        change(arrays)
        return load_into(network, arrays, *rest)

    adapter.load_into = changed


def change_progress(change: Callable[[Any], None]) -> None:
    """Changes the configuration after the counters are restored."""
    from mindresume.mindformers import counters

    restore = counters.restore_progress

    def changed(config, dataset_size, context):
        restore(config, dataset_size, context)
        change(config)

    counters.restore_progress = changed


def weights(arrays: dict[str, Any]) -> list[str]:
    """Returns the names of the matrices of the network, not of the optimizer."""
    return [name for name in sorted(arrays) if arrays[name].ndim == 2 and "adam_" not in name]


def stale_tensor(arrays: dict[str, Any]) -> None:
    name = weights(arrays)[0]
    arrays[name] = arrays[name] * arrays[name].dtype.type(0.999)


def swapped_tensors(arrays: dict[str, Any]) -> None:
    # both have one shape
    first, second = "embedding.word_embeddings.weight", "output_layer.weight"
    arrays[first], arrays[second] = arrays[second], arrays[first]


def flipped_bit(arrays: dict[str, Any]) -> None:
    import numpy as np

    name = weights(arrays)[-1]
    data = bytearray(arrays[name].tobytes())
    data[len(data) // 2 + 2] ^= 0x40
    arrays[name] = np.frombuffer(bytes(data), arrays[name].dtype).reshape(arrays[name].shape)


def moments_from_the_start(arrays: dict[str, Any]) -> None:
    for name in arrays:
        if name.startswith("adam_"):
            arrays[name] = arrays[name] * 0


def optimizer_one_step_ahead(arrays: dict[str, Any]) -> None:
    arrays["global_step"] = arrays["global_step"] + 1


def samples_shifted(config: Any) -> None:
    config.data_skip_steps += 1


def one_step_ahead(config: Any) -> None:
    config.runner_config.initial_step += 1


FAULTS: dict[str, Callable[[], None]] = {
    "stale tensor": lambda: change_arrays(stale_tensor),
    "swapped tensors": lambda: change_arrays(swapped_tensors),
    "flipped bit read": lambda: change_arrays(flipped_bit),
    "flipped bit loaded": lambda: change_after_load(flipped_bit),
    "swapped tensors loaded": lambda: change_after_load(swapped_tensors),
    "moments from the start": lambda: change_arrays(moments_from_the_start),
    "optimizer one step ahead": lambda: change_arrays(optimizer_one_step_ahead),
    "samples shifted": lambda: change_progress(samples_shifted),
    "one step ahead": lambda: change_progress(one_step_ahead),
    "none": lambda: None,
}


def main() -> None:
    import mindresume.plugin  # noqa: F401  what is changed is imported before the training

    FAULTS[os.environ[FAULT]]()
    runpy.run_path(os.path.join(sys.path[0], "run_mindformer.py"), run_name="__main__")


if __name__ == "__main__":
    # the repository, as run_mindformer.py has it
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main())
