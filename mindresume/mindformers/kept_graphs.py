"""Keeps the compiled graph of a training for its next start (setting ``keep_graphs``), with
MindSpore's compile cache.

    before the selection   a digest of all that a graph is made of ─▶ the folder of this rank
                           sealed on every rank ─▶ MindSpore reads it; else it is emptied first
    after the first step   the checksums of its files are sealed

MindSpore compares the script and what it imports outside of the installed packages only, and takes
the n-th file for the n-th graph that a process compiles, whole or torn. So the name of a folder is
a digest of everything, and a seal holds for one start: one that dies before its first step leaves
none, and the next one compiles. A graph that draws random numbers is not kept: it holds seeds of
its start. Nor is one of a training that evaluates: its second graph could be the first of another
start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

import mindresume
from mindresume.coordination.collectives import Group, gather_results
from mindresume.errors import CollectiveError
from mindresume.events import Emit, Notice, warning
from mindresume.mindformers import upstream
from mindresume.mindformers.heartbeat import process_started
from mindresume.storage import error_text

FOLDER = "mindresume_graphs"  # in the output folder
ENABLE, PATH = "MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH"
_SEAL = "sealed.json"
_DIGESTS = 2  # graphs that are kept
# of the environment: what changes how MindSpore compiles, without the place in the cluster
_SETTINGS = re.compile(
    "(MS|ASCEND)_(?!SCHED_|ROLE$|NODE_ID$|NODE_TIMEOUT$|TOPO_|RETRY_|COMPILER_CACHE_)"
)
# when the process began that has imported this; a forked rank has what its standby process imported
_BEGAN = process_started() or 0.0
_RANDOM = re.compile(rb"seed|random|dropout|generator|bernoulli|multinomial", re.IGNORECASE)


class KeptGraph:
    """The folder of one rank for the graph of one digest."""

    def __init__(self, path: Path, emit: Emit):
        self.path = path
        self.emit = emit
        self.is_sealed = False

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Yields path in the folder and content of each file of MindSpore."""
        for path in self.path.rglob("*"):
            if path.is_file() and path.name != _SEAL:
                yield str(path.relative_to(self.path)), path.read_bytes()

    def checksums(self) -> dict[str, str]:
        return {name: xxhash.xxh3_128_hexdigest(content) for name, content in self.contents()}

    def take_seal(self) -> bool:
        """Removes the seal. Returns whether it was that of these files."""
        try:
            sealed = json.loads((self.path / _SEAL).read_bytes())
            (self.path / _SEAL).unlink()
            return bool(sealed) and sealed == self.checksums()
        except (OSError, ValueError):
            return False

    def seal(self) -> None:
        """Seals the files after the first step of a start, once. Removes them if the graph draws
        random numbers. An error is a warning: the next start compiles."""
        if self.is_sealed:
            return
        self.is_sealed = True
        try:
            if any(_RANDOM.search(content) for _, content in self.contents()):
                shutil.rmtree(self.path)
                self.emit(Notice("the compiled graph is not kept: it draws random numbers"))
            else:
                (self.path / _SEAL).write_text(json.dumps(self.checksums()))
        except OSError as error:
            self.emit(warning(f"the compiled graph is not kept: {error_text(error)}"))


def keep_graph(
    config: Mapping[str, Any], output: str, group: Group, emit: Emit
) -> KeptGraph | None:
    """Makes MindSpore read the graph that an earlier start has kept, if every rank has one of this
    configuration, release and source; else write the one that it compiles. Called by all ranks
    before a graph is compiled, with the configuration as the user gave it. Returns None if
    MindSpore has a compile cache already, or the training evaluates."""
    if ENABLE in os.environ or PATH in os.environ or config.get("do_eval"):
        return None
    folder = Path(output, FOLDER, f"rank_{group.rank}")

    def find() -> tuple[str, bool]:
        path = folder / digest(config, group)
        return path.name, KeptGraph(path, emit).take_seal()

    def prepare() -> None:
        if not is_kept:
            shutil.rmtree(graph.path, ignore_errors=True)
        graph.path.mkdir(parents=True, exist_ok=True)
        os.utime(graph.path)
        for old in sorted(folder.iterdir(), key=os.path.getmtime)[:-_DIGESTS]:
            shutil.rmtree(old, ignore_errors=True)

    try:
        found = gather_results(group, find)
        is_kept = all(sealed for _, sealed in found)
        graph = KeptGraph(folder / found[group.rank][0], emit)
        gather_results(group, prepare)
    except CollectiveError as error:
        emit(warning(f"the compiled graph is not kept: {error}"))
        return None
    os.environ.update({ENABLE: "1", PATH: str(graph.path)})
    if group.rank == 0:
        what = "is used" if is_kept else "is compiled, and kept for the next start"
        emit(Notice(f"the graph of this configuration, release and source {what}: {graph.path}"))
    return graph


def digest(config: Mapping[str, Any], group: Group) -> str:
    """Returns a digest of all that the graph of this rank is made of. Raises ValueError if a source
    has changed since it was, perhaps, imported."""
    settings = {
        # such as .../latest, which leads to the installed CANN
        name: os.path.realpath(value) if value.startswith("/") else value
        for name, value in os.environ.items()
        if _SETTINGS.match(name)
    }
    release = {**upstream.installed_versions(), "mindresume": mindresume.__version__}
    facts = [config, group.rank, group.size, settings, release, sys.version]
    found = xxhash.xxh3_128(json.dumps(facts, sort_keys=True, default=_plain).encode())
    for path in sorted(set(_sources())):
        if os.stat(path).st_ctime > _BEGAN:
            raise ValueError(f"{path} has changed since its process has begun")
        found.update(f"\0{path}\0".encode())
        found.update(Path(path).read_bytes())
    return found.hexdigest()


def _plain(value: Any) -> Any:
    """Returns an object of a configuration as JSON. Where its text has an address, no start has the
    digest of another."""
    has_parts = hasattr(value, "__dict__") and not isinstance(value, Enum)
    return vars(value) if has_parts else str(value)


def _sources() -> Iterator[str]:
    """Yields the files of mindformers, and those of all modules that are not installed: the script,
    and what ``register_path`` names."""
    package = find_spec("mindformers")
    for place in package.submodule_search_locations or () if package else ():
        yield from map(str, Path(place).rglob("*.py"))
    ours = os.path.dirname(mindresume.__file__)
    known = (ours, *sysconfig.get_paths().values())
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        # in a forked rank __mp_main__ is the script of the process that it was forked from
        if path.endswith(".py") and not path.startswith(known) and name != "__mp_main__":
            yield os.path.abspath(path)
