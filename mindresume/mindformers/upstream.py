"""Reads the table of upstream symbols, ``upstream.json``: every name of mindformers and MindSpore
that mindresume wraps, overrides, calls or reads.

    PROFILES[1].symbols                             # the rows that must hold in this release

A group of the table: module; how its symbols are used (``Kind``); what needs them (``Feature``);
the first and the last release of its package in which they hold, without ``until`` the newest one
that is known; the symbols, "name" or "name(signature)". The table has its features first.

Each release of mindformers has a ``Profile``: the rows that hold in it and in its MindSpore. Before
anything is patched, ``upstream_check`` compares them with the installed packages, so that a release
that renamed a function is refused at the start and not during a training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

TRAINER = "mindformers.trainer.trainer"
BASE_TRAINER = "mindformers.trainer.base_trainer"
TRAINER_UTILS = "mindformers.trainer.utils"
CAUSAL_TRAINER = "mindformers.trainer.causal_language_modeling.causal_language_modeling"
PYNATIVE_TRAINER = "mindformers.pynative.trainer.trainer"

_TABLE: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("upstream.json").read_text(encoding="utf-8")
)


class Kind(Enum):
    """Says how a symbol is used."""

    WRAPPED = "function wrapped"  # replaced in its module by a function that calls it
    REPLACED = "class attribute replaced"  # the same for a method, in its class
    OVERRIDDEN = "method overridden"  # by a subclass, which calls it
    CALLED = "called"
    READ = "attribute read"
    # called or read, though upstream does not publish it
    INTERNAL = "internal name used"


@dataclass(frozen=True)
class Feature:
    """Names what needs a symbol. ``without``: what is lost when the feature is switched off,
    because a symbol is absent or has another signature; empty: the installation is refused
    instead. ``since``: the first release in which mindformers itself has it; empty: all have."""

    name: str
    without: str = ""
    since: str = ""


FEATURES = {name: Feature(name, **row) for name, row in _TABLE["features"].items()}
TENSORBOARD = FEATURES["TensorBoard"]
RESCUE = FEATURES["saving when ranks are lost"]
TRANSFORM = FEATURES["transform_engine: mindspore"]
CHECKPOINT_SECTION = FEATURES["the section checkpoint:"]
PRETRAINED = FEATURES["Hugging Face weights in Checkpoint 2.0"]


@dataclass(frozen=True)
class Symbol:
    """Describes one row of the table. ``name``: dotted, within ``module``. ``signature``: parameter
    names and defaults; None: only the existence is checked. ``since``, ``until``: first and last
    release of its package in which the row holds; empty ``until``: it holds in the newest one that
    is known."""

    module: str
    name: str
    signature: str | None
    kind: Kind
    feature: Feature
    since: str
    until: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def is_wrapped(self) -> bool:
        return self.kind in (Kind.WRAPPED, Kind.REPLACED)

    def holds_in(self, release: str) -> bool:
        """Returns whether the row holds in ``release`` of its package."""
        return numbers(self.since) <= numbers(release) and (
            not self.until or numbers(release) <= numbers(self.until)
        )


@dataclass(frozen=True)
class Profile:
    """Describes a release of mindformers with the MindSpore with which it is tested. ``versions``:
    of the two packages. ``symbols``: must hold when mindresume is installed; ``pynative``: when the
    PyNative trainer is imported."""

    versions: Mapping[str, str]
    symbols: tuple[Symbol, ...]
    pynative: tuple[Symbol, ...] = ()

    @property
    def off(self) -> list[Feature]:
        """Returns the features that mindformers itself has only in later releases."""
        release = numbers(self.versions["mindformers"])
        return [each for each in FEATURES.values() if release < numbers(each.since)]

    @property
    def name(self) -> str:
        return f"mindformers {self.versions['mindformers']}"


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version: (1, 9, 0) of "1.9.0rc1"."""
    return tuple(int(found) for found in re.findall(r"\d+", re.split(r"[a-zA-Z+]", version)[0]))


def _symbols(group: Mapping[str, Any]) -> Iterator[Symbol]:
    """Yields the rows of one group of the table."""
    for text in group["symbols"]:
        name, parenthesis, rest = text.partition("(")
        yield Symbol(
            group["module"],
            name,
            rest.removesuffix(")") if parenthesis else None,
            Kind(group["kind"]),
            FEATURES[group["feature"]],
            group["since"],
            group.get("until", ""),
        )


def _rows(table: str) -> tuple[Symbol, ...]:
    return tuple(row for group in _TABLE[table] for row in _symbols(group))


MINDFORMERS = _rows("mindformers")
MINDSPORE = _rows("mindspore")
PYNATIVE = _rows("pynative")  # compared when the PyNative trainer is imported


def _profile(mindformers: str, mindspore: str) -> Profile:
    versions = {"mindformers": mindformers, "mindspore": mindspore}
    symbols, pynative = (
        tuple(row for row in table if row.holds_in(versions[row.module.split(".")[0]]))
        for table in (MINDFORMERS + MINDSPORE, PYNATIVE)
    )
    return Profile(versions, symbols, pynative)


# From the oldest to the newest. mindformers 2.1.0 asks for mindspore 2.11, of which there is no
# package to test with.
PROFILES = tuple(
    _profile(*pair)
    for pair in (("1.8.0", "2.7.2"), ("1.9.0", "2.9.0"), ("2.0.0", "2.10.0"), ("2.1.0", "2.10.0"))
)
