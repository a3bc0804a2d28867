"""Reads the table of upstream symbols, ``upstream.json``: every name of mindformers and MindSpore
that mindresume wraps, overrides, calls or reads; and compares it with the installed packages.

    PROFILES[1].symbols                             # the rows that must hold in this release

    profile, notice = profile_for(installed_versions())
    require_import("mindformers")      # ConfigError names the package that is absent or incomplete
    off, notices = require(profile)    # ConfigError lists every missing symbol that is needed
    switch_off(off)

A group of the table: module; how its symbols are used (``Kind``); what needs them (``Feature``);
the first and the last release of its package in which they hold, without ``until`` the newest one
that is known; the symbols, "name" or "name(signature)". The table has its features first.

Each release of mindformers has a ``Profile``: the rows that hold in it and in its MindSpore. They
are compared before anything is patched, so that a release that renamed a function is refused at the
start and not during a training.
"""

from __future__ import annotations

import dis
import functools
import inspect
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module, metadata
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mindresume.errors import ConfigError

TRAINER = "mindformers.trainer.trainer"
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

Hooks = Mapping[str, Any]  # {name of a symbol: what makes its replacement, of what is there}

_off: set[Feature] = set()  # features switched off in this process, since the installation


@dataclass(frozen=True)
class Finding:
    """Describes a symbol that differs from the table. ``found``: its signature, None: it is
    absent."""

    symbol: Symbol
    found: str | None
    # only what no call of ours depends on differs: calls work as before
    compatible: bool = False

    def __str__(self) -> str:
        expected = "" if self.symbol.signature is None else f"expected ({self.symbol.signature}), "
        found = "it is absent" if self.found is None else f"found ({self.found})"
        return (
            f"{self.symbol.path}: {expected}{found}; {self.symbol.kind.value}, needed by: "
            f"{self.symbol.feature.name}"
        )


