"""Checkpoint 2.0: the built-in of mindformers beside ours, on the same four ranks.

    python benchmarks/iterations.py [--mib 1024] [--rounds 7] [--only save|load] [--dir FOLDER]
    [--json FILE]

save    float32 weights and two moments, --mib each of them once, on dp2 x tp2, so that the ranks
        hold twice as much: four
        processes in a real MindSpore process group. built-in: mindformers' save_checkpoint as its
        callback calls it; ours: as the monitor does. "stall": what the call and the callback in the
        following steps hold the training thread; "committed": until the tracker names the save; the
        slowest rank counts. Retention is measured for neither
load    a checkpoint of eight ranks, dp2 x tp4, by four of dp2 x tp2, as four processes at once, so
        that both use all cores:
        load_checkpoint beside plain reading, and of_iteration, wanted_regions, read_regions,
        load_into. The files are in the page cache

Everything is measured once a round, in changing order, with the kernel's free memory warmed up; a
save after a sync. In a first round, which does not count, all tensors are compared bit for bit. The
built-in has no asynchronous saving with remove_redundancy: it writes its files in the training
thread then, and the tracker one step later.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _iterations_job as job
import _iterations_load as loading
import _iterations_save as saving
import _measure as measure
import numpy as np

from mindresume.model.training_state import TrainingState
from mindresume.saving.committer import SyncSaver
from mindresume.saving.retention import KeepLast
from mindresume.saving.shard_writer import Save, SaveTarget, iteration_shard
from mindresume.storage.posix import PosixStorage

STALL = 0.5
SLOWER = 1.0
FASTER = 2.0
LIMIT = 1.4
OVER = 1.02
MEMORY = 256
HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["save", "load"])
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-iterations-", dir=options.dir)
    rounds = measure.Rounds()
    texts = []
    more = {}
    try:
        for part, work in (("save", save), ("load", load)):
            if options.only in (None, part):
                text, more[part] = work(os.path.join(folder, part), options, rounds)
                texts.append(text)
        measure.finish(
            f"Checkpoint 2.0, {options.mib} MiB of float32, {options.rounds} rounds",
            folder,
            rounds,
            "\n".join(texts),
            options.json,
            more,
        )
    finally:
        shutil.rmtree(folder)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(job.ROOT), str(HERE)]), "GLOG_v": "4"}


# ---- save ----------------------------------------------------------------------------------------


def save(
    folder: str, options: argparse.Namespace, rounds: measure.Rounds
) -> tuple[str, dict[str, Any]]:
    from st.cpu_cluster.launch import Job

    os.makedirs(folder)
    command = [
        sys.executable,
        str(HERE / "_iterations_save.py"),
        folder,
        str(options.mib),
        str(options.rounds),
    ]
    print("saving: the ranks run their rounds by themselves", file=sys.stderr, flush=True)
    with Job(
        saving.RANKS, command, cwd=folder, env={**environment(), "MS_TOPO_TIMEOUT": "200"}
    ) as ranks:
        code = ranks.wait()
        if code:
            failed = next(
                (rank for rank, status in enumerate(ranks.codes()) if status not in (0, -9)), 0
            )
            raise SystemExit(
                f"rank {failed} failed with exit status {code}:\n"
                + Path(folder, "msrun_log", f"worker_{failed}.log").read_text(errors="replace")[
                    -3000:
                ]
            )
    found = [read_lines(os.path.join(folder, f"rank_{rank}.jsonl")) for rank in range(saving.RANKS)]
    shutil.rmtree(folder)
    return save_text(found, options, rounds), {"ranks": found}


def read_lines(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def save_text(
    found: list[list[dict[str, Any]]], options: argparse.Namespace, rounds: measure.Rounds
) -> str:
    written: dict[str, int] = {}
    phases: dict[str, list[dict[str, float]]] = {}
    # the four ranks' lines of one measurement
    for same in zip(*found, strict=True):
        what, begun = same[0]["what"], min(line["begun"] for line in same)
        if same[0]["round"] == 0:
            written[what] = sum(line["written"] for line in same)
            continue
        for kind, value in (
            ("stall", max(line["held"] for line in same)),
            ("committed", max(line["committed"] for line in same) - begun),
            ("durable", max(line["ended"] for line in same) - begun),
        ):
            rounds.values.setdefault(f"{what}: {kind}", []).append(value)
        phases.setdefault(what, []).append(phases_of(same))
    rounds.loads += [line["load"] for line in found[0] if line["round"]]
    plain = [saving.plain_name(once) for once in (False, True)]
    rows = [row_of_save(name, None, written[name], rounds) for name in plain]
    for way in saving.WAYS:
        base = (
            None
            if way.who == "built-in"
            else saving.Way("built-in", way.asynchronous, way.once).name
        )
        rows.append(row_of_save(way.name, base, written[way.name], rounds))
    tensors = job.model(options.mib, saving.DATA, saving.TENSOR)
    barrier = statistics.median(line["barrier"] for line in found[0] if line["round"])
    table = measure.table(
        [
            "what",
            "written, MiB",
            "stall, median s",
            "ratio to the built-in",
            "ratios of the rounds",
            f"target {STALL}",
            "committed, s",
            "ratio to the built-in",
            "ratios of the rounds",
            "not slower",
            "on disk, s",
        ],
        rows,
    )
    return (
        f"Saving: {len(tensors)} tensors, {job.size_of(tensors) / 2**20:.0f} MiB, of which each of "
        f"{saving.RANKS} ranks "
        f"holds {job.held(tensors) / 2**20:.0f}; steps in which the thread waits "
        f"{saving.PAUSE * 1000:.0f} ms, between "
        "them an exchange of all ranks as a training has it; a barrier of the ranks takes "
        f'{barrier * 1000:.1f} ms. "on '
        'disk": until the files are flushed as well, which the built-in leaves to the '
        f"kernel:\n\n{table}\n"
        f"{phases_text(phases)}"
    )


def row_of_save(name: str, base: str | None, written: int, rounds: measure.Rounds) -> list[str]:
    cells = [name, f"{written / 2**20:.0f}"]
    for kind, target in (("stall", STALL), ("committed", SLOWER)):
        cells.append(f"{rounds.median(f'{name}: {kind}'):.3f}")
        if base is None:
            cells += ["", "", ""]
            continue
        ratio = rounds.ratio(f"{name}: {kind}", f"{base}: {kind}")
        cells += [
            f"{ratio:.2f}",
            rounds.spread(f"{name}: {kind}", f"{base}: {kind}"),
            "met" if ratio <= target else "missed",
        ]
    return [*cells, f"{rounds.median(f'{name}: durable'):.3f}"]


def phases_of(same: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of the rank that needs most; of barriers of the one that needs least, which is the
    last to come."""
    names = dict.fromkeys(name for line in same for name in line["phases"])
    found = {
        name: (min if name == "barriers" else max)(line["phases"].get(name, 0.0) for line in same)
        for name in names
    }
    return {
        "the call": max(line["call"] for line in same),
        "the steps after it": max(line["held"] - line["call"] for line in same),
        **found,
    }


