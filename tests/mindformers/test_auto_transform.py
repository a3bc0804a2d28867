"""auto_trans_ckpt on several ranks (threads), with a network that only has parameters."""

import os
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from plan_networks import NET, TENSORS, Network, assert_compared, contents, device  # noqa: F401  device: a fixture
from rank_folders import STORAGE, Threads, flip_bit
from reshard.plans import (
    COUNTERS,
    STEP,
    Plan,
    complete,
    foreign,
    put,
    recorded,
)

pytest.importorskip("mindformers.tools")

from mindformers import MindFormerConfig  # noqa: E402

import mindresume  # noqa: E402
from mindresume.errors import CollectiveError, ConfigError, EngineError, MissingCheckpointError  # noqa: E402
from mindresume.mindformers import (
    configuration,
    job_start,
    loading,
    training_context,
)  # noqa: E402
from mindresume.mindformers.adapter import MindFormersLog  # noqa: E402
from mindresume.mindformers.graph_load import GraphNetwork  # noqa: E402
from mindresume.reshard.open_checkpoint import open_checkpoint  # noqa: E402
from mindresume.resume.progress import START  # noqa: E402
from mindresume.settings import ConversionSettings, Settings  # noqa: E402
from tests.strategy_files import write_strategy  # noqa: E402

DIRECT = Settings(conversion=ConversionSettings(transform_engine="direct"))
UNIFIES = Settings(conversion=ConversionSettings(unified_checkpoint=1))


CONTEXTS: list[training_context.TrainingContext] = []  # of the jobs of a test


@pytest.fixture(autouse=True)
def released():
    """Releases read locks and kept bytes, as the end of a training does."""
    yield
    while CONTEXTS:
        CONTEXTS.pop().resources.release()


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


COUNTER = {"global_step": (COUNTERS["global_step"].shape, "int32")}


def read_arrays(config, network, current):
    """Returns the arrays that the network takes."""
    loading.load(GraphNetwork(current, config, network), current)
    assert_compared(current, network)
    return network.loaded


def loads(plan, path, output, settings=None, **values):
    """Returns for each rank (its arrays, its context), or its error."""

    def load(group):
        current, config = job(group, path, output, plan, settings, **values)
        return read_arrays(config, Network(plan, group.rank, COUNTER), current), current

    return Threads(plan.world_size).run(load)


def all_right(plan, found, ignored=()):
    for rank, each in enumerate(found):
        assert not isinstance(each, Exception), each
        shard = {**plan.shard(TENSORS, rank), "global_step": COUNTERS["global_step"]}
        arrays = {name: array for name, array in each[0].items() if name not in ignored}
        assert contents(arrays) == contents(shard)
    return found


@pytest.mark.parametrize(
    "origin, target",
    [
        ("records", "dp2tp2opt2"),
        ("records", "dp4opt4"),
        ("records", "tp2pp2"),
        ("strategy beside", "dp4opt4"),
        ("strategy given", "tp2pp2"),
        ("consolidated", "dp2tp2opt2"),
    ],
)
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
    for _, current in all_right(plan, loads(plan, path, tmp_path / "out", **values)):
        assert current.plan.choice.chosen.step == STEP


def test_the_same_command_again_finds_the_strategy_that_was_set_aside(tmp_path):
    """In mindformers' own folders the strategy of the source is in the folder to which this job
    writes its own."""
    source, plan = Plan.parse("dp2tp2", NET), Plan.parse("dp2", NET)
    foreign(tmp_path / "checkpoint", source, TENSORS)
    write_strategy(source.strategy(), str(tmp_path / "strategy"))
    for _ in range(3):
        all_right(plan, loads(plan, tmp_path / "checkpoint", tmp_path))


@pytest.mark.parametrize("given", ["tp8", "dp4opt4"])
def test_the_setting_of_the_first_conversion_stops_no_restart_from_checkpoints_of_the_new_layout(
    tmp_path, monkeypatch, given
):
    """Where the old layout had as many ranks, each restart of the same command failed at the job's
    own checkpoints."""
    plan, said = Plan.parse("dp2", NET), []
    recorded(tmp_path / "checkpoint", Plan.parse("tp4", NET), TENSORS)
    write_strategy(Plan.parse(given, NET).strategy(), str(tmp_path / "old"))
    monkeypatch.setattr(
        MindFormersLog, "handle", lambda self, event, time_s: said.append(str(event))
    )
    old = str(tmp_path / "old")
    all_right(plan, loads(plan, tmp_path / "checkpoint", tmp_path, src_strategy_path_or_dir=old))
    unneeded = "old is not needed; step 15 has records, which hold its layouts"
    assert any(unneeded in text for text in said)


