"""Every release of mindformers that mindresume supports, with the real Trainer and mindresume: each
feature in each release, and each release reads what each other one wrote.

A release that is not installed is skipped, with the reason. Without --soak: kill and resume in all
formats by one process (not of 1.9.0, which the rest of st/ has), in the 2.0 format by four
processes of the newest release, fall-back, and each release reads one other. Trainings with which
several tests compare are shared. The results of the tests that have the mark ``cell`` are the
tables in docs/releases.md (st/release_table.py).
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from st.checkpoint_files import flip_bit
from st.release_runs import (
    BEFORE,
    EPOCH,
    FORMATS,
    OTHER_LAYOUT,
    SAVED,
    STEPS,
    copy_of,
    expect_equal,
    expect_resumed,
    run_killed,
    small_run,
    tolerance_of,
)
from st.releases import HERE, RELEASES, ReleaseRun, python_of, why_not
from st.run_attempts import LIMIT, refused_steps, selected_step, steps_of
from st.training_run import ROOT, Attempt

pytestmark = pytest.mark.timeout(1800)
Made = Callable[..., ReleaseRun]
# as its first attempt must be configured
BUILT_IN = {"load_checkpoint": "", "resume_training": False}
# a release, killed after this step
CHANGES = (("1.8.0", 4), ("1.9.0", 7), ("2.0.0", 10), ("2.1.0", 13), ("2.0.0", None))


def needs(*releases: str) -> list[pytest.MarkDecorator]:
    """Returns the marks of a test that runs these releases."""
    reasons = [reason for reason in map(why_not, dict.fromkeys(releases)) if reason]
    return [pytest.mark.skipif(bool(reasons), reason="; ".join(reasons))]


def each_release(row: str, *more: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Parametrizes a test by release; its results are a row of the table."""
    return pytest.mark.parametrize(
        "release",
        [
            pytest.param(
                release, marks=[*needs(release), pytest.mark.cell("features", row, release), *more]
            )
            for release in RELEASES
        ],
    )


def each_format(row: str, formats: dict[str, list[pytest.MarkDecorator]]) -> pytest.MarkDecorator:
    """The same by release and format; each format is a row."""
    return pytest.mark.parametrize(
        "release, kind",
        [
            pytest.param(
                release,
                kind,
                id=f"{release}-{kind.replace(' ', '_')}",
                marks=[
                    *needs(release),
                    pytest.mark.cell("features", f"{row}, {kind}", release),
                    *marks,
                ],
            )
            for release in RELEASES
            for kind, marks in formats.items()
        ],
    )


LONG = [pytest.mark.soak]
# formats in which releases read each other
ACROSS = ("2.0", "1.0 safetensors")


# ---- shared trainings ----------------------------------------------------------------------------


def in_folder(folder: Path, data: Path, graphs: Path, release: str, workers: int) -> ReleaseRun:
    """Returns the training that another call, perhaps of another process, did in ``folder``."""
    return ReleaseRun(
        folder,
        str(folder / "config.yaml"),
        data,
        workers,
        graphs=graphs,
        release=release,
        attempts=[Attempt()],
    )


@pytest.fixture(scope="session")
def whole(shared, data, graphs) -> Made:
    """whole(release, workers): an uninterrupted training. Read it, do not change it."""

    def made(release: str, workers: int = 1, epochs: int = 2) -> ReleaseRun:
        def make(folder: Path) -> None:
            small_run(
                folder, data, release, "2.0", workers, epochs=epochs, graphs=graphs
            ).start().wait_for_success(LIMIT)

        return in_folder(
            shared(f"whole-{release}-{workers}-{epochs}", make), data, graphs, release, workers
        )

    return made


@pytest.fixture(scope="session")
def left(shared, data, graphs) -> Made:
    """left(release, kind, workers, by): a training that was killed after step 8, as it left its
    folder. ``by``: what saved."""

    def made(release: str, kind: str, workers: int = 1, by: str = "mindresume") -> ReleaseRun:
        extra, changes = ("", {}) if by == "mindresume" else ("--no-mindresume", BUILT_IN)

        def make(folder: Path) -> None:
            run_killed(
                small_run(folder, data, release, kind, workers, graphs=graphs, **changes),
                extra=extra,
            )

        return in_folder(
            shared(f"left-{release}-{kind.replace(' ', '_')}-{workers}-{by}", make),
            data,
            graphs,
            release,
            workers,
        )

    return made


