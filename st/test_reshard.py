"""One training, one folder, another parallel layout at every start: auto_trans_ckpt, and nothing said about the old layout.

    steps  1-5    dp2 x tp2 with optimizer shard, 4 ranks      the folder of the uninterrupted run as it was after step 5
    steps  6-12   dp2 with optimizer shard, 2 ranks            SIGKILL after step 12: the newest checkpoint is step 10
    steps 11-17   one process                                  SIGKILL after step 17: the newest checkpoint is step 15
    steps 16-20   dp4 with optimizer shard, 4 ranks            to the end

Once with .safetensors files; with .ckpt files the second line, to the end. The global batch size is 8 in all lives. MindDataset
deals the samples out like cards (sample i goes to data-parallel rank i mod dp): a step sees the same 8 samples in every layout.

Weights and moments must go from life to life bit for bit. The losses need not: sums over ranks are taken in another order.

As a program, this file is run_mindformer.py that also writes down what every rank starts with and sees, see ``train_and_tell``.
"""
from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)          # not st/, whose modules have common names
from mindresume.model.manifest import FOLDER, MANIFEST, Manifest, parse_attempt, read_details  # noqa: E402
from mindresume.model.record_details import TensorRecord  # noqa: E402
from mindresume.model.training_state import is_transient  # noqa: E402
from mindresume.tensor_files import read_header, read_tensor  # noqa: E402

TELL = "RESHARD_TELL"                        # environment: the folder for rank_R.npz and, of ranks other than 0, steps_R.jsonl
TOLERANCE = 1e-5                             # of a loss of about 6 in float32
BATCH, STEPS = 8, 20
LIFE = 600.0                                  # seconds that one life may take on a busy machine
COUNTERS = {"epoch_num", "step_num", "loss_scale", "global_batch_size"}             # of a file, not of the network


def train_and_tell() -> None:
    """Starts run_mindformer.py in this process. When the training begins, the parameters of this rank go to rank_R.npz."""
    import mindspore as ms
    from mindspore.train.callback import Callback
    rank, folder = os.environ.get("RANK_ID", "0"), os.environ[TELL]
    if rank != "0":
        os.environ["CPU_CLUSTER_STEPS"] = os.path.join(folder, "steps_{rank}.jsonl")
    train = ms.Model._train

    class Tell(Callback):
        def on_train_begin(self, run_context):
            os.makedirs(folder, exist_ok=True)
            parameters = run_context.original_args().train_network.parameters_and_names()
            np.savez(os.path.join(folder, f"rank_{rank}.npz"), **{value.name: value.asnumpy() for _, value in parameters})

    def train_with_tell(self, epoch, dataset, callbacks=None, *args, **kwargs):
        given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
        return train(self, epoch, dataset, [*given, Tell()], *args, **kwargs)
    ms.Model._train = train_with_tell
    runpy.run_path(os.path.join(sys.path[0], "run_mindformer.py"), run_name="__main__")


if __name__ == "__main__":
    sys.exit(train_and_tell())

import pytest  # noqa: E402

from st.jobs import ONE_LAYER, Run  # noqa: E402
from st.lives import Life, ended  # noqa: E402

pytestmark = pytest.mark.timeout(1200)


@dataclass(frozen=True)
class Kind:
    """A model and its files. ``columns``: of its data."""
    config: str
    columns: int
    legacy: bool
    plans: tuple[Plan, ...]
    options: str = ""


@dataclass(frozen=True)
class Layout:
    """With optimizer shard if there are several ranks."""
    dp: int
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp

    def options(self, columns: int) -> str:
        """The words of the command line that change the layout of a configuration for one process."""
        if self.ranks == 1:
            return f"--use_parallel False --batch_size {BATCH}"
        strategy = json.dumps([[self.dp, 1]] * columns, separators=(",", ":"))
        return (f"--use_parallel True --batch_size {BATCH // self.dp} --parallel.dataset_strategy {strategy} "
                f"--parallel_config.data_parallel {self.dp} --parallel_config.model_parallel {self.tp} "
                "--parallel.enable_parallel_optimizer True "           # with no threshold, or nothing so small is cut
                "--parallel.parallel_optimizer_config "
                "'{gradient_accumulation_shard: False, parallel_optimizer_threshold: 0}'")


@dataclass(frozen=True)
class Plan:
    """One life: its layout, the step whose checkpoint it must take, and the step after which it is killed."""
    layout: Layout
    takes: int
    killed: int | None


@dataclass
class Told:
    """One life after its end. ``saved``, ``loaded``: whole tensors of the checkpoint before it, and of what it started with.
    ``samples``: {step: ids that all ranks saw}."""
    plan: Plan
    life: Life
    saved: dict[str, np.ndarray]
    loaded: dict[str, np.ndarray]
    samples: dict[int, list[str]] = field(default_factory=dict)


