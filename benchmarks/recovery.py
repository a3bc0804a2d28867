"""From the death of a rank to the next step: ``mindresume run`` with the tier in memory, beside
msrun and a start by hand.

    python benchmarks/recovery.py [--rounds 3] [--folder FOLDER] [--json FILE]
                                  [--ways "by hand,supervisor,joining,standby,lost node"]

by hand       msrun as it is; the same command is started again in the moment in which msrun has
              ended
supervisor    mindresume run around scripts/msrun_launcher.sh, memory_tier: {every_steps: 1}, with
              MindSpore's own MS_RETRY_INTERVAL_LOWER and _UPPER (3 and 5)
joining       the same with the intervals that the supervisor sets
standby       the same with --standby
lost node     as joining, on two nodes of two ranks with memory of their own and partner copies:
              both ranks of one node are killed, and its memory is removed (needs root)

All train the quickstart's model on four processes (data parallel 2 x model parallel 2) with
mindformers' real Trainer, with mindresume, and with compiled graphs kept
(MS_COMPILER_CACHE_ENABLE), and save to disk every 5 steps. One rank gets SIGKILL between two saves,
when all wait after a step, with --standby until the standby process is ready (st/programs/held.py).
msrun's scheduler ends by itself, which the test bed otherwise hastens. The phases are those of
``mindresume report``; "notice" and "end" need no report here: they are the time from the kill until
no process was left. "joined" lasts from the last import of a rank until the last one begins to
train. "redone" are steps that the dead job had done already. Changing order within a round; the
first round compiles the graphs and does not count.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _measure as measure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mindresume.events import PHASES  # noqa: E402
from mindresume.report.accounting import Recovery  # noqa: E402
from mindresume.report.builder import build_report  # noqa: E402
from mindresume.storage.posix import PosixStorage  # noqa: E402
from st.run_attempts import LIMIT, PROGRAMS, assert_no_process_left, committed_steps, events  # noqa: E402
from st.supervised_run import number_of_starts, supervised, supervisor_events  # noqa: E402
from st.training_run import Run  # noqa: E402

RANKS, KILL_AFTER = 4, 8  # step; the newest save on disk is that of step 5
RESUME = "--load_checkpoint ./output/checkpoint --resume_training True"
WAYS = ("by hand", "supervisor", "joining", "standby", "lost node")
PARTNER = {"CPU_CLUSTER_MEMORIES": "2", "MINDRESUME_MEMORY_TIER_PARTNER": "true"}
INTERVALS = {"MS_RETRY_INTERVAL_LOWER": "3", "MS_RETRY_INTERVAL_UPPER": "5"}
# seconds: msrun's scheduler is not ended by st/cpu_cluster before it ends itself
OWN_END = {"CPU_CLUSTER_AFTER_LAST": "600"}
# seconds from the kill until the last process has ended
TARGET_END = 3.0
AFTER_END = [phase for phase in PHASES.values() if phase not in ("notice", "end")]


class PlainRun(Run):
    """The same training started by msrun itself."""

    def command(self, extra: str = "") -> list[str]:
        _, _, inner, workers, port, logs, _, timeout = super().command(extra)
        return [
            "msrun",
            f"--worker_num={workers}",
            f"--local_worker_num={workers}",
            f"--master_port={port}",
            f"--log_dir={logs}",
            "--join=True",
            f"--cluster_time_out={timeout}",
            *shlex.split(inner),
        ]


class Bench:
    def __init__(self, folder: Path, ways: list[str]):
        self.folder = folder
        self.ways = ways
        self.rounds = measure.Rounds()
        self.chance = random.Random(0)
        self.memory = Path(tempfile.mkdtemp(prefix="bench-recovery-", dir="/dev/shm"))
        self.data = folder / "data"
        subprocess.run(
            [sys.executable, str(ROOT / "st" / "data" / "make_data.py"), str(self.data)],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def run(self, rounds: int) -> None:
        for number in self.rounds.numbers(rounds):
            for way in measure.shuffled(list(self.ways), number):
                self.recover(way, self.folder / f"{number}-{way.replace(' ', '-')}")

    def recover(self, way: str, folder: Path) -> None:
        kind = PlainRun if way == "by hand" else Run
        run = kind(
            folder,
            "quickstart_qwen3_dp2tp2.yaml",
            self.data,
            RANKS,
            PROGRAMS / "held.py",
            graphs=self.folder / "graphs",
        )
        hold = folder / f"hold_{KILL_AFTER}"
        folder.mkdir()
        hold.touch()
        if way != "by hand":
            supervised(
                run,
                *(["--standby"] if way == "standby" else []),
                extra=RESUME,
                MINDRESUME_MEMORY_TIER_EVERY_STEPS="1",
                MINDRESUME_MEMORY_TIER_DIR=str(self.memory),
                **(INTERVALS if way == "supervisor" else {}),
                **(PARTNER if way == "lost node" else {}),
                OMP_NUM_THREADS="1",  # as st/cpu_cluster/run.py sets it, too late for a fork
            )
        else:
            run.start(RESUME, **OWN_END)
        run.wait_for_step(KILL_AFTER)
        while not (committed_steps(run) and (way != "standby" or is_standby_ready(run))):
            time.sleep(0.01)
        while way == "lost node" and copied(run) < KILL_AFTER:
            time.sleep(0.01)
        hold.unlink()
        ranks = (2, 3) if way == "lost node" else (self.chance.randrange(RANKS),)
        processes, killed = [run.worker(rank) for rank in ranks], time.time()
        for process in processes:
            os.kill(process, signal.SIGKILL)
        if way == "lost node":
            shutil.rmtree(f"{self.memory}-node_1")
        if way != "by hand":
            while number_of_starts(run) < 2:
                assert run.process.poll() is None, run.launcher_log()[-3000:]
                time.sleep(0.01)
            ended = next(event for event in supervisor_events(run, "job_ended"))
            noticed = next(event["time"] for event in supervisor_events(run, "rank_died")) - killed
            self.rounds.add(f"{way}: notice", noticed)
            gone = ended["time"]
        else:
            run.wait(LIMIT)
            assert_no_process_left(run, LIMIT)
            gone = time.time()
            run.start(RESUME, **OWN_END)
        run.wait_for_success(LIMIT)
        assert_no_process_left(run)
        self._add(way, run, killed, gone)
        shutil.rmtree(folder)

    def _add(self, way: str, run: Run, killed: float, gone: float) -> None:
        output = str(run.folder / "output")
        (recovery,) = build_report(PosixStorage(), output, str(run.checkpoints)).recoveries
        times: dict[int, list[float]] = {}
        for row in run.steps():
            times.setdefault(row["step"], []).append(row["time"])
        last = max(step for step, found in times.items() if found[0] <= gone)
        first = min(found[-1] for found in times.values() if found[-1] > gone)
        self.rounds.add(f"{way}: kill to no process left", gone - killed)
        for name, seconds in parts(recovery, gone).items():
            self.rounds.add(f"{way}: {name}", seconds)
        self.rounds.add(f"{way}: joined", joined(run))
        self.rounds.add(f"{way}: steps redone", sum(len(found) > 1 for found in times.values()))
        self.rounds.add(f"{way}: kill to first step", first - killed)
        self.rounds.add(f"{way}: kill to a new step", times[last + 1][-1] - killed)

    def median(self, way: str, name: str) -> float:
        """Returns 0 for a phase that nothing recorded."""
        return statistics.median(self.rounds.values.get(f"{way}: {name}", [0.0]))

    def text(self) -> str:
        rows = []
        for name in (
            "kill to no process left",
            *dict.fromkeys(
                key.partition(": ")[2]
                for key in self.rounds.values
                if key.partition(": ")[2] in AFTER_END
            ),
            "joined",
            "kill to first step",
            "steps redone",
            "kill to a new step",
        ):
            first, *others = (self.median(way, name) for way in self.ways)
            ratios = (f"{other:.1f} ({other / first:.2f})" if first else "" for other in others)
            rows.append([name, f"{first:.1f}", *ratios])
        note = ""
        if "supervisor" in self.ways:
            ended = self.median("supervisor", "kill to no process left")
            note = (
                f"Notice and end with the supervisor: {ended:.2f} s (noticed after "
                f"{self.median('supervisor', 'notice'):.2f} s); "
                f"target {TARGET_END:.0f} s: {'met' if ended <= TARGET_END else 'missed'}.\n"
            )
        return measure.table(["seconds, medians (ratio)", *self.ways], rows) + "\n" + note


def joined(run: Run) -> float:
    """Returns the seconds from the moment in which the last rank of the last start had imported
    everything to the beginning of its training on all ranks."""
    began = [events(run, "training_started", rank)[-1] for rank in range(RANKS)]
    return max(row["time"] for row in began) - max(row["imported"] for row in began)


def copied(run: Run) -> int:
    """Returns the newest step of which each of two nodes keeps what the other one has saved."""
    rows = [events(run, "partner_copied", rank) for rank in (0, 2)]
    return min(max((row["step"] for row in found), default=0) for found in rows)


def is_standby_ready(run: Run) -> bool:
    return any("standby process" in event["text"] for event in supervisor_events(run, "notice"))


def parts(recovery: Recovery, gone: float) -> dict[str, float]:
    """Returns the seconds of each phase after the end of the dead job. A phase whose end nothing
    recorded is in the next one."""
    found: dict[str, float] = {}
    for phase in recovery.phases:
        if phase.end > gone:
            found[phase.names[-1]] = (
                found.get(phase.names[-1], 0.0) + phase.end - max(phase.begin, gone)
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--folder", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    # msrun starts "python"
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    folder = Path(tempfile.mkdtemp(prefix="bench-recovery-", dir=options.folder))
    bench = Bench(folder, options.ways.split(","))
    try:
        bench.run(options.rounds)
        measure.finish(
            f"From SIGKILL of one of {RANKS} ranks to the next step, {options.rounds} rounds",
            str(folder),
            bench.rounds,
            bench.text(),
            options.json,
        )
    finally:
        shutil.rmtree(folder)
        for memory in bench.memory.parent.glob(f"{bench.memory.name}*"):
            shutil.rmtree(memory)


if __name__ == "__main__":
    main()
