"""Names of Checkpoint 1.0: folders of ranks, files of weights, ``meta.json``, and the label inside our files.

Names are for people and for mindformers; nothing true is read out of them where there are records.
"""
from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from mindresume.model.file_record import FORMATS
from mindresume.tensor_files import Header

META = "meta.json"
LABEL = "mindresume"                   # key in the metadata of our files: "<run> <step>"
_NAME = re.compile(r"(?P<prefix>.+)_rank_(?P<rank>\d+)(?:_(?P<suffix>\d+))?-(?P<epoch>\d+)_(?P<step>\d+)"
                   r"\.(?P<format>ckpt|safetensors)")
_FOLDER = re.compile(r"rank_(\d+)")
_LABEL = re.compile(r"([^ ]+) ([0-9]{1,18})")


class FileName(NamedTuple):
    """Parts of a file name. ``suffix``: 0 = none; it grows when files of the same prefix exist (document 001)."""
    prefix: str
    rank: int
    suffix: int
    epoch: int
    step: int
    format: str

    def __str__(self) -> str:
        return f"{stem(self.prefix, self.rank, self.suffix)}-{self.epoch}_{self.step}.{self.format}"


def parse_name(name: str) -> FileName | None:
    """None for a name that does not follow the rule."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    return FileName(found["prefix"], int(found["rank"]), int(found["suffix"] or 0), int(found["epoch"]),
                    int(found["step"]), found["format"])


def stem(prefix: str, rank: int, suffix: int) -> str:
    """``{prefix}_rank_{R}[_{n}]``: what documents call the prefix, rank included."""
    return f"{prefix}_rank_{rank}" + (f"_{suffix}" if suffix else "")


def folder_name(rank: int) -> str:
    return f"rank_{rank}"


def folder_rank(name: str) -> int | None:
    found = _FOLDER.fullmatch(name)
    return int(found.group(1)) if found else None


def free_suffix(names: Iterable[str], prefix: str, rank: int) -> int:
    """The smallest suffix larger than all in use for ``prefix``; 0 if no file of that prefix exists."""
    used = [parsed.suffix for parsed in map(parse_name, names) if parsed and (parsed.prefix, parsed.rank) == (prefix, rank)]
    return max(used) + 1 if used else 0


def name_for_rank(name: str, rank: int, fmt: str) -> str:
    """The file that ``resume_training: name`` means on ``rank``: extension completed, rank id replaced (document 001)."""
    if not name.endswith(tuple(f".{known}" for known in FORMATS)):
        name = f"{name}.{fmt}"
    head, dash, tail = name.rpartition("-")
    if not dash:
        return name
    return re.sub(r"_rank_\d+(_\d+)?$", lambda found: f"_rank_{rank}{found.group(1) or ''}", head) + "-" + tail


def meta_json(name: FileName) -> dict[str, object]:
    """Content of ``meta.json`` after a commit of this file (mindformers callback.py:record_last_ckpt_to_json)."""
    return {"last_epoch": name.epoch, "last_step": name.step, "last_ckpt_file": str(name)}


def label(run: str, step: int) -> dict[str, str]:
    """Metadata of our files: tells them from files of mindformers, and the runs apart, even when the records are gone."""
    return {LABEL: f"{run} {step}"}


def parse_label(header: Header) -> tuple[str, int] | None:
    """(run, step) that a file says it is of; None without our label, or with one that we cannot have written."""
    found = _LABEL.fullmatch(header.metadata.get(LABEL, ""))
    return (found[1], int(found[2])) if found else None
