"""The engine of MindSpore itself: the same bytes as the direct engine and as numpy. All transforms
run in two processes, as ``import mindspore`` takes longer than most of them."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from rank_folders import STORAGE
from reshard.plans import COUNTERS, MODEL, Plan, Spec, complete, foreign, random_tensors

from mindresume.errors import EngineError
from mindresume.events import Event
from mindresume.formats import CheckpointDir
from mindresume.formats.consolidated import read_consolidated
from mindresume.formats.strategy import Strategy
from mindresume.model.layout import TensorLayout
from mindresume.reshard import mindspore_engine
from mindresume.reshard.checkpoint_view import CheckpointView, view_of_consolidated
from mindresume.reshard.conversion_plan import fitted, rank_files
from mindresume.reshard.direct_engine import transform
from mindresume.reshard.mindspore_engine import prepare, rewrite, run
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.step_view import view_of_rank_folders
from mindresume.tensor_files import read_header, read_tensor
from st.training_run import ROOT

PAIRS = """tp2>tp4 tp4>tp2 tp4>tp1 dp8>dp4 dp8opt8>dp4opt4 dp8opt-1>dp4opt-1 dp4opt4>dp8opt2 dp4opt4>dp4 pp2>pp1 pp1>pp2
    tp2pp2>tp2 tp2pp2>tp4 tp2>tp2pp2 tp2pp4>tp2pp2 dp2tp2pp2>tp4pp2 dp2tp2pp2opt2>dp4opt4 dp2tp2pp2opt2>tp8 dp1>dp2tp4
    tp8>dp2tp2pp2opt2 dp2tp4opt2>dp4tp2opt2 dp2tp2opt-1>tp4 dp2tp2axes10>tp2 tp2>dp2tp2axes01""".split()  # noqa: E501, SIM905
UNCUT = [
    f"{source}>" for source in ("dp2tp2pp2opt2", "dp2tp2opt-1", "dp2tp2axes10", "pp4", "dp2tp4opt2")
]
# of several files
COMPLETE = [f">{target}" for target in ("tp2", "dp2tp2pp2opt2", "dp2tp2axes10", "pp4")]
REAL = [
    f"{name}:"
    for name in (
        "mf180_10_ckpt_tp2",
        "mf190_10_ckpt_dp2tp2opt",
        "mf190_10_safetensors_dp2tp2",
        "mf190_10_safetensors_dp2tp2_nodup",
    )
]
# MindSpore has no empty tensors, keeps one NaN of bfloat16 of a ckpt, and does not merge accu_grads
# into parts.
FULL = {name: spec for name, spec in MODEL.items() if 0 not in spec.shape}
PLAIN = {name: spec for name, spec in FULL.items() if not name.startswith("accu_grads")}
CASES = [f"{pair} {fmt}" for pair in (*PAIRS, *UNCUT) for fmt in ("safetensors", "ckpt")]
CASES += [
    f"{pair} safetensors {kind}"
    for pair in UNCUT
    for kind in ("unified", "dedup")
    if (pair, kind) != (UNCUT[2], "dedup")
]
CASES += [f"{pair} safetensors" for pair in COMPLETE] + REAL

SWAPPED = TensorLayout((2, 2, 2), (0, 1), 2)
WRONG = ["layout safetensors", "layout ckpt", "nested dedup", "nan"]


def quiet(tensors):
    """Every NaN of bfloat16 the one that MindSpore keeps."""
    found = dict(tensors)
    for name, array in tensors.items():
        if array.dtype.name == "bfloat16":
            bits = array.view(np.uint16)
            found[name] = np.where(bits & 0x7FFF > 0x7F80, np.uint16(0x7FC0), bits).view(
                array.dtype
            )
    return found


TENSORS = quiet(random_tensors(FULL))


@dataclass
class Case:
    weights: CheckpointView
    target: Strategy | None
    plan: Plan | None = None
    tensors: dict | None = None
    task: mindspore_engine.Task | None = None


def weights_of(
    root: Path, plan: Plan, tensors, fmt: str = "safetensors", dedup: bool = False
) -> CheckpointView:
    candidate = replace(foreign(root, plan, tensors, fmt, dedup), world_size=plan.world_size)
    return view_of_rank_folders(CheckpointDir(STORAGE, str(root)), candidate, plan.strategy())


def case_of(root: Path, text: str) -> Case:
    if text in REAL:
        return Case(
            open_checkpoint(
                STORAGE, str(ROOT / "st" / "fixtures" / text[:-1] / "output" / "checkpoint")
            ).weights,
            None,
        )
    pair, fmt, kind = (*text.split(), "")[:3]
    model = PLAIN if kind else FULL
    tensors = {name: TENSORS[name] for name in model}
    source, target = (Plan.parse(side, model) if side else None for side in pair.split(">"))
    if source is None:
        weights = view_of_consolidated(
            STORAGE, read_consolidated(STORAGE, str(complete(root, tensors)))
        )
    else:
        weights = weights_of(root, source, tensors, fmt, kind == "dedup")
    return Case(weights, target.strategy() if target else None, target, tensors)


def wrong_case(root: Path, text: str) -> Case:
    """Returns a refused case, which MindSpore would convert wrongly without an error."""
    if text.startswith("layout"):
        model, source = {"w": Spec((8, 4), 0, 0)}, Plan.parse("tp2", {"w": Spec((8, 4), 0, 0)})
        return Case(
            weights_of(root, source, random_tensors(model), text.split()[1]),
            Strategy(({"w": SWAPPED},)),
        )
    if text == "nan":
        model = {"w": Spec((8, 4), 0, 0, "bfloat16")}
        array = np.full((8, 4), 0xFFC1, np.uint16).view(np.dtype(random_tensors(model)["w"].dtype))
        return Case(
            weights_of(root, Plan.parse("tp2", model), {"w": array}, "ckpt"),
            Plan.parse("tp4", model).strategy(),
        )
    model = {f"layers.0.{i}": Spec((8, 8), 1, 0) for i in range(8)}
    return Case(
        weights_of(root, Plan.parse("dp2tp2axes10", model), random_tensors(model), dedup=True), None
    )


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Case]:
    """Returns all cases, prepared and transformed by MindSpore."""
    root = tmp_path_factory.mktemp("engines")
    found: dict[str, Case] = {}
    with pytest.MonkeyPatch.context() as patch:
        for number, text in enumerate([*CASES, *WRONG]):
            if text == WRONG[0]:
                for check in ("_is_misread", "_is_nested", "_check_nan"):
                    patch.setattr(mindspore_engine, check, lambda *args: False)
            case = (wrong_case if text in WRONG else case_of)(root / str(number), text)
            (root / f"{number}-work").mkdir()
            found[text] = replace(
                case,
                task=prepare(case.weights, case.target, str(root / f"{number}-work"), workers=2),
            )
    jobs = [job for case in found.values() for job in case.task.jobs]
    run([jobs[::2], jobs[1::2]], str(root), 300.0)
    return found


def final(
    weights: CheckpointView, target: Strategy | None, folder: Path
) -> list[dict[str, np.ndarray]]:
    """Returns the result of the direct writer: {tensor: array} of each rank."""
    folder.mkdir()
    paths = [
        str(folder / f"{rank}.safetensors") for rank in range(target.world_size if target else 1)
    ]
    files = rank_files(weights, fitted(target, weights), paths, "safetensors")
    transform(weights, STORAGE, files)
    found = []
    for file in files:
        with open(file.path, "rb") as opened:
            header = read_header(opened, file.path)
            found.append(
                {name: read_tensor(opened, entry) for name, entry in header.tensors.items()}
            )
    return found


def bits(tensors):
    return {
        name: (array.dtype.name, array.shape, array.tobytes()) for name, array in tensors.items()
    }


def written(case: Case, folder: Path) -> list[list[dict[str, np.ndarray]]]:
    """Returns the results of the direct engine and of MindSpore's."""
    return [
        final(weights, case.target, folder / name)
        for name, weights in (
            ("direct", case.weights),
            ("mindspore", mindspore_engine.collect(case.task)),
        )
    ]


