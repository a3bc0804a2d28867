"""SIGKILL at random moments of a loop that saves and commits, many times in one folder, without a
training around it.

After each kill: the newest complete checkpoint is chosen, it is at least the last one reported as
committed, every byte of it is right, and no file under a final name is torn. The next attempt goes
on from there. ST_SEED repeats the random numbers.
"""

import os
import random
import re
import secrets
import select as polling
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mindresume.formats.rank_folders import free_suffix, parse_name
from mindresume.model.manifest import (
    FOLDER,
    attempts,
    read_record,
    record_rank,
    run_name,
    run_sequence,
)
from mindresume.resume.eligible import Choice, SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KeepLast
from mindresume.storage import TEMPORARY
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import file_checksum, read_header, read_tensor
from st.save_loop import KEPT, PER_EPOCH, PREFIX, tensors_of
from st.training_run import ROOT
from tests.rank_folders import Ranks, save, target_of, write_rank

STORAGE = PosixStorage()
WEIGHTS = (".safetensors", ".ckpt")


@dataclass
class Saver:
    """The processes of all ranks of one attempt. ``committed``: what rank 0 has reported so far."""

    root: Path
    run: str
    ranks: int
    first_step: int
    processes: list[subprocess.Popen] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def start(self) -> None:
        suffix = max(
            free_suffix(STORAGE.list(str(self.root / f"rank_{rank}")), PREFIX, rank)
            for rank in range(self.ranks)
        )
        for rank in range(self.ranks):
            self.processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "st.save_loop",
                        *map(str, (self.root, self.run, rank, self.ranks, suffix, self.first_step)),
                    ],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
        for process in self.processes:
            assert (
                polling.select([process.stdout], [], [], 60)[0]
                and process.stdout.readline() == "ready\n"
            )

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            assert self.processes[rank].poll() is None, f"rank {rank} ended by itself"
            self.processes[rank].kill()

    def end(self) -> None:
        """Kills what still runs, and reads what rank 0 had reported before."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            output = process.communicate()[0]
            self.committed += [
                int(step) for step in re.findall(r"^committed (\d+)$", output, re.MULTILINE)
            ]


@dataclass
class KilledRun:
    """One folder over all rounds. ``cut``: rounds that ended inside a save; ``resumed``: those that
    leave something to go on from."""

    root: Path
    ranks: int
    chosen: int = 0
    last_run: int = 0
    cut: int = 0
    resumed: int = 0

    def round(self, kill: Callable[[Saver], None]) -> None:
        self.last_run += 1
        saver = Saver(
            self.root, run_name(self.last_run, secrets.token_hex(4)), self.ranks, self.chosen + 1
        )
        try:
            saver.start()
            left = [
                path
                for path in self.files()
                if path.name.endswith(TEMPORARY) and saver.run not in path.name
            ]
            assert all(path.parent.parent.name == FOLDER for path in left), (
                f"weights of an earlier attempt: {left}"
            )
            assert len(left) <= self.ranks * (KEPT + 2), (
                f"small files, which go with their checkpoint, pile up: {left}"
            )
            kill(saver)
        finally:
            saver.end()
        self.check(saver)

    def check(self, saver: Saver) -> None:
        complete, incomplete = self.saves()
        choice = self.choose()
        chosen = choice.chosen.step if choice.chosen else 0
        if complete:
            assert (choice.chosen.run, chosen) == max(
                complete, key=lambda save: (run_sequence(save[0]), save[1])
            )
        else:
            assert choice.is_fresh_start and not saver.committed and not self.chosen
        assert chosen >= max([self.chosen, *saver.committed]), (
            f"reported as committed: {saver.committed}"
        )
        if choice.chosen:
            self.resumed += 1
            assert sorted(choice.chosen.files) == list(range(self.ranks))
            for rank, (file,) in choice.chosen.files.items():
                holds(self.root / file.path, chosen, rank)
        self.check_final_names()
        assert len(complete) <= KEPT + 2, (
            "retention lags behind by more than the saves that were cut"
        )
        self.cut += bool(incomplete) or any(path.name.endswith(TEMPORARY) for path in self.files())
        self.chosen = chosen

    def choose(self) -> Choice:
        """Selects as all ranks of the next attempt would, each in its own thread. They must
        agree."""
        choices = Ranks(self.ranks).run(
            lambda group: select_checkpoint(
                STORAGE, str(self.root), group, SelectionPolicy(self.ranks)
            )
        )
        assert all(isinstance(choice, Choice) for choice in choices), choices
        assert (
            len(
                {
                    (choice.chosen.run, choice.chosen.step) if choice.chosen else None
                    for choice in choices
                }
            )
            == 1
        )
        return choices[0]

    def saves(self) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """(run, step) of the saves with the records of all ranks, and of those without, by names
        alone."""
        complete, incomplete = [], []
        for name, step, run in attempts(STORAGE.list(str(self.root / FOLDER))):
            names = STORAGE.list(str(self.root / FOLDER / name))
            there = {record_rank(entry) for entry in names} - {None}
            (complete if there == set(range(self.ranks)) else incomplete).append((run, step))
        return complete, incomplete

    def files(self) -> list[Path]:
        return [path for path in self.root.rglob("*") if path.is_file()]

    def check_final_names(self) -> None:
        """Checks that a weight file under its final name is complete, recorded or not, and a
        recorded one matches its record."""
        records = {}
        for path in self.files():
            if path.parent.parent.name == FOLDER and record_rank(path.name) is not None:
                with open(path, "rb") as file:
                    record = read_record(file)
                records[record.files[0].path] = record.files[0]
        for path in self.files():
            if path.suffix not in WEIGHTS or path.name.startswith("."):
                continue
            name = parse_name(path.name)
            holds(path, (name.epoch - 1) * PER_EPOCH + name.step, name.rank)
            recorded = records.get(f"{path.parent.name}/{path.name}")
            if recorded:
                with open(path, "rb") as file:
                    assert file_checksum(file) == (recorded.checksum, recorded.size), path


def holds(path: Path, step: int, rank: int) -> None:
    """Asserts that the file holds the tensors of this step and rank, all of them, bit by bit."""
    expected = tensors_of(step, rank)
    with open(path, "rb") as file:
        header = read_header(file, str(path))
        assert set(header.tensors) == set(expected), path
        for name, array in expected.items():
            found = read_tensor(file, header.tensors[name])
            assert (found.dtype, found.shape, found.tobytes()) == (
                array.dtype,
                array.shape,
                array.tobytes(),
            ), (path, name)


@pytest.fixture()
def chance() -> random.Random:
    seed = int(os.environ.get("ST_SEED", time.time_ns() % 10**6))
    print(f"ST_SEED={seed}")
    return random.Random(seed)


def test_four_processes_recover_when_some_are_killed_before_the_others(tmp_path, chance, soak):
    """The ranks that live on cannot commit: a record is missing. Then they are killed too."""
    killed = KilledRun(tmp_path / "checkpoint", 4)

    def kill(saver: Saver) -> None:
        time.sleep(chance.uniform(0, 1.5))
        saver.kill(chance.sample(range(4), chance.randint(1, 3)))
        time.sleep(chance.uniform(0, 0.3))

    rounds = 10 if soak else 5
    for _ in range(rounds):
        killed.round(kill)
    assert killed.cut >= 1, "no kill hit a save"
    assert killed.resumed >= rounds // 2 and killed.chosen >= 1
    verify = subprocess.run(
        [sys.executable, "-m", "mindresume", "verify", str(killed.root)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert verify.returncode == 0, verify.stdout


def test_a_save_that_no_rank_can_commit_any_more_is_removed(tmp_path):
    """All ranks recorded step 10, the job was killed before the commit, then a rank folder was
    lost: the next run resumes from replicas but cannot commit step 10 afterwards. Once newer ones
    fill the policy, it must be removed like any other old one."""
    for rank in range(4):
        write_rank(tmp_path, 10, rank, 4, run_name(1, "0000aaaa"))
    shutil.rmtree(tmp_path / "rank_3")
    assert (
        Ranks(4)
        .run(lambda group: select_checkpoint(STORAGE, str(tmp_path), group, SelectionPolicy(4)))[0]
        .chosen.step
        == 10
    )
    later = run_name(2, "0000bbbb")
    assert Committer(target_of(tmp_path, 0, 4, later)).recover() == []
    for step in (20, 30, 40):
        save(tmp_path, step, 4, later, suffix=1, policy=KeepLast(2))
    assert sorted(step for _, step, _ in attempts(os.listdir(tmp_path / FOLDER))) == [30, 40]
