"""Decides which object store ``remote_save_url`` names: in ModelArts the one of moxing, elsewhere
the one that fsspec has a driver for. Outside ModelArts obs:// is ignored, as in mindformers."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from mindresume.errors import ConfigError
from mindresume.events import Emit, ignore, warning
from mindresume.formats.scan import CHECKPOINT
from mindresume.mindformers import adapter
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.storage.object_store import FsspecStore, MoxingStore, RetryingStore

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
        if not url.startswith("obs://"):
            return RemoteCheckpoints(
                RetryingStore(FsspecStore(url)), f"{url.rstrip('/')}/{CHECKPOINT}"
            )
        emit(
            warning(
                f"remote_save_url: {url} is ignored: this job does not run in ModelArts (none of "
                f"{', '.join(VARIABLES)} is "
                "set). Checkpoints stay on the disk of output_dir. Outside ModelArts give the "
                "bucket as s3://, and its "
                f"endpoint as AWS_ENDPOINT_URL"
            )
        )
        return None
    # mindformers' check_obs_url: a TypeError
    if not isinstance(url, str) or not url.startswith(("obs://", "s3://")):
        raise ConfigError(
            f"remote_save_url is {url!r}; expected an address in an object store that begins with "
            "obs:// or s3://"
        )
    return RemoteCheckpoints(RetryingStore(MoxingStore()), f"{url.rstrip('/')}/{CHECKPOINT}")


def checkpoint_roots(config: Any) -> set[str]:
    """Returns the real paths of the checkpoint directories of the CheckpointMonitor. In Checkpoint
    1.0 the directory is ``checkpoint`` below ``directory``, in 2.0 it is ``directory`` itself, or
    ``save_path`` of the section ``checkpoint``, which mindformers passes on only later; all are
    returned."""
    section = config.get("checkpoint") or {}
    given = [
        callback.get("directory") or section.get("save_path")
        for callback in config.get("callbacks") or []
        if callback.get("type") == adapter.ALIAS
    ]
    folders = [folder for folder in given if folder]
    found = [*folders, *(os.path.join(folder, CHECKPOINT) for folder in folders)]
    return {
        os.path.realpath(folder)
        for folder in found or [os.path.join(adapter.output_root(), CHECKPOINT)]
    }
