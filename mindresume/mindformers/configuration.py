"""Reads the configuration: what shall be loaded, and how, by one function for each dialect; where
checkpoints lie; which object store ``remote_save_url`` names.

    Checkpoint 1.0, a resume                      request_of_resume
    Checkpoint 1.0, weights alone                 request_of_weights
    Checkpoint 2.0, both dialects of its keys     request_of_iterations
    the PyNative trainer                          request_of_pynative

Weights alone are also those of an evaluation or a prediction.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from mindresume.errors import ConfigError
from mindresume.events import Emit, ignore, warning
from mindresume.formats.huggingface import model_from_config
from mindresume.formats.scan import CHECKPOINT, CONSOLIDATED, kind_of
from mindresume.mindformers import adapter
from mindresume.reshard.huggingface import read_config
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.settings import Settings
from mindresume.storage.object_store import FsspecStore, MoxingStore, ObjectStore, RetryingStore
from mindresume.storage.posix import PosixStorage

TRAIN = "train"
EVALUATE = "evaluate"
PREDICT = "predict"


@dataclass(frozen=True)
class LoadRequest:
    """Describes what the configuration requests to load, and how.

    Attributes:
        path: path of the checkpoint; empty: none. After the selection: the path that mindformers
            receives.
        resume: optimizer and counters are loaded too; else only weights.
        iterations: the code for Checkpoint 2.0 loads.
        balanced: replicas are read once and broadcast.
        workers: number of reading threads; 0: chosen automatically.
        pretrained: ``path`` holds Hugging Face weights.
        trains: a training starts with the weights; else an evaluation or a prediction.
        converts: ``auto_trans_ckpt`` as the user wrote it.
    """

    path: str
    resume: bool = True
    iterations: bool = False
    balanced: bool = False
    workers: int = 0
    pretrained: bool = False
    trains: bool = True
    converts: bool = False

    @property
    def resumes_from_files(self) -> bool:
        """Returns whether a training resumes in Checkpoint 1.0: nothing may be missing, and ckpt
        files are converted on disk."""
        return self.resume and not self.iterations


def request_of_resume(config: Any) -> LoadRequest:
    """Returns what a training of Checkpoint 1.0 resumes from."""
    return LoadRequest(
        str(config.load_checkpoint or ""), balanced=bool(config.get("balanced_load"))
    )


def request_of_weights(config: Any, task: str) -> LoadRequest:
    """Returns which weights alone Checkpoint 1.0 loads, for the begin of a training, an evaluation
    or a prediction. The path is empty if there are none, or if mindformers loads them itself: for
    its inference models, and with slora adapters, which lie elsewhere."""
    path = config.get("load_checkpoint") or (config.get("checkpoint") or {}).get("load_path")
    if (
        config.get("only_save_strategy")
        or adapter.pet_type(config) == "slora"
        or task == PREDICT
        and not config.get("use_legacy")
        and config.get("run_mode") != "predict_with_train_model"
    ):
        path = ""
    elif (
        not path
        and (pretrained := config.get("pretrained_model_dir"))
        and kind_of(PosixStorage(), str(pretrained)) in CONSOLIDATED
    ):
        # mindformers trainer.py:_try_use_pretrained_model_dir_as_ckpt
        path = pretrained
    return LoadRequest(
        str(path or ""),
        resume=False,
        trains=task == TRAIN,
        converts=bool(config.get("auto_trans_ckpt")),
        balanced=bool(config.get("balanced_load")),
    )


def request_of_iterations(config: Any) -> LoadRequest:
    """Returns what the configuration asks for. A key that one dialect leaves out is taken from the
    other.

    Raises:
        ConfigError: The dialects contradict each other, or a value is wrong. mindformers ignores
            one of them silently, and so could load other weights than requested.
    """
    section, asked = config.get("checkpoint") or {}, config.get("resume_training")
    path, old = str(section.get("load_path") or ""), str(config.get("load_checkpoint") or "")
    if path and old and os.path.realpath(path) != os.path.realpath(old):
        raise ConfigError(
            f"checkpoint.load_path is {path}, load_checkpoint is {old}; both name the checkpoint "
            "to load: remove one of them"
        )
    path = path or old
    without = section.get("no_load_optim")
    if asked and without is True:
        raise ConfigError(
            "resume_training is set, but checkpoint.no_load_optim: True loads weights alone and "
            "starts at step 0; remove one of them"
        )
    # If a configuration that was made in Python has none of the keys, mindformers resumes.
    resume = (
        bool(asked)
        or without is False
        or (without is None and "resume_training" not in config and bool(path))
    )
    if isinstance(asked, str):
        raise ConfigError(
            f"The resume_training must be a boolean value in Checkpoint 2.0, found {asked!r}. To "
            "resume from a certain iteration give its folder as load_checkpoint "
            "(checkpoint.load_path), or its number in the tracker"
        )
    balanced = section.get("load_balanced")
    return LoadRequest(
        path,
        resume,
        True,
        bool(config.get("balanced_load") if balanced is None else balanced),
        _workers(section.get("reshard_worker_num") or config.get("reshard_worker_num")),
    )


def request_of_pynative(config: Mapping[str, Any], path: str) -> LoadRequest:
    """Returns what a PyNative training loads from ``path``. It reads replicas on every rank,
    whatever ``load_balanced`` says.

    Raises:
        ConfigError: A value is wrong.
    """
    section = config["checkpoint"]
    return LoadRequest(
        str(path),
        not section.get("no_load_optim"),
        True,
        workers=_workers(section.get("reshard_worker_num") or section.get("load_worker_number")),
    )


def _workers(count: Any) -> int:
    """Returns the number of reading threads; 0: not given. Raises ConfigError for anything else
    than a whole number."""
    count = count or 0
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(f"reshard_worker_num is {count!r}; expected a whole number of at least 1")
    return count


# ---- places --------------------------------------------------------------------------------------

# as in mindformers tools/utils.py, check_in_modelarts, which cannot be called before mindformers
# imports moxing
VARIABLES = ("MA_LOG_DIR", "MA_JOB_DIR", "MA_LOCAL_LOG_PATH", "BATCH_GROUP_NAME")


def modelarts_variable() -> str | None:
    """Returns the name of the environment variable that shows that this job runs in ModelArts, or
    None."""
    return next((name for name in VARIABLES if name in os.environ), None)


def require_moxing() -> None:
    """Raises ConfigError in ModelArts if moxing is not installed: mindformers imports it there at
    once."""
    variable = modelarts_variable()
    if variable and find_spec("moxing") is None:
        raise ConfigError(
            f"this job runs in ModelArts ({variable} is set), where mindformers needs the package "
            "moxing, and "
            f"moxing is not installed. Use an image of ModelArts, which has it, or unset {variable}"
        )


def remote_of(config: Any, emit: Emit = ignore) -> RemoteCheckpoints | None:
    """Returns the object store to which checkpoints are uploaded, or None.

    Raises:
        ConfigError: ``remote_save_url`` is no address of an object store, or the driver for it is
            not installed.
    """
    url = config.get("remote_save_url")
    if not url:
        return None
    if modelarts_variable() is None and isinstance(url, str):
        if url.startswith("obs://"):
            emit(
                warning(
                    f"remote_save_url: {url} is ignored: this job does not run in ModelArts (none "
                    f"of {', '.join(VARIABLES)} is set). Checkpoints stay on the disk of "
                    "output_dir. Outside ModelArts give the bucket as s3://, and its endpoint as "
                    "AWS_ENDPOINT_URL"
                )
            )
            return None
        store: ObjectStore = FsspecStore(url)
    # mindformers' check_obs_url: a TypeError
    elif not isinstance(url, str) or not url.startswith(("obs://", "s3://")):
        raise ConfigError(
            f"remote_save_url is {url!r}; expected an address in an object store that begins with "
            "obs:// or s3://"
        )
    else:
        store = MoxingStore()
    return RemoteCheckpoints(RetryingStore(store), f"{url.rstrip('/')}/{CHECKPOINT}")


def checkpoint_roots(config: Any) -> set[str]:
    """Returns the real paths of the checkpoint directories of the CheckpointMonitor. In Checkpoint
    1.0 the directory is ``checkpoint`` below ``directory``, in 2.0 it is ``directory`` itself, or
    ``save_path`` of the section ``checkpoint``, which mindformers passes on only later; all are
    returned."""
    section = config.get("checkpoint") or {}
    folders = [
        folder
        for callback in config.get("callbacks") or []
        if callback.get("type") == adapter.ALIAS
        and (folder := callback.get("directory") or section.get("save_path"))
    ]
    roots = [*folders, *(os.path.join(folder, CHECKPOINT) for folder in folders)]
    return set(map(os.path.realpath, roots or [os.path.join(adapter.output_root(), CHECKPOINT)]))


def with_publishing(settings: Settings, config: Any) -> Settings:
    """Returns ``settings`` with the ``config`` of ``publish``. Raises ConfigError if weights cannot
    be published so."""
    wanted = settings.publish
    if not wanted.every_steps:
        return settings
    if not wanted.dir:
        raise ConfigError(
            "mindresume.publish.dir is missing: name the folder for the weights, on a disk that "
            "their readers see"
        )
    folder = os.path.realpath(wanted.dir)
    for root in checkpoint_roots(config):
        if os.path.commonpath([folder, root]) == root:
            raise ConfigError(
                f"mindresume.publish.dir is {wanted.dir!r}, which lies in the checkpoint directory "
                f"{root}; name another folder"
            )
    path = wanted.config or config.get("pretrained_model_dir") or ""
    if not path:
        raise ConfigError(
            "mindresume.publish.config is missing: name the config.json of the Hugging Face model, "
            "or its folder; a checkpoint has no numbers of heads and layers"
        )
    model_from_config(*read_config(PosixStorage(), str(path)))
    return replace(settings, publish=replace(wanted, config=os.path.abspath(path)))
