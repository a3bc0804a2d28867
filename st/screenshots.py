"""Makes the pictures of the report page in docs/images, from a recorded training, in headless
Chromium.

    python -m st.screenshots               docs/images/report.png (light, English), report_dark.png (dark, Chinese), and of
                                           only the loss, in both languages: loss.png, loss.zh.png

The recording (st/data/recorded_training) is of a real training of one process under ``mindresume
run``, with a save to memory every 4 steps and to disk every 20: killed three times, the second time
with the loss of its memory. It has the event files, and the lines of mindformers' log that the
report reads.
"""  # noqa: E501

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from st.browser import Browser, missing
from st.training_run import ROOT

RECORDED = ROOT / "st" / "data" / "recorded_training"
IMAGES = ROOT / "docs" / "images"


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
    light, dark = images / "report.png", images / "report_dark.png"
    loss, loss_zh = images / "loss.png", images / "loss.zh.png"
    browser = Browser()
    try:
        browser.open(page, width=1140, height=1060)
        browser.point_at("loss", 116)
        browser.screenshot(light)
        browser.mouse("Moved", (5, 5))
        browser.screenshot(loss, "#charts section")
        browser.open(page, "zh-CN", width=1140, height=1060)
        browser.screenshot(loss_zh, "#charts section")
        browser.open(page, "zh-CN", dark=True, width=1140, height=1035)
        browser.drag("loss", 92, 128)
        browser.point_at("timeline", 36, 0.82)
        browser.screenshot(dark)
    finally:
        browser.close()
    return [light, dark, loss, loss_zh]


def main() -> None:
    """Prints the paths of the pictures."""
    if lacks := missing():
        raise SystemExit(lacks)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page").mkdir()
        print(*take(make_page(Path(folder) / "page"), IMAGES), sep="\n")


if __name__ == "__main__":
    main()
