"""Names and small files of Checkpoint 2.0: iteration folders, weight files, ``common.json``, the tracker.

    latest_checkpointed_iteration.txt               20
    iteration_00000020/common.json
    iteration_00000020/metadata.json                only with two ranks or more; see ``metadata``
    iteration_00000020/qwen3-model-0000003-0000008.safetensors
    iteration_00000020/qwen3-opt-0000003-0000008.safetensors

Converts between bytes and values; opens no file.
"""
from __future__ import annotations

import ast
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from mindresume.errors import CorruptFileError
from mindresume.model.manifest import MAX_NAME
from mindresume.model.training_state import is_count, is_number
from mindresume.tensor_files.header import parse_object

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.json"
METADATA = "metadata.json"
MODEL = "model"
OPTIMIZER = "opt"
MAX_ITERATION = 10**18 - 1
MAX_COMMON = 1 << 20                   # bytes; six numbers need 200
_FOLDER = re.compile(r"iteration_([0-9]{1,18})")
_WEIGHTS = re.compile(r"(?:(?P<prefix>[^/\n]*)-)?(?P<kind>model|opt)-(?P<index>[0-9]{7,18})-(?P<count>[0-9]{7,18})"
                      r"\.safetensors")
_FILE = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]+\.safetensors")
_KEY = re.compile(r"\((?P<name>(?P<quote>['\"]).*(?P=quote)), \((?P<number>0|[1-9][0-9]{0,5}),\)\)", re.DOTALL)
_MAX_KEY = 1 << 16                     # characters
_LATER = ("ckpt_status", "consumed_samples")          # keys of releases after 1.8.0


def iteration_name(step: int) -> str:
    """Returns the name of the folder of ``step`` (mindformers checkpoint/utils.py:get_checkpoint_iter_dir). Raises ValueError
    for a step that no name can express."""
    if not is_count(step, 0, MAX_ITERATION):
        raise ValueError(f"a step is a whole number from 0 to {MAX_ITERATION}, found {step!r}")
    return f"iteration_{step:08d}"


def parse_iteration(name: str) -> int | None:
    """Returns the step of an iteration folder, with any number of digits (documents show 7, mindformers writes 8); None for
    another name."""
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class WeightFile:
    """The parts of a weight file's name.

    Attributes:
        prefix: None if the name has none.
        kind: MODEL or OPTIMIZER.
        index: from 0 to ``count`` - 1; the rank, unless redundancy was removed.
        count: number of files of this kind.
    """
    prefix: str | None
    kind: str
    index: int
    count: int

    def __str__(self) -> str:
        head = "" if self.prefix is None else f"{self.prefix}-"
        return f"{head}{self.kind}-{self.index:07d}-{self.count:07d}.safetensors"


def parse_weight_file(name: str) -> WeightFile | None:
    """Parses a file name by mindformers' rule (checkpoint/utils.py:get_checkpoint_name); returns None for any other name."""
    found = _WEIGHTS.fullmatch(name)
    if not found:
        return None
    file = WeightFile(found["prefix"], found["kind"], int(found["index"]), int(found["count"]))
    return file if file.index < file.count and str(file) == name else None


def is_file_name(name: Any) -> bool:
    """Returns whether ``name`` can be a weight file in the same folder: a string without folders and control characters, in
    UTF-8."""
    return isinstance(name, str) and _FILE.fullmatch(name) is not None and len(name.encode()) <= MAX_NAME


def slice_key(name: str, ordinal: int) -> str:
    """Returns the key of a slice in ``storage_data`` of metadata.json (mindformers
    checkpoint/utils.py:get_sharded_tensor_shard_id)."""
    return str((name, (ordinal,)))


