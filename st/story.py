"""The user story end to end: uninterrupted, killed in the middle of a save, the same command again; then the comparison.

    story.py [--quick] [--folder output/quickstart]

Runs configs/quickstart_*.yaml with the repository's run_mindformer.py under scripts/msrun_launcher.sh, on the CPU cluster of
st/cpu_cluster. Nothing is injected into the product: the job is stopped (SIGSTOP) as soon as a half-written file of a save is
seen, and if the save is really incomplete then, all its processes get SIGKILL. Exit status 0 only if the resumed run equals the
uninterrupted one: same checkpoint chosen as expected, same samples, difference of every loss exactly 0.
"""
from __future__ import annotations

import argparse
import glob
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mindresume.store.storage import TEMPORARY  # noqa: E402
from st.cpu_cluster.launch import free_port  # noqa: E402

STEPS = 40
KILL_FROM = 25                       # the save of this step or a later one is the one that is cut
PAUSE = 0.0005                       # seconds between looks at the folder while waiting for a half-written file


@dataclass
class Run:
    """One training in its own folder. ``steps``: what the recorder wrote, in the order it happened."""
    name: str
    folder: Path
    workers: int
    data: Path
    process: subprocess.Popen | None = None
    started: float = 0.0
    lives: list[int] = field(default_factory=list)           # number of recorded steps before each start

    @property
    def losses(self) -> Path:
        return self.folder / "steps.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "output" / "checkpoint"

    def steps(self) -> list[dict]:
        if not self.losses.exists():
            return []
        lines = self.losses.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def command(self) -> list[str]:
        config = "quickstart_qwen3_dp2tp2.yaml" if self.workers > 1 else "quickstart_qwen3.yaml"
        inner = (f"{ROOT}/st/cpu_cluster/run.py {ROOT}/run_mindformer.py --config {ROOT}/configs/{config} "
                 f"--run_mode train --train_dataset {self.data}/mcore.mindrecord")
        tail = [str(self.workers), str(free_port()), "output/msrun_log", "True", "300"]
        return ["bash", str(ROOT / "scripts" / "msrun_launcher.sh"), inner, *tail]

    def start(self) -> None:
        """In a session of its own, so that all its processes can be found."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lives.append(len(self.steps()))
        self.started = time.time()
        environment = dict(os.environ, CPU_CLUSTER_STEPS=str(self.losses), PYTHON=sys.executable, PYTHONPATH=str(ROOT))
        with open(self.folder / f"launcher_{len(self.lives)}.log", "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(self.command(), cwd=self.folder, env=environment, stdout=log,
                                            stderr=subprocess.STDOUT, start_new_session=True)

    def signal_all(self, number: int) -> int:
        """Sends a signal to every process of the job; returns how many there were."""
        members = session_members(self.process.pid)
        for pid in members:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        return len(members)


def session_members(leader: int) -> list[int]:
    """Processes started by ``leader``'s session, itself included, also those in sub-sessions (by descent)."""
    parents, sessions = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry)], sessions[int(entry)] = int(fields[1]), int(fields[3])

    def descends(pid: int) -> bool:
        while pid > 1:
            if pid == leader or sessions.get(pid) == leader:
                return True
            pid = parents.get(pid, 0)
        return False
    return [pid for pid in parents if descends(pid)]


def watch(run: Run, show: bool = True) -> int:
    """Prints a line every few steps until the job ends; returns its exit status."""
    shown = 0
    while True:
        status = run.process.poll()
        steps = run.steps()[run.lives[-1]:]
        if show and steps and steps[-1]["step"] // 5 > shown // 5:
            shown = steps[-1]["step"]
            print(f"    step {shown:3d} of {STEPS}   loss {steps[-1]['loss']:.4f}   "
                  f"({time.time() - run.started:.0f} s)", flush=True)
        if status is not None:
            return status
        time.sleep(0.3)


def kill_in_a_save(run: Run) -> int:
    """Waits for a half-written save of step KILL_FROM or later, stops the job, makes sure that the save is incomplete, and
    kills all processes. Returns the step being saved. SystemExit if the training ends first."""
    pattern = str(run.checkpoints / "rank_*" / f".*{TEMPORARY}")
    before = 0
    while run.process.poll() is None:
        done = run.steps()[run.lives[-1]:]
        if done and done[-1]["step"] // 5 > before // 5:
            before = done[-1]["step"]
            print(f"    step {before:3d} of {STEPS}   loss {done[-1]['loss']:.4f}   "
                  f"({time.time() - run.started:.0f} s)", flush=True)
        if not done or done[-1]["step"] < KILL_FROM - 2:
            time.sleep(0.05)
            continue
        deadline = time.time() + 0.2                      # look closely for a while, then print progress again
        while time.time() < deadline:
            if glob.glob(pattern, include_hidden=True) if sys.version_info >= (3, 11) else glob.glob(pattern):
                run.signal_all(signal.SIGSTOP)
                half = glob.glob(pattern, include_hidden=True) if sys.version_info >= (3, 11) else glob.glob(pattern)
                if half:
                    killed = run.signal_all(signal.SIGKILL)
                    run.process.wait()
                    names = ", ".join(sorted(f"{Path(p).parent.name} ({os.path.getsize(p)} bytes)" for p in half))
                    print(f"    SIGKILL to {killed} processes while a checkpoint was being written; half-written: {names}")
                    return run.steps()[-1]["step"] + 1
                run.signal_all(signal.SIGCONT)
            time.sleep(PAUSE)
    raise SystemExit(f"{run.name}: the training ended before a save could be cut; see {run.folder}")


