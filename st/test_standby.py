"""``mindresume run --standby``: after a death the ranks are forked from a process that has imported
everything, and the training cannot tell.

Each death strikes while the ranks wait after a step (st/programs/held.py), so that it does not
depend on how long the imports take.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from st.run_attempts import LIMIT, PROGRAMS, assert_no_process_left, run_beside, wrong_steps
from st.supervised_run import Start, number_of_starts, supervised, supervisor_events
from st.training_run import FORMAT_2, ROOT, Run

pytestmark = pytest.mark.timeout(1500)
LAST = 40
RANK = {"RANK_ID": "3", "RANK_SIZE": "4", "DEVICE_ID": "5"}
SHOW = """
import inspect, json, os, sys, threading
sys.path[0] = os.environ["STANDBY"]
import standby_process
standby_process._SHARE = 1000
if RANK:
    standby_process.import_all()
    os.environ.update(RANK)
    standby_process.take_rank()
from mindformers.core import config_args
from mindformers.trainer import training_args
from mindformers.tools.logger import logger
import mindspore
logger.info("a line of this rank")
arguments = training_args.TrainingArguments
kinds = config_args.ContextConfig, config_args.ParallelContextConfig, arguments
found = [str(value) for kind in kinds
         for name, value in inspect.signature(kind.__init__).parameters.items()
         if name in ("device_id", "device_num", "rank_id")]
found += [getattr(arguments, name) for name in ("device_id", "device_num", "rank_id")]
print("FOUND", json.dumps([*found, mindspore.get_context("device_id")]))
"""


def standby_processes(run: Run) -> list[int]:
    """Returns those that were ready."""
    said = [event["text"] for event in supervisor_events(run, "notice")]
    return [int(text.split()[2]) for text in said if text.startswith("standby process ")]


def is_held(run: Run, number: int, step: int) -> bool:
    """Returns whether all ranks of start ``number`` wait after ``step``, and the standby process is
    ready: one after the first start, another after the one that had none."""
    return (
        number_of_starts(run) == number
        and any(row["step"] == step for row in run.steps())
        # that of the step itself is said in the next one
        and step - 1 in Start(run, number).in_memory()
        and len(standby_processes(run)) == (2 if number == 4 else 1)
    )


@pytest.mark.parametrize(
    "extra", ["", pytest.param(FORMAT_2, marks=pytest.mark.soak)], ids=["1.0", "2.0"]
)
def test_starts_after_deaths_are_forked_and_equal_the_uninterrupted_run(
    whole_several, tmp_path, memory, extra
):
    run = run_beside(whole_several, tmp_path / "run", copied=False)
    run.program = PROGRAMS / "held.py"
    holds = [run.folder / f"hold_{step}" for step in (6, 12, 18, 24)]
    run.folder.mkdir()
    for hold in holds:
        hold.touch()
    supervised(
        run,
        "--standby",
        extra=f"--load_checkpoint ./output/checkpoint --resume_training True {extra}",
        MINDRESUME_MEMORY_TIER_EVERY_STEPS="1",
        MINDRESUME_MEMORY_TIER_DIR=memory,
        OMP_NUM_THREADS="1",  # as st/cpu_cluster/run.py has it
    )

    for number, hold in enumerate(holds, 1):
        while not is_held(run, number, int(hold.name.partition("_")[2])):
            assert run.process.poll() is None, run.launcher_log()[-3000:]
            time.sleep(0.02)
        if number == 3:
            os.kill(standby_processes(run)[0], signal.SIGKILL)
            while "the standby process was killed by SIGKILL" not in run.launcher_log():
                time.sleep(0.02)
        os.kill(run.worker(number % run.workers), signal.SIGKILL)
        hold.unlink()
        while number_of_starts(run) == number:
            time.sleep(0.02)
    run.wait_for_success(LIMIT)
    assert_no_process_left(run)

    assert wrong_steps(run, whole_several) == []
    assert {row["step"] for row in run.steps()} == set(range(1, LAST + 1))
    starts = [Start(run, number) for number in range(1, 6)]
    for start, step in zip(starts, (0, 6, 12, 18, 24), strict=True):
        assert start.resumed() in (step, step - 1)
    assert [start.source() for start in starts[1:]] == ["memory"] * 4
    assert [event["status"] for event in supervisor_events(run, "job_ended")] == [137] * 4 + [0]
    # the second and the third, and the last one from another process
    assert run.launcher_log().count("the standby process forks this start") == 3
    # each rank has its own log of mindformers, as always
    for rank in range(run.workers):
        for folder in run.folder.glob(f"output/log/rank_{rank}"):
            assert (folder / "info.log").read_text(encoding="utf-8").count("build") >= 5


def test_a_fork_has_what_the_framework_reads_of_a_rank_while_it_is_imported(tmp_path):
    """For each release: it is imported without threads, and reads what is known."""
    found = []
    for folder, taken, set_before in (("new", None, RANK), ("fork", RANK, {})):
        (tmp_path / folder).mkdir()
        done = subprocess.run(
            [sys.executable, "-c", f"RANK = {taken}\n{SHOW}"],
            cwd=tmp_path / folder,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT),
                "STANDBY": str(ROOT / "mindresume" / "supervisor"),
                **set_before,
            },
            capture_output=True,
            text=True,
        )
        assert "FOUND" in done.stdout, done.stderr[-2000:]
        found.append(done.stdout.partition("FOUND ")[2])
        (log,) = tmp_path.glob(f"{folder}/**/rank_3/info.log")
        assert "a line of this rank" in log.read_text(encoding="utf-8")
    assert found[0] == found[1] and "5" in found[0]
