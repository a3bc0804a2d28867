"""Writes a parsed command line into a configuration of nested dictionaries and lists.

notes = apply(config, launch)      # then print the notes
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from mindresume.errors import ConfigError
from mindresume.launch.arguments import FLAGS, RUN_MODES, Launch
from mindresume.resume.progress import lift_data_skip

SHIM_CLASS = "mindresume_plugin.MindResume"
PREDICT_MODES = ("predict", "predict_with_train_model")
# Top-level keys that mindformers or mindresume read, although not every configuration has them by
# default.
KNOWN_KEYS = {
    "checkpoint",
    "mindresume",
    "remove_redundancy",
    "resume_by_last_timestamp_ckpt",
    "use_graceful_exit",
    "use_checkpoint_health_monitor",
    "mindio_pool_capacity",
    "rank_id",
}
SECTION_KEYS = {
    "load_checkpoint": "load_path",
    "balanced_load": "load_balanced",
    "resume_training": "no_load_optim",
    "reshard_worker_num": "reshard_worker_num",
}
IMAGES = (".jpg", ".jpeg", ".png", ".bmp")
MODALITIES = {"image": IMAGES, "video": (".mp4", ".avi", ".mkv")}


def apply(config: MutableMapping, launch: Launch) -> list[str]:
    """Sets everything that the command line gives, in the order: flags, --options, late flags, free
    keys; the last one wins.

    Returns:
        Notes for the user, one sentence each.
    Raises:
        ConfigError: A key has no parent, an index or the run mode is wrong.
    """
    notes = drop_shim(config) + lift_data_skip(config)
    if "run_mode" in launch.flags:
        config["run_mode"] = launch.flags["run_mode"]
    _apply_flags(config, launch, late=False)
    for key, value in launch.options:
        notes += set_key(config, key, value, f"--options {key}")
    if config.get("run_mode") not in RUN_MODES:
        raise ConfigError(
            f"run_mode is {config.get('run_mode')!r}; expected one of {', '.join(RUN_MODES)}. "
            f"Set it in the configuration or with --run_mode."
        )
    _apply_flags(config, launch, late=True)
    for key, value in launch.free:
        is_new = "." not in key and key not in config and key not in KNOWN_KEYS
        near = (
            difflib.get_close_matches(key, [*FLAGS, "config", "options", "no-mindresume"], 1, 0.85)
            if is_new
            else []
        )
        # a training without its ``--load_checkpoint`` would start from random weights
        if near:
            raise ConfigError(
                f"--{key} is neither a flag nor a key of the configuration; did you mean "
                f"--{near[0]}?"
            )
        notes += set_key(config, key, value, f"--{key}")
    given = {*launch.flags, *(key for key, _ in launch.options), *(key for key, _ in launch.free)}
    return notes + lift_data_skip(config) + into_section(config, given)


def into_section(config: MutableMapping, given: Collection[str]) -> list[str]:
    """Writes the flags of the load into the ``checkpoint:`` section too, where the section sets the
    same thing: mindformers would use the section alone
    (trainer/utils.py:compatible_with_both_old_new_config). Returns notes."""
    section, notes = config.get("checkpoint"), []
    for old, new in SECTION_KEYS.items():
        if not isinstance(section, MutableMapping) or old not in given or section.get(new) is None:
            continue
        value = not config[old] if new == "no_load_optim" else config[old]
        if section[new] != value:
            notes.append(f"--{old} wins over checkpoint.{new}: {section[new]!r}")
            section[new] = value
    return notes


def set_key(config: MutableMapping, key: str, value: Any, origin: str) -> list[str]:
    """Sets ``a.b.1.c``; numbers index lists. The parents must exist; if the last part is new, a
    note says so.

    Args:
        origin: the argument as the user wrote it, for messages.
    Raises:
        ConfigError: A parent is missing, or has no keys.
    """
    *parents, last = key.split(".")
    node, path = config, ""
    for part in parents:
        node, path = _child(node, part, path, origin), f"{path}.{part}" if path else part
    if isinstance(node, list):
        node[_index(node, last, path, origin)] = value
        return []
    if not isinstance(node, MutableMapping):
        raise ConfigError(
            f"{origin}: {path or 'the configuration'} is {_describe(node)}, so it has no key "
            f"{last!r}. To replace all of it: {path}=VALUE."
        )
    if not last:
        raise ConfigError(f"{origin}: the key {key!r} ends in a dot.")
    new = last not in node and (parents or last not in KNOWN_KEYS)
    node[last] = _as_config(value, node, origin)
    return [_new_key_note(node, last, path, origin)] if new else []


def drop_shim(config: Mapping) -> list[str]:
    """Removes the line that loads mindresume in mindformers' own run_mindformer.py; this script
    loads it by itself. Returns notes."""
    trainer = config.get("trainer")
    if isinstance(trainer, MutableMapping) and trainer.get("auto_register") == SHIM_CLASS:
        del trainer["auto_register"]
        return [
            f"trainer.auto_register: {SHIM_CLASS} is not needed with this script, and is ignored"
        ]
    return []


def _apply_flags(config: MutableMapping, launch: Launch, late: bool) -> None:
    for name, value in launch.flags.items():
        flag = FLAGS[name]
        if flag.late != late or (name in ("train_dataset_dir", "eval_dataset_dir") and not value):
            continue
        if name == "strategy_load_checkpoint":
            set_key(config, "parallel.strategy_ckpt_load_file", strategy_file(value), f"--{name}")
        elif name == "num_samples":
            # a training without evaluation has no eval_dataset
            for section in ("train_dataset", "eval_dataset"):
                if loader := (config.get(section) or {}).get("data_loader"):
                    loader["num_samples"] = value
        elif flag.key:
            set_key(config, flag.key, value, f"--{name}")
    if late and config["run_mode"] in PREDICT_MODES:
        _apply_predict(config, launch.flags)


def strategy_file(path: str) -> str:
    """Returns a strategy file; in a folder the only .ckpt file, else the one of this rank. Raises
    ConfigError if that is ambiguous."""
    if not os.path.isdir(path):
        return path
    files = sorted(name for name in os.listdir(path) if name.endswith(".ckpt"))
    own = [
        name for name in files if re.search(rf"rank_{os.environ.get('RANK_ID', '0')}\.ckpt$", name)
    ]
    found = files if len(files) == 1 else own
    if len(found) != 1:
        raise ConfigError(
            f"--strategy_load_checkpoint: {path} holds {len(files)} files *.ckpt"
            f"{', ' + str(len(own)) + ' of them of this rank' if files else ''}; name the file "
            "itself."
        )
    return os.path.join(path, found[0])


def _apply_predict(config: MutableMapping, flags: Mapping[str, Any]) -> None:
    config["input_data"] = predict_input(flags.get("predict_data"), flags.get("modal_type"))
    if "predict_batch_size" in flags:
        config["predict_batch_size"] = flags["predict_batch_size"]
    model = (config.get("model") or {}).get("model_config") or {}
    if (model.get("pet_config") or {}).get("pet_type") == "slora":
        config["adapter_id"] = flags.get("adapter_id")


def predict_input(data: list[str] | None, modal_types: list[str] | None) -> Any:
    """Returns the argument of Trainer.predict: None, a text, a list of texts or files, or
    [[{modality: text or file}, ...]].

    One folder becomes the list of the images below it; a backslash and n in a text become a line
    break.
    """
    if modal_types is not None:
        return [_multi_modal(data, modal_types)]
    if not data or len(data) > 1:
        return data
    if not os.path.isdir(data[0]):
        return data[0].replace(r"\n", "\n")
    return sorted(
        os.path.join(root, name)
        for root, _, names in os.walk(data[0])
        for name in names
        if name.lower().endswith(IMAGES)
    )


def _multi_modal(data: list[str] | None, modal_types: list[str]) -> list[dict[str, str]]:
    if data is None or len(data) != len(modal_types):
        raise ConfigError(
            f"--modal_type names {len(modal_types)} kinds for {len(data or ())} values of "
            f"--predict_data; give one kind for each value."
        )
    query = []
    for value, kind in zip(data, (kind.lower() for kind in modal_types), strict=True):
        if kind != "text" and kind not in MODALITIES:
            raise ConfigError(f"--modal_type {kind}: expected text, {', '.join(MODALITIES)}.")
        if kind != "text" and not value.lower().endswith(MODALITIES[kind]):
            raise ConfigError(
                f"--predict_data {value}: a file of kind {kind} ends in one of "
                f"{', '.join(MODALITIES[kind])}."
            )
        query.append({kind: value})
    return query


def _child(node: Any, part: str, path: str, origin: str) -> Any:
    """Returns the child ``part`` of ``node``. Raises ConfigError that names what is missing and
    lists what exists."""
    if isinstance(node, (list, tuple)):
        return node[_index(node, part, path, origin)]
    if isinstance(node, Mapping) and part in node:
        return node[part]
    here = path or "the configuration"
    if isinstance(node, Mapping):
        near = difflib.get_close_matches(part, map(str, node), 1)
        whole = f"{path}.{part}" if path else part
        raise ConfigError(
            f"{origin}: {here} has no key "
            f"{part!r}{f' (did you mean {near[0]!r}?)' if near else ''}; "
            f"it has: {', '.join(sorted(map(str, node))) or 'nothing'}. "
            f"To add it, give all of it: {whole}='{{key: value}}'."
        )
    raise ConfigError(f"{origin}: {here} is {_describe(node)}, so it has no key {part!r}.")


def _index(node: list | tuple, part: str, path: str, origin: str) -> int:
    """Returns ``part`` as an index of the list at ``path``. Raises ConfigError if it is none."""
    entries = ", ".join(
        f"{i}: {item.get('type', '...') if isinstance(item, Mapping) else repr(item)}"
        for i, item in enumerate(node)
    )
    if not re.fullmatch(r"\d+", part) or int(part) >= len(node):
        raise ConfigError(
            f"{origin}: {path} is a list of {len(node)} entries, {part!r} is none of them; "
            f"it has: {entries or 'nothing'}."
        )
    return int(part)


def _describe(node: Any) -> str:
    """Returns a value as a phrase for messages."""
    return "empty" if node is None else f"{node!r}, not a section"


def _as_config(value: Any, parent: MutableMapping, origin: str) -> Any:
    """Converts a dictionary to the type of the configuration, which reads its keys as
    attributes."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str) for key in value):
        raise ConfigError(
            f"{origin}: keys of a section must be text, got {list(value)!r}; put numbers in quotes."
        )
    return type(parent)(**value)


def _new_key_note(node: Mapping, last: str, path: str, origin: str) -> str:
    near = difflib.get_close_matches(last, [str(key) for key in node if key != last], 1, 0.8)
    return f"{origin} adds a key that {path or 'the configuration'} did not have" + (
        f"; did you mean {near[0]!r}?" if near else ""
    )
