"""auto_trans_ckpt on several ranks (threads), with a network that only has parameters."""

import os
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from rank_folders import STORAGE, Threads, flip_bit
from reshard.plans import (
    COUNTERS,
    MODEL,
    STEP,
    Plan,
    complete,
    foreign,
    put,
    random_tensors,
    recorded,
)

pytest.importorskip("mindformers.tools")

from mindformers import MindFormerConfig  # noqa: E402

import mindresume  # noqa: E402
from mindresume.errors import CollectiveError, ConfigError, EngineError, MissingCheckpointError  # noqa: E402
from mindresume.mindformers import (
    adapter,
    configuration,
    job_start,
    loading,
    network_state,
    training_context,
)  # noqa: E402
from mindresume.mindformers.adapter import MindFormersLog  # noqa: E402
from mindresume.mindformers.graph_load import GraphNetwork  # noqa: E402
from mindresume.reshard.open_checkpoint import open_checkpoint  # noqa: E402
from mindresume.resume.progress import START  # noqa: E402
from mindresume.resume.selection import select_checkpoint  # noqa: E402
from mindresume.settings import ConversionSettings, Settings  # noqa: E402
from tests.strategy_files import write_strategy  # noqa: E402

NET = {
    name: spec
    for name, spec in MODEL.items()
    if not name.startswith("accu_grads") and 0 not in spec.shape
}
TENSORS = random_tensors(NET)
GLOBAL_STEP = COUNTERS["global_step"].shape
DIRECT = Settings(conversion=ConversionSettings(transform_engine="direct"))
UNIFIES = Settings(conversion=ConversionSettings(unified_checkpoint=1))


class Network:
    """Has the parameters of one rank of a job under ``plan``, and their layouts in
    ``parameter_layout_dict``."""

    def __init__(self, plan: Plan, rank: int, **changed):
        shapes = {name: array.shape for name, array in plan.shard(TENSORS, rank).items()}
        self.wanted = {name: (shape, str(TENSORS[name].dtype)) for name, shape in shapes.items()}
        self.wanted |= {"global_step": (GLOBAL_STEP, "int32")} | changed
        rows = {}
        for name, layout in plan.layouts(rank).items():
            group = "" if layout.optimizer_slices == 1 else "group"
            rows[name] = (
                list(layout.device_matrix),
                [list(m) if isinstance(m, tuple) else m for m in layout.tensor_map],
                list(shapes[name]),
                0,
                True,
                group,
                list(TENSORS[name].shape),
            )
        self.parameter_layout_dict = rows

    def cells_and_names(self):
        return []


CONTEXTS: list[training_context.TrainingContext] = []  # of the jobs of a test


@pytest.fixture(autouse=True)
def released():
    """Releases read locks and kept bytes, as the end of a training does."""
    yield
    while CONTEXTS:
        CONTEXTS.pop().resources.release()


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(adapter, "is_parallel", lambda: True)
    monkeypatch.setattr(network_state, "is_parallel", lambda: True)
    monkeypatch.setattr(adapter, "parameters_to_load", lambda network, offered: network.wanted)
    monkeypatch.setattr(
        adapter,
        "load_into",
        lambda network, arrays, deduplicated: setattr(network, "taken", dict(arrays)) or ([], []),
    )


def job(group, path, output, plan, settings=None, **values):
    """Runs the hooks of one rank up to the load. Returns (session, configuration)."""
    config = MindFormerConfig(
        load_checkpoint=str(path),
        resume_training=True,
        auto_trans_ckpt=True,
        output_dir=str(output),
        load_ckpt_format="safetensors",
        **values,
    )
    current = training_context.TrainingContext(
        settings or Settings(), configuration.TRAIN, training_context.Resources(group)
    )
    CONTEXTS.append(current)
    job_start.select_checkpoint(config, current)
    assert config.auto_trans_ckpt is False
    current.progress.origin = replace(START, global_step=STEP)
    if group.rank == 0 and plan.world_size > 1:  # the compiler
        write_strategy(plan.strategy(), os.path.join(str(output), "strategy"))
    group.gather(b"")
    return current, config


def load(group, path, output, plan, settings=None, **values):
    current, config = job(group, path, output, plan, settings, **values)
    return read_arrays(config, Network(plan, group.rank), current), current


def read_arrays(config, network, current):
    """Returns the arrays that the network takes."""
    loading.load(GraphNetwork(current, config, network), current)
    return network.taken


