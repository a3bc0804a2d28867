"""What the system tests of Checkpoint 2.0 share: whole tensors of iteration folders, layouts out of records, exact kills.

As a program, this file is run_mindformer.py that writes down what every rank starts with (st/test_reshard.py) and can be killed
at an exact step with an exact checkpoint behind it:

    ITERATIONS_KILL=12@10    all ranks end by SIGKILL after step 12, once every rank has recorded what it saved of step 10

A background save would else be complete or not as the load of the machine has it.
"""
from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)          # not st/, whose modules have common names

KILL = "ITERATIONS_KILL"
PATIENCE = 300.0                     # seconds that ranks wait for each other before they die


def all_die(step: int, saved: int, folder: str) -> Any:
    """A callback. ``folder``: for marks of ranks that are ready."""
    from mindspore.train.callback import Callback

    from st.cpu_cluster.recorder import global_step
    ranks = int(os.environ.get("MS_WORKER_NUM", "1"))
    attempt, mark = f".mindresume/step-{saved:010d}-run-*", os.path.join(folder, "ready_" + os.environ.get("RANK_ID", "0"))
    records = [f"output/checkpoint/{base}{attempt}/rank_*.json" for base in ("iteration_*/", attempt + "/", "")]

    class AllDie(Callback):
        def step_begin(self, run_context):           # of the step behind it, so that everybody has written down this one
            if global_step(run_context.original_args()) < step:
                return
            os.makedirs(folder, exist_ok=True)
            Path(mark).touch()
            deadline = time.monotonic() + PATIENCE
            while len(glob.glob(os.path.join(folder, "ready_*"))) < ranks or all(len(glob.glob(p)) < ranks for p in records):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not all ranks have saved step {saved}: {[glob.glob(p) for p in records]}")
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
    return AllDie()


def main() -> None:
    import mindspore as ms

    from st.test_reshard import TELL, train_and_tell
    asked, train = os.environ.get(KILL), ms.Model._train

    def train_until(self, epoch, dataset, callbacks=None, *args, **kwargs):
        given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
        step, saved = map(int, asked.split("@"))
        return train(self, epoch, dataset, [*given, all_die(step, saved, os.environ[TELL])], *args, **kwargs)
    if asked:
        ms.Model._train = train_until
    train_and_tell()


if __name__ == "__main__":
    sys.exit(main())

from mindresume.formats import Candidate  # noqa: E402
from mindresume.formats.iteration_naming import TRACKER, iteration_name, parse_iteration  # noqa: E402
from mindresume.formats.scan import scan  # noqa: E402
from mindresume.model.manifest import FOLDER, read_details, record_name  # noqa: E402
from mindresume.model.record_details import TensorRecord  # noqa: E402
from mindresume.storage.posix import PosixStorage  # noqa: E402
from mindresume.tensor_files import read_header, read_tensor  # noqa: E402
from st.jobs import Run  # noqa: E402
from st.test_reshard import TELL, merged  # noqa: E402

PROGRAM = Path(__file__)
NEW = "--use_legacy_format False"
# Parameters of the train step: ours are saved beside the optimizer, mindformers saves none in Checkpoint 2.0.
OF_STEP = frozenset({"scale_sense", "lm_loss", "aux_loss", "mtp_loss", "indexer_loss"})


def told(run: Run) -> Path:
    """Where the next life of ``run`` writes down what its ranks start with."""
    return run.folder / f"life_{len(run.lives) + 1}"


def begin(run: Run, *extra: str, kill: str | None = None, **environment: str) -> Run:
    """Starts a life of a ``run`` of this program. ``kill``: as above."""
    named = {TELL: str(told(run)), **({KILL: kill} if kill else {})}
    return run.start(" ".join(extra), MSRUN_GRACE="1", **named, **environment)


def configured(run: Run, resume_training: bool, **section: Any) -> Run:
    """``run`` with a configuration of its own: the newer dialect, a ``checkpoint:`` section; of the older one resume_training
    alone."""
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in section.items()}
    return run.configure({"load_checkpoint": "", "resume_training": resume_training, "checkpoint": plain})


# ---- folders -------------------------------------------------------------------------------------------------------------

