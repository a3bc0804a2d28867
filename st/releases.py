"""Trainings of other releases of mindformers than the one of this environment, in real processes.

    run = ReleaseRun(folder, "quickstart_qwen3_dp2tp2.yaml", data, workers=4, release="2.0.0")
    run.start().wait_for_success()

1.9.0 is what .venv has. Another release is in the environment .venv-RELEASE at the root of the
repository (scripts/release_env.sh); a test is skipped with ``why_not`` if it is not there. Of the
environment of this process, PYTHONPATH is not passed on (``Run.start`` sets it to the repository).
ST_RELEASES="1.9.0 2.0.0": tests of other releases are skipped.
"""

import importlib.util
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from st.training_run import ROOT, Run

HERE = "1.9.0"
RELEASES = ("1.8.0", HERE, "2.0.0", "2.1.0")
LOGS = "output/msrun_log"  # where Run.log looks


def python_of(release: str) -> Path:
    """Returns the interpreter that has this release of mindformers. It may not exist:
    ``why_not``."""
    return Path(sys.executable) if release == HERE else ROOT / f".venv-{release}" / "bin" / "python"


def why_not(release: str) -> str:
    """Returns why this release cannot be run here, or "" if it can."""
    if release not in os.environ.get("ST_RELEASES", release).split():
        return (
            f"mindformers {release} is not one of the releases to test, {os.environ['ST_RELEASES']}"
        )
    if release == HERE and importlib.util.find_spec("mindformers") is None:
        return f"mindformers {HERE} is not installed in this environment"
    if not python_of(release).exists():
        return f"mindformers {release} is not installed: no {python_of(release)}"
    return ""


@dataclass
class ReleaseRun(Run):
    """A training of the graph trainer with the interpreter of a release. Several processes are
    started by st/cpu_cluster/launch.py, which ends the others once one fails."""

    release: str = HERE

    def graph_folder(self) -> Path | None:
        """Returns the folder of compiled graphs, one a release: a graph is of the mindspore that
        compiled it."""
        return self.graphs and self.graphs / self.release

    def words(self, extra: str) -> list[str]:
        """Returns the command of one process, after the interpreter."""
        return shlex.split(super().command(extra)[2])

    def command(self, extra: str = "") -> list[str]:
        python = str(python_of(self.release))
        if self.workers == 1:
            return [python, *self.words(extra)]
        launch = str(ROOT / "st" / "cpu_cluster" / "launch.py")
        return [python, launch, "--logs", LOGS, str(self.workers), "--", python, *self.words(extra)]
