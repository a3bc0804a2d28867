"""The quickstart: a training uninterrupted, killed in the middle of a save, the same command again;
then the comparison.

    quickstart.py [--quick] [--folder output/quickstart]

Runs configs/quickstart_*.yaml with the repository's run_mindformer.py under
scripts/msrun_launcher.sh, on the CPU cluster of st/cpu_cluster. Nothing is injected into the
product: the job is stopped (SIGSTOP) as soon as a half-written file of a save is seen, and if the
save is really incomplete then, all its processes get SIGKILL. Exit status 0 only if the resumed run
equals the uninterrupted one: same checkpoint chosen as expected, same samples, difference of every
loss exactly 0.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from st.training_run import ROOT, Run, differences  # noqa: E402

STEPS = 40
# the save of this step or a later one is the one that is cut: resumed inside an epoch
KILL_FROM = 30


class ProgressPrinter:
    """Prints how far the last attempt of a run is, every five steps."""

    def __init__(self, run: Run):
        self.run, self.shown = run, None

    def print_progress(self) -> None:
        steps = self.run.steps(-1)
        if steps and (self.shown is None or steps[-1]["step"] // 5 > self.shown // 5):
            self.shown = steps[-1]["step"]
            print(
                f"    step {self.shown:3d} of {STEPS}   loss {steps[-1]['loss']:.4f}   "
                f"({time.time() - self.run.started:.0f} s)",
                flush=True,
            )


def wait_and_print(run: Run) -> None:
    """Waits until the job ends. SystemExit with the end of its log if it fails."""
    printer = ProgressPrinter(run)
    while run.process.poll() is None:
        printer.print_progress()
        time.sleep(0.2)
    printer.print_progress()
    if run.process.returncode:
        tail = "\n".join(run.log().splitlines()[-25:])
        raise SystemExit(
            f"{run.folder}: exit status {run.process.returncode}; the end of its log:\n{tail}"
        )


def kill_in_a_save(run: Run) -> None:
    """Kills all processes in the middle of a save of step KILL_FROM or later."""
    printer = ProgressPrinter(run)
    while (
        run.process.poll() is None and (run.steps(-1) or [{"step": 0}])[-1]["step"] < KILL_FROM - 2
    ):
        printer.print_progress()
        time.sleep(0.05)
    half = run.stop_in_a_save(KILL_FROM - 2)
    sizes = ", ".join(f"{Path(path).parent.name} ({os.path.getsize(path)} bytes)" for path in half)
    killed = run.kill()
    print(
        f"    SIGKILL to {killed} processes while a checkpoint was being written; half-written: "
        f"{sizes}"
    )


def compare(whole: Run, broken: Run, chosen: int) -> list[str]:
    """Prints the table; returns what is wrong, nothing if the two runs are the same run."""
    reference = {row["step"]: row for row in whole.steps()}
    first, second = broken.steps(0), broken.steps(1)
    problems = differences(whole.steps(), second)
    problems += [text for text in differences(whole.steps(), first) if "missing" not in text]
    if sorted(reference) != list(range(1, STEPS + 1)) or second[0]["step"] != chosen + 1:
        problems.append(f"expected steps 1 to {STEPS}, and a resume from step {chosen + 1} on")
    print(
        f"\n  {'step':>4}  {'loss uninterrupted':>20}  {'loss resumed':>20}  {'difference':>10}  "
        "same samples"
    )
    for row in second:
        other = reference[row["step"]]
        print(
            f"  {row['step']:>4}  {other['loss']:>20.12f}  {row['loss']:>20.12f}  "
            f"{abs(row['loss'] - other['loss']):>10g}  "
            f"{'yes' if row['samples'] == other['samples'] else 'NO'}"
        )
    worst = max(abs(row["loss"] - reference[row["step"]]["loss"]) for row in second)
    print(f"\n  largest difference: {worst:g}")
    return problems


def prove(broken: Run) -> list[str]:
    """Prints what mindresume itself says of the resume; returns what is wrong with that."""
    done = broken.mindresume("proof", str(broken.folder / "output"), "--json")
    (row,) = json.loads(done.stdout)
    print(
        f"  mindresume proof: resumed after step {row['step']}: {row['verdict']}, "
        f"{row['tensors']} tensors, {row['steps']} steps done again, "
        f"largest difference of the loss {row['largest_loss_difference']:g} {row['text']}"
    )
    return [] if row["verdict"] == "proved" else [f"mindresume proof says {row['verdict']}"]


def write_report(broken: Run, page: Path) -> None:
    """Writes the report page on the run that was killed: its loss, the kill, and the resume."""
    done = broken.mindresume("report", str(broken.folder), "-o", str(page))
    if done.returncode:
        raise SystemExit(f"mindresume report: {done.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one process instead of four")
    parser.add_argument("--folder", type=Path, default=ROOT / "output" / "quickstart")
    options = parser.parse_args()
    quick = options.quick
    if not quick and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print(
            f"The 4-process CPU cluster needs x86-64 Linux; this is {platform.system()} "
            f"{platform.machine()}: it runs on one process instead (--quick)."
        )
        quick = True
    folder, workers, began = options.folder.resolve(), 1 if quick else 4, time.time()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    layout = "one process" if quick else "4 processes, data parallel 2 x model parallel 2"

    print(
        f"== a small Qwen3, the real mindformers Trainer, {layout}, {STEPS} steps, a checkpoint "
        "every 5"
    )
    print("-- data: tokenising st/data/story.txt", flush=True)
    subprocess.run(
        [sys.executable, str(ROOT / "st" / "data" / "make_data.py"), str(folder / "data")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    config = "quickstart_qwen3.yaml" if quick else "quickstart_qwen3_dp2tp2.yaml"
    whole = Run(folder / "uninterrupted", config, folder / "data", workers)
    broken = Run(folder / "interrupted", config, folder / "data", workers)
    print("-- (a) uninterrupted", flush=True)
    whole.start()
    wait_and_print(whole)
    print("-- (b) the same, killed while a checkpoint is written", flush=True)
    broken.start()
    kill_in_a_save(broken)
    answer = broken.which()
    if answer["chosen"] is None or not answer["refused"]:
        raise SystemExit(
            f"expected a checkpoint to resume from and a newer one that is refused: {answer}"
        )
    chosen, killed = answer["chosen"]["step"], answer["refused"][0]["step"]
    print("-- (c) the same command again")
    for refusal in answer["refused"]:
        print(f"    refused: step {refusal['step']}: {refusal['reason']}")
    print(
        f"    chosen:  step {chosen}, epoch {answer['chosen']['epoch']}, "
        f"{len(answer['chosen']['files'])} file(s), every byte checked",
        flush=True,
    )
    broken.start()
    wait_and_print(broken)
    problems = compare(whole, broken, chosen)
    if chosen >= killed:
        problems.append(f"step {chosen} was chosen, though step {killed} is older and refused")
    problems += prove(broken)
    write_report(broken, folder / "report.html")
    print(f"  loss, kill and resume: {folder / 'report.html'}")
    for problem in problems:
        print(f"  WRONG: {problem}")
    print(
        f"== {'FAILED' if problems else 'the resumed training is the uninterrupted one'} "
        f"({time.time() - began:.0f} s)"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
