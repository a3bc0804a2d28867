"""Weights-only loads in Checkpoint 1.0 on several ranks (threads), with a network that only has
parameters."""

import os
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from plan_networks import NET, TENSORS, Network, assert_compared, contents, load_into
from rank_folders import STORAGE, Threads, flip_bit, path_of
from reshard.plans import STEP, Plan, complete, foreign, put, recorded

pytest.importorskip("mindformers.tools")

from mindformers import MindFormerConfig  # noqa: E402

import mindresume.plugin  # noqa: E402, F401  installs the patches
from mindresume.coordination.collectives import SingleProcess  # noqa: E402
from mindresume.coordination.storage_topology import SharedGroups  # noqa: E402
from mindresume.errors import CollectiveError, MissingCheckpointError, NoUsableCheckpointError  # noqa: E402
from mindresume.mindformers import (
    adapter,
    graph_load,
    job_start,
    patches,
    training_context,
)  # noqa: E402
from mindresume.mindformers.configuration import (
    EVALUATE,
    PREDICT,
    TRAIN,
    LoadRequest,
    request_of_weights,
)  # noqa: E402
from mindresume.reshard.conversion_plan import to_consolidated, to_iteration  # noqa: E402
from mindresume.reshard.converter import Conversion  # noqa: E402
from mindresume.reshard.direct_engine import Engine  # noqa: E402
from mindresume.reshard.open_checkpoint import open_checkpoint  # noqa: E402
from mindresume.reshard.strategy_store import own_strategy  # noqa: E402
from mindresume.resume import job_selection  # noqa: E402
from mindresume.settings import Settings  # noqa: E402
from tests.strategy_files import write_strategy  # noqa: E402

WEIGHTS = {name for name in NET if not name.startswith("adam_")}


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(adapter, "is_parallel", lambda: False)
    monkeypatch.setattr(adapter, "parameters_to_load", lambda network, offered=(): network.wanted)
    monkeypatch.setattr(adapter, "_translating_network", lambda network: None)
    monkeypatch.setattr(adapter, "core_network", lambda network: network)
    monkeypatch.setattr(
        graph_load,
        "job_layouts",
        lambda network, shapes, size, warn: {
            name: (network.plan_layouts[name], TENSORS[name].shape)
            for name in shapes
            if name in network.plan_layouts
        },
    )

    monkeypatch.setattr(adapter, "load_into", load_into)
    yield
    training_context.set_current(training_context.TrainingContext())


def config_of(path, output, **values):
    return MindFormerConfig(
        **{
            "load_checkpoint": str(path),
            "resume_training": False,
            "output_dir": str(output),
            "use_legacy": True,
            "use_parallel": False,
            "model": {"model_config": {}},
            **values,
        }
    )


def chosen(path, output, task=TRAIN, group=None, settings=None, **values):
    """(configuration, session) after the choice, and after mindformers has migrated the keys."""
    current = training_context.TrainingContext(
        settings or Settings(), task, training_context.Resources(group or SingleProcess())
    )
    config = config_of(path, output, **values)
    job_start.select_weights(config, task, current)
    config.checkpoint = MindFormerConfig(load_path=config.load_checkpoint)
    return config, current


def load(path, output, plan, task=TRAIN, group=None, settings=None, changed=(), **values):
    """Returns the network after the load."""
    group = group or SingleProcess()
    config, current = chosen(path, output, task, group, settings, **values)
    network = Network(plan, group.rank, changed)
    model = SimpleNamespace(_train_network=network if task == TRAIN else None)
    assert graph_load.load_weights(
        config, model, network, None, current, task == EVALUATE, task == PREDICT
    )
    assert (
        not current.plan.resumes
        and config.resume_training is False
        and config.auto_trans_ckpt is False
    )
    assert_compared(current, network)
    return network