def which(run: Run) -> dict:
    """What a resume will take, asked before it is started."""
    done = subprocess.run([sys.executable, "-m", "mindresume", "which", "--json", str(run.checkpoints)], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"mindresume which: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout)


def need(status: int, run: Run) -> None:
    if status:
        log = run.folder / f"launcher_{len(run.lives)}.log"
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
        raise SystemExit(f"{run.name}: the job ended with exit status {status}; the end of {log}:\n{tail}")


def compare(whole: Run, broken: Run, chosen: int) -> list[str]:
    """Prints the table; returns what is wrong, nothing if the two runs are the same run."""
    reference = {row["step"]: row for row in whole.steps()}
    life = broken.lives[1]
    first, second = broken.steps()[:life], broken.steps()[life:]
    problems = []
    if sorted(reference) != list(range(1, STEPS + 1)):
        problems.append(f"the uninterrupted run recorded steps {sorted(reference)}, expected 1 to {STEPS}")
    if [row["step"] for row in second] != list(range(chosen + 1, STEPS + 1)):
        problems.append(f"the resumed run trained steps {[row['step'] for row in second]}, expected {chosen + 1} to {STEPS}")
    print(f"\n  {'step':>4}  {'loss uninterrupted':>20}  {'loss resumed':>20}  {'difference':>10}  same samples")
    worst = 0.0
    for row in second:
        other = reference.get(row["step"])
        if other is None:
            continue
        same, difference = row["samples"] == other["samples"], abs(row["loss"] - other["loss"])
        worst = max(worst, difference)
        if row["hex"] != other["hex"] or not same:
            problems.append(f"step {row['step']}: loss {row['loss']!r} and {other['loss']!r}, "
                            f"{'same' if same else 'other'} samples")
        print(f"  {row['step']:>4}  {other['loss']:>20.12f}  {row['loss']:>20.12f}  {difference:>10g}  "
              f"{'yes' if same else 'NO'}")
    for row in first:
        if row["step"] in reference and row["hex"] != reference[row["step"]]["hex"]:
            problems.append(f"step {row['step']} differs already before the kill: two runs of this machine are not alike")
    print(f"\n  largest difference: {worst:g}")
    return problems


def draw(whole: Run, broken: Run, killed: int, chosen: int, path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    life = broken.lives[1]
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for rows, label, style in (
            (whole.steps(), "uninterrupted", {"color": "#b8c4d0", "linewidth": 7, "solid_capstyle": "round"}),
            (broken.steps()[:life], "until the kill", {"color": "#c0392b", "linewidth": 2}),
            (broken.steps()[life:], "resumed by the same command", {"color": "#1a5276", "linewidth": 2, "marker": "o",
                                                                   "markersize": 3})):
        axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], label=label, **style)
    axes.axvline(killed, color="#c0392b", linestyle=":", linewidth=1)
    axes.annotate(f"SIGKILL while\nstep {killed} is saved", (killed, axes.get_ylim()[1]), (4, -4), va="top",
                  textcoords="offset points", color="#c0392b", fontsize=9)
    axes.axvline(chosen, color="#1a5276", linestyle=":", linewidth=1)
    axes.annotate(f"resumed from\nstep {chosen}", (chosen, axes.get_ylim()[0]), (-4, 6), ha="right",
                  textcoords="offset points", color="#1a5276", fontsize=9)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one process instead of four")
    parser.add_argument("--folder", type=Path, default=ROOT / "output" / "quickstart")
    options = parser.parse_args()
    quick = options.quick
    if not quick and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print(f"The 4-process CPU cluster needs x86-64 Linux; this is {platform.system()} {platform.machine()}: playing the "
              f"story on one process instead (--quick).")
        quick = True
    folder, workers, began = options.folder.resolve(), 1 if quick else 4, time.time()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    layout = "one process" if quick else "4 processes, data parallel 2 x model parallel 2"

    print(f"== a small Qwen3, the real mindformers Trainer, {layout}, {STEPS} steps, a checkpoint every 5")
    print("-- data: tokenising st/data/story.txt", flush=True)
    subprocess.run([sys.executable, str(ROOT / "st" / "data" / "make_data.py"), str(folder / "data")], check=True,
                   stdout=subprocess.DEVNULL)
    whole = Run("uninterrupted", folder / "uninterrupted", workers, folder / "data")
    broken = Run("interrupted", folder / "interrupted", workers, folder / "data")
    print("-- (a) uninterrupted", flush=True)
    whole.start()
    need(watch(whole), whole)
    print("-- (b) the same, killed while a checkpoint is written", flush=True)
    broken.start()
    killed = kill_in_a_save(broken)
    answer = which(broken)
    if answer["chosen"] is None:
        raise SystemExit("there is nothing to resume from")
    chosen = answer["chosen"]["step"]
    print("-- (c) the same command again")
    for refusal in answer["refused"]:
        print(f"    refused: step {refusal['step']}: {refusal['reason']}")
    print(f"    chosen:  step {chosen}, epoch {answer['chosen']['epoch']}, {len(answer['chosen']['files'])} file(s), every byte "
          f"checked", flush=True)
    broken.start()
    need(watch(broken), broken)
    problems = compare(whole, broken, chosen)
    if chosen >= killed or not answer["refused"]:
        problems.append(f"step {chosen} was chosen and {len(answer['refused'])} refused, though step {killed} was cut")
    draw(whole, broken, killed, chosen, folder / "loss.png")
    print(f"  curves: {folder / 'loss.png'}")
    for problem in problems:
        print(f"  WRONG: {problem}")
    print(f"== {'FAILED' if problems else 'the resumed training is the uninterrupted one'} ({time.time() - began:.0f} s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