def parse_slice_key(key: str) -> tuple[str, int] | None:
    """Returns (name, ordinal) of a result of ``slice_key``, whatever quotes and commas the name has; None for any other text."""
    found = _KEY.fullmatch(key) if len(key) <= _MAX_KEY else None
    if not found:
        return None
    name = found["name"][1:-1]
    if "\\" in name:
        try:
            name = ast.literal_eval(found["name"])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    # Accepts only Python's own representation, so that a slice has exactly one key.
    return (name, int(found["number"])) if isinstance(name, str) and repr(name) == found["name"] else None


@dataclass(frozen=True)
class CommonInfo:
    """The content of ``common.json``, in the order of mindformers (checkpoint/checkpoint.py:CommonInfo); None means unknown.

    ``step_num`` is the absolute step, ``global_step`` the optimizer's own counter; ``ckpt_status`` is 0 if healthy, 1 if not;
    ``consumed_samples`` (since 2.1.0) counts what a PyNative training has read.
    mindformers divides by ``global_batch_size`` and computes with ``epoch_num`` when it resumes: always write both.
    """
    epoch_num: int | None = None
    step_num: int | None = None
    global_step: int | None = None
    loss_scale: float | None = None
    global_batch_size: int | None = None
    ckpt_status: int | None = None
    consumed_samples: int | None = None


def parse_common(data: bytes, path: str) -> CommonInfo:
    """Parses ``common.json``. Ignores unknown keys (2.1.0 has more); missing ones are None (1.8.0 has no ckpt_status), but
    ``step_num`` is required. Raises CorruptFileError if the file is empty, torn or not an object, or a value has the wrong type.
    """
    if not data:
        raise CorruptFileError(path, "it is empty, expected the JSON object that mindformers writes: the save did not finish")
    if len(data) > MAX_COMMON:
        raise CorruptFileError(path, f"it has {len(data)} bytes, expected a JSON object of at most {MAX_COMMON}")
    found = parse_object(data, path, COMMON)
    if found.get("step_num") is None:
        raise CorruptFileError(path, "step_num is missing, expected the number of the step: it cannot be resumed from")
    return CommonInfo(**{name: _checked(path, name, found.get(name)) for name in CommonInfo.__dataclass_fields__})


def _checked(path: str, name: str, value: Any) -> Any:
    if name == "loss_scale":
        right, expected = is_number(value), "a finite number or null"
    else:
        least = {"global_batch_size": 1, "global_step": -1}.get(name, 0)           # FusedAdamW counts from -1
        right, expected = is_count(value, least), f"a whole number of at least {least} or null"
    if value is not None and not right:
        raise CorruptFileError(path, f"{name} is {value!r}"[:200] + f", expected {expected}")
    return value


def encode_common(common: CommonInfo) -> bytes:
    """Returns the bytes of ``common.json`` as mindformers 1.8.0 writes them. The keys of later releases are only there if they
    have a value: the readers of older releases reject keys that they do not know, and all read a missing one as null.

    Raises:
        ValueError: A value could not be read back.
    """
    row = {key: value for key, value in asdict(common).items() if key not in _LATER or value is not None}
    data = json.dumps(row, ensure_ascii=False, indent=4).encode()
    try:
        parse_common(data, COMMON)
    except CorruptFileError as error:
        raise ValueError(f"these values cannot be written to {COMMON}: {error.reason}") from error
    return data


def parse_tracker(data: bytes) -> int | str:
    """Returns the step in the tracker, or a phrase for why there is none. Allows white space around the number, as people edit
    the file."""
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        return "it is not text, expected the number of a step"
    if not text:
        return "it is empty, expected the number of a step"
    if re.fullmatch(r"-[0-9]+", text):
        return f"{text[:40]!r} is negative, expected the number of a step"
    if not re.fullmatch(r"[0-9]+", text):
        return f"{text[:40]!r} is not a whole number, expected the number of a step"
    digits = text.lstrip("0") or "0"
    if len(digits) > len(str(MAX_ITERATION)):
        return f"a number of {len(digits)} digits, expected the number of a step, at most {MAX_ITERATION}"
    return int(digits)