def right(network, plan, rank=0, without=()):
    wanted = {
        name: array
        for name, array in plan.shard(TENSORS, rank).items()
        if name in WEIGHTS and name not in without
    }
    assert contents(network.loaded) == contents(wanted)


def on_all_ranks(path, output, plan, **given):
    """Returns the network of each rank, or its error."""
    return Threads(plan.world_size).run(
        lambda group: load(path, output, plan, group=group, **given)
    )


def all_right(plan, networks):
    for rank, network in enumerate(networks):
        assert not isinstance(network, Exception), network
        right(network, plan, rank)


def written(root, origin, plan):
    """Returns the path of a checkpoint of that kind."""
    path = root / "run" / "checkpoint"
    if origin == "consolidated":
        return complete(path, TENSORS)
    if origin == "one file":
        return put(path / "model.ckpt", TENSORS)
    if origin.startswith("mindformers"):
        foreign(path, plan, TENSORS, fmt="ckpt" if origin.endswith("ckpt") else "safetensors")
        write_strategy(plan.strategy(), str(root / "run" / "strategy"))
        return path
    recorded(path, plan, TENSORS)
    if origin in ("merged", "iteration"):
        source, target = open_checkpoint(STORAGE, str(path)), root / origin
        conversion = Conversion(
            STORAGE,
            to_consolidated(source, "mindspore")
            if origin == "merged"
            else to_iteration(source, own_strategy(source.weights)),
            str(target),
        )
        conversion.run(Engine())
        return target
    return path / "rank_1" / path_of(path, STEP, 1).name if origin == "file of a rank" else path


SOURCE, SINGLE = Plan.parse("dp2tp2opt2", NET), Plan.parse("dp1", NET)
ORIGINS = [
    "records",
    "mindformers",
    "mindformers ckpt",
    "consolidated",
    "one file",
    "merged",
    "iteration",
    "file of a rank",
]