def phases_text(phases: dict[str, list[dict[str, float]]]) -> str:
    """Describes the parts of the stall. Some phases are within others or happen on one rank while
    the others wait: they do not add up."""
    names = dict.fromkeys(name for way in saving.WAYS for row in phases[way.name] for name in row)
    rows = [
        [
            way.name,
            *(
                f"{statistics.median(row.get(name, 0.0) for row in phases[way.name]):.3f}"
                if any(name in row for row in phases[way.name])
                else ""
                for name in names
            ),
        ]
        for way in saving.WAYS
    ]
    return (
        "Where the stall goes, seconds of the rank that needs most; of barriers of the one that "
        'comes last. "waiting for '
        'the writer" and "copied" are parts of "files":\n\n' + measure.table(["what", *names], rows)
    )


# ---- load ----------------------------------------------------------------------------------------


class Child:
    def __init__(self, kind: str, rank: int, folder: str, mib: int):
        self.kind = kind
        self.rank = rank
        self.log = os.path.join(folder, f"{kind}-{rank}.log")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "_iterations_load.py"), kind, str(rank), str(mib)],
                cwd=folder,
                env=environment(),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def prepare(self, task: dict[str, Any]) -> None:
        print(json.dumps(task), file=self.process.stdin, flush=True)

    def begin(self) -> None:
        print("", file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        return json.loads(self.line())

    def line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            with open(self.log) as log:
                raise SystemExit(
                    f"{self.kind}, rank {self.rank}: exit status "
                    f"{self.process.wait()}:\n{log.read()[-3000:]}"
                )
        return line

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


OF_OURS, OF_BUILT_IN = "of a checkpoint of ours", "of one of the built-in"
PLAIN = "plain reading"
PROVEN = f"ours, {OF_OURS}, and its proof before"


def load(
    folder: str, options: argparse.Namespace, rounds: measure.Rounds
) -> tuple[str, dict[str, Any]]:
    os.makedirs(folder)
    roots = {
        OF_OURS: write_ours(os.path.join(folder, "ours"), options.mib),
        OF_BUILT_IN: write_built_in(os.path.join(folder, "built-in"), options.mib),
    }
    children = {
        kind: [Child(kind, rank, folder, options.mib) for rank in range(loading.RANKS)]
        for kind in ("built-in", "ours")
    }
    children[PLAIN] = children["ours"]
    works = [(kind, source) for source in roots for kind in ("built-in", "ours")] + [
        (PLAIN, OF_OURS)
    ]
    reads: dict[str, list[int]] = {}
    answers: list[dict[str, Any]] = []
    tensors = job.model(options.mib, *loading.TARGET)
    for number in rounds.numbers(options.rounds):
        for kind, source in measure.shuffled(works, number):
            ours = kind == "ours"
            os.sync()
            for child in children[kind]:
                child.prepare(
                    {
                        "root": roots[source],
                        "first": number == 0,
                        "prove": ours and source == OF_OURS,
                        "plain": kind == PLAIN,
                    }
                )
            for child in children[kind]:
                child.line()
            measure.warm_memory(int(1.25 * loading.RANKS * job.held(tensors)))
            for child in children[kind]:
                child.begin()
            rows = [child.answer() for child in children[kind]]
            name = f"{kind}, {source}"
            answers.append({"round": number, "what": name, "ranks": rows})
            if kind != "built-in" or number == 0:
                reads[name] = [row["read"] for row in rows]
            if number == 0:
                continue
            rounds.add(name, max(row["seconds"] for row in rows))
            rounds.add(f"{name}: MiB", max(row["anonymous"] for row in rows))
            if ours and source == OF_OURS:
                rounds.add(PROVEN, max(row["seconds"] + row["proof"] for row in rows))
    for child in children["built-in"] + children["ours"]:
        child.close()
    shutil.rmtree(folder)
    return load_text(rounds, reads, works, tensors), {"answers": answers}


def load_text(
    rounds: measure.Rounds,
    reads: dict[str, list[int]],
    works: list[tuple[str, str]],
    tensors: job.Model,
) -> str:
    own = job.held(tensors)
    needed, rows = own * loading.RANKS, []
    for kind, source in works:
        name, base = f"{kind}, {source}", f"built-in, {source}"
        ours = kind == "ours"
        times = 1 / rounds.ratio(name, base)
        read, most = sum(reads[name]), max(rounds.values[f"{name}: MiB"])
        beyond = most - own / 2**20
        plain = rounds.ratio(name, f"{PLAIN}, {OF_OURS}")
        compared = [f"{times:.1f}", rounds.spread(base, name)] if name != base else ["", ""]
        rows.append(
            [
                name,
                f"{rounds.median(name):.3f}",
                *compared,
                verdict(ours, times >= FASTER),
                f"{plain:.2f}",
                rounds.spread(name, f"{PLAIN}, {OF_OURS}"),
                verdict(ours, plain <= LIMIT),
                f"{read / 2**20:.0f}",
                f"{read / needed:.3f}",
                verdict(ours, read <= OVER * needed),
                f"{most:.0f}",
                f"{beyond:+.0f}",
                verdict(ours, beyond <= MEMORY),
            ]
        )
    base = f"built-in, {OF_OURS}"
    rows.append(
        [
            PROVEN,
            f"{rounds.median(PROVEN):.3f}",
            f"{1 / rounds.ratio(PROVEN, base):.1f}",
            rounds.spread(base, PROVEN),
            "",
            f"{rounds.ratio(PROVEN, f'{PLAIN}, {OF_OURS}'):.2f}",
            rounds.spread(PROVEN, f"{PLAIN}, {OF_OURS}"),
            *[""] * 7,
        ]
    )
    table = measure.table(
        [
            "what",
            "median s",
            "times the built-in",
            "times, of the rounds",
            f"target {FASTER:.0f}",
            "of plain reading",
            "of the rounds",
            f"target {LIMIT}",
            "read, MiB",
            "read / needed",
            f"target {OVER}",
            "anonymous memory, MiB",
            "beyond the parameters",
            f"target {MEMORY}",
        ],
        rows,
    )
    return (
        f"Loading by {loading.RANKS} ranks of dp2 x tp2 what 8 of dp2 x tp4 saved: "
        f"{job.size_of(tensors) / 2**20:.0f} MiB "
        f"in {len(tensors)} tensors; each rank has {own / 2**20:.0f} MiB of parameters, "
        f"{needed / 2**20:.0f} in all are "
        f"needed. Plain reading is as many bytes of one file into new arrays, and nothing else. "
        "The slowest rank counts, and the one with most memory (the largest of all rounds, above "
        "that before the "
        "load). What the built-in reads: the pages it touches of the files it maps, and what it "
        "reads otherwise:\n\n"
        f"{table}"
    )


def verdict(ours: bool, met: bool) -> str:
    return "" if not ours else "met" if met else "missed"


def write_ours(root: str, mib: int) -> str:
    """Writes as eight ranks, one after the other; rank 0, which commits, comes last."""
    tensors, state = job.model(mib, *loading.SOURCE), TrainingState(20, 1_000_000, 20)
    ranks = loading.SOURCE[0] * loading.SOURCE[1]
    tables = {name: (layout, shape) for name, (shape, layout) in tensors.items()}
    for rank in reversed(range(ranks)):
        arrays = {name: job.part(tensors, name, rank) for name in tensors}
        optimizer = {name: array for name, array in arrays.items() if name.startswith("adam_")}
        model = {name: array for name, array in arrays.items() if name not in optimizer}
        target = SaveTarget(PosixStorage(), root, "0001-00000000", rank, ranks, iterations=True)
        os.makedirs(root, exist_ok=True)
        work = SyncSaver(target, KeepLast(5) if rank == 0 else None, lambda text: None)
        optimizer["global_step"] = np.full(1, 20, np.int32)
        outcome = work.write(
            Save(iteration_shard(job.PREFIX, target, state, model, optimizer, tables))
        )
        if outcome.error is not None:
            raise outcome.error
        if work.committer is not None:
            work.committer.poll(outcome.step)
    return root


def write_built_in(root: str, mib: int) -> str:
    from st.builtin_versions import builtin

    tensors = job.model(mib, *loading.SOURCE)
    values = {name: job.whole(name, shape) for name, (shape, _) in tensors.items()}
    builtin("1.9.0").write(
        Path(root),
        {**values, "global_step": np.full(1, 20, np.int32)},
        {name: layout for name, (_, layout) in tensors.items()},
        iteration=20,
    )
    builtin("1.9.0").close()
    return root


if __name__ == "__main__":
    main()
