"""Names of Checkpoint 1.0: rank folders, weight files, ``meta.json``, and the label in weight files of mindresume.

Names are for people and for mindformers; where records exist, names are not used as a source.
"""
from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from mindresume.model.manifest import FORMATS, is_run
from mindresume.tensor_files import Header

META = "meta.json"
LABEL = "mindresume"                   # key in the metadata of weight files that mindresume writes: "<run> <step>"
_NAME = re.compile(r"(?P<prefix>.+)_rank_(?P<rank>\d+)(?:_(?P<suffix>\d+))?-(?P<epoch>\d+)_(?P<step>\d+)"
                   r"\.(?P<format>ckpt|safetensors)")
_FOLDER = re.compile(r"rank_(\d+)")
_LABEL = re.compile(r"([^ ]+) ([0-9]{1,18})")


class FileName(NamedTuple):
    """The parts of a weight file's name. ``suffix``: 0 for none; it increases when files with the same prefix exist (document
    001)."""
    prefix: str
    rank: int
    suffix: int
    epoch: int
    step: int
    format: str

    def __str__(self) -> str:
        return f"{stem(self.prefix, self.rank, self.suffix)}-{self.epoch}_{self.step}.{self.format}"


def parse_name(name: str) -> FileName | None:
    """Parses the name of a weight file; returns None for a name of another form."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    return FileName(found["prefix"], int(found["rank"]), int(found["suffix"] or 0), int(found["epoch"]),
                    int(found["step"]), found["format"])


def stem(prefix: str, rank: int, suffix: int) -> str:
    """Returns ``{prefix}_rank_{R}[_{n}]``, which the documents of mindformers call the prefix, including the rank."""
    return f"{prefix}_rank_{rank}" + (f"_{suffix}" if suffix else "")


def folder_name(rank: int) -> str:
    """Returns the name of the folder of ``rank``."""
    return f"rank_{rank}"


def folder_rank(name: str) -> int | None:
    """Returns the rank of a rank folder; None for any other name."""
    found = _FOLDER.fullmatch(name)
    return int(found.group(1)) if found else None


def free_suffix(names: Iterable[str], prefix: str, rank: int) -> int:
    """Returns the smallest suffix larger than all in use for ``prefix``; 0 if no file has that prefix."""
    used = [parsed.suffix for parsed in map(parse_name, names) if parsed and (parsed.prefix, parsed.rank) == (prefix, rank)]
    return max(used) + 1 if used else 0


def name_for_rank(name: str, rank: int, fmt: str) -> str:
    """Returns the file that ``resume_training: name`` means on ``rank``: completes the extension and replaces the rank id
    (document 001)."""
    if not name.endswith(tuple(f".{known}" for known in FORMATS)):
        name = f"{name}.{fmt}"
    head, dash, tail = name.rpartition("-")
    if not dash:
        return name
    return re.sub(r"_rank_\d+(_\d+)?$", lambda found: f"_rank_{rank}{found.group(1) or ''}", head) + "-" + tail


def meta_json(name: FileName) -> dict[str, object]:
    """Returns the content of ``meta.json`` after the commit of this file (mindformers callback.py:record_last_ckpt_to_json)."""
    return {"last_epoch": name.epoch, "last_step": name.step, "last_ckpt_file": str(name)}


def label(run: str, step: int) -> dict[str, str]:
    """Returns the metadata of a weight file of mindresume. It distinguishes the file from those of mindformers and of other runs,
    even if the records are gone."""
    return {LABEL: f"{run} {step}"}


def parse_label(header: Header) -> tuple[str, int] | None:
    """Returns the (run, step) in a file's label; None without a label, or for one that mindresume cannot have written."""
    found = _LABEL.fullmatch(header.metadata.get(LABEL, ""))
    return (found[1], int(found[2])) if found and is_run(found[1]) else None
