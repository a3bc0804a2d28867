"""The built-in reader and writer of Checkpoint 2.0 of several versions of mindformers, each in a
process of its own.

    # load_checkpoint of 1.8.0 gives these, bit for bit
    expect_readable(folder, tensors, layouts, "1.8.0")
    answer = builtin("1.9.0").read(folder, tensors, layouts)        # what it gave, or its error
    builtin("1.8.0").write(root, tensors, layouts, iteration=10, remove_redundancy=True)

``tensors``: {name: whole array}. ``layouts``: {name: TensorLayout} of the job that reads or writes,
or a Strategy if it has several pipeline stages; None or {} = one process. A tensor without a layout
is whole on every rank, as global_step is.

1.9.0 is what .venv has; the other is made by scripts/release_env.sh when it is first asked for. A
process imports mindformers once (6 s) and then answers in milliseconds; it ends with the tests.
"""

import atexit
import functools
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindresume.formats.strategy import Strategy, read_strategy
from mindresume.model.layout import TensorLayout, held
from mindresume.reshard.range_reader import view
from mindresume.tensor_files import encode, read_header, read_tensor
from st.releases import HERE
from st.training_run import ROOT

VERSIONS = ("1.8.0", "1.9.0")
# of an optimizer, no layout
COUNTERS = {"global_step", "learning_rate", "weight_decay", "beta1_power", "beta2_power"}
Layouts = Mapping[str, TensorLayout] | Strategy | None


