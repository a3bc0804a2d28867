"""Trainings as a user starts them, in real processes, for the system tests and the quickstart.

    run = Run(folder, config="quickstart_qwen3_dp2tp2.yaml", workers=4, data=data)
    run.start(); assert run.wait() == 0; run.steps()

Everything goes through the repository's run_mindformer.py (or another ``program``) and
scripts/msrun_launcher.sh, with st/cpu_cluster/run.py around it. What each step saw and gave is
recorded by st/cpu_cluster/recorder.py.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mindresume.events.event_file import FOLDER  # noqa: E402
from mindresume.storage import TEMPORARY  # noqa: E402
from st.cpu_cluster.launch import free_port  # noqa: E402

CRASHED = 128 + signal.SIGSEGV  # exit status, as of a shell
# seconds between looks at the folder while waiting for a half-written file
POLL_SECONDS = 0.0005
# Compiling is half of a short training. As many bytes as two layers of the quickstart, which
# st/quickstart.py trains as it is.
SIZES = {"model.model_config.num_hidden_layers": 1, "model.model_config.intermediate_size": 1024}
ONE_LAYER = " ".join(f"--{key} {value}" for key, value in SIZES.items())
FORMAT_2 = "--use_legacy_format False"  # Checkpoint 2.0: iteration folders
# Keys of a configuration that do not change the graph: what is saved and loaded, when and where.
NOT_IN_GRAPHS = (
    "callbacks",
    "load_checkpoint",
    "load_ckpt_format",
    "resume_training",
    "mindresume",
    "auto_trans_ckpt",
    "src_strategy_path_or_dir",
    "output_dir",
    "remote_save_url",
    "use_graceful_exit",
    "use_legacy_format",
    "balanced_load",
    "ignore_data_skip",
    "data_skip_steps",
)


def make_data(folder: Path, *options: str) -> None:
    """Runs st/data/make_data.py."""
    subprocess.run(
        [sys.executable, str(ROOT / "st" / "data" / "make_data.py"), str(folder), *options],
        check=True,
    )


@dataclass(frozen=True)
class Attempt:
    """The state when an attempt started: the number of recorded steps, and these event files."""

    steps: int = 0
    event_files: frozenset[Path] = frozenset()


@dataclass
class Run:
    """One training in its own folder; every ``start`` is another attempt at it, by the same
    command.

    ``data``: folder made by st/data/make_data.py. ``program``: the script to run, default the
    repository's. ``device``: "CPU", or "Ascend" (then nothing is patched; only the recorder is
    added). ``options``: words of the command line in every attempt.
    ``graphs``: what is compiled is kept there and taken by runs of the same graph that share the
    folder (MindSpore's MS_COMPILER_CACHE_ENABLE, as many jobs that restart often have it). None:
    each attempt compiles.
    """

    folder: Path
    config: str
    data: Path
    workers: int = 1
    program: Path = ROOT / "run_mindformer.py"
    device: str = "CPU"
    legacy: bool = False
    options: str = ""
    graphs: Path | None = None
    process: subprocess.Popen | None = None
    started: float = 0.0
    # where the graph of this attempt is, or will be
    kept: Path | None = field(default=None, init=False)
    attempts: list[Attempt] = field(default_factory=list)

    def like(self, folder: Path, **changes: Any) -> Run:
        """Returns the same training in another folder, not started yet."""
        return replace(
            self, **{"folder": folder, "process": None, "started": 0.0, "attempts": [], **changes}
        )

    def configure(self, changes: Mapping[str, Any]) -> Run:
        """Writes a configuration of its own for this run, with ``changes``: {keys with dots between
        them: value}. KeyError if there is no such section: the change would have no effect."""
        config = yaml.safe_load((ROOT / "configs" / self.config).read_text(encoding="utf-8"))
        for keys, value in changes.items():
            *outer, last = keys.split(".")
            section = config
            for key in outer:
                section = section[key]
            section[last] = value
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config = str(self.folder / "config.yaml")
        Path(self.config).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return self

    @property
    def losses(self) -> Path:
        return self.folder / "steps.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "output" / "checkpoint"

    def steps(self, attempt: int | None = None) -> list[dict]:
        """Recorded steps of all attempts in order, or of one (-1: the last)."""
        if not self.losses.exists():
            return []
        lines = self.losses.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        if attempt is None:
            return rows
        ends = [*(later.steps for later in self.attempts[1:]), len(rows)]
        return rows[self.attempts[attempt].steps : ends[attempt]]

    def event_files(self, rank: int = 0, attempt: int = -1) -> list[Path]:
        """The event files that the processes of a rank have begun in one attempt."""
        later = [*self.attempts[1:], Attempt(0, self._event_files())]
        found = later[attempt].event_files - self.attempts[attempt].event_files
        return sorted(path for path in found if f"-rank_{rank}-" in path.name)

    def _event_files(self) -> frozenset[Path]:
        return frozenset(
            path
            for folder in (self.folder, *self.folder.glob("node_*"))
            for path in (folder / "output" / FOLDER).glob("*.jsonl")
        )

    def log(self, rank: int = 0) -> str:
        """Returns what one rank of the last attempt printed."""
        path = self.folder / "output" / "msrun_log" / f"worker_{rank}.log"
        return (
            path.read_text(encoding="utf-8", errors="replace")
            if self.workers > 1
            else self.launcher_log()
        )

    def launcher_log(self) -> str:
        return (self.folder / f"launcher_{len(self.attempts)}.log").read_text(
            encoding="utf-8", errors="replace"
        )

    def command(self, extra: str = "") -> list[str]:
        config = self.config if os.path.isabs(self.config) else f"{ROOT}/configs/{self.config}"
        inner = (
            f"{ROOT}/st/cpu_cluster/run.py {self.program} --config {config} --run_mode train "
            f"--train_dataset {self.data}/{'legacy' if self.legacy else 'mcore'}.mindrecord "
            f"{self.options} {extra}"
        )
        if self.device != "CPU":
            inner += f" --device_target {self.device}"
        return [
            "bash",
            str(ROOT / "scripts" / "msrun_launcher.sh"),
            inner,
            str(self.workers),
            str(free_port()),
            "output/msrun_log",
            "True",
            "300",
        ]

    def start(self, extra: str = "", prefix: tuple[str, ...] = (), **environment: str) -> Run:
        """``extra``: more arguments of the program. ``prefix``: words before the command, such as a
        shell with limits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.attempts.append(Attempt(len(self.steps()), self._event_files()))
        self.started = time.time()
        settings = {
            **os.environ,
            "CPU_CLUSTER_STEPS": str(self.losses),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "CPU_CLUSTER_DEVICE": self.device,
            **self._compiled(extra),
            **environment,
        }
        with open(self.folder / f"launcher_{len(self.attempts)}.log", "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [*prefix, *self.command(extra)],
                cwd=self.folder,
                env=settings,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def graph_folder(self) -> Path | None:
        """Returns the folder where compiled graphs are kept, or None."""
        return self.graphs

    def _compiled(self, extra: str) -> dict[str, str]:
        """Returns the variables for the next attempt."""
        folder = self.graph_folder()
        if folder is None:
            return {}
        # a subclass may start it in another way
        _, _, inner, workers, *_ = Run.command(self, extra)
        options = re.sub(rf"--(config|{'|'.join(NOT_IN_GRAPHS)})(\.\S+)? \S+", "", inner)
        # or an absolute path
        config = yaml.safe_load((ROOT / "configs" / self.config).read_text(encoding="utf-8"))
        rest = {key: value for key, value in config.items() if key not in NOT_IN_GRAPHS}
        key = json.dumps([options.split(), workers, rest], sort_keys=True)
        self.kept = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        own = self.kept if self.kept.exists() else self.folder / f"graphs_{len(self.attempts)}"
        return {"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": str(own)}

    def _keep_compiled(self) -> None:
        """Keeps the compiled graph, which is written once a step was done. Of two that compiled the
        same at once, one is kept."""
        own = self.folder / f"graphs_{len(self.attempts)}"
        if own.exists() and self.steps(-1):
            self.kept.parent.mkdir(exist_ok=True)
            with suppress(OSError):
                own.rename(self.kept)

    def wait(self, timeout: float = 400.0) -> int:
        """Returns the exit status of the job. TimeoutExpired after ``timeout`` seconds; nothing of
        the job is left behind."""
        try:
            return self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                self.signal_all(signal.SIGKILL)
                self.process.wait()
            self._keep_compiled()

    def wait_for_success(self, timeout: float = 400.0) -> Run:
        """Waits for a job that must succeed. AssertionError with the end of its log if it does not.

        A crash when its processes exit, after every rank has finished the training, is a warning: a
        thread of MindSpore 2.7.2 (RECV_EVENT_LOOP of libmindspore_cluster.so) seldom follows a null
        pointer there."""
        status = self.wait(timeout)
        if status == CRASHED and all(map(self.has_finished, range(self.workers))):
            warnings.warn(
                f"a process of {self.folder} crashed at its exit, after the training", stacklevel=2
            )
            return self
        assert status == 0, (
            f"exit status {status}; the end of the log of {self.folder}:\n"
            + "\n".join(self.log().splitlines()[-30:])
        )
        return self

    def has_finished(self, rank: int) -> bool:
        """Returns whether the last event of a rank in the last attempt is the end of a training
        that finished."""
        files = self.event_files(rank)
        last = files[-1].read_text(encoding="ascii").splitlines()[-1:] if files else []
        return (
            bool(last)
            and last[0].endswith("}")
            and json.loads(last[0]).get("outcome") == "finished"
        )

    def processes(self) -> list[int]:
        """Returns every process of the job, found by session and by descent, scheduler and launcher
        included."""
        return session_processes(self.process.pid)

    def worker(self, rank: int) -> int:
        """Returns the process of one rank. LookupError if there is none."""
        for pid in self.processes():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if (
                b"MS_ROLE=MS_WORKER" in environment
                and f"RANK_ID={rank}".encode() in environment
                and b"run.py" in command
            ):
                return pid
        raise LookupError(f"no process of rank {rank}")

    def signal_all(self, number: int) -> int:
        """Sends a signal to every process of the job; returns how many there were."""
        processes = self.processes()
        for pid in processes:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        return len(processes)

    def kill(self) -> int:
        killed = self.signal_all(signal.SIGKILL)
        self.process.wait()
        return killed

    def half_written(self) -> list[str]:
        """Returns the files of a save in progress."""
        return sorted(
            path
            for folder in glob.glob(str(self.checkpoints / "rank_*"))
            for path in (os.path.join(folder, name) for name in os.listdir(folder))
            if path.endswith(TEMPORARY)
        )

    def stop_in_a_save(self, first_step: int) -> list[str]:
        """Stops the job (SIGSTOP) in the middle of a save after ``first_step``, by looking at its
        folder; nothing is injected. Returns the half-written files; the caller kills or continues.
        RuntimeError if the training ends before."""
        while self.process.poll() is None:
            done = self.steps(-1)
            if not done or done[-1]["step"] < first_step:
                time.sleep(0.05)
                continue
            if self.half_written():
                self.signal_all(signal.SIGSTOP)
                half = self.half_written()
                if half:
                    return half
                self.signal_all(signal.SIGCONT)
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"{self.folder}: the training ended before a save could be cut")

    def wait_for_step(self, step: int, timeout: float = 300.0) -> None:
        """Waits until this attempt has recorded ``step``. TimeoutError; RuntimeError if the job
        ends before."""
        while not any(row["step"] >= step for row in self.steps(-1)):
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"{self.folder}: the training ended before step {step}:\n{self.log()[-3000:]}"
                )
            if time.time() - self.started > timeout:
                raise TimeoutError(f"{self.folder}: step {step} was not reached in {timeout} s")
            time.sleep(0.02)

    def mindresume(self, *arguments: str) -> subprocess.CompletedProcess:
        """Runs the command line, as a user calls it."""
        return subprocess.run(
            [sys.executable, "-m", "mindresume", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    def which(self, *arguments: str) -> dict:
        """Returns what a resume would take now."""
        return json.loads(
            self.mindresume("which", "--json", str(self.checkpoints), *arguments).stdout
        )


def session_processes(leader: int) -> list[int]:
    """Returns the processes of a session and their descendants."""
    parents, sessions = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = (
                    Path(f"/proc/{entry}/stat")
                    .read_text(encoding="utf-8")
                    .rpartition(")")[2]
                    .split()
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z":
                parents[int(entry)], sessions[int(entry)] = int(fields[1]), int(fields[3])

    def belongs(pid: int) -> bool:
        while pid > 1:
            if pid == leader or sessions.get(pid) == leader:
                return True
            pid = parents.get(pid, 0)
        return False

    return [pid for pid in parents if belongs(pid)]


def differences(reference: list[dict], other: list[dict]) -> list[str]:
    """Returns what is not bit-identical between the recorded steps of two runs: losses and sample
    ids, by step. Steps that only one has are differences as well, except those of ``reference``
    before the first of ``other``."""
    known = {row["step"]: row for row in reference}
    found = []
    for row in other:
        match = known.get(row["step"])
        if match is None:
            found.append(f"step {row['step']} is only in one of them")
        elif (match["hex"], match["samples"]) != (row["hex"], row["samples"]):
            found.append(
                f"step {row['step']}: loss {match['loss']!r} and {row['loss']!r}, "
                f"{'same' if match['samples'] == row['samples'] else 'other'} samples"
            )
    wanted = [step for step in known if other and step >= other[0]["step"]]
    missing = sorted(set(wanted) - {row["step"] for row in other})
    return found + [f"step {step} is missing" for step in missing]