def steps_there(root: Path) -> list[int]:
    """Steps of the iteration folders, smallest first."""
    return sorted(step for path in root.glob("iteration_*") if (step := parse_iteration(path.name)) is not None)


def tracker(root: Path) -> int:
    return int((root / TRACKER).read_text(encoding="utf-8"))


def copy_root(root: Path, to: Path, *steps: int) -> Path:
    """Only these iterations, the newest of them in the tracker, and nothing of the runs that were there."""
    for step in steps:
        shutil.copytree(root / iteration_name(step), to / iteration_name(step))
    (to / TRACKER).write_text(str(max(steps)), encoding="utf-8")
    return to


def files_of(root: Path, step: int) -> list[str]:
    """Names in an iteration folder, without ours."""
    return sorted(path.name for path in (root / iteration_name(step)).iterdir() if path.name != FOLDER)


def common_json(root: Path, step: int) -> dict[str, Any]:
    return json.loads((root / iteration_name(step) / "common.json").read_text(encoding="utf-8"))


def flip_byte(path: Path) -> None:
    """One bit of the last byte, which belongs to a tensor; mindformers leaves its files read-only."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


# ---- whole tensors -------------------------------------------------------------------------------------------------------

def candidate(root: Path, step: int, legacy: bool = False) -> Candidate:
    """The one of ours. AssertionError if it cannot be used."""
    found = [c for c in scan(PosixStorage(), str(root)).candidates
             if c.step == step and c.attempt and legacy == (not c.iteration_dir)]
    assert len(found) == 1 and found[0].problem is None, found
    return found[0]


def tensors_of_ranks(root: Path, step: int, legacy: bool = False) -> dict[int, Mapping[str, TensorRecord]]:
    """{rank: what it recorded of the tensors in its files}"""
    one, found = candidate(root, step, legacy), {}
    for rank in one.files:
        with open(os.path.join(one.attempt, record_name(rank)), "rb") as file:
            found[rank] = read_details(file)[1].tensors
    return found


def layout_table(root: Path, step: int, legacy: bool = False) -> dict[str, TensorRecord]:
    """{tensor: a record of it by some rank}: with redundancy removal a rank records its share alone."""
    return {name: row for rows in tensors_of_ranks(root, step, legacy).values() for name, row in rows.items()}


def pieces_of(root: Path, step: int, legacy: bool = False) -> list[tuple[str, str]]:
    """(tensor, which part of it) of everything with a layout in the files of all ranks."""
    return [(name, str(row.layout.slices(rank, row.global_shape)))
            for rank, rows in tensors_of_ranks(root, step, legacy).items()
            for name, row in rows.items() if row.layout is not None]


def saved_tensors(root: Path, step: int, legacy: bool = False) -> dict[str, np.ndarray]:
    """Whole tensors of all ranks' files. AssertionError if replicas differ or a part is nowhere."""
    table = layout_table(root, step, legacy)

    def of_rank(files: Any) -> dict[str, np.ndarray]:
        arrays = {}
        for row in files:
            with open(root / row.path, "rb") as file:
                header = read_header(file, row.path)
                arrays.update({name: read_tensor(file, entry) for name, entry in header.tensors.items() if name in table})
        return arrays
    return merged((rank, of_rank(files), table) for rank, files in candidate(root, step, legacy).files.items())


def of_network(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights and state of the optimizer: what mindformers saves and loads."""
    return {name: array for name, array in tensors.items() if name not in OF_STEP}


def loaded_tensors(run: Run, table: Mapping[str, TensorRecord]) -> dict[str, np.ndarray]:
    """Whole tensors of what the ranks of the last life started with. ``table``: of this layout, as a later save recorded it."""
    folder = run.folder / f"life_{len(run.lives)}"
    return merged((rank, dict(np.load(folder / f"rank_{rank}.npz")), table) for rank in range(run.workers))


def not_equal(saved: Mapping[str, np.ndarray], loaded: Mapping[str, np.ndarray]) -> list[str]:
    """Names that are in only one of them, or not the same bit for bit."""
    def content(array: np.ndarray | None) -> Any:
        return None if array is None else (str(array.dtype), array.shape, array.tobytes())
    return [name for name in sorted({*saved, *loaded}) if content(saved.get(name)) != content(loaded.get(name))]
