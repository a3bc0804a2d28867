"""The reference engine around MindSpore: what it refuses, and what it makes of processes that
misbehave. The processes here are real, MindSpore is not in them: they copy what was made before
into place, or do worse. ``st/test_engines.py`` runs MindSpore."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from rank_folders import STORAGE, dir_at
from reshard.plans import COUNTERS, Plan, Spec, complete, foreign, part_of, put, random_tensors

from mindresume import runtime
from mindresume.errors import EngineError, StrategyError
from mindresume.formats.consolidated import read_consolidated
from mindresume.formats.strategy import Strategy
from mindresume.mindformers import transform_worker
from mindresume.model.layout import TensorLayout, held, whole
from mindresume.reshard.checkpoint_view import view_of_consolidated
from mindresume.reshard.mindspore_engine import prepare, rewrite, run
from mindresume.reshard.step_view import view_of_rank_folders
from mindresume.tensor_files import read_header, read_tensor

SMALL = {
    "embedding.weight": Spec((8, 4), 0, "first"),
    "layers.0.proj.weight": Spec((4, 8), 1, 0, "float16"),
    "layers.1.norm.weight": Spec((8,), None, 1),
}
TENSORS = random_tensors(SMALL)
HERE = Path(__file__).resolve().parents[2]


def weights_of(root, plan, tensors=TENSORS, fmt="safetensors", dedup=False, lose=(), strategy=None):
    candidate = foreign(root, plan, tensors, fmt, dedup)
    for rank in lose:
        os.remove(root / candidate.files[rank][0].path)
    return view_of_rank_folders(
        dir_at(root), replace(candidate, world_size=plan.world_size), strategy or plan.strategy()
    )


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def small(tmp_path):
    """Returns weights of tp2, the target dp2pp2, and the output expected from MindSpore, below
    ``ready``."""
    plan, target = Plan.parse("tp2", SMALL), Plan.parse("dp2pp2", SMALL)
    for rank in range(target.world_size):
        put(
            tmp_path / "ready" / f"rank_{rank}" / f"weights{rank}.safetensors",
            {**target.shard(TENSORS, rank), **COUNTERS},
        )
    return SimpleNamespace(
        weights=weights_of(tmp_path / "src", plan), target=target, ready=tmp_path / "ready"
    )


def fake(folder: Path, ready: Path, more: str = "") -> list[str]:
    """Returns a worker that copies the ready output for the ranks of its jobs, then runs
    ``more``."""
    script = folder / "fake.py"
    script.write_text(f"""import json, os, shutil, signal, subprocess, sys
