"""Makes the pictures of the report page in docs/images, from a recorded training, in headless
Chromium.

    python -m st.screenshots               docs/images/report.png (light, English), report_dark.png (dark, Chinese), and of
                                           the first one only the loss: loss.png
    python -m st.screenshots --record      plays the training again before that, about a minute, and replaces the recording

The recording (st/data/recorded_training) is of a real training of one process under ``mindresume
run``, with a save to memory every 4 steps and to disk every 20: killed three times, the second time
with the loss of its memory. It has the event files, and the lines of mindformers' log that the
report reads.
"""  # noqa: E501

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import yaml

from st.browser import Browser, missing
from st.supervised_run import number_of_starts, supervised
from st.training_run import ONE_LAYER, ROOT, Run

RECORDED = ROOT / "st" / "data" / "recorded_training"
IMAGES = ROOT / "docs" / "images"
# the lines that the report reads
READ = re.compile(r"\{ Epoch:|Init Config|Training Over|pipeline stages")
EPOCHS = 24
# (step, whether the memory is lost as well)
KILLS = ((57, False), (116, True), (177, False))


def make_page(folder: Path) -> Path:
    """Writes the report page on the recorded training into a folder, and returns its path."""
    shutil.copytree(RECORDED, folder / "output")
    subprocess.run(
        [sys.executable, "-m", "mindresume", "report", "output", "-o", "report.html"],
        cwd=folder,
        check=True,
        env={**os.environ, "TZ": "UTC", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    return folder / "report.html"


def take(page: Path, images: Path) -> list[Path]:
    """Writes the pictures, and returns their paths."""
    light, dark, loss = images / "report.png", images / "report_dark.png", images / "loss.png"
    browser = Browser()
    try:
        browser.open(page, width=1140, height=1060)
        browser.point_at("loss", 116)
        browser.screenshot(light)
        browser.mouse("Moved", (5, 5))
        browser.screenshot(loss, "#charts section")
        browser.open(page, "zh-CN", dark=True, width=1140, height=1035)
        browser.drag("loss", 92, 128)
        browser.point_at("timeline", 36, 0.82)
        browser.screenshot(dark)
    finally:
        browser.close()
    return [light, dark, loss]


# ---- the recording -------------------------------------------------------------------------------


def record(folder: Path) -> None:
    """Plays the training in a folder, and replaces the recording."""
    data, memory = folder / "data", Path(tempfile.mkdtemp(prefix="mindresume-st-", dir="/dev/shm"))
    subprocess.run(
        [sys.executable, str(ROOT / "st" / "data" / "make_data.py"), str(data)], check=True
    )
    run = Run(
        folder / "run",
        "quickstart_qwen3.yaml",
        data,
        options=f"{ONE_LAYER} --runner_config.epochs {EPOCHS}",
    )
    callbacks = yaml.safe_load((ROOT / "configs" / run.config).read_text(encoding="utf-8"))[
        "callbacks"
    ]
    for row in callbacks:
        if row["type"] == "CheckpointMonitor":
            row["save_checkpoint_steps"] = 20
    try:
        play(run.configure({"callbacks": callbacks}), memory)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    keep(
        run.folder / "output",
        {
            str(run.folder): "/home/user/training",
            str(folder): "/home/user",
            str(ROOT): "/home/user/mindresume",
        },
    )


def play(run: Run, memory: Path) -> None:
    """Runs the training to its end through all kills. The supervisor stays, and starts it again."""
    supervised(
        run,
        "--max-restarts",
        "9",
        MINDRESUME_MEMORY_TIER_EVERY_STEPS="4",
        MINDRESUME_MEMORY_TIER_DIR=str(memory),
    )
    for number, (step, is_lost) in enumerate(KILLS, 1):
        while run.process.poll() is None and not (
            number_of_starts(run) == number and _reached(run) >= step
        ):
            time.sleep(0.005)
        for pid in run.processes():
            if pid != run.process.pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for path in memory.iterdir() if is_lost else ():
            shutil.rmtree(path)
        while number_of_starts(run) == number and run.process.poll() is None:
            time.sleep(0.02)
    run.wait_for_success()


def _reached(run: Run) -> int:
    return max((row["step"] for row in run.steps()), default=0)


def keep(output: Path, names: dict[str, str]) -> None:
    """Copies what the report reads. ``names``: folders of this machine, and what is written for
    them."""
    shutil.rmtree(RECORDED, ignore_errors=True)
    for path in sorted(
        [*output.glob("mindresume_events/*.jsonl"), output / "log" / "rank_0" / "info.log"]
    ):
        text = path.read_text(encoding="utf-8")
        for folder, name in names.items():
            text = text.replace(folder, name)
        if path.suffix == ".log":
            text = "".join(line for line in text.splitlines(keepends=True) if READ.search(line))
        target = RECORDED / path.relative_to(output)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def main() -> None:
    """Parses the arguments, and prints the paths of the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="play the training again")
    arguments = parser.parse_args()
    if lacks := missing():
        raise SystemExit(lacks)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.record:
            record(Path(folder))
        (Path(folder) / "page").mkdir()
        print(*take(make_page(Path(folder) / "page"), IMAGES), sep="\n")


if __name__ == "__main__":
    main()
