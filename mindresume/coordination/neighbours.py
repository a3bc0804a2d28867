"""Names what else here takes part in a recovery: mindformers' high availability (MS_ENABLE_TFT),
MindIO, and MindCluster. ``docs/with_mindcluster.md`` says where each row comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

PAGE = "docs/with_mindcluster.md"
VARIABLE = "MS_ENABLE_TFT"
_MINDIO = ("TTP", "UCE", "HCCE", "ARF", "TSP")  # these need the package mindio_ttp
_GIVES_RANKS_AWAY = (*_MINDIO, "RSC")  # with one of these msrun lets taskd start the ranks
# what a flag does, and what to do if it does not go together with mindresume
_FLAGS = {
    "TTP": ("when ranks are lost, the others save the last step; the next start takes it", ""),
    "UCE": ("an error of device memory is repaired in the process; saves go on", ""),
    "HCCE": ("an error of communication is repaired in the process; saves go on", ""),
    "TSP": (
        "MindCluster can pause the training after a step",
        "give mindresume run a --hang-timeout that is longer than a pause",
    ),
    "RSC": ("MindCluster starts all ranks again", ""),
    "ARF": (
        "a rank that is started again alone would select a checkpoint, and wait for the others",
        "remove ARF:1; a restart of all ranks continues from a checkpoint",
    ),
    "TRE": (
        "weights are loaded within the process, without a comparison of their checksums",
        "remove TRE",
    ),
}


@dataclass(frozen=True)
class Neighbour:
    """Describes what was found. ``remedy``: what to do, because it does not go together with
    mindresume as it is; empty: nothing."""

    name: str
    text: str
    remedy: str = ""


def neighbours(environment: Mapping[str, str]) -> Iterator[Neighbour]:
    """Yields what takes part in a recovery of a training with these variables."""
    asked = [
        flag
        for flag, value in re.findall(r"(\w+)\s*:\s*(\d)", environment.get(VARIABLE, ""))
        if value != "0"
    ]
    for flag in asked:
        if flag in _FLAGS:
            yield Neighbour(f"{VARIABLE} {flag}", *_FLAGS[flag])
    if set(asked) & set(_MINDIO) and not _is_installed("mindio_ttp"):
        yield Neighbour(
            "MindIO TTP",
            f"is not installed, but {VARIABLE} needs it: a training on Ascend would not start",
            f"install mindio_ttp, or unset {VARIABLE}",
        )
    if set(asked) & set(_GIVES_RANKS_AWAY) and _is_installed("taskd"):
        yield Neighbour(
            "taskd",
            "is installed: MindCluster, and not msrun, starts and ends the ranks",
            "start without mindresume run and without MSRUN_RESTARTS: one of the two restarts",
        )
    if _is_installed("mindio_acp"):
        yield Neighbour("MindIO ACP", "is installed; saves of mindresume do not pass through it")
    if environment.get("MINDX_TASK_ID"):
        yield Neighbour("MindCluster", "its Ascend Operator has started this pod")


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None
