"""The step time of the quickstart's training with a save in memory at each step, against the same
training without one.

Both trainings are started by the real Trainer and then run in turns: while one runs, all processes
of the other are stopped (SIGSTOP). So both see the same machine, and neither takes a core from the
other.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import _measure as measure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_WARM_UP = 20  # steps of each training before the first turn
_AFTER_CONT = 3  # steps at the beginning of a turn that do not count
WITHOUT, WITH = "no tier", "every_steps: 1"
_EVERY = "MINDRESUME_MEMORY_TIER_EVERY_STEPS"
KINDS = {WITHOUT: {_EVERY: "0"}, WITH: {_EVERY: "1"}}


def measure_steps(
    folder: str,
    memory: str,
    ranks: int,
    rounds: int,
    seconds: float,
    kinds: Mapping[str, Mapping[str, str]] = KINDS,
) -> measure.Rounds:
    """Returns the seconds a step of both trainings, the median and the mean of each turn, and of
    the tier the copy.

    Args:
        ranks: 1, 2 (data parallel) or 4.
        seconds: of one turn.
        kinds: the environment of each of the two trainings, the one with more to do last.
    """
    from st.training_run import Run

    data = Path(folder) / "data"
    subprocess.run(
        [sys.executable, str(ROOT / "st" / "data" / "make_data.py"), str(data)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    config = "quickstart_qwen3.yaml" if ranks == 1 else "quickstart_qwen3_dp2tp2.yaml"
    options = "--runner_config.epochs 2000 --callbacks.1.save_checkpoint_steps 1000000" + (
        " --parallel_config.model_parallel 1" if ranks == 2 else ""
    )
    runs, result = {}, measure.Rounds()
    try:
        for number, (name, settings) in enumerate(kinds.items()):
            run = runs[name] = Run(
                Path(folder) / f"kind_{number}", config, data, ranks, options=options
            )
            run.start(**settings, MINDRESUME_MEMORY_TIER_DIR=memory)
        for run in runs.values():  # the ranks of one that is stopped for long would lose each other
            run.wait_for_step(_WARM_UP)
        for run in runs.values():
            run.signal_all(signal.SIGSTOP)
        for number in result.numbers(rounds):
            for work in measure.shuffled(
                [lambda name=name: _turn(result, name, runs[name], seconds) for name in runs],
                number,
            ):
                work()
    finally:
        for run in runs.values():
            run.kill()
    for path in runs[[*kinds][-1]].event_files():
        for row in map(json.loads, path.read_text().splitlines()):
            if row.get("event") in ("tier_refused", "partner_copy_failed"):
                raise SystemExit(f"the tier did not save: {row}")
            if row.get("event") == "tier_saved":
                result.values.setdefault("copy", []).append(row["stall_seconds"])
                result.values.setdefault("size", []).append(row["size_bytes"])
    return result


def _turn(result: measure.Rounds, name: str, run, seconds: float) -> None:
    done = len(run.steps())
    run.signal_all(signal.SIGCONT)
    time.sleep(seconds)
    run.signal_all(signal.SIGSTOP)
    if run.process.poll() is not None:
        raise SystemExit(f"{run.folder}: the training ended:\n{run.log()[-3000:]}")
    times = [row["time"] for row in run.steps()[done + _AFTER_CONT :]]
    result.add(
        name,
        statistics.median(after - before for before, after in zip(times, times[1:], strict=False)),
    )
    result.add(f"{name}, mean", (times[-1] - times[0]) / (len(times) - 1))


def text(result: measure.Rounds, less: str = WITHOUT, more: str = WITH, target: float = 10) -> str:
    rows = []
    for what, without, name in (
        ("median of a turn", less, more),
        ("mean of a turn", f"{less}, mean", f"{more}, mean"),
    ):
        growth = 100 * (result.ratio(name, without) - 1)
        rows.append(
            [
                what,
                f"{result.median(without) * 1000:.2f}",
                f"{result.median(name) * 1000:.2f}",
                f"{growth:+.1f} %",
                result.spread(name, without),
                f"{target:g} %: {'met' if growth <= target else 'missed'}",
            ]
        )
    copy, size = statistics.median(result.values["copy"]), max(result.values["size"])
    columns = [
        "step time",
        f"{less}, ms",
        f"{more}, ms",
        "growth",
        "ratios of the rounds",
        "target",
    ]
    return (
        f"{measure.table(columns, rows)}\nA save of {size / 2**20:.1f} MiB stops the training for "
        f"{copy * 1000:.2f} ms (median of {len(result.values['copy'])})\n"
    )
