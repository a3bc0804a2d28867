"""Reads and writes the folder in which a training publishes weights (setting ``publish``).

    with mindresume.published("weights") as folder:     # such as weights/step-500
        model = AutoModelForCausalLM.from_pretrained(folder)

    weights/LATEST              the name of the newest folder, replaced atomically
    weights/step-500            what ``mindresume export-hf`` writes of step 500
    weights/.work               of the publisher: what is half-written or being removed

A reader holds a shared lock (flock) on ``config.json`` of its folder, and then looks whether the
path still leads to the file that it has locked. The publisher renames a folder away only while it
has the exclusive lock, so one of both sees the other. Locks end with their process.

``python -m mindresume.api.publication REQUEST`` publishes one step; the training starts it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from mindresume import runtime
from mindresume.api import catalog
from mindresume.api.conversion import export_hf
from mindresume.errors import (
    ConfigError,
    CorruptFileError,
    MindResumeError,
    MissingCheckpointError,
    SaveError,
)
from mindresume.events import Emit, Event, PublishFailed, WeightsPublished, ignore, warning
from mindresume.formats.consolidated import read_conversion_manifest
from mindresume.formats.huggingface import CONFIG
from mindresume.model.training_state import crosses_multiple
from mindresume.settings import PublishSettings
from mindresume.storage import Storage, error_text, publish, read_bytes, remove_tree
from mindresume.storage.posix import PosixStorage

LATEST, WORK, _LOCK = "LATEST", ".work", "lock"
_FOLDER = re.compile(r"step-([0-9]{1,18})")
_PATIENCE, _PAUSE = 30.0, 0.1  # seconds for which a reader looks for the folder that LATEST names
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@contextmanager
def published(dir: str | os.PathLike[str]) -> Iterator[str]:
    """Holds the newest weights that a training has published, until the end of the block: they are
    not removed meanwhile.

    Args:
        dir: The setting ``publish.dir`` of the training.

    Yields:
        The path of the folder: a Hugging Face model without tokenizer.

    Raises:
        MissingCheckpointError: Nothing is published there.
        OSError: It cannot be read.
    """
    storage, folder = PosixStorage(), os.fspath(dir)
    until = runtime.monotonic() + _PATIENCE
    while True:
        try:
            name = read_bytes(storage, os.path.join(folder, LATEST), 64).decode().strip()
        except FileNotFoundError:
            raise MissingCheckpointError(
                f"{folder} has no file {LATEST}: no weights are published there yet"
            ) from None
        path = os.path.join(folder, os.path.basename(name))
        if (lock := _hold(os.path.join(path, CONFIG))) is not None:
            break
        if runtime.monotonic() > until:
            raise MissingCheckpointError(
                f"{folder}/{LATEST} names {name!r}, which is not there; the next publication of "
                "the training mends this"
            )
        runtime.sleep(_PAUSE)
    with lock:
        yield path


def _hold(path: str) -> BinaryIO | None:
    """Locks a file until it is closed. Returns None if it is gone, or another one has its name."""
    with suppress(FileNotFoundError):
        lock = open(path, "rb")  # noqa: SIM115  the caller closes it
        with suppress(OSError):  # where there are no locks, nothing is removed
            fcntl.flock(lock, fcntl.LOCK_SH)
        if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
            return lock
    return None


# ---- the process that publishes ------------------------------------------------------------------


def publish_step(
    settings: PublishSettings, root: str, step: int, catches_up: bool = False, emit: Emit = ignore
) -> None:
    """Publishes the weights of a committed step. Waits for the process of an earlier job that still
    publishes, and removes what a dead one left.

    Args:
        settings: what is published, and where.
        root: the checkpoint directory.
        step: the step.
        catches_up: publishes the newest committed step up to ``step``, if it is due.
        emit: receives WeightsPublished, unless there is nothing to do.

    Raises:
        MindResumeError: as for ``export_hf``; or a reader holds other weights of this step.
        OSError: ``settings.dir`` cannot be written.
    """
    storage, folder = PosixStorage(), os.path.abspath(settings.dir)
    work, began = os.path.join(folder, WORK), runtime.monotonic()
    storage.make_folder(work)
    with open(os.path.join(work, _LOCK), "w", encoding="utf-8") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if catches_up:
            steps = catalog.open(root, missing_ok=True).steps()
            step = max((found for found in steps if found <= step), default=0)
            before = [found for found in _published(storage, folder) if found <= step]
            if not crosses_multiple(max(before, default=0), step, settings.every_steps):
                return
        name = f"step-{step}"
        made, target = os.path.join(work, name), os.path.join(folder, name)
        for left in storage.list(work):
            # a started export of this step continues
            if left != _LOCK and not left.startswith(f".{name}."):
                remove_tree(storage, os.path.join(work, left))
        config, dtype = settings.config, settings.dtype
        size = export_hf(
            root, made, step=step, config=config, dtype=dtype, workers=1
        ).bytes_to_write
        if storage.status(target) is not None:  # of a training that went back
            _take_away(storage, folder, name)
        storage.rename(made, target)
        storage.sync(folder)
        newest = os.path.join(work, LATEST)
        publish(storage, newest, [f"{name}\n".encode()], name)
        storage.rename(newest, os.path.join(folder, LATEST))
        storage.sync(folder)
        # later steps are those of a training that went back
        rows = sorted(_published(storage, folder), key=lambda found: (found <= step, found))
        for old in rows[: -settings.keep]:
            try:
                _take_away(storage, folder, f"step-{old}")
            except SaveError:  # a reader holds it
                continue
            except OSError as error:
                emit(warning(f"{folder}: old weights are not removed: {error_text(error)}"))
    emit(WeightsPublished(step, target, size, runtime.monotonic() - began))


def _published(storage: Storage, folder: str) -> list[int]:
    """Returns the steps that are published in ``folder``, and no other folder that is there."""
    found = map(_FOLDER.fullmatch, storage.list(folder))
    return [int(match[1]) for match in found if match and _is_own(storage, folder, match[0])]


def _is_own(storage: Storage, folder: str, name: str) -> bool:
    with suppress(CorruptFileError):
        return read_conversion_manifest(storage, os.path.join(folder, name)) is not None
    return False


def _take_away(storage: Storage, folder: str, name: str) -> None:
    """Removes published weights. Raises SaveError if a reader holds them, and ConfigError if they
    are something else."""
    path, gone = os.path.join(folder, name), os.path.join(folder, WORK, f"{name}.removed")
    if not _is_own(storage, folder, name):
        raise ConfigError(f"{path} holds no published weights; move it away")
    with open(os.path.join(path, CONFIG), "r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SaveError(f"{path} is held by a reader (docs/publish.md)") from None
        storage.rename(path, gone)
    remove_tree(storage, gone)


def main() -> None:
    """Publishes the step of the request, and writes events as lines of JSON to stdout."""
    with suppress(OSError, AttributeError):
        # a training that dies while this process is stopped would leave it stopped
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGCONT)
    request = json.loads(sys.argv[1])

    def emit(event: Event) -> None:
        print(json.dumps(event.to_json()), flush=True)

    try:
        publish_step(PublishSettings(**request.pop("settings")), **request, emit=emit)
    except (MindResumeError, OSError) as error:
        code = f"[{error.code}] " if isinstance(error, MindResumeError) else ""
        emit(PublishFailed(request["step"], f"{code}{error_text(error)}"))


if __name__ == "__main__":
    main()