def run(plan, function):
    return Threads(plan.world_size).run(function)


def right(plan, rank, arrays):
    shard = plan.shard(TENSORS, rank)
    assert {name: array.tobytes() for name, array in arrays.items() if name != "global_step"} == {
        name: array.tobytes() for name, array in shard.items()
    }
    assert arrays["global_step"].tobytes() == COUNTERS["global_step"].tobytes()


@pytest.mark.parametrize("target", ["tp4", "dp2tp2opt2", "dp4opt4", "tp2pp2", "dp2"])
@pytest.mark.parametrize("origin", ["records", "strategy beside", "strategy given", "consolidated"])
def test_every_rank_loads_its_own_slices(tmp_path, origin, target):
    source, plan = Plan.parse("dp2tp2opt2", NET), Plan.parse(target, NET)
    path, values = tmp_path / "run" / "checkpoint", {}
    if origin == "consolidated":
        complete(path, TENSORS)
    elif origin == "records":
        recorded(path, source, TENSORS)
    else:
        foreign(path, source, TENSORS)
        where = tmp_path / ("run/strategy" if origin == "strategy beside" else "elsewhere")
        write_strategy(source.strategy(), str(where))
        values = {"src_strategy_path_or_dir": str(where)} if origin == "strategy given" else {}
    for rank, found in enumerate(
        run(plan, lambda group: load(group, path, tmp_path / "out", plan, **values))
    ):
        assert not isinstance(found, Exception), found
        right(plan, rank, found[0])
        assert found[1].plan.choice.chosen.step == STEP


def test_the_same_command_again_finds_the_strategy_that_was_set_aside(tmp_path):
    """In mindformers' own folders the strategy of the source is in the folder to which this job
    writes its own."""
    source, plan = Plan.parse("dp2tp2", NET), Plan.parse("dp2", NET)
    foreign(tmp_path / "checkpoint", source, TENSORS)
    write_strategy(source.strategy(), str(tmp_path / "strategy"))
    for _ in range(3):
        for rank, found in enumerate(
            run(plan, lambda group: load(group, tmp_path / "checkpoint", tmp_path, plan))
        ):
            assert not isinstance(found, Exception), found
            right(plan, rank, found[0])


def test_a_strategy_of_other_ranks_does_not_stop_what_has_records(tmp_path):
    plan = Plan.parse("dp2", NET)
    recorded(tmp_path / "checkpoint", Plan.parse("tp4", NET), TENSORS)
    write_strategy(Plan.parse("tp8", NET).strategy(), str(tmp_path / "old"))
    found = run(
        plan,
        lambda group: load(
            group,
            tmp_path / "checkpoint",
            tmp_path,
            plan,
            src_strategy_path_or_dir=str(tmp_path / "old"),
        ),
    )
    right(plan, 1, found[1][0])


def test_the_setting_of_the_first_conversion_stops_no_restart_from_checkpoints_of_the_new_layout(
    tmp_path, monkeypatch
):
    """The old layout had as many ranks, so each restart of the same command failed at the job's own
    checkpoints."""
    plan = Plan.parse("dp2", NET)
    recorded(tmp_path / "checkpoint", Plan.parse("tp4", NET), TENSORS)
    write_strategy(Plan.parse("dp4opt4", NET).strategy(), str(tmp_path / "old"))
    said = []
    monkeypatch.setattr(
        MindFormersLog, "handle", lambda self, event, time_s: said.append(str(event))
    )
    for rank, found in enumerate(
        run(
            plan,
            lambda group: load(
                group,
                tmp_path / "checkpoint",
                tmp_path,
                plan,
                src_strategy_path_or_dir=str(tmp_path / "old"),
            ),
        )
    ):
        assert not isinstance(found, Exception), found
        right(plan, rank, found[0])
    assert any(
        "old is not needed; step 15 has records, which hold its layouts" in text for text in said
    )


