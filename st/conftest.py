"""Fixtures of the system tests: the device, the training data, and runs with which several tests
compare."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from st.training_run import ONE_LAYER, ROOT, Attempt, Run, make_data  # noqa: E402

Shared = Callable[[str, Callable[[Path], object]], Path]


def pytest_addoption(parser):
    parser.addoption(
        "--device-target",
        default="CPU",
        choices=["CPU", "Ascend"],
        help="Ascend: the same tests on real devices, without the CPU cluster",
    )


# With ``--dist loadgroup --no-loadscope-reorder``: a file is a group, for the trainings that its
# tests share; what takes longest comes first, and single tests come last, so that all processes end
# at about the same time.
LONGEST = (
    *("test_iterations", "test_judge", "test_cluster", "test_supervised_recovery"),
    *("test_deaths_in_each_epoch_and_in_a_save", "test_four_killed_processes_resume_bit_by_bit"),
    *("test_single_iterations", "test_cookbook", "test_cluster_foreign", "test_supervisor"),
    *("test_huggingface_training", "test_node_local_storage", "test_single_data"),
)
SINGLE = {
    "test_releases",
    *(f"test_pynative{part}" for part in ("", "_job", "_memory", "_operations")),
}


def place_of(item) -> int:
    names = (item.path.stem, item.originalname)
    places = [LONGEST.index(name) for name in names if name in LONGEST]
    return places[0] if places else len(LONGEST) + (names[0] in SINGLE)


@pytest.hookimpl(tryfirst=True)  # before -k removes any
def pytest_collection_modifyitems(config, items):
    items.sort(key=place_of)
    for item in items:
        if item.path.stem not in SINGLE:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    record_cells(
        (cell.args, "not run", "", item.nodeid, 0.0)
        for item in items
        for cell in item.iter_markers("cell")
    )


def record_cells(rows: Iterable[tuple[tuple[str, str, str], str, str, str, float]]) -> None:
    """Appends (cell, outcome, reason, test, seconds) to the file RELEASE_RESULTS, if there is
    one."""
    if path := os.environ.get("RELEASE_RESULTS"):
        text = "".join(
            json.dumps(
                {
                    "cell": cell,
                    "outcome": outcome,
                    "reason": reason[:1000],
                    "test": test,
                    "seconds": round(seconds, 1),
                }
            )
            + "\n"
            for cell, outcome, reason, test, seconds in rows
        )
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Appends the result of each test with a mark ``cell`` to the file RELEASE_RESULTS, for
    st/release_table.py."""
    report = (yield).get_result()
    if (report.when == "call" or not report.passed) and not item.get_closest_marker("skip"):
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = report.longrepr[2] if report.skipped else crash.message if crash else ""
        record_cells(
            (cell.args, report.outcome, reason, item.nodeid, report.duration)
            for cell in item.iter_markers("cell")
        )


@pytest.fixture
def memory() -> Iterator[str]:
    """Returns a folder in memory."""
    path = tempfile.mkdtemp(prefix="mindresume-st-", dir="/dev/shm")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def device(request) -> str:
    return request.config.getoption("--device-target")


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Shared:
    """shared(name, make): a folder that ``make(folder)`` filled, once for all processes of this
    pytest; others wait."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = base / name, base / f"{name}.done"
        with open(base / f"{name}.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one who failed
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def data(shared) -> Path:
    return shared("data", make_data)


@pytest.fixture(scope="session")
def sequences(shared) -> Path:
    """The data that mindformers was trained on for st/fixtures."""
    return shared(
        "sequences",
        lambda folder: subprocess.run(
            [sys.executable, str(ROOT / "st" / "fixtures" / "make_sequences.py"), str(folder)],
            check=True,
        ),
    )


@pytest.fixture(scope="session")
def graphs(shared) -> Path:
    """Returns the folder of the compile cache."""
    return shared("graphs", lambda folder: None)


@pytest.fixture(scope="session")
def trained(shared) -> Callable[..., Run]:
    """trained(name, run, play): ``run`` in another folder, where ``play(run)`` has trained it to
    the end, shared like that."""

    def found(
        name: str,
        run: Run,
        play: Callable[[Run], object] = lambda run: run.start().wait_for_success(),
    ) -> Run:
        return run.like(shared(name, lambda folder: play(run.like(folder))), attempts=[Attempt()])

    return found


@pytest.fixture(scope="session")
def uninterrupted(trained, data, device, graphs) -> Callable[..., Run]:
    """uninterrupted(name, config, workers, options): 40 steps, saves at 5, 10 ... 40, of which 3
    are kept."""

    def run(name: str, config: str, workers: int = 1, options: str = "") -> Run:
        return trained(
            name,
            Run(
                Path(),
                config,
                data,
                workers,
                device=device,
                options=f"{ONE_LAYER} {options}".rstrip(),
                graphs=graphs,
            ),
        )

    return run


@pytest.fixture(scope="session")
def whole_single(uninterrupted) -> Run:
    """The uninterrupted Qwen3 run of one process. Read it, do not change it."""
    return uninterrupted("whole_single", "quickstart_qwen3.yaml")


@pytest.fixture(scope="session")
def whole_four(uninterrupted) -> Run:
    """The same on 4 processes, data parallel 2 x model parallel 2."""
    return uninterrupted("whole_four", "quickstart_qwen3_dp2tp2.yaml", 4)


@pytest.fixture(scope="session")
def whole_two(uninterrupted) -> Run:
    """The same on 2 processes, data parallel."""
    return uninterrupted(
        "whole_two", "quickstart_qwen3_dp2tp2.yaml", 2, "--parallel_config.model_parallel 1"
    )


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("whole_two", id="2 ranks"),
        pytest.param("whole_four", id="4 ranks", marks=pytest.mark.soak),
    ],
)
def whole_several(request) -> Run:
    return request.getfixturevalue(request.param)