def installed_versions() -> dict[str, str]:
    """Returns the versions of mindformers and mindspore. Raises ConfigError if one is not
    installed."""
    found = {}
    for name in ("mindformers", "mindspore"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise ConfigError(
                f"{name} is not installed; mindresume trains with {PROFILES[0].name} or newer. "
                f"Install it into the environment of {sys.executable}"
            ) from None
    return found


def require_import(module: str) -> None:
    """Imports a module of mindformers. A failed import leaves parts of it behind, and the next one
    fails with another error.

    Raises:
        ConfigError: It tells the first error, and which required package is absent or incomplete.
    """
    try:
        import_module(module)
    except Exception as error:
        what = f"mindformers {metadata.version('mindformers')}" + (
            f": {module}" if "." in module else ""
        )
        raise ConfigError(
            f"{what} cannot be imported: {type(error).__name__}: {error}. {_remedy(error)}"
        ) from error


def _remedy(error: Exception) -> str:
    package = (getattr(error, "name", None) or "").partition(".")[0]
    required = [text.partition(";")[0].strip() for text in metadata.requires("mindformers") or []]
    found = next(
        (text for text in required if _normal(re.split(r"[^\w.-]", text)[0]) == _normal(package)),
        None,
    )
    if found is None:
        return "Install mindformers again, with the packages that it requires"
    there = find_spec(package) is not None
    return f"Install {found}, which it requires" + (
        f": the {package} that is there is incomplete or of another version" * there
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def profile_for(versions: Mapping[str, str]) -> tuple[Profile, str]:
    """Returns the profile of the installed versions, and a notice that is empty if they are tested
    together. An untested release gets the profile of the newest release that is not newer; its rows
    then decide whether the installation is possible.

    Raises:
        ConfigError: mindformers is older than every profile.
    """
    release = numbers(versions["mindformers"])
    older = [
        profile
        for profile in PROFILES
        if numbers(profile.versions["mindformers"])[:2] <= release[:2]
    ]
    if not older:
        raise ConfigError(
            f"mindformers {versions['mindformers']} is installed; mindresume needs "
            f"{PROFILES[0].versions['mindformers']} or newer. Install a newer release, or train "
            "without mindresume"
        )
    profile = older[-1]
    untested = [
        f"{name} {versions[name]} is installed; mindresume is tested with {name} {tested}"
        for name, tested in profile.versions.items()
        if numbers(versions[name])[:2] != numbers(tested)[:2]
    ]
    return profile, "; ".join(untested)


def resolve(symbol: Symbol) -> Any:
    """Returns the object of a symbol: a descriptor of a class unchanged; None for an attribute that
    the methods of the class set.

    Raises:
        AttributeError, ImportError: It is absent.
    """
    found: Any = import_module(symbol.module)
    for part in symbol.name.split("."):
        if not isinstance(found, type):
            found = getattr(found, part)
        elif symbol.kind is Kind.REPLACED:
            try:
                # an inherited method would be replaced for this class alone
                found = found.__dict__[part]
            except KeyError as error:
                raise AttributeError(f"{found.__name__} does not define {part}") from error
        else:
            found = (
                None
                if part in _assigned(found) and not hasattr(found, part)
                else inspect.getattr_static(found, part)
            )
    return found


def check(symbols: Iterable[Symbol], hooks: Hooks = MappingProxyType({})) -> list[Finding]:
    """Returns every symbol that is absent or has another signature than expected. Wrappers pass
    everything on as it came, so of a symbol that one of ``hooks`` wraps only the names of the
    parameters that it looks up matter."""
    findings = []
    for symbol in symbols:
        try:
            found = resolve(symbol)
        except (ImportError, AttributeError):
            findings.append(Finding(symbol, None))
            continue
        if symbol.signature is not None and (text := signature_text(found)) != symbol.signature:
            looked_up = (
                getattr(hooks.get(symbol.name), "looked_up", None) if symbol.is_wrapped else None
            )
            findings.append(Finding(symbol, text, _compatible(symbol.signature, text, looked_up)))
    return findings


def require(
    profile: Profile, hooks: Hooks = MappingProxyType({})
) -> tuple[frozenset[Feature], list[str]]:
    """Compares all rows of ``profile`` with the installed packages. ``hooks``: as for ``check``.

    Returns:
        The features to switch off, and the notices about them.
    Raises:
        ConfigError: It lists every missing symbol that mindresume cannot work without.
    """
    findings = check(profile.symbols, hooks)
    serious = [finding for finding in findings if not finding.compatible]
    refused = [finding for finding in serious if not finding.symbol.feature.without]
    if refused:
        installed = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
        wanted = " and ".join(f"{name} {version}" for name, version in profile.versions.items())
        raise ConfigError(
            f"mindresume cannot be used with {installed}: {len(refused)} of {len(profile.symbols)} "
            f"symbols differ from {profile.name}:"
            + "".join(f"\n  {finding}" for finding in refused)
            + f"\nInstall {wanted}, or train without mindresume"
        )
    off = frozenset(finding.symbol.feature for finding in serious)
    later = [
        f"{feature.name} (since {feature.since}; {feature.without})" for feature in profile.off
    ]
    notices = [f"not available in {profile.name}: " + "; ".join(later)] if later else []
    notices += [
        f"{feature.name} is switched off: {feature.without}. "
        + "; ".join(str(finding) for finding in serious if finding.symbol.feature == feature)
        for feature in sorted(off, key=attrgetter("name"))
    ]
    changed = [str(finding) for finding in findings if finding.compatible]
    if changed:
        notices.append(
            "these symbols differ from "
            + profile.name
            + " without an effect on mindresume: "
            + "; ".join(changed)
        )
    return off.union(profile.off), notices


def refuse_if_off(feature: Feature) -> None:
    """Raises ConfigError if the configuration asks for a feature that is switched off."""
    if is_off(feature):
        raise ConfigError(
            f"mindformers {installed_versions()['mindformers']} has no {feature.name}; "
            f"{feature.without}"
        )


def switch_off(features: Iterable[Feature]) -> None:
    """Sets the features that this process switches off."""
    _off.clear()
    _off.update(features)


def is_off(feature: Feature) -> bool:
    """Returns whether ``feature`` is switched off."""
    return feature in _off


def signature_text(function: Any) -> str:
    """Returns the parameters without annotations: ``self, a, b=None, *args, **kwargs``. ``...``
    stands for a default that is no constant."""
    try:
        signature = inspect.signature(
            function.__func__ if isinstance(function, (classmethod, staticmethod)) else function
        )
    except (TypeError, ValueError):
        return "unknown"
    return ", ".join(map(_parameter_text, signature.parameters.values()))


def _parameter_text(parameter: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(
        parameter.kind, ""
    )
    default = parameter.default
    if default is inspect.Parameter.empty:
        return star + parameter.name
    return (
        f"{parameter.name}={default!r}"
        if default is None or isinstance(default, (bool, int, float, str, tuple))
        else f"{parameter.name}=..."
    )


def _compatible(expected: str, found: str, looked_up: Collection[str] | None = None) -> bool:
    """Returns whether every call that fits ``expected`` fits ``found`` with the same meaning.
    ``*args, **kwargs`` may take optional parameters, as in another package's wrapper.
    ``looked_up``: the parameters whose names matter; None: all."""
    wanted, there = _parameters(expected), _parameters(found)
    takes_any = {"*args", "**kwargs"} <= there.keys()
    if found == "unknown" or any(name.startswith("*") and name not in there for name in wanted):
        return False
    rows = [row for row in wanted.items() if not row[0].startswith("*")]
    named = [row for row in there.items() if not row[0].startswith("*")]
    head, extra = named[: len(rows)], named[len(rows) :]
    swallowed = rows[len(head) :]
    fits = all(
        (
            name == expected_name
            or looked_up is not None
            and {name, expected_name}.isdisjoint(looked_up)
        )
        and (has_default or not expected_default)
        for (name, has_default), (expected_name, expected_default) in zip(head, rows, strict=False)
    )
    return (
        fits
        and all(has_default for _, has_default in extra)
        and (not swallowed or takes_any and all(has_default for _, has_default in swallowed))
    )


def _parameters(signature: str) -> dict[str, bool]:
    """Returns {name: whether it has a default}, in order."""
    return {
        name: bool(default) for name, default in re.findall(r"(?:^|, )(\*{0,2}\w+)(=?)", signature)
    }


@functools.cache
def _assigned(holder: type) -> frozenset[str]:
    """Returns the attributes that the methods of a class set on their instance."""
    methods = (
        inspect.unwrap(value)
        for base in holder.__mro__
        for value in vars(base).values()
        if inspect.isfunction(value)
    )
    return frozenset(
        step.argval
        for method in methods
        if inspect.isfunction(method)
        for step in dis.get_instructions(method)
        if step.opname == "STORE_ATTR"
    )