FIRST = Layout(dp=2, tp=2)
PLANS = (Plan(Layout(dp=2), 5, 12), Plan(Layout(dp=1), 10, 17), Plan(Layout(dp=4), 15, None))
SHORT = (Plan(Layout(dp=2), 5, 12), Plan(Layout(dp=1), 10, None))        # st/test_iterations.py has the way up again
KINDS = {"safetensors": Kind("quickstart_qwen3.yaml", 4, False, SHORT, ONE_LAYER),
         "safetensors-up": Kind("quickstart_qwen3.yaml", 4, False, PLANS),
         "ckpt": Kind("quickstart_llama.yaml", 1, True, (Plan(Layout(dp=2), 5, None),))}


# ---- the lives -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module", params=["safetensors", *(pytest.param(name, marks=pytest.mark.soak) for name in list(KINDS)[1:])])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(kind, data, device, graphs, trained) -> Run:
    return whole_of(kind, data, device, graphs, trained)


@pytest.fixture(scope="module")
def chain(kind, whole, data, device, graphs, tmp_path_factory) -> tuple[Run, list[Told]]:
    """Plays the lives. What keeps the next one from starting is asserted here: that a life ends as planned."""
    run, told = made(kind, tmp_path_factory.mktemp(f"chain_{kind}"), data, device, graphs), []
    leave_only(5, whole, run)
    for plan in KINDS[kind].plans:
        saved = merged(pieces_of_files(run, plan.takes))
        start(run, plan.layout, KINDS[kind], **{"CPU_CLUSTER_KILL": f"all@{plan.killed}"} if plan.killed else {})
        status = run.wait(LIFE)
        assert (status == 0) == (plan.killed is None), f"exit status {status}:\n" + run.log()[-4000:]
        records = [tensors for _, _, tensors in pieces(run, plan.takes + 5)]
        loaded = merged((rank, dict(np.load(run.folder / f"life_{len(run.lives)}" / f"rank_{rank}.npz")), tensors)
                        for rank, tensors in enumerate(records))
        told.append(Told(plan, ended(run), saved, loaded, samples(run)))
    return run, told


def whole_of(kind: str, data: Path, device: str, graphs: Path, trained: Callable[..., Run]) -> Run:
    """The uninterrupted run, dp2 x tp2. Keeps all four checkpoints."""
    run = made(kind, Path(), data, device, graphs).like(Path(), workers=FIRST.ranks)
    return trained(f"whole_{kind}", run, lambda run: start(
        run, FIRST, KINDS[kind], "--callbacks.1.keep_checkpoint_max 4").ended(LIFE))


def made(kind: str, folder: Path, data: Path, device: str, graphs: Path) -> Run:
    return Run(folder, KINDS[kind].config, data, program=Path(__file__), device=device, legacy=KINDS[kind].legacy,
               options=KINDS[kind].options, graphs=graphs)


def start(run: Run, layout: Layout, kind: Kind, extra: str = "", **environment: str) -> Run:
    run.workers = layout.ranks
    return run.start(f"--epochs 2 --auto_trans_ckpt True {layout.options(kind.columns)} {extra}", MSRUN_GRACE="1",
                     **{TELL: str(run.folder / f"life_{len(run.lives) + 1}")}, **environment)