def test_tensors_that_do_not_fit_are_named(tmp_path):
    plan = Plan.parse("tp2", NET)
    recorded(tmp_path / "checkpoint", Plan.parse("dp1", NET), TENSORS)

    def attempt(group):
        current, config = job(group, tmp_path / "checkpoint", tmp_path, plan)
        network = Network(
            plan, group.rank, **{"new.weight": ((3,), "float32"), "norm.weight": ((8,), "float16")}
        )
        network.parameter_layout_dict["head.weight"][6][0] *= 2
        network.wanted["head.weight"] = ((16, 8), "float32")
        return read_arrays(config, network, current)

    for error in run(plan, attempt):
        assert (
            isinstance(error, CollectiveError)
            and "rank 0: LoadError" in str(error)
            and "(3 tensors)" in str(error)
        )
        for text in (
            "new.weight is not in the checkpoint",
            "norm.weight is float32 in the checkpoint, float16 in the network",
            "head.weight is (16, 8) in the checkpoint, (32, 8) in the network",
        ):
            assert text in str(error)


@pytest.mark.parametrize("processes", [None, 1, 2, 4])
def test_ckpt_files_are_converted_on_disk_and_loaded_later_directly(tmp_path, processes):
    source, plan = Plan.parse("dp2tp2", NET), Plan.parse("tp4", NET)
    recorded(tmp_path / "checkpoint", source, TENSORS, fmt="ckpt")
    settings = DIRECT

    def start(path):
        return run(
            plan,
            lambda group: load(
                group, path, tmp_path / "out", plan, settings, transform_process_num=processes
            ),
        )

    made = tmp_path / "out" / "transformed_checkpoint" / "checkpoint"
    for path in (tmp_path / "checkpoint", tmp_path / "checkpoint", made):
        times = {file: file.stat().st_mtime_ns for file in made.rglob("*.ckpt")}
        for rank, found in enumerate(start(path)):
            assert not isinstance(found, Exception), found
            assert found[1].plan.choice.root == str(made) and found[1].shard.rank == rank
            # at last nothing is left to transform
            right(
                plan,
                rank,
                {
                    name: array
                    for name, array in found[0].items()
                    if name not in COUNTERS or name == "global_step"
                },
            )
        assert len(list(made.rglob("*.ckpt"))) == 4
        assert not times or times == {
            file: file.stat().st_mtime_ns for file in made.rglob("*.ckpt")
        }
    assert os.listdir(tmp_path / "out" / "transformed_checkpoint") == ["checkpoint"]


@pytest.mark.parametrize("processes", [3, 0, -1, "2", True, 2.0])
def test_transform_process_num_must_divide(tmp_path, processes):
    plan = Plan.parse("dp2", NET)
    recorded(tmp_path / "checkpoint", Plan.parse("tp4", NET), TENSORS, fmt="ckpt")
    for error in run(
        plan,
        lambda group: load(
            group, tmp_path / "checkpoint", tmp_path, plan, DIRECT, transform_process_num=processes
        ),
    ):
        if processes in (0,):  # not given
            assert not isinstance(error, Exception)
        else:
            assert (
                isinstance(error, ConfigError)
                and "transform_process_num is" in str(error)
                and "divides 2," in str(error)
            )


@pytest.mark.parametrize("engine", ["auto", "mindspore"])
def test_the_direct_engine_takes_over_refused_work_unless_mindspores_is_requested(
    tmp_path, engine, monkeypatch
):
    source, plan = Plan.parse("tp2", NET), Plan.parse("dp2", NET)
    recorded(tmp_path / "checkpoint", source, TENSORS, fmt="ckpt")

    def refuse(*args, **kwargs):
        raise EngineError("not this one")

    monkeypatch.setattr("mindresume.reshard.mindspore_engine.rewrite", refuse)
    settings = Settings(conversion=ConversionSettings(transform_engine=engine))
    found = run(
        plan, lambda group: load(group, tmp_path / "checkpoint", tmp_path / "out", plan, settings)
    )
    if engine == "auto":
        made = tmp_path / "out" / "transformed_checkpoint" / "checkpoint"
        assert [rank.plan.choice.root for _, rank in found] == [str(made)] * 2
    else:
        assert all(
            isinstance(error, EngineError) and "not this one" in str(error) for error in found
        )
        assert not any((tmp_path / "out" / "transformed_checkpoint").rglob("*.ckpt"))


def test_another_conversion_in_the_way_is_left_alone(tmp_path):
    plan, settings = Plan.parse("dp2", NET), DIRECT
    recorded(tmp_path / "checkpoint", Plan.parse("tp2", NET), TENSORS, fmt="ckpt")
    (tmp_path / "out" / "transformed_checkpoint" / "checkpoint").mkdir(parents=True)
    mine = tmp_path / "out" / "transformed_checkpoint" / "checkpoint" / "notes.txt"
    mine.write_text("mine")
    found = run(
        plan, lambda group: load(group, tmp_path / "checkpoint", tmp_path / "out", plan, settings)
    )
    roots = {rank.plan.choice.root for _, rank in found}
    assert (
        len(roots) == 1 and f"checkpoint_step_{STEP}_" in roots.pop() and mine.read_text() == "mine"
    )


