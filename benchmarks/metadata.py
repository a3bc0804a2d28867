"""metadata.json of a large job: ours, and mindformers' own functions at the sizes that they reach.

    python benchmarks/metadata.py [--ranks 1024] [--stages 8] [--parameters 2000] [--rounds 5]
                                  [--built-in 8:12 32:12 64:12 128:6 256:3] [--dir FOLDER] [--json FILE]

encode      mindresume.formats.metadata.encode_metadata; write: the same, and its bytes into a file that is not flushed
read        the file, and mindresume.formats.metadata.read_metadata
describe    mindformers, what get_all_sharded_tensor does on every rank for all ranks: get_sharded_tensor_from_strategy_metadata
save        get_total_params_file_mapping_info and save_metadata; load: load_metadata

A stage is data parallel 16 (2 if it has less than 16 ranks), the rest tensor parallel; a third of the parameters is cut by
rows, a third by columns, a third is whole, and every copy is stored. ``--built-in R:P``: R ranks in one stage and P parameters
for both, as mindformers' time grows with the parameters and the square of the ranks; shown by parameter. The target is to
encode in 10 s.
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

from mindresume.formats.iteration_files import METADATA, MODEL, WeightFile
from mindresume.formats.metadata import Described, Stored, encode_metadata, ordinals, read_metadata
from mindresume.layout import TensorLayout

TARGET = 10.0
HIDDEN = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--parameters", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--built-in", nargs="*", default=["8:12", "32:12", "64:12", "128:6", "256:3"])
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
        self.jobs = {f"{ranks}:{count}": (ranks, count, model(ranks, 1, count)) for ranks, count in pairs}
        self.large = model(options.ranks, options.stages, options.parameters)
        self.built_in = BuiltIn(folder) if pairs else None

    def run(self) -> None:
        for number in self.rounds.numbers(self.options.rounds):
            works = [lambda: self.ours("large", self.large)]
            for name, (ranks, _, tensors) in self.jobs.items():
                works += [lambda name=name, tensors=tensors: self.ours(name, tensors),
                          lambda name=name, ranks=ranks, tensors=tensors: self.theirs(name, ranks, tensors)]
            for work in measure.shuffled(works, number):
                work()
        options = self.options
        title = f"metadata.json, {options.ranks} ranks in {options.stages} stages x {options.parameters} parameters"
        measure.finish(f"{title}, {options.rounds} rounds", self.folder, self.rounds, self.text(), options.json,
                       {"sizes": self.sizes})

    def ours(self, name: str, tensors: list[Described]) -> None:
        path = os.path.join(self.folder, f"ours-{name.replace(':', '-')}-{METADATA}")

        def write() -> None:
            with open(path, "wb") as file:
                file.writelines(encode_metadata(tensors))

        def read() -> dict[str, Described]:
            with open(path, "rb") as file:
                return read_metadata(file.read(), path)
        self.rounds.timed(f"encode {name}", lambda: encode_metadata(tensors))
        self.rounds.timed(f"write {name}", write)
        found = self.rounds.timed(f"read {name}", read)
        self.sizes[f"ours {name}"] = os.path.getsize(path)
        if list(found.values()) != tensors:
            raise SystemExit(f"{name}: what was read is not what was written")

    def theirs(self, name: str, ranks: int, tensors: list[Described]) -> None:
        path = os.path.join(self.folder, f"theirs-{name.replace(':', '-')}-{METADATA}")
        infos = self.built_in.infos(tensors)
        metas = self.rounds.timed(f"describe {name}", lambda: self.built_in.describe(infos, ranks))
        self.rounds.timed(f"save {name}", lambda: self.built_in.save(metas, ranks, path))
        found, storage = self.rounds.timed(f"load {name}", lambda: self.built_in.load(path))
        self.sizes[f"theirs {name}"] = os.path.getsize(path)
        with open(path, "rb") as file:
            ours = read_metadata(file.read(), path)
        if ours != {tensor.name: tensor for tensor in tensors} or len(storage) != sum(len(row.stored) for row in tensors):
            raise SystemExit(f"{name}: mindformers wrote something else than was described")

    def text(self) -> str:
        median, options = self.rounds.median, self.options
        verdict = "met" if median("encode large") <= TARGET else "missed"
        seconds = [f"{median(f'{what} large'):.2f}" for what in ("encode", "write", "read")]
        rows = [[str(options.ranks), str(options.parameters), *seconds, f"{self.sizes['ours large'] / 2**20:.1f}",
                 verdict]]
        large = measure.table(["ranks", "parameters", "encode, s", "encode and write, s", "read, s", "MiB",
                               f"target {TARGET:.0f} s to encode"], rows)
        rows = []
        for name, (ranks, count, _) in self.jobs.items():
            each = [f"{1000 * median(f'{what} {name}') / count:.2f}" for what in ("describe", "save", "load", "write", "read")]
            sizes = [f"{self.sizes[f'{who} {name}'] / 1024 / count:.1f}" for who in ("theirs", "ours")]
            rows.append([str(ranks), str(count), *each, *sizes])
        small = measure.table(["ranks", "parameters", "mindformers: describe, ms a parameter", "save", "load",
                               "ours: encode and write, ms a parameter", "read", "mindformers: KiB a parameter", "ours"], rows)
        return f"{large}\n{small}" if rows else large


def model(ranks: int, stages: int, count: int) -> list[Described]:
    """``count`` parameters over all stages; every rank stores all that it holds."""
    size = ranks // stages
    data = 16 if size >= 16 else 2
    kinds = [(TensorLayout((data, size // data), (0, -1)), (HIDDEN, HIDDEN)),
             (TensorLayout((data, size // data), (-1, 0)), (HIDDEN, HIDDEN)), (TensorLayout((size,), (-1,)), (HIDDEN,))]
    found = []
    for stage in range(stages):
        first = stage * size
        for number in range(count // stages):
            layout, shape = kinds[number % len(kinds)]
            groups: dict[int, list[int]] = {}
            for rank, ordinal in enumerate(ordinals(layout, shape), first):
                groups.setdefault(ordinal, []).append(rank)
            stored = {ordinal: tuple(Stored(str(WeightFile("net", MODEL, rank, ranks)), rank, tuple(group)) for rank in group)
                      for ordinal, group in groups.items()}
            found.append(Described(f"decoder.layers.{stage}.{number}.weight", "float32", shape, layout, first, stored))
    return found


class BuiltIn:
    """mindformers' functions, with a log that is silent and a world of as many ranks as we say."""

    def __init__(self, folder: str):
        os.environ["LOCAL_DEFAULT_PATH"] = os.path.join(folder, "output")
        from mindformers.checkpoint import metadata
        from mindformers.checkpoint.sharded_tensor import get_sharded_tensor_from_strategy_metadata
        from mindspore.parallel import Layout
        logging.disable(logging.WARNING)
        self.metadata, self.of_rank, self.layout = metadata, get_sharded_tensor_from_strategy_metadata, Layout

    def infos(self, tensors: list[Described]) -> dict[str, list[Any]]:
        """As mindspore.parallel.strategy.get_strategy_metadata gives them for each rank."""
        found = {}
        for tensor in tensors:
            names = "ab"[:len(tensor.layout.device_matrix)]
            cuts = ["None" if axis == -1 else names[len(names) - 1 - axis] for axis in tensor.layout.tensor_map]
            layout = self.layout(tensor.layout.device_matrix, tuple(names), list(range(tensor.layout.stage_size)))
            found[tensor.name] = [layout(*cuts), tensor.dtype, tensor.shape]
        return found

    def describe(self, infos: dict[str, list[Any]], ranks: int) -> dict[int, Any]:
        return {rank: self.of_rank(infos, rank) for rank in range(ranks)}

    def save(self, metas: dict[int, Any], ranks: int, path: str) -> None:
        with patch.object(self.metadata, "get_group_size", lambda: ranks):
            mappings = self.metadata.get_total_params_file_mapping_info(metas, "net", list(metas[0]))
        self.metadata.save_metadata(metas, mappings, path)

    def load(self, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.metadata.load_metadata(path)


if __name__ == "__main__":
    main()