@pytest.mark.parametrize("text", CASES)
def test_both_engines_write_the_same_tensors(cases, tmp_path, text):
    case = cases[text]
    direct, rewritten = written(case, tmp_path)
    assert len(direct) == (case.target.world_size if case.target else 1)
    for rank, (one, other) in enumerate(zip(direct, rewritten, strict=True)):
        assert bits(one) == bits(other)
        if case.tensors is not None:
            expected = case.plan.shard(case.tensors, rank) if case.plan else case.tensors
            assert bits(one) == bits({**expected, **COUNTERS})


@pytest.mark.parametrize("text", WRONG)
def test_refused_layouts_would_be_silently_wrong_in_mindspore(cases, tmp_path, text):
    """If this fails, MindSpore has been fixed, and the refusal can be removed."""
    direct, rewritten = written(cases[text], tmp_path)
    assert [bits(rank) for rank in direct] != [bits(rank) for rank in rewritten]


def test_mindspore_runs_in_its_own_processes(tmp_path):
    """The ranks of a ckpt spread over two."""
    source, target = Plan.parse("dp2tp2opt2", PLAIN), Plan.parse("tp2pp2", PLAIN)
    said: list[Event] = []
    (tmp_path / "work").mkdir()
    found = rewrite(
        weights_of(tmp_path / "src", source, quiet(random_tensors(PLAIN)), "ckpt"),
        target.strategy(),
        str(tmp_path / "work"),
        workers=2,
        timeout=120.0,
        emit=said.append,
    )
    assert "4 files of ranks, processes: 2" in said[0].text
    assert [bits(rank) for rank in final(found, target.strategy(), tmp_path / "out")] == [
        bits({**target.shard(quiet(random_tensors(PLAIN)), rank), **COUNTERS}) for rank in range(4)
    ]


def test_the_error_contains_the_message_of_mindspore(tmp_path):
    """An axis of 3 is free before one of 2, and MindSpore begins with the minor one: 2 pieces it
    cannot make of 3."""
    source = complete(tmp_path / "src", {"w": np.zeros((12, 4), np.float32)})
    weights = view_of_consolidated(STORAGE, read_consolidated(STORAGE, str(source)))
    (tmp_path / "work").mkdir()
    with pytest.raises(
        EngineError, match="ended with status 1(.|\n)*ValueError: dev_matrix value 3"
    ):
        rewrite(
            weights,
            Strategy(({"w": TensorLayout((2, 3, 2), (0, -1), 2)},)),
            str(tmp_path / "work"),
            timeout=120.0,
        )
