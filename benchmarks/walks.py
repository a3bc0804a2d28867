"""What a reader crosses to follow one story through the package: functions, files, depth of calls.

    python benchmarks/walks.py [save] [which] [load] [convert] [--verbose]

save     one step of Checkpoint 1.0, written and committed by one rank in its training thread
which    the choice of a resume in a folder of one checkpoint of two ranks
load     the regions of rank 1 of tp4 from a checkpoint of tp2
convert  the same checkpoint from tp2 to tp4

Each story runs once before, so that imports and caches do not count. Only the calling thread is
followed. A climb is a call from a room to one above it (``[tool.importlinter]`` in pyproject.toml).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# not this folder: it has a reshard.py, too
sys.path[:1] = [str(ROOT / "tests"), str(ROOT)]

import mindresume  # noqa: E402

BASE = os.path.dirname(mindresume.__file__) + os.sep
ROOMS = (
    "cli",
    "report",
    "launch",
    "supervisor",
    "fault_injection",
    "api",
    "mindformers",
    "reshard",
    "resume",
    "saving",
    "coordination",
    "formats",
    "tensor_files",
    "storage",
    "model",
    "settings.py",
    "events",
)
Function = tuple[str, str]  # (file, qualified name)


class Walk:
    """The calls within the package while it is entered."""

    def __init__(self) -> None:
        self.calls: Counter[Function] = Counter()
        self.climbs: Counter[tuple[Function, Function]] = Counter()
        self.stack: list[Function] = []
        self.depth = 0

    def __enter__(self) -> Walk:
        sys.setprofile(self._follow)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _follow(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(BASE):
            return
        here = path[len(BASE) :], getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        if event == "return":
            while here in self.stack and self.stack.pop() != here:
                pass
            return
        self.calls[here] += 1
        if self.stack and _floor(here) < _floor(self.stack[-1]):
            self.climbs[self.stack[-1], here] += 1
        self.stack.append(here)
        self.depth = max(self.depth, len(self.stack))

    def functions(self) -> dict[str, list[str]]:
        """Returns {file: named functions}; comprehensions are part of the function around them."""
        found = defaultdict(list)
        for file, name in self.calls:
            if "comp>" not in name and "genexpr" not in name:
                found[file].append(name)
        return found


def _floor(function: Function) -> int:
    room = function[0].split("/")[0]
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def save(folder: Path) -> Callable[[], object]:
    from manager_jobs import Job

    job = Job(folder / "checkpoint")
    job.steps(9)
    return lambda: job.steps(1)


def which(folder: Path) -> Callable[[], object]:
    import rank_folders

    rank_folders.save(folder, 5, world=2)
    with mindresume.open(folder) as catalog:
        catalog.select()

    def select() -> None:
        with mindresume.open(folder) as catalog:
            catalog.select()

    return select


def load(folder: Path) -> Callable[[], object]:
    from reshard.plans import MODEL, Plan, random_tensors, recorded

    from mindresume.reshard.open_checkpoint import open_checkpoint
    from mindresume.reshard.region_load import LoadTarget, read_regions, wanted_regions
    from mindresume.storage.posix import PosixStorage

    network = {
        name: spec
        for name, spec in MODEL.items()
        if not name.startswith("accu_grads") and 0 not in spec.shape
    }
    tensors = random_tensors(network)
    recorded(folder, Plan.parse("tp2", network), tensors)
    plan = Plan.parse("tp4", network)
    shapes = {
        name: (array.shape, str(array.dtype)) for name, array in plan.shard(tensors, 1).items()
    }
    layouts = {name: (layout, tensors[name].shape) for name, layout in plan.layouts(1).items()}

    def regions() -> None:
        source = open_checkpoint(PosixStorage(), str(folder))
        read_regions(source.weights, wanted_regions(source.weights, LoadTarget(shapes, layouts), 1))

    regions()
    return regions


def convert(folder: Path) -> Callable[[], object]:
    from reshard.plans import MODEL, Plan, random_tensors, recorded

    recorded(folder / "source", Plan.parse("tp2"), random_tensors(MODEL))
    mindresume.convert(folder / "source", folder / "before", to="tp=4", workers=1)
    return lambda: mindresume.convert(folder / "source", folder / "target", to="tp=4", workers=1)


STORIES = {story.__name__: story for story in (save, which, load, convert)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "stories", nargs="*", metavar="STORY", help=f"{', '.join(STORIES)}; default: all"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="name the functions of each file, and the climbs"
    )
    options = parser.parse_args()
    if unknown := set(options.stories) - set(STORIES):
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(STORIES)}"
        )
    for name in options.stories or STORIES:
        with tempfile.TemporaryDirectory() as folder:
            story = STORIES[name](Path(folder))
            with Walk() as walk:
                story()
        found = walk.functions()
        print(
            f"{name:8} {sum(map(len, found.values())):4} functions {len(found):3} files, depth "
            f"{walk.depth}, {len(walk.climbs)} kinds of climbs"
        )
        if options.verbose:
            for file, names in sorted(found.items()):
                print(f"    {len(names):3} {file}: {', '.join(names)}")
            for (lower, upper), count in walk.climbs.most_common():
                print(f"    up {count} x {' '.join(lower)} -> {' '.join(upper)}")


if __name__ == "__main__":
    main()