for path in sys.argv[1:]:
    job = json.load(open(path))
    for rank in job["ranks"]:
        shutil.copytree({str(ready)!r} + f"/rank_{{rank}}", job["out"] + f"/rank_{{rank}}")
{more}
""")
    return [sys.executable, str(script)]


def array_of(weights, name, rank):
    path = weights.places[name][0] if weights.is_consolidated else weights.files[rank][0]
    with open(path, "rb") as file:
        return read_tensor(file, read_header(file, path).tensors[name])


# ---- preparation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fmt, dedup, model, kind",
    [
        ("safetensors", False, SMALL, "unified"),
        ("safetensors", True, SMALL, "unified"),
        ("ckpt", False, SMALL, "ranks"),
        (
            "safetensors",
            False,
            {**SMALL, "accu_grads.embedding.weight": Spec((8, 4), 0, "first")},
            "folder",
        ),
    ],
)
def test_a_conversion_to_uncut_tensors_is_one_job(tmp_path, work, fmt, dedup, model, kind):
    weights = weights_of(
        tmp_path / "src", Plan.parse("dp2tp2", model), random_tensors(model), fmt, dedup
    )
    task = prepare(weights, None, str(work), workers=2)
    (job,) = [json.loads(Path(path).read_text()) for path in task.jobs]
    assert (job["kind"], job["redundant"], job["target_strategy"]) == (kind, not dedup, None)


def test_consolidated_weights_of_several_files_become_one(tmp_path, work):
    root = complete(tmp_path / "src", TENSORS, part_bytes=100)
    weights = view_of_consolidated(STORAGE, read_consolidated(STORAGE, str(root)))
    assert len({copies[0] for copies in weights.places.values()}) > 2
    task = prepare(weights, Plan.parse("tp2", SMALL).strategy(), str(work))
    path = work / "in" / "rank_0" / "weights.safetensors"
    with open(path, "rb") as file:
        header = read_header(file, str(path))
        for name, array in {**TENSORS, **COUNTERS}.items():
            assert read_tensor(file, header.tensors[name]).tobytes() == array.tobytes()
    assert json.loads(Path(task.jobs[0]).read_text())["source_strategy"] is None


@pytest.mark.parametrize("listed, expected", [(["w", "stray"], "model"), (["w"], "merged")])
def test_a_complete_file_is_used_directly_unless_it_has_extra_tensors(
    tmp_path, work, listed, expected
):
    """MindSpore would also copy tensors that the index does not name."""
    put(tmp_path / "src" / "model.safetensors", {"w": np.zeros((8, 4)), "stray": np.zeros(())})
    (tmp_path / "src" / "param_name_map.json").write_text(
        json.dumps(dict.fromkeys(listed, "model.safetensors"))
    )
    weights = view_of_consolidated(STORAGE, read_consolidated(STORAGE, str(tmp_path / "src")))
    layouts = {"w": TensorLayout((2,), (0, -1)), "stray": TensorLayout((2,), ())}
    prepare(weights, Strategy(({name: layouts[name] for name in listed},)), str(work))
    path = os.path.realpath(work / "in" / "rank_0" / "weights.safetensors")
    with open(path, "rb") as file:
        assert (
            list(read_header(file, path).tensors) == sorted(listed) and Path(path).stem == expected
        )


def test_uncut_to_uncut_needs_no_work(tmp_path, work):
    weights = view_of_consolidated(
        STORAGE, read_consolidated(STORAGE, str(complete(tmp_path / "src", TENSORS)))
    )
    assert rewrite(weights, None, str(work), command=["false"]) is weights
    assert not os.listdir(work)


# ---- refusals ------------------------------------------------------------------------------------


def refused(weights, target, work, *parts):
    with pytest.raises(EngineError) as error:
        rewrite(weights, target, str(work), command=["false"])
    for part in ("--engine direct", *parts):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "source, target, part",
    [
        ("tp2", "pp4", "4 stages of one rank"),
        ("dp2tp3", "tp4", "one number has to divide the other"),
    ],
)
def test_plans_that_mindspore_cannot(tmp_path, work, source, target, part):
    model = {f"layers.{i}.weight": Spec((12, 4), 0, i) for i in range(4)}
    weights = weights_of(tmp_path / "src", Plan.parse(source, model), random_tensors(model))
    refused(weights, Plan.parse(target, model).strategy(), work, part)


@pytest.mark.parametrize(
    "name, spec, part",
    [
        ("layers.0.up-proj.weight", Spec((8, 4), 0, 0), "'-'"),
        ("layers.0.none", Spec((8, 0), 0, 0), "empty"),
        ("layers.0.scale", Spec((8, 4), 0, 0, "float8_e5m2"), "float8_e5m2"),
    ],
)
def test_parameters_that_mindspore_cannot(tmp_path, work, name, spec, part):
    model = {**SMALL, name: spec}
    weights = weights_of(tmp_path / "src", Plan.parse("tp2", model), random_tensors(model))
    refused(weights, Plan.parse("tp4", model).strategy(), work, name, part)


@pytest.mark.parametrize(
    "layout, shape, part",
    [
        (TensorLayout((2, 2), ((1, 0),)), (8,), "vector"),
        (TensorLayout((2, 2, 2), (0, 1), 2), (8, 4), "other ranks"),
        (TensorLayout((2, 2, 2), (0, 1), -1), (8, 4), "other ranks"),
    ],
)
def test_layouts_that_mindspore_cannot_convert_are_refused(tmp_path, work, layout, shape, part):
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    plan = Plan.parse("tp2", {"w": Spec(shape, 0, 0)})
    weights = weights_of(tmp_path / "src", plan, {"w": array})
    refused(weights, Strategy(({"w": layout},)), work, "w", part)


def test_redundancy_removed(tmp_path, work):
    weights = weights_of(tmp_path / "a", Plan.parse("dp2tp2", SMALL), dedup=True)
    refused(weights, Plan.parse("tp4", SMALL).strategy(), work, "remove_redundancy")
    nested = weights_of(tmp_path / "b", Plan.parse("dp2tp2axes10", SMALL), dedup=True)
    refused(nested, None, work, "parts of other ranks for copies")


def test_a_parameter_of_several_stages(tmp_path, work):
    """MindSpore would change the number of stages for one of them only."""
    alone, one = Plan.parse("tp2pp2", SMALL), Plan.parse("tp4", SMALL)
    first, last = alone.strategy().stages
    two = Strategy((first, {**last, "embedding.weight": first["embedding.weight"]}))
    refused(weights_of(tmp_path / "a", one), two, work, "embedding.weight", "several stages")
    candidate = foreign(tmp_path / "b", alone, TENSORS)
    for rank in (2, 3):
        put(
            tmp_path / "b" / candidate.files[rank][0].path,
            {
                **alone.shard(TENSORS, rank),
                **COUNTERS,
                "embedding.weight": part_of(
                    TENSORS["embedding.weight"], two.stages[1]["embedding.weight"], rank % 2
                ),
            },
        )
    weights = view_of_rank_folders(dir_at(tmp_path / "b"), candidate, two)
    refused(weights, one.strategy(), work, "embedding.weight", "several stages")
    for name, fine in (("same", weights), ("ckpt", weights_of(tmp_path / "c", one, fmt="ckpt"))):
        (tmp_path / name).mkdir()
        assert prepare(fine, two, str(tmp_path / name)) is not None


def test_a_file_is_missing_though_its_copy_is_there(tmp_path, work):
    weights = weights_of(tmp_path / "src", Plan.parse("dp2tp2", SMALL), lose=[2])
    assert weights.locate(
        "embedding.weight", weights.tensors["embedding.weight"].cuts(whole((8, 4)))[0]
    )
    refused(weights, Plan.parse("tp4", SMALL).strategy(), work, "rank 2 has no file")


@pytest.mark.parametrize(
    "other, says",
    [
        (
            {"embedding.weight": np.zeros((8, 4), np.float32)},
            ("embedding.weight", "(4, 4)", "(8, 4)"),
        ),
        ({"stray": np.zeros(3, np.float32)}, ("stray",)),
    ],
)
def test_a_file_with_other_tensors_is_an_error(tmp_path, work, other, says):
    plan = Plan.parse("dp2tp2", SMALL)
    weights = weights_of(tmp_path / "src", plan)
    put(Path(weights.files[3][0]), {**plan.shard(TENSORS, 3), **COUNTERS, **other})
    weights.headers.clear()
    refused(weights, Plan.parse("tp4", SMALL).strategy(), work, "rank 3", *says)


def test_a_parameter_without_layout(tmp_path, work):
    weights = weights_of(tmp_path / "src", Plan.parse("tp2", SMALL))
    weights.tensors["stray"] = replace(
        weights.tensors["embedding.weight"], name="stray", layout=None
    )
    target = Strategy(
        ({**Plan.parse("tp2", SMALL).strategy().stages[0], "stray": TensorLayout((1, 2), (0, -1))},)
    )
    refused(weights, target, work, "stray", "no layout")


def test_a_parameter_that_the_target_lacks(tmp_path, work, small):
    stages = [
        {name: layout for name, layout in stage.items() if name != "embedding.weight"}
        for stage in Plan.parse("tp2", SMALL).strategy().stages
    ]
    with pytest.raises(StrategyError, match="embedding.weight"):
        rewrite(small.weights, Strategy(tuple(stages)), str(work), command=["false"])


@pytest.mark.parametrize(
    "fmt, bits, fine",
    [
        ("ckpt", 0xFFC0, False),
        ("ckpt", 0x7FC1, False),
        ("ckpt", 0x7FC0, True),
        ("ckpt", 0xFF80, True),
        ("safetensors", 0xFFC0, True),
    ],
)
def test_nan_of_bfloat16(tmp_path, work, fmt, bits, fine):
    model = {"w": Spec((4, 2), 0, 0, "bfloat16")}
    array = np.full((4, 2), 0x3F80, np.uint16)
    array[3, 1] = bits
    weights = weights_of(
        tmp_path / "src", Plan.parse("tp2", model), {"w": array.view(ml_dtypes.bfloat16)}, fmt
    )
    if fine:
        assert prepare(weights, Plan.parse("tp4", model).strategy(), str(work))
    else:
        refused(weights, Plan.parse("tp4", model).strategy(), work, "NaN", weights.files[1][0])


# ---- processes -----------------------------------------------------------------------------------


def attempt(small, work, command, **options):
    return rewrite(small.weights, small.target.strategy(), str(work), command=command, **options)


def test_a_complete_result_is_accepted(tmp_path, work, small):
    said = []
    found = attempt(small, work, fake(tmp_path, small.ready), emit=said.append)
    assert len(said) == 1 and found.world_size == 4
    for rank in range(4):
        for name, layout in small.target.layouts(rank).items():
            tensor = found.tensors[name]
            assert (tensor.layout, tensor.first) == (layout, rank // 2 * 2)
            (cut,) = tensor.cuts(held(layout, rank % 2, tensor.shape))
            assert found.locate(name, cut).path == found.path_of(rank // 2 * 2, name)
            assert (
                array_of(found, name, rank).tobytes()
                == part_of(TENSORS[name], layout, rank % 2).tobytes()
            )
    assert found.path_of(4, "embedding.weight") is None
    assert all(found.tensors[name].layout is None for name in COUNTERS)


def test_counters_need_not_be_on_all_ranks(tmp_path, work, small):
    put(small.ready / "rank_3" / "weights3.safetensors", small.target.shard(TENSORS, 3))
    attempt(small, work, fake(tmp_path, small.ready))


@pytest.mark.parametrize(
    "rank, change, expected",
    [
        (
            1,
            {"embedding.weight": np.zeros((4, 4), np.float32)},
            "embedding.weight float32 (4, 4), expected float32 (8, 4)",
        ),
        (
            2,
            {"layers.1.norm.weight": np.zeros(8)},
            "layers.1.norm.weight float64 (8,), expected float32",
        ),
        (3, {"stray": np.zeros(8)}, "stray float64 (8,), expected nothing"),
        (0, {"layers.0.proj.weight": None}, "layers.0.proj.weight nothing"),
        (0, {"step_num": None}, "step_num nothing"),
    ],
)
def test_a_wrong_result_is_an_error_despite_exit_status_0(
    tmp_path, work, small, rank, change, expected
):
    content = {**small.target.shard(TENSORS, rank), **COUNTERS, **change}
    put(
        small.ready / f"rank_{rank}" / f"weights{rank}.safetensors",
        {name: array for name, array in content.items() if array is not None},
    )
    with pytest.raises(EngineError) as error:
        attempt(small, work, fake(tmp_path, small.ready, "print('all done', file=sys.stderr)"))
    for part in (f"rank {rank}", expected, "all done", "--engine direct"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "more, part",
    [
        ("for r in (1, 2, 3): shutil.rmtree(job['out'] + f'/rank_{r}')", "no file for rank 1"),
        ("os.truncate(job['out'] + '/rank_2/weights2.safetensors', 300)", "rank 2 is damaged"),
    ],
)
def test_files_that_are_not_there_or_cut_short(tmp_path, work, small, more, part):
    with pytest.raises(EngineError, match=part):
        attempt(small, work, fake(tmp_path, small.ready, more))


@pytest.mark.parametrize(
    "more, part",
    [
        (
            "print('first'); print('ValueError: no such thing', file=sys.stderr); sys.exit(3)",
            "status 3",
        ),
        ("raise ValueError('no such thing')", "status 1"),
        (
            "print('no such thing', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
            "SIGKILL (out of memory?)",
        ),
        ("print('no such thing', flush=True); os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
def test_a_failed_process_is_an_error(tmp_path, work, small, more, part):
    with pytest.raises(EngineError) as error:
        attempt(small, work, fake(tmp_path, small.ready, more))
    assert (
        part in str(error.value)
        and "no such thing" in str(error.value)
        and "--engine direct" in str(error.value)
    )


# A process and one that it started, each with an open end of a pipe: its other end reads the end of
# file when both have ended.
HANGS = """os.open({fifo!r}, os.O_WRONLY)
subprocess.Popen([sys.executable, "-c", "import os, signal; os.open({fifo!r}, os.O_WRONLY); print('hanging', flush=True); "
                  "os.open({ready!r}, os.O_WRONLY); signal.pause()"])
