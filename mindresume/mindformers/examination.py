"""Examines mindformers and a configuration for ``mindresume doctor``, which runs this module in a
process of its own: an import of mindspore can end a process.

    python -m mindresume.mindformers.examination [CONFIG]

The last line on standard output is a JSON document: ``checks``, [what, state, found, what to do] of
each; ``output_dir``; ``memory_dir``, if saves go to memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

from mindresume.errors import ConfigError
from mindresume.mindformers import adapter, patches, upstream
from mindresume.mindformers.configuration import (
    TRAIN,
    VARIABLES,
    modelarts_variable,
    remote_of,
    request_of_iterations,
    request_of_resume,
    request_of_weights,
)
from mindresume.mindformers.job_start import uses_iterations
from mindresume.settings import Settings

OK, NOTE, WRONG = "ok", "note", "wrong"
Row = tuple[str, str, str, str]
_SHIM = "mindresume_plugin."  # of ``mindresume plugin-path``


def installation() -> Iterator[Row]:
    """Yields what is found out about the installed releases. Raises ConfigError if mindresume
    cannot train with them."""
    versions = upstream.installed_versions()
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    profile, notice = upstream.profile_for(versions)
    yield (
        "releases",
        NOTE if notice else OK,
        notice or f"{found}, which were tested together",
        "docs/releases.md has the releases that are tested" if notice else "",
    )
    upstream.require_import("mindformers")
    off, notices = upstream.require(profile, patches.WRAPPERS)
    upstream.switch_off(off)
    yield (
        "symbols",
        NOTE if notices else OK,
        "; ".join(notices)
        or f"all {len(profile.symbols)} functions and classes of theirs that mindresume uses are "
        "as expected",
        "",
    )


def configuration(path: str) -> tuple[list[Row], dict[str, str]]:
    """Returns what mindresume will do with a configuration, and its folders. Raises ConfigError."""
    import yaml
    from mindformers.tools.register import MindFormerConfig

    if not os.path.isfile(path):
        raise ConfigError(f"{path}: no such file; give the YAML that the training starts with")
    try:
        with open(path, encoding="utf-8") as file:
            plain = yaml.safe_load(file)
        if not isinstance(plain, dict):
            raise ValueError(f"it holds {plain!r:.60}; expected sections and key: value")
        config = MindFormerConfig(path)
    except Exception as error:  # such as YAML that cannot be parsed
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    settings = Settings.load(config.get("mindresume"))
    folders = {"output_dir": str(config.get("output_dir") or "./output")}
    if settings.memory_tier.every_steps:
        folders["memory_dir"] = settings.memory_tier.dir
    if (config.get("context") or {}).get("mode") == 1:
        pynative = "PyNative trainer (context.mode: 1)"
        return [("trainer", OK, pynative, "docs/pynative.md")], folders
    rows = [_activation(config), _saves(config), _resume(config, folders["output_dir"])]
    if (store := remote_of(config)) is not None:
        rows.append(("uploads", OK, f"each checkpoint is uploaded to {store.url}", ""))
    elif config.get("remote_save_url"):
        rows.append(
            (
                "uploads",
                NOTE,
                f"remote_save_url is ignored: none of {', '.join(VARIABLES)} is set here",
                "outside ModelArts give the bucket as s3://, with AWS_ENDPOINT_URL",
            )
        )
    every = settings.memory_tier.every_steps
    rows.append(
        ("memory tier", OK, f"a save in memory every {every} steps" if every else "off", "")
    )
    return rows, folders


def _activation(config: Any) -> Row:
    word = (config.get("trainer") or {}).get("auto_register")
    if word and str(word).startswith(_SHIM):
        return (
            "active",
            OK,
            "trainer.auto_register loads it into mindformers' own run_mindformer.py",
            'start with --register_path "$(mindresume plugin-path)"',
        )
    return (
        "active",
        NOTE,
        "with run_mindformer.py of mindresume; mindformers' own file of this name does not load it",
        "to use mindformers' own, add auto_register: mindresume_plugin.MindResume to trainer:, and "
        'start with --register_path "$(mindresume plugin-path)". The log of a start with '
        "mindresume has lines that begin with mindresume",
    )


def _saves(config: Any) -> Row:
    callbacks = config.get("callbacks") or []
    if not (isinstance(callbacks, list) and all(isinstance(row, dict) for row in callbacks)):
        raise ConfigError(f"callbacks is {callbacks!r:.60}; expected a list of - type: NAME")
    rows = [row for row in callbacks if row.get("type") == adapter.ALIAS]
    if not rows:
        return (
            "saves",
            WRONG,
            "callbacks: has no CheckpointMonitor, so nothing is saved",
            "add - type: CheckpointMonitor with save_checkpoint_steps (README)",
        )
    row = rows[0]
    dialect = "Checkpoint 2.0" if uses_iterations(config) else "Checkpoint 1.0"
    form = row.get("checkpoint_format", "ckpt")
    seconds = row.get("save_checkpoint_seconds")
    interval = f"{seconds} s" if seconds else f"{row.get('save_checkpoint_steps', 1)} steps"
    found = (
        f"{dialect}, {form}, every {interval}, the newest {row.get('keep_checkpoint_max', 5)} stay"
        + (", in the background" if row.get("async_save") else "")
    )
    if row.get("enc_key") is not None:
        return (
            "saves",
            NOTE,
            f"{found}; enc_key is set: encrypted checkpoints are saved and loaded by mindformers "
            "alone",
            "remove enc_key to let mindresume save and resume",
        )
    return "saves", OK, found, ""


def _resume(config: Any, output: str) -> Row:
    if uses_iterations(config):
        request = request_of_iterations(config)
    elif config.get("resume_training"):
        request = request_of_resume(config)
    else:
        request = request_of_weights(config, TRAIN)
    own = os.path.join(output, adapter.CHECKPOINTS)
    if request.path and request.resume:
        found = f"from the newest usable checkpoint in {request.path}"
        if not os.path.exists(request.path):
            found += "; it does not exist yet, so the first start is fresh"
        ways = {os.path.realpath(path) for path in (own, output)}
        if os.path.realpath(request.path) in ways or os.path.isfile(request.path):
            return "resume", OK, found, ""
        elsewhere = f"; this training saves to {own}, where a restart does not look"
        return (
            "resume",
            NOTE,
            found + elsewhere,
            f"to continue after a failure: load_checkpoint: {own}",
        )
    return (
        "resume",
        NOTE,
        f"weights alone, of {request.path}; each start begins at step 0"
        if request.path
        else "each start begins at step 0: load_checkpoint names nothing to resume from",
        f"to continue after a failure: load_checkpoint: {own} and resume_training: True",
    )


def platform() -> Iterator[Row]:
    """Yields what is found of ModelArts."""
    if variable := modelarts_variable():
        yield "ModelArts", OK, f"this job runs there ({variable} is set)", "docs/modelarts.md"


def main(path: str) -> None:
    """Prints the document."""
    rows: list[Row] = []
    folders: dict[str, str] = {}
    stage = "installation"
    try:
        for row in chain(installation(), platform()):  # each as soon as it is known
            rows.append(row)
        if path:
            stage = "configuration"
            more, folders = configuration(path)
            rows += more
    except ConfigError as error:
        rows.append((stage, WRONG, str(error), ""))
    except Exception as error:
        rows.append((stage, WRONG, f"{path}: {type(error).__name__}: {error}", ""))
    if path and stage == "installation":
        rows.append(("configuration", NOTE, "not examined: that needs mindformers", ""))
    print("\n" + json.dumps({"checks": rows, **folders}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
