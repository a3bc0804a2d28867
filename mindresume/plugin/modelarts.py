"""ModelArts: disks vanish with the job, so checkpoints go to ``remote_save_url`` and come back from there. Only there; elsewhere
the key has no effect, as in mindformers.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Collection
from importlib.util import find_spec
from typing import Any

from mindresume.agree import Group
from mindresume.errors import ConfigError, RemoteError
from mindresume.formats.names import folder_rank
from mindresume.plugin import adapter
from mindresume.resume import restore
from mindresume.resume.select import Choice
from mindresume.store.islands import Islands
from mindresume.store.objects import MoxingStore
from mindresume.store.remote import Remote
from mindresume.store.storage import Storage

# mindformers tools/utils.py: check_in_modelarts, which cannot be asked before mindformers imports moxing
VARIABLES = ("MA_LOG_DIR", "MA_JOB_DIR", "MA_LOCAL_LOG_PATH", "BATCH_GROUP_NAME")
FOLDER = "checkpoint"                   # below remote_save_url, where mindformers has folders of its own


def variable() -> str | None:
    """The variable by which a job knows that it is in ModelArts."""
    return next((name for name in VARIABLES if name in os.environ), None)


def require_moxing() -> None:
    """ConfigError in ModelArts without moxing, which mindformers imports there at once."""
    if variable() and find_spec("moxing") is None:
        raise ConfigError(f"this job runs in ModelArts ({variable()} is set), where mindformers needs the package moxing, and it "
                          f"is not installed. Use an image of ModelArts, which has it, or unset {variable()}")


def remote_of(config: Any) -> Remote | None:
    """Returns where checkpoints are kept besides, None: nowhere. ConfigError if ``remote_save_url`` is no address of an object
    store."""
    url = config.get("remote_save_url")
    if not url:
        return None
    if variable() is None:
        adapter.logger().warning("mindresume: remote_save_url: %s is ignored: this job does not run in ModelArts (none of %s is "
                                 "set). Checkpoints are on the disk of output_dir only", url, ", ".join(VARIABLES))
        return None
    if not isinstance(url, str) or not url.startswith(("obs://", "s3://")):         # mindformers' check_obs_url: a TypeError
        raise ConfigError(f"remote_save_url is {url!r}; expected an address in an object store that begins with obs:// or s3://")
    return Remote(MoxingStore(), f"{url.rstrip('/')}/{FOLDER}")


def choose(pick: Callable[[], Choice], config: Any, path: str, named: str | None, remote: Remote, group: Group, storage: Storage,
           converts: bool, islands: Islands | None = None, sick: Collection[str] | None = None, poison_limit: int = 0) -> Choice:
    """``pick``, among what ``remote`` has too, if ``path`` is where this job saves: then it continues itself. ``islands``: of
    nodes that share no disk. ``sick``, ``poison_limit``: as of ``select``."""
    log = adapter.logger()
    root = os.path.realpath(path)
    root = os.path.dirname(root) if folder_rank(os.path.basename(root)) is not None else root
    if root not in _saved_to(config) and os.path.join(root, FOLDER) in _saved_to(config):
        root = os.path.join(root, FOLDER)                       # the output folder was given, and nothing is in it yet
    if root not in _saved_to(config):
        log.info("mindresume: %s is not looked at: load_checkpoint is %s, not where this job saves to", remote.url, path)
        return pick()
    return restore.Restore(storage, remote, root, group, None if converts else group.size, named,
                           lambda text: log.info("mindresume: %s", text),
                           lambda text: log.warning("mindresume: %s", text), islands, sick, poison_limit).choose(pick)


def _saved_to(config: Any) -> set[str]:
    """Roots of the CheckpointMonitor. In Checkpoint 1.0 a folder of its own lies in ``directory``, in 2.0 that is it."""
    given = [callback.get("directory") for callback in config.get("callbacks") or [] if callback.get("type") == adapter.ALIAS]
    folders = [folder for folder in given if folder]
    found = [*folders, *(os.path.join(folder, "checkpoint") for folder in folders)]
    return {os.path.realpath(folder) for folder in found or [os.path.join(adapter.output_root(), "checkpoint")]}


def number_runs(remote: Remote | None, storage: Storage, root: str) -> None:
    """So that the run of this job is later than all at the url, on an empty disk too. For rank 0, before it claims ``root``."""
    if remote is None:
        return
    try:
        restore.trace(storage, remote, root)
    except RemoteError as error:                    # uploads will fail, or find the later run, and say so
        adapter.logger().warning("mindresume: %s", error)
