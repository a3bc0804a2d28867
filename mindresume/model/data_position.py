"""Defines which data set a training reads, and how far it has read it.

A position counts passes and samples, not steps. It therefore stays valid when the global batch size changes, and when the data
set was replaced during the training: step counts then say nothing about the data.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mindresume.typed import Count

MAX_IDENTITY = 64               # keys of an identity
MAX_TEXT = 256                  # characters of one value: every rank records them
IGNORE_KEY = "ignore_data_skip"
SKIP_KEY = "data_skip_steps"


@dataclass(frozen=True)
class DataRequest:
    """The configuration's request for the data of a resume.

    Attributes:
        ignore: start at the beginning of the data set (``ignore_data_skip``).
        skip: number of steps to skip (``data_skip_steps``); None: not set. mindformers treats 0 as not set, too.
    """
    ignore: bool = False
    skip: int | None = None

    def __str__(self) -> str:
        return f"{IGNORE_KEY}: True" if self.ignore else f"{SKIP_KEY}: {self.skip}" if self.skip else ""


@dataclass(frozen=True)
class DataPosition:
    """A position in a data set.

    Attributes:
        passes: completed passes over the data set.
        samples: samples read in the current pass.
        first_epoch: epochs of the training that were completed before the first pass over this data set; 0 for the first data
            set.
        declared: how the configuration declared that this data set starts at first_epoch; empty if it did not.
        identity: fingerprint of the data set (resume/dataset_fingerprint.py); empty if unknown.
    """
    passes: Count
    samples: Count
    first_epoch: int = 0
    declared: str = ""
    identity: Mapping[str, str] = field(default_factory=dict, hash=False)

    def steps(self, size: int, batch: int) -> int:
        """Returns the number of whole steps from the beginning of the data set. ``size``: steps in a pass; ``batch``: samples
        in a step."""
        return self.passes * size + min(self.samples // batch, size)

    def after(self, steps: int, size: int, batch: int) -> DataPosition:
        """Returns the position ``steps`` steps later, in a run with ``size`` steps in a pass and ``batch`` samples in a step."""
        passes, within = divmod(self.steps(size, batch) + steps, size)
        return replace(self, passes=passes, samples=within * batch)