def leave_only(step: int, whole: Run, run: Run) -> None:
    """Copies the checkpoints of ``whole`` up to ``step`` into the folder of ``run``."""
    for folder in (whole.checkpoints / FOLDER).iterdir():
        attempt = parse_attempt(folder.name)
        if attempt and attempt[0] <= step:
            with open(folder / MANIFEST, "rb") as file:
                files = [record.path for records in Manifest.read(file).files for record in records]
            for path in [*files, *(f"{FOLDER}/{folder.name}/{path.name}" for path in folder.iterdir())]:
                (run.checkpoints / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(whole.checkpoints / path, run.checkpoints / path)


# ---- whole tensors -------------------------------------------------------------------------------------------------

def pieces(run: Run, step: int) -> list[tuple[int, Path, Mapping[str, TensorRecord]]]:
    """(rank, file, record of every tensor) of the newest committed checkpoint of ``step``."""
    folder = max(path.parent for path in (run.checkpoints / FOLDER).glob(f"step-{step:010d}-run-*/{MANIFEST}"))
    found = []
    for path in sorted(folder.glob("rank_*.json")):
        with open(path, "rb") as file:
            record, details = read_details(file)
        found.append((record.rank, run.checkpoints / record.files[0].path, details.tensors))
    return found


def pieces_of_files(run: Run, step: int) -> Iterable[tuple[int, dict[str, np.ndarray], Mapping[str, TensorRecord]]]:
    for rank, path, tensors in pieces(run, step):
        with open(path, "rb") as file:
            header = read_header(file, str(path))
            yield rank, {name: read_tensor(file, header.tensors[name]) for name in tensors}, tensors


def merged(ranks: Iterable[tuple[int, Mapping[str, np.ndarray], Mapping[str, TensorRecord]]]) -> dict[str, np.ndarray]:
    """{name: whole tensor} of what the ranks hold. What is outside the strategy is the same on all; a number gets one dimension.
    AssertionError if replicas are not equal bit for bit, or a part of a tensor is held by no rank."""
    whole: dict[str, np.ndarray] = {}
    known: dict[str, np.ndarray] = {}
    for rank, arrays, records in ranks:
        for name, array in arrays.items():
            record, array = records.get(name), np.atleast_1d(array)
            cut = record is not None and record.layout is not None
            shape = record.global_shape if cut else array.shape
            part = record.layout.slices(rank, shape) if cut else ...
            whole.setdefault(name, np.zeros(shape, array.dtype))
            known.setdefault(name, np.zeros(shape, bool))
            before = known[name][part].copy()
            assert whole[name][part][before].tobytes() == array[before].tobytes(), f"{name} of rank {rank} is not its replicas"
            whole[name][part], known[name][part] = array, True
    assert [name for name in known if not known[name].all()] == []
    return whole


def samples(run: Run) -> dict[int, list[str]]:
    """{step: sorted ids of the samples that the ranks of the last life saw}. Steps that all ranks recorded."""
    others = [path.read_text(encoding="utf-8").splitlines() for path in
              sorted((run.folder / f"life_{len(run.lives)}").glob("steps_*.jsonl"))]
    rows = [run.steps(-1), *([json.loads(line) for line in lines if line.endswith("}")] for lines in others)]
    assert len(rows) == run.workers
    ranks = [{row["step"]: row["samples"] for row in rank} for rank in rows]
    return {step: sorted({sample for rank in ranks for sample in rank[step]})
            for step in ranks[0] if all(step in rank for rank in ranks)}


# ---- what must hold ------------------------------------------------------------------------------------------------

def test_every_life_goes_on_from_the_newest_checkpoint_of_the_one_before(chain):
    for told in chain[1]:
        plan = told.plan
        assert told.life.chosen() == [plan.takes] * plan.layout.ranks
        last = STEPS if plan.killed is None else plan.killed                 # rank 0 may die just before it writes it down
        assert told.life.trained() in [list(range(plan.takes + 1, end + 1)) for end in (last, last - (plan.killed is not None))]


def test_what_a_life_starts_with_is_bit_for_bit_what_was_saved(chain, kind):
    """Weights, both moments, the step of the optimizer, the loss scale: whole tensors, however they were and are cut."""
    for told in chain[1]:
        saved, loaded = told.saved, told.loaded
        assert set(saved) - set(loaded) == COUNTERS
        assert [name for name in set(loaded) - set(saved) if not is_transient(name)] == []
        wrong = [name for name in sorted(set(saved) & set(loaded)) if
                 (saved[name].dtype, saved[name].shape, saved[name].tobytes()) !=
                 (loaded[name].dtype, loaded[name].shape, loaded[name].tobytes())]
        assert wrong == [], f"{told.plan}: {len(wrong)} of {len(loaded)} tensors"
        assert int(loaded["global_step"][0]) == told.plan.takes
        moments = [name for name in loaded if name.startswith("adam_")]
        assert len(moments) >= (20 if KINDS[kind].options else 36) and all(loaded[name].any() for name in moments)


def test_the_losses_are_those_of_the_run_that_never_stopped(chain, whole, kind, capsys):
    reference = {row["step"]: row for row in whole.steps()}
    assert sorted(reference) == list(range(1, STEPS + 1)) and reference[1]["loss"] - reference[STEPS]["loss"] > 0.5
    found = {told.plan.layout: max(abs(row["loss"] - reference[row["step"]]["loss"]) for row in told.life.steps)
             for told in chain[1]}
    with capsys.disabled():
        print(f"\n{kind}: largest difference of a loss: " +
              ", ".join(f"dp{layout.dp} {difference:.2e}" for layout, difference in found.items()))
    assert max(found.values()) <= TOLERANCE
    assert all(row["lr"] == reference[row["step"]]["lr"] for told in chain[1] for row in told.life.steps)


def test_every_step_sees_the_samples_that_it_sees_in_every_layout(chain, whole):
    reference = samples(whole)
    assert {len(ids) for ids in reference.values()} == {BATCH}
    for told in chain[1]:
        assert {step: ids for step, ids in told.samples.items() if reference[step] != ids} == {}
        assert set(range(told.plan.takes + 1, (told.plan.killed or STEPS + 1))) <= set(told.samples)


def test_three_checkpoints_stay_and_are_whole(chain, kind):
    """keep_checkpoint_max is 3, over all lives: what ranks wrote that later lives do not have is removed as well."""
    run = chain[0]
    checked = run.mindresume("verify", "--json", str(run.checkpoints))
    assert checked.returncode == 0, checked.stdout
    assert [(row["step"], row["state"]) for row in json.loads(checked.stdout)["checkpoints"]] == [
        (20, "verified"), (15, "verified"), (10, "verified")]
    files = sorted(path.relative_to(run.checkpoints).parts[0] for path in run.checkpoints.glob("rank_*/*-*"))
    saved_by = {step: max((told.plan for told in chain[1] if told.plan.takes < step), key=lambda plan: plan.takes).layout.ranks
                for step in (10, 15, 20)}
    assert files == sorted(f"rank_{rank}" for ranks in saved_by.values() for rank in range(ranks))