@pytest.mark.parametrize("processes", [None, 2])
def test_ckpt_files_are_converted_on_disk_and_loaded_later_directly(tmp_path, processes):
    source, plan = Plan.parse("dp2tp2", NET), Plan.parse("tp4", NET)
    recorded(tmp_path / "checkpoint", source, TENSORS, fmt="ckpt")
    made = tmp_path / "out" / "transformed_checkpoint" / "checkpoint"
    times = {}
    # at last nothing is left to transform
    for path in (tmp_path / "checkpoint", tmp_path / "checkpoint", made):
        found = loads(plan, path, tmp_path / "out", DIRECT, transform_process_num=processes)
        others = COUNTERS.keys() - {"global_step"}
        for rank, (_, current) in enumerate(all_right(plan, found, others)):
            assert current.plan.choice.root == str(made) and current.shard.rank == rank
        before, times = times, {file: file.stat().st_mtime_ns for file in made.rglob("*.ckpt")}
        assert len(times) == 4 and before in ({}, times)
    assert os.listdir(tmp_path / "out" / "transformed_checkpoint") == ["checkpoint"]


@pytest.mark.parametrize("processes", [3, 0, -1, "2", True])
def test_transform_process_num_must_divide(tmp_path, processes):
    plan = Plan.parse("dp2", NET)
    recorded(tmp_path / "checkpoint", Plan.parse("tp4", NET), TENSORS, fmt="ckpt")
    path = tmp_path / "checkpoint"
    found = loads(plan, path, tmp_path, DIRECT, transform_process_num=processes)
    if processes == 0:  # not given
        all_right(plan, found, COUNTERS.keys() - {"global_step"})
        return
    for error in found:
        assert isinstance(error, ConfigError)
        assert "transform_process_num is" in str(error) and "divides 2," in str(error)


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
    found = loads(plan, tmp_path / "checkpoint", tmp_path / "out", settings)
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
    found = loads(plan, tmp_path / "checkpoint", tmp_path / "out", settings)
    roots = {rank.plan.choice.root for _, rank in found}
    assert (
        len(roots) == 1 and f"checkpoint_step_{STEP}_" in roots.pop() and mine.read_text() == "mine"
    )


def test_merged_weights_besides(tmp_path):
    source, plan = Plan.parse("tp4", NET), Plan.parse("dp2", NET)
    recorded(tmp_path / "checkpoint", source, TENSORS)
    all_right(plan, loads(plan, tmp_path / "checkpoint", tmp_path / "out", UNIFIES))
    merged = open_checkpoint(STORAGE, str(tmp_path / "out" / "unified_checkpoint"))
    unified = tmp_path / "out" / "unified_checkpoint"
    assert mindresume.compare(unified, tmp_path / "checkpoint").equal
    assert merged.state.step == STEP


def test_all_ranks_get_the_error_of_damaged_merged_weights(tmp_path):
    plan = Plan.parse("dp2", NET)
    recorded(tmp_path / "checkpoint", Plan.parse("tp4", NET), TENSORS)
    loads(plan, tmp_path / "checkpoint", tmp_path / "out", UNIFIES)
    merged = tmp_path / "out" / "unified_checkpoint"
    flip_bit(next(merged.glob("part0.safetensors")))
    # quick: not at the choice, but while it is loaded
    for verify in ("full", "quick"):
        for error in loads(plan, merged, tmp_path / "again", Settings(verify=verify)):
            assert isinstance(error, CollectiveError)
            assert "is not what was written" in str(error) and "part0" in str(error)


def test_merged_weights_without_a_step_cannot_be_resumed(tmp_path):
    put(tmp_path / "weights" / "model.safetensors", TENSORS)
    for error in loads(Plan.parse("dp2", NET), tmp_path / "weights", tmp_path):
        assert isinstance(error, MissingCheckpointError)
        assert "holds consolidated weights, but no step_num" in str(error)


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
