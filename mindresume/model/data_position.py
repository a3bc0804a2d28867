"""Which data set a training reads, and how far it has come in it.

A position is counted in passes and samples, not in steps: so it stays true when the global batch size changes, and when the data
set was changed in the middle of a training, after which the steps of the training say nothing about the data.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mindresume.errors import RecordError

MAX_IDENTITY = 64               # keys of an identity
MAX_TEXT = 256                  # characters of one value: every rank records them
IGNORE_KEY = "ignore_data_skip"
SKIP_KEY = "data_skip_steps"


@dataclass(frozen=True)
class DataRequest:
    """What the configuration says of the data of a resume. ``skip``: steps, None: not said (mindformers takes 0 for that too)."""
    ignore: bool = False
    skip: int | None = None

    def __str__(self) -> str:
        return f"{IGNORE_KEY}: True" if self.ignore else f"{SKIP_KEY}: {self.skip}" if self.skip else ""


@dataclass(frozen=True)
class DataPosition:
    """``passes`` over the data set are done, and ``samples`` of the next one. ``first_epoch``: epochs of the training that were
    done when its first pass began; 0 but for a data set that came later. ``declared``: how the configuration said that it
    begins there, empty if it did not. ``identity``: what the data set is known by (resume/dataset_fingerprint.py); empty: not
    known."""
    passes: int = 0
    samples: int = 0
    first_epoch: int = 0
    declared: str = ""
    identity: Mapping[str, str] = field(default_factory=dict, hash=False)

    def steps(self, size: int, batch: int) -> int:
        """Whole steps from the beginning of the data set. ``size``: steps of a pass; ``batch``: samples of a step."""
        return self.passes * size + min(self.samples // batch, size)

    def after(self, steps: int, size: int, batch: int) -> DataPosition:
        """So many steps later, in a run with ``size`` steps a pass of ``batch`` samples each."""
        passes, within = divmod(self.steps(size, batch) + steps, size)
        return replace(self, passes=passes, samples=within * batch)

    def to_json(self) -> dict[str, Any]:
        return {"passes": self.passes, "samples": self.samples, "first_epoch": self.first_epoch, "declared": self.declared,
                "identity": dict(self.identity)}

    @classmethod
    def from_json(cls, value: Any) -> DataPosition:
        """RecordError if it is not what ``to_json`` gives; what it does not know is ignored."""
        if not isinstance(value, dict):
            raise RecordError(f"training state: data is {value!r}"[:200] + ", expected an object")
        passes, samples, first = (value.get(name) for name in ("passes", "samples", "first_epoch"))
        declared, identity = value.get("declared"), value.get("identity")
        if not all(type(count) is int and 0 <= count < 2**63 for count in (passes, samples)) or type(first) is not int \
                or abs(first) >= 2**63:
            raise RecordError(f"training state: data is at pass {passes!r}, sample {samples!r}, epoch {first!r}"[:300]
                              + ", expected whole numbers")
        if not isinstance(declared, str) or not isinstance(identity, dict) or not all(
                isinstance(text, str) for text in identity.values()):
            raise RecordError(f"training state: data is {value!r}"[:300] + ", expected a text declared and an identity of texts")
        return cls(passes, samples, first, declared, identity)