# ---- one release ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "release, kind",
    [
        pytest.param(
            release,
            kind,
            id=f"{release}-{kind.replace(' ', '_')}",
            marks=[
                *needs(release),
                pytest.mark.cell("features", f"kill and resume, one process, {kind}", release),
                *(
                    [pytest.mark.cell(f"{kind}, written with mindresume", release, release)]
                    if kind in ACROSS
                    else []
                ),
                # the other files of st/ are of 1.9.0
                *(LONG if release == HERE else []),
            ],
        )
        for release in RELEASES
        for kind in FORMATS
    ],
)
def test_a_killed_training_resumes_bit_by_bit(release, kind, left, whole, tmp_path):
    reference = whole(release).steps()
    assert [row["step"] for row in reference] == list(range(1, STEPS + 1))
    run = copy_of(left(release, kind), tmp_path / "run")
    expect_equal(left(release, kind).steps(), reference)
    expect_resumed(run, reference)


@each_release("automatic recovery: an empty folder")
def test_an_empty_folder_is_a_fresh_start(release, left):
    """The same command starts and resumes."""
    run = left(release, "2.0")
    assert selected_step(run) is None
    assert run.steps()[0]["step"] == 1


@each_release("fall-back from a damaged newest checkpoint")
def test_a_damaged_newest_checkpoint_is_refused(release, left, whole, tmp_path):
    run = copy_of(left(release, "2.0"), tmp_path / "run")
    flip_bit(next((run.checkpoints / f"iteration_{SAVED:08d}").glob("*-model-*.safetensors")))
    expect_resumed(run, whole(release).steps(), BEFORE)
    assert refused_steps(run) == [SAVED]


@pytest.mark.parametrize(
    "release, kind",
    [
        pytest.param(
            release,
            kind,
            id=f"{release}-{kind.replace(' ', '_')}",
            marks=[
                *needs(release),
                pytest.mark.cell(
                    "features",
                    f"kill and resume, four processes dp2 x tp2, optimizer shard, {kind}",
                    release,
                ),
                *([] if kind == "2.0" and release == RELEASES[-1] else LONG),
            ],
        )
        for release in RELEASES
        for kind in ACROSS
    ],
)
def test_four_killed_processes_resume_bit_by_bit(release, kind, left, whole, soak, tmp_path):
    """Compares with the steps of the killed attempt after the save; with --soak also with an
    uninterrupted training."""
    killed = left(release, kind, 4)
    expect_resumed(
        copy_of(killed, tmp_path / "run"), whole(release, 4).steps() if soak else killed.steps()
    )


@each_format("reshard 4 to 2 processes", {"2.0": LONG, "1.0 safetensors": LONG})
def test_two_processes_continue_what_four_began(release, kind, left, data, graphs, tmp_path):
    killed = left(release, kind, 4)
    run = small_run(tmp_path / "run", data, release, kind, 2, graphs=graphs, auto_trans_ckpt=True)
    copy_of(killed, run.folder)
    expect_resumed(run, killed.steps(), tolerance=OTHER_LAYOUT)


@each_format("async_save", {"2.0": LONG, "1.0 safetensors": LONG})
def test_an_asynchronous_save_is_resumed(release, kind, whole, data, graphs, tmp_path):
    run = small_run(
        tmp_path / "run", data, release, kind, graphs=graphs, monitor={"async_save": True}
    )
    run_killed(run)
    expect_resumed(run, whole(release).steps(), run.which()["chosen"]["step"])


@each_format("remove_redundancy, four processes", {"2.0": LONG, "1.0 safetensors": LONG})
def test_a_folder_without_redundancy_is_resumed(release, kind, data, graphs, tmp_path):
    run = small_run(
        tmp_path / "run", data, release, kind, 4, graphs=graphs, monitor={"remove_redundancy": True}
    )
    run_killed(run)
    expect_resumed(run, run.steps(0))