@functools.cache
def python_of(version: str) -> Path:
    """The interpreter that has this version of mindformers; for another than .venv's it is made,
    which takes about a minute."""
    if version == HERE:
        return Path(sys.executable)
    made = subprocess.run(
        [str(ROOT / "scripts" / "release_env.sh"), version],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return Path(made.stdout.strip())


def is_optimizer(name: str, names: Mapping[str, Any]) -> bool:
    """Returns whether a tensor is optimizer state: a counter, or a moment, which is called
    ``<kind>.<parameter>``."""
    return name in COUNTERS or name.partition(".")[2] in names


def device_axes(layout: TensorLayout) -> tuple[list[int], list[int | list[int]]]:
    """Returns a device matrix and tensor map of the same slices without optimizer shards, which
    become further axes of dimension 0; as MindSpore's Layout expects it. ValueError if the shards
    do not fall on whole axes or parts of one."""
    matrix, needed, free = (
        list(layout.device_matrix),
        layout.optimizer_slices,
        list(layout.unused_axes),
    )
    cuts, shard = layout.axes, []
    if needed == 1:
        return matrix, [_cut(axes) for axes in cuts]
    # from the minor axis on: neighbours hold neighbouring pieces
    while needed > 1:
        axis = free.pop()
        position = len(matrix) - 1 - axis
        part = math.gcd(matrix[position], needed)
        if part < min(matrix[position], needed):
            raise ValueError(
                f"{layout.optimizer_slices} optimizer shards are no whole axes: {layout}"
            )
        # one axis becomes two: all above move up by one
        if part < matrix[position]:
            matrix[position : position + 1] = [matrix[position] // part, part]
            cuts = [tuple(a + (a > axis) for a in axes) for axes in cuts]
        shard.insert(0, axis)
        needed //= part
    return matrix, [_cut(cuts[0] + tuple(shard)), *map(_cut, cuts[1:])]


def _cut(axes: tuple[int, ...]) -> int | list[int]:
    return -1 if not axes else axes[0] if len(axes) == 1 else list(axes)


def fixture(name: str, step: int = 15) -> tuple[dict[str, np.ndarray], Strategy | None]:
    """Returns the global tensors of a Checkpoint 2.0 folder in st/fixtures and the layouts of its
    job, from its strategy files and not from metadata.json. AssertionError if the tensors of step
    15 differ from expected.json."""
    folder, whole = ROOT / "st" / "fixtures" / name, {}
    known, expected = (
        json.loads((folder / file).read_text(encoding="utf-8"))
        for file in ("steps.json", "expected.json")
    )
    strategy = (
        read_strategy(str(folder / "output" / "strategy")) if known["world_size"] > 1 else None
    )
    for rank, files in known["steps"][str(step)].items():
        for path in files:
            with open(folder / path, "rb") as file:
                for tensor, entry in read_header(file, path).tensors.items():
                    part, shape = (
                        read_tensor(file, entry),
                        expected["tensors"][tensor]["global_shape"],
                    )
                    layout = strategy and strategy.of_rank(int(rank)).get(tensor)
                    here = whole.setdefault(tensor, np.zeros(shape, part.dtype))
                    if layout:
                        here = view(here, held(layout, int(rank) % strategy.stage_size, here.shape))
                    here[...] = part
    assert step != expected["step"] or {
        tensor: sha256(array) for tensor, array in whole.items()
    } == {tensor: row["sha256"] for tensor, row in expected["tensors"].items()}
    return whole, strategy


def sha256(array: np.ndarray) -> str:
    """Returns the hash of the bytes, which are little-endian as everywhere here."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def strategy_of(layouts: Layouts) -> Strategy | None:
    """The layouts as one type; None or nothing = one process."""
    if isinstance(layouts, Strategy) or not layouts:
        return layouts or None
    return Strategy((layouts,))


def table(tensors: Mapping[str, np.ndarray], layouts: Layouts) -> dict[str, dict[str, Any]]:
    """``layouts`` of st/programs/builtin_20.py."""
    strategy, rows = strategy_of(layouts), {}
    for name, array in tensors.items():
        stage = strategy and strategy.stage_of(name)
        layout = None
        if stage is not None:
            size = strategy.stage_size
            matrix, cuts = device_axes(strategy.stages[stage][name])
            layout = {
                "device_matrix": matrix,
                "tensor_map": cuts,
                "rank_list": list(range(stage * size, (stage + 1) * size)),
            }
        rows[name] = {
            "dtype": str(array.dtype),
            "global_shape": list(array.shape),
            "layout": layout,
            "optimizer": is_optimizer(name, tensors),
        }
    return rows


def parts(tensors: Mapping[str, np.ndarray], layouts: Layouts, rank: int) -> dict[str, np.ndarray]:
    """Returns the slices of ``rank``, {name: slice}; none of another pipeline stage."""
    strategy = strategy_of(layouts)
    if strategy is None:
        return dict(tensors)
    here, everywhere = (
        strategy.of_rank(rank),
        set(tensors) - {name for stage in strategy.stages for name in stage},
    )
    return {
        name: array
        if name in everywhere
        else view(array, held(here[name], rank % strategy.stage_size, array.shape))
        for name, array in tensors.items()
        if name in everywhere or name in here
    }


class Builtin:
    """A process with one version of mindformers; see the top. ``log``: what mindformers printed."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._folder = tempfile.TemporaryDirectory(prefix="builtin_")
        self.folder = Path(self._folder.name)
        self.log = self.folder / "log.txt"
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("RANK_ID", "RANK_SIZE", "PYTHONPATH")
        }
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python_of(version)), str(ROOT / "st" / "programs" / "builtin_20.py")],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ask(self, do: str, layouts: Layouts, tensors: Mapping[str, Any], **request: Any) -> Any:
        """Returns the result. AssertionError with an error that the program did not expect."""
        strategy = strategy_of(layouts)
        request |= {
            "do": do,
            "layouts": table(tensors, layouts),
            "ranks": strategy.world_size if strategy else 1,
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the process ended:\n{self.log.read_text(errors='replace')[-2000:]}"
        answer = json.loads(line)
        assert "result" in answer, answer["error"]
        return answer["result"]

    def read(
        self, folder: Path, tensors: Mapping[str, np.ndarray], layouts: Layouts = None
    ) -> dict[str, Any]:
        """Returns the result of ``read`` of st/programs/builtin_20.py: what load_checkpoint put
        into parameters like ``tensors``, of which only type and shape matter. ``folder``: an
        iteration, or the folder with the tracker file."""
        return self.ask("read", layouts, tensors, folder=str(Path(folder).resolve()))

    def write(
        self,
        root: Path,
        tensors: Mapping[str, np.ndarray],
        layouts: Layouts = None,
        *,
        iteration: int,
        remove_redundancy: bool = False,
    ) -> Path:
        """The folder of the iteration that save_checkpoint made."""
        values = self.folder / "values.safetensors"
        with values.open("wb") as file:
            for _, piece in encode("safetensors", tensors, {}):
                file.write(piece)
        self.ask(
            "write",
            layouts,
            tensors,
            values=str(values),
            root=str(Path(root).resolve()),
            iteration=iteration,
            remove_redundancy=remove_redundancy,
        )
        return Path(root) / f"iteration_{iteration:08d}"

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._folder.cleanup()


@functools.cache
def builtin(version: str) -> Builtin:
    """The process with this version, started when first asked for."""
    process = Builtin(version)
    atexit.register(process.close)
    return process


def differences(
    answer: Mapping[str, Any], tensors: Mapping[str, np.ndarray], layouts: Layouts = None
) -> list[str]:
    """What ``Builtin.read`` gave otherwise than ``tensors`` cut by ``layouts``, one line each; []
    if all is there, bit for bit.

    In a job of several ranks the built-in loads what the graph has a layout for, and global_step,
    which it takes from common.json; other tensors without a layout it leaves alone."""
    if answer["error"]:
        return [answer["error"]]
    strategy, found = strategy_of(layouts), []
    for rank, given in answer["ranks"].items():
        for name, array in parts(tensors, layouts, int(rank)).items():
            if strategy and strategy.stage_of(name) is None and name != "global_step":
                continue
            expected = {
                "sha256": sha256(array),
                "shape": list(array.shape),
                "dtype": str(array.dtype),
            }
            if name in given["not_loaded"]:
                found.append(f"rank {rank}: {name} was not loaded")
            elif given["tensors"].get(name) != expected:
                found.append(
                    f"rank {rank}: {name}: expected {expected}, found {given['tensors'].get(name)}"
                )
    return found


def expect_readable(
    folder: Path, tensors: Mapping[str, np.ndarray], layouts: Layouts, version: str
) -> dict[str, Any]:
    """Asserts that this version's load_checkpoint gives every rank of a job with these layouts its
    part of ``tensors``, bit for bit, that nothing keeps its old value, and that its trainer can
    read common.json. Returns what was read."""
    answer = builtin(version).read(folder, tensors, layouts)
    wrong = differences(answer, tensors, layouts)
    assert not wrong, f"mindformers {version}, {folder}: {len(wrong)} differences: " + "; ".join(
        wrong[:5]
    )
    assert isinstance(answer["common"], dict), (
        f"mindformers {version}, {folder}/common.json: {answer['common']}"
    )
    return answer