# ---- loaded checkpoints --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin, task",
    [*((origin, TRAIN) for origin in ORIGINS), (ORIGINS[0], EVALUATE), (ORIGINS[1], PREDICT)],
)
def test_every_saved_format_is_loaded_in_one_process(tmp_path, origin, task):
    """Without use_parallel or auto_trans_ckpt; optimizer state is not loaded."""
    network = load(written(tmp_path, origin, SOURCE), tmp_path / "out", SINGLE, task)
    right(network, SINGLE)
    assert network.training is (task == TRAIN)
    if origin.startswith("mindformers"):  # nothing is going to write there
        assert (tmp_path / "run" / "strategy").is_dir() and len(os.listdir(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    "origin, target",
    [("records", "dp2"), ("mindformers", "tp2pp2"), ("merged", "tp2pp2"), ("iteration", "dp2")],
)
def test_every_rank_loads_its_own_slices(tmp_path, origin, target):
    path, plan = written(tmp_path, origin, SOURCE), Plan.parse(target, NET)
    all_right(plan, on_all_ranks(path, tmp_path / "out", plan, auto_trans_ckpt=True))


def test_equal_ranks_without_a_strategy_load_their_own_files(tmp_path):
    plan = Plan.parse("tp2", NET)
    foreign(tmp_path / "checkpoint", plan, TENSORS)
    all_right(plan, on_all_ranks(tmp_path / "checkpoint", tmp_path, plan))
    for error in on_all_ranks(tmp_path / "checkpoint", tmp_path, plan, auto_trans_ckpt=True):
        assert "tensors have no layout" in str(error)


def test_nodes_that_share_no_disk_load_their_own(tmp_path, monkeypatch):
    plan = Plan.parse("tp2", NET)
    recorded(tmp_path / "checkpoint", plan, TENSORS)
    for module in (job_selection, job_start):
        monkeypatch.setattr(module, "shared_groups_of", lambda *arguments: SharedGroups((0, 1)))
    all_right(plan, on_all_ranks(tmp_path / "checkpoint", tmp_path, plan))


def test_weights_without_a_step_are_loaded(tmp_path):
    """As saved by checkpoint_network: no counters, no optimizer."""
    plan = Plan.parse("tp2", NET)
    for rank in range(2):
        arrays = {
            name: array for name, array in plan.shard(TENSORS, rank).items() if name in WEIGHTS
        }
        put(
            tmp_path
            / "checkpoint_network"
            / f"rank_{rank}"
            / f"net_rank_{rank}-network-1_5.safetensors",
            arrays,
        )
    write_strategy(plan.strategy(), str(tmp_path / "strategy"))
    right(load(tmp_path / "checkpoint_network", tmp_path / "out", SINGLE, PREDICT), SINGLE)


def test_a_damaged_newest_checkpoint_is_skipped_and_a_named_one_is_an_error(tmp_path, caplog):
    recorded(tmp_path / "checkpoint", SINGLE, TENSORS)
    path = path_of(tmp_path / "checkpoint", STEP, 0)
    flip_bit(path)
    with pytest.raises(
        NoUsableCheckpointError, match="is not what was written; damaged: "
    ) as found:
        chosen(tmp_path / "checkpoint", tmp_path)
    assert "resume_training" not in str(found.value) and "another load_checkpoint" in str(
        found.value
    )
    with pytest.raises(MissingCheckpointError, match="is not what was written; damaged: "):
        chosen(path, tmp_path)


# ---- optional tensors ----------------------------------------------------------------------------

NEW = {
    "layers.0.lora_a": ((3,), "float32"),
    "layers.1.lora_a": ((3,), "float32"),
    "value_head.weight": ((2, 8), "float32"),
}


def test_a_missing_tensor_is_an_error_that_names_the_option_to_allow_it(tmp_path):
    path = complete(tmp_path / "weights", TENSORS)
    with pytest.raises(
        CollectiveError,
        match=r"value_head.weight is not in the checkpoint.*set mindresume: "
        r'\{allow_missing: \["layers.\*.lora_a", "value_head.weight"\]\}',
    ):
        load(path, tmp_path, SINGLE, changed=NEW)
    allowed = Settings(allow_missing=("layers.*.lora_a", "value_head.weight"))
    right(load(path, tmp_path, SINGLE, changed=NEW, settings=allowed), SINGLE)


def test_the_same_of_a_file_of_each_rank(tmp_path):
    plan = Plan.parse("tp2", NET)
    foreign(tmp_path / "checkpoint", plan, TENSORS)

    def attempt(settings=None):
        path = tmp_path / "checkpoint"
        return on_all_ranks(path, tmp_path, plan, changed=NEW, settings=settings)

    proposal = 'allow_missing: ["layers.*.lora_a", "value_head.weight"]'
    assert all(proposal in str(error) for error in attempt())
    right(attempt(Settings(allow_missing=("layers.*.lora_a", "value_*")))[1], plan, 1)


LORA = {"model": {"model_config": {"pet_config": {"pet_type": "lora"}}}}


def test_adapters_that_mindformers_adds_begin_as_they_are_initialised(tmp_path):
    """Only in a training, with weights that have no adapters."""
    adapters = {name: row for name, row in NEW.items() if "lora" in name}
    path = complete(tmp_path / "weights", TENSORS)
    right(load(path, tmp_path, SINGLE, changed=adapters, **LORA), SINGLE)
    with pytest.raises(CollectiveError, match="value_head.weight is not"):
        load(path, tmp_path, SINGLE, changed=NEW, **LORA)
    for task, values in ((EVALUATE, LORA), (TRAIN, {})):
        with pytest.raises(CollectiveError, match="layers.0.lora_a is not in the checkpoint"):
            load(path, tmp_path, SINGLE, task, changed=adapters, **values)
    half = complete(tmp_path / "half", {**TENSORS, "layers.0.lora_a": np.zeros(3, np.float32)})
    with pytest.raises(CollectiveError, match="layers.1.lora_a is not in the checkpoint"):
        load(half, tmp_path, SINGLE, changed=adapters, **LORA)


def test_weights_of_another_model(tmp_path):
    path = complete(tmp_path / "weights", {"encoder.a": np.zeros((2, 2), np.float32)})
    with pytest.raises(
        CollectiveError,
        match=r"holds none of the \d+ parameters of the network, .*; it holds encoder.a, ",
    ):
        load(path, tmp_path, SINGLE)


def test_a_shape_that_differs_is_named(tmp_path):
    path = complete(tmp_path / "weights", TENSORS)
    with pytest.raises(
        CollectiveError,
        match=r"head.weight is \(16, 8\) in the checkpoint, \(32, 8\) in the network",
    ) as found:
        load(path, tmp_path, SINGLE, changed={"head.weight": ((32, 8), "float32")})
    assert "allow_missing" not in str(found.value)


# ---- names and dtypes ----------------------------------------------------------------------------


def test_a_common_prefix_and_old_adapter_names_are_accepted(tmp_path):
    prefixed = {f"backbone.{name}": array for name, array in TENSORS.items() if name in WEIGHTS}
    right(load(complete(tmp_path / "prefixed", prefixed), tmp_path, SINGLE), SINGLE)
    old = {**{name: TENSORS[name] for name in WEIGHTS}, "w.tk_delta_lora_a": np.ones(3, np.float32)}
    network = load(
        complete(tmp_path / "old", old),
        tmp_path,
        SINGLE,
        changed={"w.mindpet_delta_lora_a": ((3,), "float32")},
    )
    assert network.loaded["w.mindpet_delta_lora_a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("state", ["adam_m", "moments", "exp_avg"])
def test_the_states_of_an_optimizer_are_no_weights(tmp_path, state):
    """A file of one momentum alone was loaded as weights, with a warning about a prefix."""
    states = {f"{state}.{name}": array for name, array in TENSORS.items() if name in WEIGHTS}
    with pytest.raises(CollectiveError, match=r"holds none of the \d+ parameters of the network"):
        load(complete(tmp_path / "states", states), tmp_path, SINGLE)


@pytest.mark.parametrize(
    "stored, wanted, values",
    [
        ("float32", "bfloat16", [1.0, -0.5, np.inf]),
        ("bfloat16", "float32", [1.0, 3.0, -2.0]),
        ("float32", "float16", [1.0, 2.5, 7.0]),
        ("int64", "int32", [1, -5, 2**31 - 1]),
    ],
)
def test_another_dtype_of_the_same_kind_is_converted(tmp_path, stored, wanted, values):
    array = np.array(values).astype(getattr(ml_dtypes, stored, None) or stored)
    path = complete(tmp_path / "weights", {**TENSORS, "w": array})
    network = load(path, tmp_path, SINGLE, changed={"w": ((3,), wanted)})
    assert network.loaded["w"].dtype.name == wanted and network.loaded["w"].tolist() == values


@pytest.mark.parametrize(
    "value, wanted, says",
    [
        (
            np.array([1e30], np.float32),
            "float16",
            "has values that float16, the dtype of the parameter, cannot hold",
        ),
        (np.array([2**40]), "int32", "has values that int32"),
        (np.array([1.5], np.float32), "int32", "w is float32 in the checkpoint"),
    ],
)
def test_a_dtype_that_loses_values_is_an_error(tmp_path, value, wanted, says):
    path = complete(tmp_path / "weights", {**TENSORS, "w": value})
    with pytest.raises(CollectiveError, match=says):
        load(path, tmp_path, SINGLE, changed={"w": ((1,), wanted)})


# ---- entry points --------------------------------------------------------------------------------


def begun(task, config, pipeline_task=None):
    """Returns the request as it is after mindformers' checks."""
    checks = patches.WRAPPERS["Trainer._check_config_rules"](
        lambda self: training_context.current().plan.weights_only
    )
    trainer = SimpleNamespace(config=config, trainer=SimpleNamespace(pipeline_task=pipeline_task))
    request = patches.WRAPPERS[f"Trainer.{task}"](lambda self: checks(self))(trainer)
    idle = training_context.current()
    assert idle.task == "" and idle.plan == training_context.ResumePlan()
    return request


def test_evaluation_and_prediction_select_and_end_their_context(tmp_path):
    path = written(tmp_path, "records", SINGLE)
    for task in (EVALUATE, PREDICT):
        config = config_of(path, tmp_path, resume_training=True, auto_trans_ckpt=True)
        assert begun(task, config) == LoadRequest(
            str(path), resume=False, trains=False, converts=True
        )
        assert (config.resume_training, config.auto_trans_ckpt, config.load_ckpt_format) == (
            False,
            False,
            "safetensors",
        )


@pytest.mark.parametrize(
    "task, values, pipeline",
    [
        # mindformers' inference models load themselves
        (PREDICT, {"use_legacy": False}, None),
        (PREDICT, {}, "loaded already"),
        (EVALUATE, {"load_checkpoint": ""}, None),
        (EVALUATE, {"only_save_strategy": True}, None),
        (PREDICT, {"model": {"model_config": {"pet_config": {"pet_type": "slora"}}}}, None),
    ],
)
def test_other_loads_are_left_to_mindformers(tmp_path, task, values, pipeline):
    config = config_of(written(tmp_path, "records", SINGLE), tmp_path, **values)
    before = dict(config)
    assert begun(task, config, pipeline) is None and dict(config) == before


@pytest.mark.parametrize(
    "values",
    [
        {"load_checkpoint": None, "checkpoint": {"load_path": "PATH"}},
        {"load_checkpoint": "", "pretrained_model_dir": "PATH"},
        {"use_legacy": False, "run_mode": "predict_with_train_model"},
    ],
)
def test_the_path_is_read_from_every_key(tmp_path, values):
    path = str(written(tmp_path, "consolidated", SINGLE))
    values = {
        key: {"load_path": path} if isinstance(value, dict) else path if value == "PATH" else value
        for key, value in values.items()
    }
    config = config_of(path, tmp_path, **{"load_checkpoint": path, **values})
    assert request_of_weights(config, PREDICT).path == path
    assert begun(PREDICT, config).path == path == config.load_checkpoint


def test_hugging_face_names_that_only_the_network_translates_are_left_to_mindformers(
    tmp_path, monkeypatch
):
    path = put(
        tmp_path / "hf" / "model.safetensors", {"model.embed": np.zeros((2, 2), np.float32)}
    ).parent
    config, current = chosen(path, tmp_path, auto_trans_ckpt=True)
    monkeypatch.setattr(
        adapter,
        "_translating_network",
        lambda network: SimpleNamespace(
            convert_name=lambda name: name.replace("embed", "tok_embeddings")
        ),
    )
    assert not graph_load.load_weights(config, None, Network(SINGLE), None, current)
    assert config.auto_trans_ckpt is True  # as the user wrote it
    monkeypatch.setattr(training_context, "_current", [current])
    called = []

    def load(config, model, network, dataset, optimizer=None, do_eval=False, do_predict=False):
        called.append((optimizer, do_eval, do_predict))

    patches.WRAPPERS["transform_and_load_checkpoint"](load)(
        config, None, Network(SINGLE), None, do_eval=True
    )
    assert called == [(None, True, False)]


def test_new_files_that_mindformers_translated_names_into(tmp_path):
    config, current = chosen(
        put(tmp_path / "hf" / "model.safetensors", {"q": np.zeros(2, np.float32)}).parent, tmp_path
    )
    config.checkpoint.load_path = str(complete(tmp_path / "translated", TENSORS))
    network = Network(SINGLE)
    assert graph_load.load_weights(
        config, SimpleNamespace(_train_network=network), network, None, current
    )
    right(network, SINGLE)