@pytest.mark.parametrize(
    "release, workers",
    [
        pytest.param(
            release,
            workers,
            marks=[*needs(release), *([] if (release, workers) == ("2.1.0", 1) else LONG)],
        )
        for release in RELEASES
        for workers in (1, 4)
    ],
)
def test_mindformers_alone_continues_what_mindresume_saved(release, workers, left, whole, tmp_path):
    """In Checkpoint 2.0; by one process mindformers resumes from no rank folder of safetensors,
    whoever wrote it."""
    run = copy_of(left(release, "2.0", workers), tmp_path / "run")
    run.start("--no-mindresume").wait_for_success(LIMIT)
    assert steps_of(run) == list(range(SAVED + 1, STEPS + 1))
    expect_equal(run.steps(-1), whole(release, workers).steps())


@pytest.mark.parametrize(
    "half", [pytest.param(half, marks=needs("2.0.0")) for half in (False, True)]
)
def test_hyper_parallel_that_is_absent_or_incomplete_is_named_in_one_line(half, tmp_path):
    """The trainer of 2.0.0 itself, without the stand-in for hyper_parallel."""
    (tmp_path / "packages" / "hyper_parallel").mkdir(parents=True)
    (tmp_path / "packages" / "hyper_parallel" / "__init__.py").touch()
    work = tmp_path / "work"
    work.mkdir()
    ended = subprocess.run(
        [
            python_of("2.0.0"),
            ROOT / "run_mindformer.py",
            "--config",
            ROOT / "configs" / "quickstart_qwen3.yaml",
        ],
        cwd=work,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path / 'packages'}" if half else str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    error = ended.stderr.splitlines()[-1]
    assert (
        "mindformers 2.0.0" in error
        and "hyper-parallel~=1.0.0" in error
        and ("incomplete" in error) == half
    )
    assert not (work / "output" / "checkpoint").exists()


# ---- several releases ----------------------------------------------------------------------------


def pairs() -> list:
    """Returns the parameters (writer, reader, format, what saved). Without --soak each release
    reads one other."""
    found = []
    for by in ("mindresume", "mindformers"):
        for kind in ACROSS:
            for number, reader in enumerate(RELEASES):
                for writer in RELEASES:
                    if by == "mindresume" and writer == reader:
                        # test_a_killed_training_resumes_bit_by_bit
                        continue
                    short = (writer, kind, by) == (RELEASES[number - 1], "2.0", "mindresume")
                    found.append(
                        pytest.param(
                            writer,
                            reader,
                            kind,
                            by,
                            id=f"{writer}-{reader}-{kind.replace(' ', '_')}-{by}",
                            marks=[
                                *needs(writer, reader),
                                pytest.mark.cell(f"{kind}, written with {by}", writer, reader),
                                *([] if short else LONG),
                            ],
                        )
                    )
    return found


@pytest.mark.parametrize("writer, reader, kind, by", pairs())
def test_a_release_resumes_what_another_one_wrote(
    writer, reader, kind, by, left, whole, data, graphs, tmp_path
):
    run = small_run(tmp_path / "run", data, reader, kind, graphs=graphs)
    copy_of(left(writer, kind, 1, by), run.folder)
    expect_resumed(run, whole(reader).steps(), tolerance=tolerance_of(writer, reader))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=[
                *needs(*(release for release, _ in CHANGES)),
                pytest.mark.cell("changes", ", ".join(release for release, _ in CHANGES), kind),
                *LONG,
            ],
        )
        for kind in ACROSS
    ],
)
def test_a_training_changes_the_release(kind, whole, data, graphs, tmp_path):
    """Compares all of its steps with an uninterrupted training of 1.9.0, with the tolerance of
    1.8.0, which began it."""
    run, taken, last = (
        small_run(tmp_path / "run", data, HERE, kind, epochs=3, graphs=graphs),
        None,
        3 * EPOCH,
    )
    for release, step in CHANGES:
        run.release = release
        if step is None:
            run.start().wait_for_success(LIMIT)
        else:
            run_killed(run, step)
        assert selected_step(run) == taken
        assert [row["step"] for row in run.steps(-1)] == list(
            range((taken or 0) + 1, (step or last) + 1)
        )
        expect_equal(run.steps(-1), whole(HERE, epochs=3).steps(), tolerance_of("1.8.0", HERE))
        taken = step and step - 1
