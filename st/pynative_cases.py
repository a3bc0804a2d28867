"""What the system tests of the PyNative trainer have in common: releases, trainings with which they
compare, and comparisons.

An epoch has 20 steps and a training 45, so resumes are in each of three epochs. The learning rate
rises and falls. Losses, samples, random numbers and counters are compared bit by bit.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from st.pynative_run import PynativeRun, why_not
from st.releases import HERE
from st.run_attempts import LIMIT
from st.training_run import Attempt, differences

STEPS = 45
OURS = {"CPU_CLUSTER_PLUGIN": "mindresume.plugin"}
DECAY = {
    "lr_scheduler.type": "CosineWithWarmUpLR",
    "lr_scheduler.lr_end": 1e-5,
    "lr_scheduler.warmup_ratio": 0.1,
}
DIED = (-9, 137)
RELEASES = (HERE, "2.0.0", "2.1.0")
Build = Callable[..., PynativeRun]


def each(row: str, *cases: str, soak: Sequence[str] = (), absent: str = "") -> pytest.MarkDecorator:
    """Parametrizes a test by ``release`` and ``workers``; its results are a row of the table in
    docs/releases.md, or two.

    Args:
        cases: releases, as "2.0.0", or "2.0.0-2" for two processes.
        soak: those that only --soak runs.
        absent: why all other releases do not have this.
    """
    named, missing = [*cases, *soak], []
    for several in dict.fromkeys("".join(name.partition("-")[1:]) for name in named if absent):
        missing += [release + several for release in RELEASES if release not in "".join(named)]
    found = []
    for name in [*named, *missing]:
        release, _, several = name.partition("-")
        workers = int(several or 1)
        reason = absent if name in missing else why_not(release, workers)
        found.append(
            pytest.param(
                release,
                workers,
                id=f"{release}-{workers}",
                marks=[
                    pytest.mark.cell(
                        "PyNative", row + (", two processes" if workers > 1 else ""), release
                    ),
                    *([pytest.mark.skipif(True, reason=reason)] if reason else []),
                    *([pytest.mark.soak] if name in soak else []),
                ],
            )
        )
    return pytest.mark.parametrize("release, workers", found)


@pytest.fixture
def build(data, tmp_path) -> Build:
    """build(name, release, workers, **changes): a run in a folder of this test, not started yet."""

    def made(
        name: str = "run",
        release: str = HERE,
        workers: int = 1,
        changes: Mapping[str, Any] | None = None,
    ) -> PynativeRun:
        return PynativeRun(
            tmp_path / name,
            data=data,
            release=release,
            workers=workers,
            changes={"training.steps": STEPS, **DECAY, **(changes or {})},
        )

    return made


@pytest.fixture(scope="session")
def whole(shared, data) -> Callable[..., PynativeRun]:
    """whole(release, workers, changes): the same training, which nothing interrupts. Read it, do
    not change it."""

    def found(
        release: str = HERE,
        workers: int = 1,
        changes: Mapping[str, Any] | None = None,
        **environment: str,
    ) -> PynativeRun:
        settings = {"training.steps": STEPS, **DECAY, **(changes or {})}

        def train(folder: Path) -> None:
            PynativeRun(
                folder, data=data, release=release, workers=workers, changes=settings
            ).start(**OURS, **environment).wait_for_success()

        words = [
            release,
            workers,
            *sorted(map(str, (changes or {}).values())),
            *environment.values(),
        ]
        name = re.sub(r"[^\w.]+", "_", "_".join(map(str, ("whole_pynative", *words))))
        return PynativeRun(
            shared(name, train),
            data=data,
            release=release,
            workers=workers,
            changes=settings,
            attempts=[Attempt()],
        )

    return found


def steps_of(run: PynativeRun) -> list[int]:
    return [row["step"] for row in run.steps(-1)]


def assert_same(run: PynativeRun, reference: PynativeRun, first: int, last: int = STEPS) -> None:
    """The last attempt did the steps ``first`` to ``last`` on each rank, and each is that of
    ``reference``: loss, samples, random numbers, epoch, counters and the fields of
    ``TrainerState``. If rank 0 died within a step, the others may have recorded it."""
    for rank in range(run.workers):
        rows, known = run.steps(-1, rank), {row["step"]: row for row in reference.steps(rank=rank)}
        if rank and rows and rows[-1]["step"] == last + 1:
            del rows[-1]
        assert [row["step"] for row in rows] == list(range(first, last + 1)), run.log(rank)[-3000:]
        expected = [known[row["step"]] for row in rows]
        assert [row for row in differences(expected, rows) if not row.endswith("is missing")] == []
        for key in ("draws", "opt_step", "consumed", "epoch", "state"):
            assert [row[key] for row in rows] == [row[key] for row in expected], key


def same_losses(rows: Sequence[dict], reference: PynativeRun, first: int, last: int) -> bool:
    """Returns whether ``rows`` are the steps ``first`` to ``last`` of ``reference``, by losses and
    samples: mindformers saves nothing else."""
    keys = ("step", "hex", "samples")
    found, expected = (
        [[row[key] for key in keys] for row in some]
        for some in (rows, reference.steps()[first - 1 : last])
    )
    return found == expected


def dies(run: PynativeRun) -> None:
    assert run.wait(LIMIT) in DIED, run.log()[-3000:]
