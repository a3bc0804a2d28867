"""Lists the upstream symbols: every name of mindformers and MindSpore that mindresume wraps,
overrides, calls or reads.

    PROFILES[1].symbols                             # the rows that must hold in this release
    to_json(PROFILES[1])                            # its table, for people and tools

Each row says in which releases it holds, and each release of mindformers has a ``Profile``: the
rows that hold in it and in its MindSpore. Before anything is patched, ``upstream_check`` compares
them with the installed packages, so that a release that renamed a function is refused at the start
and not during a training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

# Modules whose names are wrapped: a name is replaced in each module that imported it.
TRAINER = "mindformers.trainer.trainer"
BASE_TRAINER = "mindformers.trainer.base_trainer"
TRAINER_UTILS = "mindformers.trainer.utils"
CAUSAL_TRAINER = "mindformers.trainer.causal_language_modeling.causal_language_modeling"
REGISTER = "mindformers.tools.register"
MONITOR = "mindformers.core.callback.callback"
PYNATIVE_TRAINER = "mindformers.pynative.trainer.trainer"
SERIALIZATION = "mindspore.train.serialization"
ACCESSIBLE_PATH_USERS = (
    TRAINER,
    "mindformers.checkpoint.checkpoint",
    "mindformers.tools.resume_ckpt",
    "mindformers.utils.resume_ckpt_utils",
    "mindformers.utils.file_utils",
)


class Kind(Enum):
    """Says how a symbol is used."""

    WRAPPED = "function wrapped"  # replaced in its module by a function that calls it
    REPLACED = "class attribute replaced"  # the same for a method, in its class
    OVERRIDDEN = "method overridden"  # by a subclass, which calls it
    CALLED = "called"
    READ = "attribute read"
    # called or read, though upstream does not publish it
    INTERNAL = "internal name used"


WRAPPED, REPLACED, OVERRIDDEN, CALLED, READ, INTERNAL = Kind


@dataclass(frozen=True)
class Feature:
    """Names what needs a symbol. ``without``: what is lost when the feature is switched off,
    because a symbol is absent or has another signature; empty: the installation is refused
    instead."""

    name: str
    without: str = ""


INSTALLATION = Feature("installation")
SELECTION = Feature("selection of the checkpoint")
PROGRESS = Feature("step, epoch, data position and loss scale")
LOAD = Feature("loading, Checkpoint 1.0")
ITERATION_LOAD = Feature("loading, Checkpoint 2.0")
SAVE = Feature("saving")
REDUNDANCY = Feature("redundancy removal")
COLLECTIVES = Feature("exchanges between ranks")
RANDOM = Feature("random state")
HUGGING_FACE = Feature("Hugging Face weights")
PRETRAINED_CONFIG = Feature(
    "config.json of transformers 4.57 and later",
    "mindformers refuses some keys of it, such as dtype",
)
RESCUE = Feature("saving when ranks are lost", "such a save is left to mindformers' own code")
TENSORBOARD = Feature("TensorBoard", "no scalars of mindresume are written")
DATA_KEYS = Feature(
    "data keys below trainer:",
    "ignore_data_skip and data_skip_steps work at the top level of the file only",
)
SHARED_PATHS = Feature("SHARED_PATHS", "mindformers alone decides which paths all nodes share")
FILE_PATHS = Feature("a file as load_checkpoint", "load_checkpoint must name a folder")
TRANSFORM = Feature("transform_engine: mindspore", "conversions are done by the direct engine only")
LAUNCHER = Feature("run_mindformer.py", "start the training with a script of your own")
CHECKPOINT_SECTION = Feature(
    "the section checkpoint:",
    "set use_legacy_format: False, load_checkpoint and resume_training instead",
)
PRETRAINED = Feature(
    "Hugging Face weights in Checkpoint 2.0",
    "convert the weights first, and give them as load_checkpoint",
)


# Features that mindformers itself has only since a release.
FIRST_RELEASE = {CHECKPOINT_SECTION: "1.9.0", PRETRAINED: "1.9.0"}


@dataclass(frozen=True)
class Symbol:
    """Describes one row of the table. ``name``: dotted, within ``module``. ``signature``: parameter
    names and defaults; None: only the existence is checked. ``since``, ``until``: first and last
    release of its package in which the row holds; empty ``until``: it holds in the newest one that
    is known."""

    module: str
    name: str
    signature: str | None
    kind: Kind
    feature: Feature
    since: str
    until: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_wrapped(self) -> bool:
        return self.kind in (Kind.WRAPPED, Kind.REPLACED)

    def holds_in(self, release: str) -> bool:
        """Returns whether the row holds in ``release`` of its package."""
        return numbers(self.since) <= numbers(release) and (
            not self.until or numbers(release) <= numbers(self.until)
        )


@dataclass(frozen=True)
class Profile:
    """Describes a release of mindformers with the MindSpore with which it is tested. ``versions``:
    of the two packages. ``symbols``: must hold when mindresume is installed; ``pynative``: when the
    PyNative trainer is imported."""

    versions: Mapping[str, str]
    symbols: tuple[Symbol, ...]
    pynative: tuple[Symbol, ...] = ()

    @property
    def off(self) -> dict[Feature, str]:
        """Returns {feature: its first release} of the features that mindformers itself has only in
        later releases."""
        release = numbers(self.versions["mindformers"])
        return {
            feature: since for feature, since in FIRST_RELEASE.items() if release < numbers(since)
        }

    @property
    def name(self) -> str:
        return f"mindformers {self.versions['mindformers']}"


def _rows(
    module: str, kind: Kind, feature: Feature, *symbols: str, since: str = "", until: str = ""
) -> tuple[Symbol, ...]:
    """Returns the rows of one module. ``symbols``: "name" or "name(signature)". By default they
    hold in all known releases."""
    since = since or (
        "2.7.2"
        if module.startswith("mindspore")
        else "1.9.0"
        if module.startswith("mindformers.pynative")
        else "1.8.0"
    )
    rows = []
    for text in symbols:
        name, parenthesis, rest = text.partition("(")
        rows.append(
            Symbol(
                module,
                name,
                rest.removesuffix(")") if parenthesis else None,
                kind,
                feature,
                since,
                until,
            )
        )
    return tuple(rows)


_CHECKPOINT_ARGUMENTS = "auto_trans_ckpt=None, src_strategy=None, transform_process_num=None"
_TRAIN_ARGUMENTS = (
    "resume_from_checkpoint=None, resume_training=None, ignore_data_skip=None, "
    f"data_skip_steps=None, {_CHECKPOINT_ARGUMENTS}, do_eval=False"
)
_LOAD_ARGUMENTS = "config, model, network, dataset, optimizer=None, do_eval=False, do_predict=False"
_COMPILE_ARGUMENTS = (
    "model, dataset, mode, sink_mode, epoch=1, sink_size=1, do_eval=False, do_predict=False"
)
_COMMON = "epoch_num=None, step_num=None, global_step=None, loss_scale=None, global_batch_size=None"
_MONITOR_ARGUMENTS = (
    "self, prefix='CKP', directory=None, config=None, save_checkpoint_steps=1, "
    "save_checkpoint_seconds=0, keep_checkpoint_max=5, keep_checkpoint_per_n_minutes=0, "
    "integrated_save=True, save_network_params=False, save_trainable_params=False, "
    "async_save=False, saved_network=None, append_info=None, enc_key=None, enc_mode='AES-GCM', "
    "exception_save=False, global_batch_size=None, checkpoint_format='ckpt', "
    "remove_redundancy=False, embedding_size=4096, embedding_local_norm_threshold=1.0, "
    "use_checkpoint_health_monitor=False, health_ckpts_record_dir='./output', "
    "use_legacy_format=True, save_optimizer=True"
)

MINDFORMERS: tuple[Symbol, ...] = (
    # ---- a training, an evaluation, a prediction begins and ends
    *_rows(
        TRAINER,
        REPLACED,
        INSTALLATION,
        f"Trainer.train(self, train_checkpoint=False, {_TRAIN_ARGUMENTS})",
        f"Trainer.finetune(self, finetune_checkpoint=False, {_TRAIN_ARGUMENTS})",
        "Trainer.evaluate(self, eval_dataset=None, eval_checkpoint=False, "
        f"{_CHECKPOINT_ARGUMENTS}, **kwargs)",
        f"Trainer.predict(self, predict_checkpoint=None, {_CHECKPOINT_ARGUMENTS}, input_data=None, "
        "batch_size=None, **kwargs)",
    ),
    # ---- the selection
    *_rows(
        TRAINER,
        REPLACED,
        SELECTION,
        "Trainer._check_config_rules(self)",
        "Trainer.get_last_checkpoint(self)",
    ),
    *_rows(
        TRAINER, CALLED, SELECTION, "Trainer._convert_health_checkpoint_config(self)", since="1.9.0"
    ),
    *_rows(
        TRAINER,
        WRAPPED,
        SELECTION,
        "get_resume_checkpoint(checkpoint_dir, resume_training, resume_by_meta=True, "
        "ckpt_format='ckpt', "
        "use_checkpoint_health_monitor=False, health_ckpts_record_dir='./output')",
        "clear_auto_trans_output(load_checkpoint=None, src_strategy_path_or_dir=None, "
        "load_ckpt_format='ckpt')",
    ),
    *_rows(TRAINER, WRAPPED, SELECTION, "get_checkpoint_path(checkpoint)", until="2.0.0"),
    *_rows(
        TRAINER,
        WRAPPED,
        SELECTION,
        "get_checkpoint_path(checkpoint, require_optimizer=True)",
        since="2.1.0",
    ),
    *_rows(BASE_TRAINER, WRAPPED, SELECTION, "get_healthy_checkpoint_path()", since="1.9.0"),
    *_rows(BASE_TRAINER, REPLACED, SELECTION, "BaseTrainer.resume_ckpt_path_with_strategy(config)"),
    *_rows(TRAINER_UTILS, WRAPPED, FILE_PATHS, "is_hf_checkpoint(checkpoint_path)", since="1.9.0"),
    *(
        row
        for module in ACCESSIBLE_PATH_USERS
        for row in _rows(module, WRAPPED, SHARED_PATHS, "is_publicly_accessible_path(path)")
    ),
    # ---- counters and data
    *_rows(
        REGISTER,
        REPLACED,
        DATA_KEYS,
        "MindFormerRegister.get_cls(cls, module_type, class_name=None)",
    ),
    *_rows(REGISTER, READ, DATA_KEYS, "MindFormerModuleType.TRAINER"),
    *_rows(
        BASE_TRAINER,
        WRAPPED,
        PROGRESS,
        "load_resume_context_from_checkpoint(config, dataset)",
        "_resume_hf_iterable_dataset(dataset, step)",
        "check_runner_config(config, dataset)",
    ),
    *_rows(
        BASE_TRAINER,
        REPLACED,
        PROGRESS,
        "BaseTrainer._train_dataset_postprocess(self, dataset, config)",
        "CommonInfo.load_common(cls, common_filename)",
    ),
    *_rows(BASE_TRAINER, CALLED, PROGRESS, f"CommonInfo({_COMMON})", until="1.8.0"),
    *_rows(
        BASE_TRAINER,
        CALLED,
        PROGRESS,
        f"CommonInfo({_COMMON}, ckpt_status=None)",
        since="1.9.0",
        until="2.0.0",
    ),
    *_rows(
        BASE_TRAINER,
        CALLED,
        PROGRESS,
        f"CommonInfo({_COMMON}, consumed_samples=None, ckpt_status=None)",
        since="2.1.0",
    ),
    *_rows(
        "mindformers.dataset.dataloader.hf_dataloader",
        INTERNAL,
        PROGRESS,
        "HFIterableDataset._load_state",
        "HFIterableDataset.state_dir",
        "HFIterableDataset.resume_step",
        "HFIterableDataset.batch_size",
        "HFIterableDataset.local_rank",
        "HFIterableDataset.cur_epoch",
    ),
    # ---- the load
    *_rows(
        BASE_TRAINER,
        WRAPPED,
        LOAD,
        "preload_ckpt(config)",
        f"transform_and_load_checkpoint({_LOAD_ARGUMENTS})",
    ),
    *_rows(CAUSAL_TRAINER, WRAPPED, LOAD, f"transform_and_load_checkpoint({_LOAD_ARGUMENTS})"),
    *_rows(TRAINER_UTILS, CALLED, LOAD, f"compile_model({_COMPILE_ARGUMENTS})"),
    *_rows(
        BASE_TRAINER,
        WRAPPED,
        ITERATION_LOAD,
        "Model(network, loss_fn=None, optimizer=None, metrics=None, eval_network=None, "
        "eval_indexes=None, amp_level='O0', boost_level='O0', **kwargs)",
        f"compile_model({_COMPILE_ARGUMENTS})",
    ),
    *_rows(
        BASE_TRAINER,
        WRAPPED,
        ITERATION_LOAD,
        "load_checkpoint(checkpoint, network, optimizer=None, global_step=None, "
        "balanced_load=False)",
        until="1.8.0",
    ),
    *_rows(
        BASE_TRAINER,
        WRAPPED,
        ITERATION_LOAD,
        "load_checkpoint(checkpoint, network, optimizer=None, global_step=None, "
        "balanced_load=False, reshard_worker_num=1)",
        since="1.9.0",
    ),
    *_rows(
        BASE_TRAINER,
        WRAPPED,
        PRETRAINED,
        "load_hf_checkpoint(pretrained_model_dir, network, balanced_load=False, "
        "reshard_worker_num=1)",
        since="1.9.0",
    ),
    *_rows(TRAINER_UTILS, READ, CHECKPOINT_SECTION, "convert_checkpoint_config", since="1.9.0"),
    *_rows("mindformers.checkpoint.checkpoint", CALLED, HUGGING_FACE, "get_core_network(network)"),
    *_rows(
        "mindformers.models.build_config",
        WRAPPED,
        PRETRAINED_CONFIG,
        "merge_model_config(pretrain_model_dir, config)",
    ),
    *_rows(
        "mindformers.parallel_core.utils.model_mixin",
        CALLED,
        HUGGING_FACE,
        "ModelMixin.get_gpt_transformer_config(self)",
    ),
    *_rows(
        "mindformers.parallel_core.utils.model_mixin",
        READ,
        HUGGING_FACE,
        "TrainModelMixin.is_train_model",
    ),
    *_rows(
        "mindformers.utils.load_checkpoint_utils",
        INTERNAL,
        HUGGING_FACE,
        "_get_origin_network(network)",
    ),
    # ---- the CheckpointMonitor
    *_rows(
        REGISTER,
        CALLED,
        INSTALLATION,
        "MindFormerRegister.register_cls(cls, register_class, module_type='tools', alias=None, "
        "legacy=True, search_names=None)",
    ),
    *_rows(REGISTER, READ, INSTALLATION, "MindFormerModuleType.CALLBACK"),
    *_rows(MONITOR, CALLED, SAVE, "CheckpointMonitor"),
    *_rows(
        MONITOR,
        OVERRIDDEN,
        SAVE,
        f"CheckpointMonitor.__init__({_MONITOR_ARGUMENTS})",
        "CheckpointMonitor.on_train_begin(self, run_context)",
        "CheckpointMonitor.on_train_step_begin(self, run_context)",
        "CheckpointMonitor.step_end(self, run_context)",
        "CheckpointMonitor.on_train_end(self, run_context)",
        "CheckpointMonitor.end(self, run_context)",
        "CheckpointMonitor._save_ckpt(self, cb_params, force_to_save=False)",
        "CheckpointMonitor.save_checkpoint(self, cb_params)",
    ),
    *_rows(MONITOR, CALLED, SAVE, "CheckpointMonitor.get_checkpoint_health_info(self, cb_params)"),
    *_rows(
        MONITOR,
        READ,
        SAVE,
        *(
            f"CheckpointMonitor.{name}"
            for name in (
                "origin_prefix",
                "directory",
                "trainable_directory",
                "network_directory",
                "save_trainable_params",
                "save_network_params",
                "use_legacy_format",
                "save_optimizer",
                "global_batch_size",
                "use_checkpoint_health_monitor",
                "health_ckpts_record_dir",
            )
        ),
    ),
    *_rows(
        MONITOR,
        INTERNAL,
        SAVE,
        *(
            f"CheckpointMonitor.{name}"
            for name in (
                "_append_dict",
                "_append_step_num",
                "_config",
                "_directory",
                "_last_triggered_step",
                "_latest_ckpt_file_name",
                "_need_flush_from_cache",
                "_prefix",
                "_flush_from_cache(self, cb_params)",
            )
        ),
    ),
    *_rows("mindformers.tools.logger", READ, INSTALLATION, "logger"),
    *_rows(
        "mindformers.tools.utils",
        CALLED,
        SAVE,
        "get_output_root_path()",
        "is_last_pipeline_stage()",
    ),
    *_rows("mindformers.utils.tensorboard", CALLED, TENSORBOARD, "get_tensorboard_writer()"),
    # ---- run_mindformer.py
    *_rows(REGISTER, CALLED, LAUNCHER, "MindFormerConfig(*args, **kwargs)"),
    *_rows("mindformers.core.context", CALLED, LAUNCHER, "build_context(config)"),
    *_rows("mindformers.utils.file_utils", CALLED, LAUNCHER, "set_output_path(path)"),
    *_rows("mindformers.trainer", CALLED, LAUNCHER, "Trainer"),
)

_CALLBACK = (
    "self, save_path, save_max=3, save_interleaved_steps=1000, no_save_optim=False, "
    "async_save=False, prefix='checkpoint', remove_redundancy=False"
)
_MORE = "save_global_layout_cache=True"
_CALLBACKS = "mindformers.pynative.callback.checkpoint_callback"

# The PyNative trainer; these rows are compared when it is imported.
PYNATIVE: tuple[Symbol, ...] = (
    *_rows("mindformers.pynative.trainer", CALLED, LAUNCHER, "Trainer"),
    *_rows(
        PYNATIVE_TRAINER,
        REPLACED,
        INSTALLATION,
        "Trainer.train(self, checkpoint_path=None, mode='pretrain')",
    ),
    *_rows(
        PYNATIVE_TRAINER,
        REPLACED,
        SELECTION,
        "Trainer._load_checkpoint(self, checkpoint_path, model, optimizer=None, global_step=None)",
    ),
    *_rows(PYNATIVE_TRAINER, REPLACED, PROGRESS, "Trainer._create_dataset_iterator(self, dataset)"),
    *_rows(
        "mindformers.pynative.callback.callback",
        REPLACED,
        ITERATION_LOAD,
        "CallbackHandler.on_step_begin(self, args, state, **kwargs)",
    ),
    *_rows(PYNATIVE_TRAINER, WRAPPED, SAVE, "CheckpointCallback"),
    *_rows(
        _CALLBACKS,
        OVERRIDDEN,
        SAVE,
        f"CheckpointCallback.__init__({_CALLBACK})",
        since="1.9.0",
        until="1.9.0",
    ),
    *_rows(
        _CALLBACKS,
        OVERRIDDEN,
        SAVE,
        f"CheckpointCallback.__init__({_CALLBACK}, {_MORE})",
        since="2.0.0",
        until="2.0.0",
    ),
    *_rows(
        _CALLBACKS,
        OVERRIDDEN,
        SAVE,
        f"CheckpointCallback.__init__({_CALLBACK}, {_MORE}, save_trainable_only=False, "
        "base_load_path='', lora_config=None)",
        since="2.1.0",
    ),
    *_rows(
        _CALLBACKS,
        OVERRIDDEN,
        SAVE,
        "CheckpointCallback.on_train_begin(self, args, state, **kwargs)",
        "CheckpointCallback.on_step_end(self, args, state, **kwargs)",
        "CheckpointCallback.on_train_end(self, args, state, **kwargs)",
    ),
    *_rows(
        PYNATIVE_TRAINER,
        READ,
        PROGRESS,
        "Trainer.config",
        "Trainer.state",
        "Trainer.model",
        "Trainer.optimizer",
        "Trainer.train_dataset",
        "Trainer.train_epoch_step",
        "Trainer.global_batch_size",
    ),
    *_rows(PYNATIVE_TRAINER, READ, SAVE, "Trainer.callback_handler"),
    *_rows(
        PYNATIVE_TRAINER,
        INTERNAL,
        PROGRESS,
        "Trainer._base_units",
        "Trainer._consumed_samples",
        "Trainer.dynamic_batch_enabled",
        "Trainer._balance_source",
        "Trainer._uses_data_balance(self)",
        since="2.1.0",
    ),
    *_rows(
        "mindformers.checkpoint.layout_adapter",
        CALLED,
        SAVE,
        "LayoutAdapter.get_current_layout(network)",
        since="2.0.0",
    ),
)

_GROUP = "group='hccl_world_group'"
MINDSPORE: tuple[Symbol, ...] = (
    # ---- parallel modes, groups
    *_rows(
        "mindspore",
        CALLED,
        LOAD,
        "context.get_auto_parallel_context(attr_key)",
        "context.get_context(attr_key)",
        "get_context(attr_key)",
    ),
    *_rows("mindspore", READ, LOAD, "context.GRAPH_MODE"),
    *_rows(
        "mindspore.communication",
        READ,
        COLLECTIVES,
        "GlobalComm.INITED",
        "GlobalComm.WORLD_COMM_GROUP",
    ),
    *_rows(
        "mindspore.communication",
        CALLED,
        COLLECTIVES,
        f"get_group_size({_GROUP})",
        f"get_rank({_GROUP})",
        "create_group(group, rank_ids, options=None)",
        "destroy_group(group)",
    ),
    *_rows(
        "mindspore",
        CALLED,
        COLLECTIVES,
        f"ops.Broadcast(root_rank, {_GROUP})",
        f"ops.AllGather({_GROUP})",
        f"ops.AllReduce(op='sum', {_GROUP})",
    ),
    *_rows("mindspore", READ, COLLECTIVES, "ops.ReduceOp.SUM"),
    # ---- the network
    *_rows(
        "mindspore",
        CALLED,
        LOAD,
        "Tensor",
        "Tensor.from_numpy(array)",
        "Tensor.asnumpy(self)",
        "Parameter(default_input, *args, **kwargs)",
        "Parameter.set_data(self, data, slice_shape=False)",
        "Parameter.init_data(self, layout=None, set_sliced=False)",
        "load_param_into_net(net, parameter_dict, strict_load=False, remove_redundancy=False)",
        "nn.Cell.compile(self, *args, **kwargs)",
        "nn.Cell.parameters_and_names(self, name_prefix='', expand=True)",
        "nn.Cell.parameters_dict(self, recurse=True)",
        "nn.Cell.trainable_params(self, recurse=True)",
        "nn.Cell.set_train(self, mode=True)",
    ),
    *_rows(
        "mindspore",
        READ,
        LOAD,
        "Parameter.sliced",
        "Parameter.param_info",
        "nn.Cell.parameter_layout_dict",
    ),
    *_rows("mindspore", INTERNAL, LOAD, "Model._train_network"),
    *_rows(
        "mindspore",
        REPLACED,
        LOAD,
        "Model.train(self, epoch, train_dataset, callbacks=None, dataset_sink_mode=False, "
        "sink_size=-1, initial_epoch=0)",
    ),
    *_rows("mindspore.train", CALLED, LOAD, "Callback"),
    *_rows("mindspore.common.np_dtype", READ, LOAD, "bfloat16"),
    *_rows(
        "mindspore.parallel.strategy",
        CALLED,
        ITERATION_LOAD,
        "get_current_strategy_metadata(network)",
    ),
    # ---- the save
    *_rows(
        SERIALIZATION,
        INTERNAL,
        SAVE,
        "_convert_save_obj_to_param_list(save_obj, integrated_save, append_dict, choice_func)",
        "_get_parameter_layout()",
    ),
    *_rows(
        "mindspore.train._utils",
        INTERNAL,
        REDUNDANCY,
        "get_parameter_redundancy(layout_obj, initial_rank=None)",
        "remove_param_redundancy(param_redundancy_dict, keep_redundancy=1)",
    ),
    *_rows("mindspore", CALLED, RANDOM, "get_seed()", "get_rng_state()", "set_rng_state(state)"),
    *_rows(
        SERIALIZATION,
        INTERNAL,
        RESCUE,
        "_is_auto_parallel_mode(save_obj)",
        "_convert_cell_param_and_names_to_dict(save_obj, choice_func, is_parallel_mode)",
    ),
    *_rows("mindspore._c_expression", INTERNAL, RESCUE, "TensorPy.move_to"),
    *_rows(
        "mindspore",
        CALLED,
        RESCUE,
        "hal.Stream(priority=0, **kwargs)",
        "hal.StreamCtx(ctx_stream)",
        "Tensor.offload_file_path",
        "Tensor.move_to",
    ),
    # ---- the processes of transform_engine: mindspore
    *_rows(
        "mindspore",
        CALLED,
        TRANSFORM,
        "rank_list_for_transform(rank_id, src_strategy_file=None, dst_strategy_file=None)",
        "transform_checkpoint_by_rank(rank_id, checkpoint_files_map, save_checkpoint_file_name, "
        "src_strategy_file=None, dst_strategy_file=None)",
        "transform_checkpoints(src_checkpoints_dir, dst_checkpoints_dir, ckpt_prefix, "
        "src_strategy_file=None, dst_strategy_file=None, process_num=1, output_format='ckpt')",
    ),
    *_rows(
        "mindspore.parallel",
        CALLED,
        TRANSFORM,
        "unified_safetensors(src_dir, src_strategy_file, dst_dir, merge_with_redundancy=True, "
        "file_suffix=None, max_process_num=64, choice_func=None, split_dst_file=())",
    ),
    *_rows(
        "mindspore.parallel",
        INTERNAL,
        TRANSFORM,
        "transform_safetensors.save_file",
        "transform_safetensors.psutil",
    ),
)


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version: (1, 9, 0) of "1.9.0rc1"."""
    return tuple(int(found) for found in re.findall(r"\d+", re.split(r"[a-zA-Z+]", version)[0]))


def _profile(mindformers: str, mindspore: str) -> Profile:
    versions = {"mindformers": mindformers, "mindspore": mindspore}
    symbols, pynative = (
        tuple(row for row in table if row.holds_in(versions[row.module.split(".")[0]]))
        for table in (MINDFORMERS + MINDSPORE, PYNATIVE)
    )
    return Profile(versions, symbols, pynative)


# From the oldest to the newest. mindformers 2.1.0 asks for mindspore 2.11, of which there is no
# package to test with.
PROFILES = tuple(
    _profile(*pair)
    for pair in (("1.8.0", "2.7.2"), ("1.9.0", "2.9.0"), ("2.0.0", "2.10.0"), ("2.1.0", "2.10.0"))
)


def to_json(profile: Profile) -> list[dict[str, str | None]]:
    """Returns the table, one object per row."""
    return [
        {
            "symbol": row.path,
            "signature": row.signature,
            "kind": row.kind.value,
            "feature": row.feature.name,
            "since": row.since,
            "until": row.until or "newest",
            "if_absent": row.feature.without or "the installation is refused",
        }
        for row in profile.symbols
    ]