os.open({ready!r}, os.O_RDONLY)
"""  # noqa: E501


@pytest.fixture
def life(tmp_path):
    """``hangs``: the code of a process that hangs, with another one; ``over()`` returns when
    neither is left."""
    fifo, ready = tmp_path / "life", tmp_path / "ready_now"
    os.mkfifo(fifo)
    os.mkfifo(ready)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    yield SimpleNamespace(
        hangs=HANGS.format(fifo=str(fifo), ready=str(ready)),
        ready=ready,
        over=lambda: os.read(reader, 1) == b"",
    )
    os.close(reader)


def test_a_process_that_hangs(tmp_path, work, small, life, monkeypatch):
    now = [0.0]

    def sleep(seconds):
        if not now[0]:
            os.close(os.open(life.ready, os.O_RDONLY))  # not before both of them are there
        now[0] += 1.0

    monkeypatch.setattr(runtime, "monotonic", lambda: now[0])
    monkeypatch.setattr(runtime, "sleep", sleep)
    with pytest.raises(EngineError, match="not done after 2 s and was ended") as error:
        attempt(
            small, work, fake(tmp_path, small.ready, life.hangs + "signal.pause()"), timeout=2.0
        )
    assert "hanging" in str(error.value) and life.over() and now == [3.0]


def test_one_failure_ends_the_other_processes(tmp_path, life):
    """The second one fails once the first one hangs."""
    command = fake(
        tmp_path,
        tmp_path,
        f"if path == 'second': open({str(tmp_path / 'go')!r}).read(); sys.exit(5)\n"
        + life.hangs
        + f"open({str(tmp_path / 'go')!r}, 'w').close(); signal.pause()",
    )
    os.mkfifo(tmp_path / "go")
    script = Path(command[1])
    script.write_text(
        script.read_text().replace("job = json.load(open(path))", "job = {'ranks': []}")
    )
    with pytest.raises(EngineError, match="process 2 of 2 ended with status 5"):
        run([["first"], ["second"]], str(tmp_path), 600.0, command)
    assert life.over()


def test_an_interrupt_ends_all_processes(tmp_path, work, small, life, monkeypatch):
    def interrupt(seconds):
        os.close(os.open(life.ready, os.O_RDONLY))  # not before both of them are there
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        attempt(small, work, fake(tmp_path, small.ready, life.hangs + "signal.pause()"))
    assert life.over()


def test_the_worker_ends_with_its_parent(tmp_path, life):
    """The parent is killed, and can end nothing itself."""
    worker = fake(
        tmp_path,
        tmp_path,
        "import threading\nfrom mindresume.mindformers.transform_worker import end_with_parent\n"
        "threading.Thread(target=end_with_parent, daemon=True).start()\n"
        + life.hangs
        + f"os.open({str(tmp_path / 'go')!r}, os.O_WRONLY); signal.pause()",
    )
    os.mkfifo(tmp_path / "go")
    program = (
        f"from mindresume.reshard.mindspore_engine import run; "
        f"run([[]], {str(tmp_path)!r}, 60.0, {worker!r})"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=HERE) as parent:
        os.close(os.open(tmp_path / "go", os.O_RDONLY))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert life.over()


def test_the_real_worker_ends_without_its_parent():
    """It leaves other processes of its group alone, as after a start by hand."""
    code = (
        "from mindresume.mindformers.transform_worker import end_with_parent; "
        "end_with_parent(); print('running')"
    )
    for alone, expected in ((True, -signal.SIGKILL), (False, 0)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            cwd=HERE,
            capture_output=True,
            text=True,
            start_new_session=alone,
        )
        assert (done.returncode, done.stdout) == (expected, "" if alone else "running\n")


def test_arrays_of_mindspore_are_made_contiguous():
    """0-d arrays keep their shape, and no wait for memory of other users occurs."""
    saved = {}
    engine = SimpleNamespace(
        save_file=lambda tensors, path, metadata: saved.update(
            tensors, path=path, metadata=metadata
        )
    )
    transform_worker.guard(engine)
    cut, zero = np.arange(12).reshape(3, 4)[:, 1:3], np.array(5)
    engine.save_file({"cut": cut, "zero": zero}, "file", metadata={"format": "ms"})
    assert (
        saved["cut"].flags.c_contiguous
        and (saved["cut"] == cut).all()
        and saved["zero"].shape == ()
    )
    assert (saved["path"], saved["metadata"], engine.psutil.virtual_memory().percent) == (
        "file",
        {"format": "ms"},
        0.0,
    )
