"""metadata.json of a large job: ours, and mindformers' own functions at the sizes that they reach.

    python benchmarks/metadata.py [--ranks 1024] [--stages 8] [--parameters 2000] [--rounds 5]
                                  [--built-in 8:12 32:12 64:12 128:6 256:3] [--dir FOLDER] [--json
                                  FILE]

encode      mindresume.formats.metadata.encode_metadata; write: the same, and its bytes into a file
            that is not flushed
read        the file, and mindresume.formats.metadata.read_metadata
commit      of such a job by rank 0: the records of all ranks are read, metadata.json, common.json
            and the manifest are made and written, the folder gets its name; open: what a rank of
            the next job needs to know of it. Also with redundancy removed. The weights themselves
            are one byte a file here.
describe    mindformers, what get_all_sharded_tensor does on every rank for all ranks:
            get_sharded_tensor_from_strategy_metadata
save        get_total_params_file_mapping_info and save_metadata; load: load_metadata

A stage is data parallel 16 (2 if it has less than 16 ranks), the rest tensor parallel; a third of
the parameters is cut by rows, a third by columns, a third is whole, and every copy is stored.
``--built-in R:P``: R ranks in one stage and P parameters for both, as mindformers' time grows with
the parameters and the square of the ranks; shown by parameter. The target is to encode, and to
commit, in 10 s, with a manifest of at most 5 MB.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
from typing import Any
from unittest.mock import patch

import _measure as measure

from mindresume.formats.iterations import METADATA, MODEL, OPTIMIZER, WeightFile
from mindresume.formats.metadata import StoredSlice, TensorMetadata, encode_metadata, read_metadata
from mindresume.formats.scan import scan
from mindresume.model.layout import TensorLayout, ordinals, shares
from mindresume.model.manifest import (
    MANIFEST,
    Details,
    FileRecord,
    Record,
    TensorRecord,
    record_name,
    run_name,
)
from mindresume.model.training_state import TrainingState
from mindresume.reshard import step_view
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.saving.committer import Committer
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.posix import PosixStorage

TARGET = 10.0
STEP = 20
KINDS = COPIES, SHARED = "all copies", "shared out"
HIDDEN = 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--parameters", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--built-in", nargs="*", default=["8:12", "32:12", "64:12", "128:6", "256:3"]
    )
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-metadata-", dir=options.dir)
    try:
        Bench(folder, options).run()
    finally:
        shutil.rmtree(folder)


class Bench:
    def __init__(self, folder: str, options: argparse.Namespace):
        self.folder, self.options = folder, options
        self.rounds = measure.Rounds()
        self.sizes: dict[str, int] = {}
        pairs = [tuple(map(int, pair.split(":"))) for pair in options.built_in]
        self.jobs = {
            f"{ranks}:{count}": (ranks, count, model(ranks, 1, count)) for ranks, count in pairs
        }
        self.large = model(options.ranks, options.stages, options.parameters)
        self.built_in = BuiltIn(folder) if pairs else None
        self.checkpoints = {kind: self.recorded(kind) for kind in KINDS}

    def recorded(self, kind: str) -> SaveTarget:
        """Returns a save of which all ranks have recorded their parts."""
        options, run = self.options, run_name(1, "0000aaaa")
        target = SaveTarget(
            PosixStorage(), os.path.join(self.folder, kind), run, 0, options.ranks, True
        )
        state, size = TrainingState(STEP, 10, STEP, 8, 1.0), options.ranks // options.stages
        os.makedirs(target.attempt(STEP))
        for first in range(0, options.ranks, size):
            rows = {row.name: row for row in self.large if row.first == first}
            held = (
                shares({name: (row.layout, row.shape, 4) for name, row in rows.items()}, size)
                if kind == SHARED
                else [rows.keys()] * size
            )
            for rank in range(first, first + size):
                names = [
                    str(WeightFile("net", what, rank, options.ranks)) for what in (MODEL, OPTIMIZER)
                ]
                for name in names:
                    with open(os.path.join(target.data_dir(STEP), name), "wb") as file:
                        file.write(b"x")
                tensors = {
                    name: TensorRecord(
                        "float32",
                        row.layout.local_shape(row.shape),
                        "ab" * 16,
                        row.layout,
                        row.shape,
                    )
                    for name, row in rows.items()
                    if name in held[rank - first]
                }
                record = Record(
                    run,
                    rank,
                    options.ranks,
                    state,
                    1e9,
                    tuple(FileRecord(name, "safetensors", 1, "cd" * 16) for name in names),
                    kind == SHARED,
                )
                with open(os.path.join(target.attempt(STEP), record_name(rank)), "wb") as file:
                    file.write(record.encode(Details(tensors)))
        return target

    def commit(self, kind: str) -> None:
        target = self.checkpoints[kind]
        self.rounds.timed(f"commit {kind}", lambda: Committer(target).poll(STEP))
        candidate = scan(target).candidates[0]
        if not candidate.committed:
            raise SystemExit(f"{kind}: not committed: {candidate.problem}")
        weights = CheckpointView(
            target.storage, target.path(candidate.iteration_dir), {}, candidate=candidate
        )
        found = self.rounds.timed(
            f"open {kind}", lambda: step_view._described(target, weights, False)[0]
        )
        if len(found) != len(self.large):
            raise SystemExit(f"{kind}: {len(found)} of {len(self.large)} parameters are described")
        self.sizes[f"manifest {kind}"] = os.path.getsize(
            os.path.join(candidate.records_dir, MANIFEST)
        )
        self.sizes[f"metadata {kind}"] = sum(file.size for file in candidate.metadata_files)
        os.rename(candidate.commit_dir, target.data_dir(STEP))  # for the next round
        os.remove(os.path.join(target.attempt(STEP), MANIFEST))

    def run(self) -> None:
        for number in self.rounds.numbers(self.options.rounds):
            works = [
                lambda: self.ours("large", self.large),
                *(lambda kind=kind: self.commit(kind) for kind in KINDS),
            ]
            for name, (ranks, _, tensors) in self.jobs.items():
                works += [
                    lambda name=name, tensors=tensors: self.ours(name, tensors),
                    lambda name=name, ranks=ranks, tensors=tensors: self.theirs(
                        name, ranks, tensors
                    ),
                ]
            for work in measure.shuffled(works, number):
                work()
        options = self.options
        title = (
            f"metadata.json, {options.ranks} ranks in {options.stages} stages x "
            f"{options.parameters} parameters"
        )
        measure.finish(
            f"{title}, {options.rounds} rounds",
            self.folder,
            self.rounds,
            self.text(),
            options.json,
            {"sizes": self.sizes},
        )

    def ours(self, name: str, tensors: list[TensorMetadata]) -> None:
        path = os.path.join(self.folder, f"ours-{name.replace(':', '-')}-{METADATA}")

        def write() -> None:
            with open(path, "wb") as file:
                file.writelines(encode_metadata(tensors))

        def read() -> dict[str, TensorMetadata]:
            with open(path, "rb") as file:
                return read_metadata(file.read(), path)

        self.rounds.timed(f"encode {name}", lambda: encode_metadata(tensors))
        self.rounds.timed(f"write {name}", write)
        found = self.rounds.timed(f"read {name}", read)
        self.sizes[f"ours {name}"] = os.path.getsize(path)
        if list(found.values()) != tensors:
            raise SystemExit(f"{name}: what was read is not what was written")

    def theirs(self, name: str, ranks: int, tensors: list[TensorMetadata]) -> None:
        path = os.path.join(self.folder, f"theirs-{name.replace(':', '-')}-{METADATA}")
        infos = self.built_in.infos(tensors)
        metas = self.rounds.timed(f"describe {name}", lambda: self.built_in.describe(infos, ranks))
        self.rounds.timed(f"save {name}", lambda: self.built_in.save(metas, ranks, path))
        found, storage = self.rounds.timed(f"load {name}", lambda: self.built_in.load(path))
        self.sizes[f"theirs {name}"] = os.path.getsize(path)
        with open(path, "rb") as file:
            ours = read_metadata(file.read(), path)
        if ours != {tensor.name: tensor for tensor in tensors} or len(storage) != sum(
            len(row.stored) for row in tensors
        ):
            raise SystemExit(f"{name}: mindformers wrote something else than was described")

    def text(self) -> str:
        median, options = self.rounds.median, self.options
        verdict = _verdict(median("encode large") <= TARGET)
        seconds = [f"{median(f'{what} large'):.2f}" for what in ("encode", "write", "read")]
        rows = [
            [
                str(options.ranks),
                str(options.parameters),
                *seconds,
                f"{self.sizes['ours large'] / 2**20:.1f}",
                verdict,
            ]
        ]
        large = measure.table(
            [
                "ranks",
                "parameters",
                "encode, s",
                "encode and write, s",
                "read, s",
                "MiB",
                f"target {TARGET:.0f} s to encode",
            ],
            rows,
        )
        rows = []
        for name, (ranks, count, _) in self.jobs.items():
            each = [
                f"{1000 * median(f'{what} {name}') / count:.2f}"
                for what in ("describe", "save", "load", "write", "read")
            ]
            sizes = [
                f"{self.sizes[f'{who} {name}'] / 1024 / count:.1f}" for who in ("theirs", "ours")
            ]
            rows.append([str(ranks), str(count), *each, *sizes])
        small = measure.table(
            [
                "ranks",
                "parameters",
                "mindformers: describe, ms a parameter",
                "save",
                "load",
                "ours: encode and write, ms a parameter",
                "read",
                "mindformers: KiB a parameter",
                "ours",
            ],
            rows,
        )
        rows_of_commits = []
        for kind in KINDS:
            seconds, manifest = median(f"commit {kind}"), self.sizes[f"manifest {kind}"]
            rows_of_commits.append(
                [
                    kind,
                    f"{seconds:.2f}",
                    _verdict(seconds <= TARGET),
                    f"{median(f'open {kind}'):.2f}",
                    f"{self.sizes[f'metadata {kind}'] / 2**20:.1f}",
                    f"{manifest / 2**20:.2f}",
                    _verdict(manifest <= 5e6),
                ]
            )
        commits = measure.table(
            [
                "copies",
                "commit, s",
                f"target {TARGET:.0f} s",
                "open, s",
                "metadata.json, MiB",
                "manifest, MiB",
                "target 5 MB",
            ],
            rows_of_commits,
        )
        return "\n".join([large, commits, *([small] if rows else [])])


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def model(ranks: int, stages: int, count: int) -> list[TensorMetadata]:
    """``count`` parameters over all stages; every rank stores all that it holds."""
    size = ranks // stages
    data = 16 if size >= 16 else 2
    kinds = [
        (TensorLayout((data, size // data), (0, -1)), (HIDDEN, HIDDEN)),
        (TensorLayout((data, size // data), (-1, 0)), (HIDDEN, HIDDEN)),
        (TensorLayout((size,), (-1,)), (HIDDEN,)),
    ]
    found = []
    for stage in range(stages):
        first = stage * size
        for number in range(count // stages):
            layout, shape = kinds[number % len(kinds)]
            groups: dict[int, list[int]] = {}
            for rank, ordinal in enumerate(ordinals(layout, shape), first):
                groups.setdefault(ordinal, []).append(rank)
            stored = {
                ordinal: tuple(
                    StoredSlice(str(WeightFile("net", MODEL, rank, ranks)), rank, tuple(group))
                    for rank in group
                )
                for ordinal, group in groups.items()
            }
            found.append(
                TensorMetadata(
                    f"decoder.layers.{stage}.{number}.weight",
                    "float32",
                    shape,
                    layout,
                    first,
                    stored,
                )
            )
    return found


class BuiltIn:
    """Calls mindformers' functions, with a silent log and the given number of ranks."""

    def __init__(self, folder: str):
        os.environ["LOCAL_DEFAULT_PATH"] = os.path.join(folder, "output")
        from mindformers.checkpoint import metadata
        from mindformers.checkpoint.sharded_tensor import get_sharded_tensor_from_strategy_metadata
        from mindspore.parallel import Layout

        logging.disable(logging.WARNING)
        self.metadata = metadata
        self.of_rank = get_sharded_tensor_from_strategy_metadata
        self.layout = Layout

    def infos(self, tensors: list[TensorMetadata]) -> dict[str, list[Any]]:
        """Returns, for each rank, the rows of mindspore.parallel.strategy.get_strategy_metadata."""
        found = {}
        for tensor in tensors:
            names = "ab"[: len(tensor.layout.device_matrix)]
            cuts = [
                "None" if axis == -1 else names[len(names) - 1 - axis]
                for axis in tensor.layout.tensor_map
            ]
            layout = self.layout(
                tensor.layout.device_matrix, tuple(names), list(range(tensor.layout.stage_size))
            )
            found[tensor.name] = [layout(*cuts), tensor.dtype, tensor.shape]
        return found

    def describe(self, infos: dict[str, list[Any]], ranks: int) -> dict[int, Any]:
        return {rank: self.of_rank(infos, rank) for rank in range(ranks)}

    def save(self, metas: dict[int, Any], ranks: int, path: str) -> None:
        with patch.object(self.metadata, "get_group_size", lambda: ranks):
            mappings = self.metadata.get_total_params_file_mapping_info(
                metas, "net", list(metas[0])
            )
        self.metadata.save_metadata(metas, mappings, path)

    def load(self, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.metadata.load_metadata(path)


if __name__ == "__main__":
    main()