def test_merged_weights_besides(tmp_path):
    source, plan = Plan.parse("tp4", NET), Plan.parse("dp2", NET)
    recorded(tmp_path / "checkpoint", source, TENSORS)
    found = run(
        plan, lambda group: load(group, tmp_path / "checkpoint", tmp_path / "out", plan, UNIFIES)
    )
    right(plan, 0, found[0][0])
    merged = open_checkpoint(STORAGE, str(tmp_path / "out" / "unified_checkpoint"))
    unified = tmp_path / "out" / "unified_checkpoint"
    assert mindresume.compare(unified, tmp_path / "checkpoint").equal
    assert merged.state.step == STEP


def test_all_ranks_get_the_error_of_damaged_merged_weights(tmp_path):
    plan = Plan.parse("dp2", NET)
    recorded(tmp_path / "checkpoint", Plan.parse("tp4", NET), TENSORS)
    run(plan, lambda group: load(group, tmp_path / "checkpoint", tmp_path / "out", plan, UNIFIES))
    merged = tmp_path / "out" / "unified_checkpoint"
    flip_bit(next(merged.glob("part0.safetensors")))
    # quick: not at the choice, but while it is loaded
    for verify in ("full", "quick"):
        settings = Settings(verify=verify)
        for error in run(
            plan,
            lambda group, settings=settings: load(
                group, merged, tmp_path / "again", plan, settings
            ),
        ):
            assert (
                isinstance(error, CollectiveError)
                and "is not what was written" in str(error)
                and "part0" in str(error)
            )


def test_merged_weights_without_a_step_cannot_be_resumed(tmp_path):
    put(tmp_path / "weights" / "model.safetensors", TENSORS)
    for error in run(
        Plan.parse("dp2", NET),
        lambda group: load(group, tmp_path / "weights", tmp_path, Plan.parse("dp2", NET)),
    ):
        assert isinstance(
            error, MissingCheckpointError
        ) and "holds consolidated weights, but no step_num" in str(error)


def test_the_checkpoint_of_the_counters_is_that_of_the_weights(tmp_path):
    """The newest is damaged: weights and step come from the previous one."""
    plan, source = Plan.parse("dp2", NET), Plan.parse("tp4", NET)
    recorded(tmp_path / "checkpoint", source, TENSORS)
    chosen = select_checkpoint(
        STORAGE,
        str(tmp_path / "checkpoint"),
        SimpleNamespace(
            rank=0, size=1, broadcast=lambda message: message, gather=lambda message: [message]
        ),
    )
    assert chosen.chosen.step == STEP
    flip_bit(tmp_path / "checkpoint" / chosen.chosen.files[3][0].path)
    for error in run(plan, lambda group: load(group, tmp_path / "checkpoint", tmp_path, plan)):
        assert isinstance(error, Exception) and "the file of rank 3 is not what was written" in str(
            error
        )


def test_a_load_without_resume_never_empties_the_folder_of_its_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output" / "strategy").mkdir(parents=True)
    for source in (
        "output/strategy",
        "./output/strategy/",
        "output/strategy/a.ckpt",
        str(tmp_path / "output" / "strategy"),
    ):
        with pytest.raises(ConfigError, match="which mindformers empties"):
            job_start.check_not_cleared("./output", None, source, load_ckpt_format="safetensors")
    job_start.check_not_cleared(
        "./output", "output/checkpoint", "output/strategy_old", load_ckpt_format="safetensors"
    )
    job_start.check_not_cleared(
        "./output", "output/transformed_checkpoint", "", load_ckpt_format="safetensors"
    )
    with pytest.raises(ConfigError):
        job_start.check_not_cleared(
            "./output", "output/transformed_checkpoint/", "", load_ckpt_format="ckpt"
        )


def test_the_tensors_of_these_tests_have_what_is_easily_lost():
    """NaN of bfloat16: that they arrive bit by bit is checked above, with everything else."""
    assert any(
        array.dtype == ml_dtypes.bfloat16 and np.isnan(array.astype(np.float32)).any()
        for array in TENSORS.values()
    )
